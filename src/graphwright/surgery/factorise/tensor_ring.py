"""Tensor rings by successive truncated SVDs: the first one's rank is shared out between both of its bonds.

Source: Zhao et al. 2016, "Tensor ring decomposition", algorithm 1; every way to share out is tried here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphwright.surgery.factorise.tensor_train import Unfolding, rank_within, sweep, train


def ring(first: Unfolding, *, error: float = 0.0, ranks: Sequence[int] | None = None) -> list[np.ndarray]:
    """Cores [r_{k-1}, p_k, r_k] of a tensor, r_d = r_0; with r_0 = 1, a train, where that is smallest.

    Args:
        first: SVD of its first unfolding.
        error: relative. The first SVD drops at most √(2/d) · error · norm, the d - 2 others error · norm / √d each:
            their squares add up to (error · norm)².
        ranks: r_0 .. r_{d-1}, instead of an error: as many at most.
    """
    d = len(first.shape)
    if d < 3:  # two cores on a ring are two on a train, with r_0 r_1 for its rank
        return train(first, error=error, ranks=None if ranks is None else [int(np.prod(ranks[:2]))])
    if ranks is not None:
        return _shared(first, ranks[0], ranks[1], 0.0, ranks[2:])
    best = train(first, error=error)
    rank = rank_within(first.s, (2 / d) ** 0.5 * error * first.norm)
    for outer in range(2, rank + 1):
        if rank % outer == 0 and outer * first.shape[-1] < sum(core.size for core in best):
            found = _shared(first, outer, rank // outer, error * first.norm / d**0.5, None)
            best = min(best, found, key=lambda cores: sum(core.size for core in cores))
    return best


def _shared(first: Unfolding, outer: int, inner: int, lost: float, ranks: Sequence[int] | None) -> list[np.ndarray]:
    """Rank r_0 r_1 of the first unfolding as two bonds: U [p_1, r_0 r_1] -> [r_0, p_1, r_1], the rest goes around."""
    p, rank = first.shape[0], outer * inner
    u, rest = np.zeros((p, rank)), np.zeros((rank, first.vt.shape[1]))
    kept = min(rank, len(first.s))
    u[:, :kept], rest[:kept] = first.u[:, :kept], first.s[:kept, None] * first.vt[:kept]
    head = u.reshape(p, outer, inner).transpose(1, 0, 2)
    turned = rest.reshape(outer, inner, -1).transpose(1, 2, 0).reshape(inner, -1)
    return [head, *sweep(np.ascontiguousarray(turned), first.shape[1:], outer, lost, ranks)]
