"""Dense masked attention in float64, and random patterns: the oracle of tests of attention over patterns."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from graphwright.patterns import Pattern


def pattern_of(
    rng: np.random.Generator, tokens: tuple[int, int], block: int, planes: int = 1, *, density: float = 0.5, **rule: Any
) -> Pattern:
    """A pattern with random edges in random order, of which some are cut again."""
    pattern = Pattern(tokens, block, planes, **rule)
    rows, columns = pattern.blocks
    pairs = [(p, i, j) for p in range(planes) for i in range(rows) for j in range(columns)
             if not pattern.causal or pattern.frame.key_span(j)[0] <= pattern.frame.query_span(i)[1]]  # fmt: skip
    for plane, query, key in rng.permutation(np.array(pairs)):
        if rng.random() < density:
            pattern.connect(int(query), int(key), int(plane))
    for edge in list(pattern.edges())[::5]:
        pattern.cut(edge)
    return pattern


def each_head(values: np.ndarray, heads: int) -> np.ndarray:
    """[planes, ...] -> [H, ...]."""
    return np.repeat(values, heads // len(values), 0)


def dense(
    q: Any, k: Any, v: Any, mask: np.ndarray, gates: torch.Tensor | None = None, *, scale: float | None = None,
    softcap: float | None = None, where: str = "exp",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Result and weights of attention over the pairs in `mask` [planes, Tq, Tk]; `gates` has a value for each pair."""
    q, k, v = (torch.as_tensor(x) for x in (q, k, v))
    heads, share = q.shape[1], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    s = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    seen = torch.from_numpy(each_head(mask, heads))
    factor = torch.ones_like(s) if gates is None else gates.repeat_interleave(heads // len(gates), 0)
    shown = seen & (factor > 0) if where == "exp" else seen
    s = s.masked_fill(~seen, -torch.inf)
    top = s.masked_fill(~shown, -torch.inf).amax(-1, True).detach()
    e = (s - torch.where(torch.isfinite(top), top, 0.0)).exp()
    e = e * factor if where == "exp" else e
    whole = e.sum(-1, True)
    a = e / torch.where(whole > 0, whole, 1.0)
    return (a * factor if where == "weight" else a) @ v, a


def block_sums(weights: np.ndarray, pattern: Pattern) -> np.ndarray:
    """Dense weights [N, H, Tq, Tk] -> mass of each edge: mean over batch, heads of its plane, queries with a key."""
    block, heads = pattern.block, weights.shape[1]
    share = heads // pattern.planes
    found = []
    for plane, query, key in pattern.pairs():
        rows = weights[:, plane * share : (plane + 1) * share, query * block : (query + 1) * block]
        seen = rows.sum(-1) > 0
        mine = rows[..., key * block : (key + 1) * block].sum(-1)
        found.append(mine[seen].mean() if seen.any() else 0.0)
    return np.array(found)
