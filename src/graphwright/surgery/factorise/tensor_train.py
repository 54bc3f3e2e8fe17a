"""Tensor trains by successive truncated SVDs, with a relative error that is a guarantee.

Source: Oseledets 2011, "Tensor-train decomposition", algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Unfolding(NamedTuple):
    """The SVD of a tensor's first unfolding [p_1, p_2 .. p_d], from which trains and rings of any accuracy begin."""

    shape: tuple[int, ...]
    u: np.ndarray
    s: np.ndarray
    vt: np.ndarray

    @staticmethod
    def of(tensor: np.ndarray) -> Unfolding:
        """Decompose it, once."""
        u, s, vt = np.linalg.svd(tensor.reshape(tensor.shape[0], -1), full_matrices=False)
        return Unfolding(tensor.shape, u, s, vt)

    @property
    def norm(self) -> float:
        """Of the tensor."""
        return float(np.linalg.norm(self.s))


def rank_within(s: np.ndarray, lost: float) -> int:
    """The smallest rank, at least 1, at which the dropped singular values have a norm of at most `lost`."""
    tail = np.sqrt(np.cumsum(s[::-1] ** 2)[::-1])  # tail[r]: norm of what is dropped at rank r
    return max(int(np.count_nonzero(tail > lost)), 1)


def train(first: Unfolding, *, error: float = 0.0, ranks: Sequence[int] | None = None) -> list[np.ndarray]:
    """Cores [r_{k-1}, p_k, r_k] of a tensor, r_0 = r_d = 1.

    Args:
        first: SVD of its first unfolding.
        error: relative; each of the d - 1 SVDs drops at most error · norm / √(d - 1).
        ranks: r_1 .. r_{d-1} at most, instead of an error.
    """
    d = len(first.shape)
    lost = error * first.norm / max(d - 1, 1) ** 0.5
    if d == 1:
        return [(first.u * first.s @ first.vt).reshape(1, first.shape[0], 1)]
    rank = rank_within(first.s, lost) if ranks is None else min(ranks[0], len(first.s))
    head = first.u[:, :rank].reshape(1, first.shape[0], rank)
    rest = first.s[:rank, None] * first.vt[:rank]
    return [head, *sweep(rest, first.shape[1:], 1, lost, None if ranks is None else ranks[1:])]


def sweep(
    rest: np.ndarray, sizes: Sequence[int], last: int, lost: float, ranks: Sequence[int] | None
) -> list[np.ndarray]:
    """Cores of what is left behind the first one, [r_1, p_2 .. p_d, last], each SVD dropping at most `lost`."""
    cores = []
    rank = rest.shape[0]
    for k, p in enumerate(sizes[:-1]):
        u, s, vt = np.linalg.svd(rest.reshape(rank * p, -1), full_matrices=False)
        kept = rank_within(s, lost) if ranks is None else min(ranks[k], len(s))
        cores.append(u[:, :kept].reshape(rank, p, kept))
        rest, rank = s[:kept, None] * vt[:kept], kept
    return [*cores, rest.reshape(rank, sizes[-1], last)]
