"""Block-sparse attention in torch: all pairs, with the mask of the sampled pattern."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from graphwright.ops.block_attention import SAMPLED

Tensors = Sequence[torch.Tensor]


class Pairs:
    """Scores and weights of all pairs of q and k; the optional operands follow."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, extra: Tensors, attrs: dict) -> None:
        pattern, share = SAMPLED[attrs["planes"]], q.shape[1] // attrs["planes"]
        self.share, self.kind = q.shape[1] // k.shape[1], q.dtype
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32

        def each(t: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.array(t)).repeat_interleave(share, 0)

        self.mask, self.q, self.k = each(pattern.to_dense()), q.to(wide), self.heads(k).to(wide)
        self.slots = np.full(pattern.to_dense().shape, -1)
        self.edges = [(p, slice(2 * i, 2 * i + 2), slice(2 * j, 2 * j + 2)) for p, i, j in pattern.pairs()]
        for (p, i, j), gate in zip(self.edges, pattern.edges["gate"], strict=True):
            self.slots[p, i, j] = gate
        self.raw = (self.q @ self.k.mT) * attrs["scale"]
        cap = attrs["softcap"]
        self.s = self.raw if cap is None else cap * torch.tanh(self.raw / cap)
        self.slope = attrs["scale"] * (1.0 if cap is None else 1 - (self.s / cap) ** 2)
        self.gates = dict(zip(attrs["optional"], extra, strict=True)).get("gates")
        self.g = 1.0
        if self.gates is not None:
            self.g = torch.cat([self.gates.to(wide), torch.ones(1, dtype=wide)])[each(self.slots)]
        self.inside = self.g if attrs["where"] == "exp" else 1.0
        self.outside = self.g if attrs["where"] == "weight" else 1.0

    def heads(self, t: torch.Tensor) -> torch.Tensor:
        return t.repeat_interleave(self.share, 1)

    def raised(self, lse: torch.Tensor) -> torch.Tensor:
        return (self.s - lse.unsqueeze(-1)).masked_fill(~self.mask, -torch.inf).exp()

    def to_groups(self, t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(1, (-1, self.share)).sum(2).to(self.kind)

    def to_gates(self, t: torch.Tensor) -> torch.Tensor:
        """Sum what each pair [N, H, Tq, Tk] adds to its gate."""
        assert self.gates is not None
        slots = torch.from_numpy(self.slots).repeat_interleave(t.shape[1] // len(self.slots), 0)
        return torch.stack([(t * (slots == i)).sum() for i in range(len(self.gates))]).to(self.gates.dtype)


def block_sdpa(ins: Tensors, attrs: dict) -> tuple[torch.Tensor, ...]:
    q, k, v, _, *extra = ins
    t = Pairs(q, k, extra, attrs)
    lse = (t.s.masked_fill(~t.mask, -torch.inf).exp() * t.inside).sum(-1).log()
    return (t.raised(lse) * t.g @ t.heads(v).to(lse.dtype)).to(q.dtype), lse


def block_sdpa_backward(ins: Tensors, attrs: dict) -> tuple[torch.Tensor, ...]:
    (q, k, v, _, *extra), (out, lse, g) = ins[:-3], ins[-3:]
    t = Pairs(q, k, extra, attrs)
    e, g = t.raised(lse), g.to(t.s.dtype)
    dp, less = g @ t.heads(v).to(g.dtype).mT, (g * out).sum(-1, keepdim=True)
    ds = e * t.inside * (dp * t.outside - less) * t.slope
    found = (ds @ t.k).to(q.dtype), t.to_groups(ds.mT @ t.q), t.to_groups((e * t.g).mT @ g)
    return (*found, t.to_gates(e * (dp - less if attrs["where"] == "exp" else dp))) if t.gates is not None else found


def block_mass(ins: Tensors, attrs: dict) -> torch.Tensor:
    q, k, _, lse, *extra = ins
    t, mass = Pairs(q, k, extra, attrs), torch.zeros(attrs["edges"])
    a, share = t.raised(lse) * t.inside, q.shape[1] // attrs["planes"]
    slots = SAMPLED[attrs["planes"]].edges().index
    for slot, (p, i, j) in zip(slots, t.edges, strict=True):
        each = a[:, p * share : (p + 1) * share, i, j].sum(-1)
        mass[int(slot)] = each.max() if attrs["reduce"] == "max" else each.mean()
    return mass


def block_gate_gradient(ins: Tensors, attrs: dict) -> torch.Tensor:
    q, k, v, out, lse, g, pairs, _ = ins
    t, share = Pairs(q, k, (), attrs), q.shape[1] // attrs["planes"]
    g = g.to(t.s.dtype)
    change = (t.s - lse.unsqueeze(-1)).exp() * (g @ t.heads(v).to(g.dtype).mT - (g * out).sum(-1, keepdim=True))
    change = change.tril()
    found = [change[:, p * share : (p + 1) * share, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].sum() for p, i, j in pairs]
    return torch.stack(found).to(lse.dtype)


def block_entropy(ins: Tensors, attrs: dict) -> torch.Tensor:
    q, k, _, lse, *extra = ins
    t = Pairs(q, k, extra, attrs)
    a = t.raised(lse) * t.inside
    unused = 0.0 if t.gates is None else 0.0 * t.gates.sum()  # no gradient is None
    return (unused - (a * torch.where(a > 0, a, 1.0).log()).sum(-1)).to(lse.dtype)


def block_entropy_backward(ins: Tensors, attrs: dict) -> tuple[torch.Tensor, ...]:
    (q, k, _, lse, *extra), (_, g) = ins[:-2], ins[-2:]
    t = Pairs(q, k, extra, attrs)
    e = t.raised(lse)
    a = e * t.inside
    slope = -(torch.where(a > 0, a, 1.0).log() + 1) * g.to(a.dtype).unsqueeze(-1)
    ds = a * slope * t.slope
    gates = slope * e if attrs["where"] == "exp" else slope * 0
    return (ds @ t.k).to(q.dtype), t.to_groups(ds.mT @ t.q), -(a * slope).sum(-1).to(lse.dtype), t.to_gates(gates)


BLOCKS = {
    f.__name__: f
    for f in (
        block_sdpa, block_sdpa_backward, block_mass, block_gate_gradient, block_entropy, block_entropy_backward,
    )
}  # fmt: skip
