"""Decomposition methods with one interface: fewest parameters for an error, or least error for some parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from graphwright.surgery.factorise.als import refine
from graphwright.surgery.factorise.factors import LowRank, TensorRing, parameters, split, to_cores, to_tensor
from graphwright.surgery.matrices import finite

if TYPE_CHECKING:
    from graphwright.surgery.factorise.factors import Factors


class Unfolding(NamedTuple):
    """The SVD of a tensor's first unfolding [p_1, p_2 .. p_d], from which trains and rings of any accuracy start."""

    shape: tuple[int, ...]
    u: np.ndarray
    s: np.ndarray
    vt: np.ndarray

    @staticmethod
    def of(tensor: np.ndarray) -> Unfolding:
        """Decompose a tensor."""
        u, s, vt = np.linalg.svd(tensor.reshape(tensor.shape[0], -1), full_matrices=False)
        return Unfolding(tensor.shape, u, s, vt)

    @property
    def norm(self) -> float:
        """Frobenius norm of the tensor."""
        return float(np.linalg.norm(self.s))


def rank_within(s: np.ndarray, lost: float) -> int:
    """The smallest rank >= 1 whose dropped singular values have a norm of at most `lost`."""
    tail = np.sqrt(np.cumsum(s[::-1] ** 2)[::-1])  # tail[r]: norm of the values dropped at rank r
    return max(int(np.count_nonzero(tail > lost)), 1)


def train(first: Unfolding, *, error: float = 0.0, ranks: Sequence[int] | None = None) -> list[np.ndarray]:
    """Cores [r_{k-1}, p_k, r_k] of a tensor, r_0 = r_d = 1.

    Args:
        first: SVD of its first unfolding.
        error: relative; each of the d - 1 SVDs drops at most error · norm / √(d - 1).
        ranks: upper limits of r_1 .. r_{d-1}, instead of an error.
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
    """Cores of the remainder [r_1, p_2 .. p_d, last] after the first one; each SVD drops at most `lost`."""
    cores = []
    rank = rest.shape[0]
    for k, p in enumerate(sizes[:-1]):
        u, s, vt = np.linalg.svd(rest.reshape(rank * p, -1), full_matrices=False)
        kept = rank_within(s, lost) if ranks is None else min(ranks[k], len(s))
        cores.append(u[:, :kept].reshape(rank, p, kept))
        rest, rank = s[:kept, None] * vt[:kept], kept
    return [*cores, rest.reshape(rank, sizes[-1], last)]


RIDGE = 1e-6
"""Share of the Gram matrix's mean diagonal that is added to it, so that it has a Cholesky factor."""


@dataclass(frozen=True, eq=False)
class LowRankFit:
    """One SVD, from which the factors of every rank follow.

    Attributes:
        u, s, vt: SVD of W, or of W L.
        root: L, or None.
    """

    u: np.ndarray
    s: np.ndarray
    vt: np.ndarray
    root: np.ndarray | None = None

    @staticmethod
    def of(w: np.ndarray, gram: np.ndarray | None = None) -> LowRankFit:
        """Decompose [out, in]; with a Gram matrix Σ x xᵀ / N weighted by the inputs."""
        root = None
        if gram is not None:
            floor = RIDGE * float(np.trace(gram)) / len(gram)
            root = np.linalg.cholesky(gram + (floor or 1.0) * np.eye(len(gram)))
        u, s, vt = np.linalg.svd(w if root is None else w @ root, full_matrices=False)
        return LowRankFit(u, s, vt, root)

    def at(self, rank: int) -> LowRank:
        """The factors of a rank; each side gets the square roots of the singular values."""
        half = np.sqrt(self.s[:rank])
        inner = half[:, None] * self.vt[:rank]
        if self.root is not None:
            inner = np.linalg.solve(self.root.T, inner.T).T
        return LowRank(self.u[:, :rank] * half, inner)

    def error(self, rank: int) -> float:
        """‖dropped‖ / ‖all‖ of the singular values: relative error of W, or of the outputs."""
        whole = float(np.linalg.norm(self.s))
        return float(np.linalg.norm(self.s[rank:])) / whole if whole else 0.0

    def rank_for(self, error: float) -> int:
        """The smallest rank with at most this relative error."""
        return rank_within(self.s, error * float(np.linalg.norm(self.s)))


def svd(w: np.ndarray, rank: int) -> LowRank:
    """Truncated SVD of [out, in]; its squared error is the sum of the dropped squared singular values.

    Raises: NonFiniteWeight.
    """
    return LowRankFit.of(finite(np.asarray(w, np.float64))).at(rank)


def asvd(w: np.ndarray, rank: int, gram: np.ndarray) -> LowRank:
    """The factors with least error of y = x · Wᵀ over inputs with a Gram matrix [in, in]. Raises: NonFiniteWeight."""
    return LowRankFit.of(finite(np.asarray(w, np.float64)), finite(np.asarray(gram, np.float64), "gram")).at(rank)


def ring(first: Unfolding, *, error: float = 0.0, ranks: Sequence[int] | None = None) -> list[np.ndarray]:
    """Cores [r_{k-1}, p_k, r_k] of a tensor, r_d = r_0; a train, with r_0 = 1, if that is smallest.

    Args:
        first: SVD of its first unfolding.
        error: relative. The first SVD drops at most √(2/d) · error · norm, the d - 2 others error · norm / √d each:
            their squares add up to (error · norm)².
        ranks: upper limits of r_0 .. r_{d-1}, instead of an error.
    """
    d = len(first.shape)
    if d < 3:  # a ring of two cores is a train of rank r_0 r_1
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
    """Split rank r_0 r_1 of the first unfolding into two bonds: U [p_1, r_0 r_1] -> [r_0, p_1, r_1]."""
    p, rank = first.shape[0], outer * inner
    u, rest = np.zeros((p, rank)), np.zeros((rank, first.vt.shape[1]))
    kept = min(rank, len(first.s))
    u[:, :kept], rest[:kept] = first.u[:, :kept], first.s[:kept, None] * first.vt[:kept]
    head = u.reshape(p, outer, inner).transpose(1, 0, 2)
    moved = rest.reshape(outer, inner, -1).transpose(1, 2, 0).reshape(inner, -1)
    return [head, *sweep(np.ascontiguousarray(moved), first.shape[1:], outer, lost, ranks)]


BISECTIONS = 14
"""Steps of the bisection that fits the error of a train or ring to a number of parameters."""


class Fit(Protocol):
    """All decompositions of one matrix by one method."""

    def within_error(self, error: float) -> Factors:
        """The fewest parameters at this relative error (asvd: of the outputs)."""
        ...

    def within_params(self, params: int) -> Factors | None:
        """The least error with up to this many parameters; None if the smallest rank does not fit."""
        ...


class LowRankMethod:
    """`svd` and `asvd`: one decomposition gives every rank."""

    def __init__(self, w: np.ndarray, gram: np.ndarray | None, min_rank: int = 1, max_rank: int | None = None) -> None:
        self.fit = LowRankFit.of(w, gram)
        most = min(len(self.fit.s), max_rank or len(self.fit.s))
        self.low, self.high, self.cost = min(min_rank, most), most, sum(w.shape)

    def within_error(self, error: float) -> LowRank:
        """The smallest sufficient rank, within `min_rank` and `max_rank`; the caller checks the error."""
        return self.fit.at(min(max(self.fit.rank_for(error), self.low), self.high))

    def within_params(self, params: int) -> LowRank | None:
        """The largest rank that fits."""
        rank = min(params // self.cost, self.high)
        return self.fit.at(rank) if rank >= self.low else None


class RingMethod:
    """`tt` and `tr`: the first unfolding is decomposed once, the others again for each accuracy."""

    def __init__(self, w: np.ndarray, order: int, closed: bool, pad: bool, sweeps: int) -> None:
        self.w, self.closed, self.sweeps = w, closed, sweeps
        self.out, self.inner = split(w.shape[0], order, pad), split(w.shape[1], order, pad)[::-1]

    @cached_property
    def tensor(self) -> np.ndarray:
        """The matrix as a tensor of modes."""
        return to_tensor(self.w, self.out, self.inner)

    @cached_property
    def first(self) -> Unfolding:
        """The SVD of the first unfolding, computed at first use."""
        return Unfolding.of(self.tensor)

    def within_error(self, error: float) -> TensorRing:
        """The error is an upper bound."""
        arrays = (ring if self.closed else train)(self.first, error=error)
        if self.sweeps:
            arrays = refine(self.tensor, arrays, self.sweeps)[0]
        return TensorRing(to_cores(arrays, self.out, self.inner), (self.w.shape[0], self.w.shape[1]))

    def within_params(self, params: int) -> TensorRing | None:
        """The smallest error whose train or ring fits, by bisection."""
        low, high = 0.0, 1.0
        best = self.within_error(high)
        if parameters(best) > params:
            return None
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            found = self.within_error(middle)
            if parameters(found) <= params:
                best, high = found, middle
            else:
                low = middle
        return best


METHODS: dict[str, Callable[..., Fit]] = {
    "svd": lambda w, gram, o: LowRankMethod(w, None, o.min_rank, o.max_rank),
    "asvd": lambda w, gram, o: LowRankMethod(w, gram, o.min_rank, o.max_rank),
    "tt": lambda w, gram, o: RingMethod(w, o.order, False, o.pad, o.sweeps),
    "tr": lambda w, gram, o: RingMethod(w, o.order, True, o.pad, o.sweeps),
}
"""Name -> fit of a matrix, given the Gram matrix of its inputs or None, and `CompressOptions`."""
