"""Native sparse attention by loops over sequences, heads and queries, in float64 torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from graphwright.attention import NativeSparse


@dataclass
class Reference:
    """Results; `gates` holds a leaf per (sequence, key head, query, block) that the selected branch evaluates."""

    compressed: torch.Tensor
    selected: torch.Tensor
    sliding: torch.Tensor
    out: torch.Tensor
    blocks: dict[tuple[int, int, int], set[int]] = field(default_factory=dict)
    shares: dict[tuple[int, int, int], np.ndarray] = field(default_factory=dict)  # P
    candidates: dict[int, int] = field(default_factory=dict)  # n
    capped: dict[tuple[int, int, int], bool] = field(default_factory=dict)
    gates: dict[tuple[int, int, int, int], torch.Tensor] = field(default_factory=dict)


def weights(m: NativeSparse) -> dict[str, torch.Tensor]:
    """The parameters as leaves."""
    return {n: torch.from_numpy(p.numpy("float64").copy()).requires_grad_() for n, p in m.named_parameters()}


def rotate(x: torch.Tensor, at: float, frequencies: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2)
    cos, sin = (at * frequencies).cos(), (at * frequencies).sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin])


def _summary(w: dict[str, torch.Tensor], name: str, window: torch.Tensor) -> torch.Tensor:
    if f"{name}.position" not in w:
        return window.mean(0)
    flat = (window + w[f"{name}.position"]).reshape(-1)
    inner = torch.nn.functional.gelu(w[f"{name}.up.weight"] @ flat + w[f"{name}.up.bias"])
    return w[f"{name}.down.weight"] @ inner + w[f"{name}.down.bias"]


def attend(
    m: NativeSparse, w: dict[str, torch.Tensor], x: torch.Tensor, mod: np.ndarray | None = None,
    ghosts: dict[tuple[int, int, int], set[int]] | None = None,
) -> Reference:  # fmt: skip
    """Compute all branches for x [B, T, dim]."""
    batch, time, _ = x.shape
    heads, groups, d, long, s, size = m.heads, m.kv_heads, m.head_dim, m.summary, m.stride, m.block
    share, f = heads // groups, torch.from_numpy(m.rope.inv_freq.numpy("float64"))
    parts: Any = [[[[None] * time for _ in range(heads)] for _ in range(batch)] for _ in range(3)]
    found = Reference(torch.zeros(0), torch.zeros(0), torch.zeros(0), torch.zeros(0))
    tau = None if m.psi is None else torch.nn.functional.softplus(w["psi"]).detach().numpy()
    for b in range(batch):
        second, third = (0, 0) if m.shared_kv else (1, 2)
        q = (x[b] @ w["q.weight"].T).view(time, heads, d)
        k = [(x[b] @ w[f"k.{i}.weight"].T).view(time, groups, d) for i in range(len(m.k))]
        v = [(x[b] @ w[f"v.{i}.weight"].T).view(time, groups, d) for i in range(len(m.v))]
        q = torch.stack([torch.stack([rotate(q[t, h], t, f) for h in range(heads)]) for t in range(time)])
        rotated = [
            torch.stack([torch.stack([rotate(a[t, g], t, f) for g in range(groups)]) for t in range(time)]) for a in k
        ]
        count = max(0, (time - long) // s + 1)
        for g in range(groups):
            ck = [
                rotate(_summary(w, "compress_k", k[0][c * s : c * s + long, g]), c * s + (long - 1) / 2, f)
                for c in range(count)
            ]
            cv = [_summary(w, "compress_v", v[0][c * s : c * s + long, g]) for c in range(count)]
            attention: dict[int, np.ndarray] = {}
            for t in range(time):
                seen = [c for c in range(count) if c * s + long - 1 <= t]
                attention[t] = np.zeros(count)
                for h in range(g * share, (g + 1) * share):
                    if not seen:
                        parts[0][b][h][t] = torch.zeros(d, dtype=torch.float64)
                        continue
                    p = torch.softmax(torch.stack([q[t, h] @ ck[c] for c in seen]) * d**-0.5, 0)
                    parts[0][b][h][t] = p @ torch.stack([cv[c] for c in seen])
                    attention[t][seen] += p.detach().numpy()
            for t in range(time):
                own, source = t // size, t
                if m.granularity == "tile":
                    source = own * size - 1
                p = attention[source] if source >= 0 else np.zeros(count)
                raw = np.zeros(-(-time // size))
                for j in range(1, own - 1):
                    for c in range(count):
                        overlap = max(0, min(c * s + long, (j + 1) * size) - max(c * s, j * size))
                        raw[j] += p[c] * overlap / long
                n = max(0, own - 2)
                P = raw / raw.sum() if raw.sum() > 0 else raw
                factor = 1.0 if mod is None or source < 0 else np.clip(mod[b, source], 0.5, 2.0)
                if tau is None:
                    taken, most = list(range(1, own - 1)), m.n
                else:
                    limit = tau[g] * factor
                    taken = [j for j in range(1, own - 1) if P[j] * n >= limit - 1e-6]
                    most = len(taken) if m.most is None else m.most
                found.capped[b, g, t] = len(taken) > most
                taken = sorted(taken, key=lambda j: (-P[j], j))[:most]
                read = {0, max(own - 1, 0), own, *taken}
                found.blocks[b, g, t], found.shares[b, g, t], found.candidates[t] = read, P, n
                extra = set() if ghosts is None else ghosts[b, g, t]
                for j in {*taken, *extra}:
                    value = torch.tensor(float(j in read), dtype=torch.float64, requires_grad=True)
                    found.gates[b, g, t, j] = value
                for h in range(g * share, (g + 1) * share):
                    pairs = [(j, i) for j in sorted(read | extra) for i in range(j * size, min((j + 1) * size, t + 1))]
                    one = torch.ones((), dtype=torch.float64)
                    gate = torch.stack([found.gates.get((b, g, t, j), one) for j, _ in pairs])
                    scores = torch.stack([q[t, h] @ rotated[second][i, g] for _, i in pairs]) * d**-0.5
                    e = gate * (scores - scores.max().detach()).exp()
                    parts[1][b][h][t] = (e / e.sum()) @ torch.stack([v[second][i, g] for _, i in pairs])
                    keys = range(max(0, t - m.window + 1), t + 1)
                    p = torch.softmax(torch.stack([q[t, h] @ rotated[third][i, g] for i in keys]) * d**-0.5, 0)
                    parts[2][b][h][t] = p @ torch.stack([v[third][i, g] for i in keys])
    branches = [torch.stack([torch.stack([torch.stack(h) for h in b]) for b in part]) for part in parts]
    gates = torch.sigmoid(x @ w["mix.weight"].T + w["mix.bias"]).view(batch, time, 3, heads).permute(2, 0, 3, 1)
    total = torch.stack([gate[..., None] * branch for gate, branch in zip(gates, branches, strict=True)]).sum(0)
    found.compressed, found.selected, found.sliding = branches
    found.out = total.transpose(1, 2).reshape(batch, time, heads * d) @ w["out.weight"].T
    return found


def aux(m: NativeSparse, w: dict[str, torch.Tensor], r: Reference) -> torch.Tensor:
    """The auxiliary loss, with shares P detached."""
    terms = []
    tau = torch.nn.functional.softplus(w["psi"])
    for (_, g, t), share in r.shares.items():
        n = r.candidates[t]
        if m.granularity == "tile" and t % m.block:
            continue
        if n:
            P = torch.from_numpy(share[1 : n + 1])
            k = torch.sigmoid((P * n - tau[g]) / 0.1).mean()
            entropy = 0.0 if n < 2 else -sum(p * np.log(p) for p in P.tolist() if p > 0) / np.log(n)
            terms.append(m.entropy_weight * (k - entropy) ** 2 + m.sparse_weight * k)
    return torch.stack(terms).mean() if terms else torch.zeros((), dtype=torch.float64)
