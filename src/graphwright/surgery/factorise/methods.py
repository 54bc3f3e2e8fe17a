"""Low-rank, tensor train and ring factors by SVD, and their refinement by alternating least squares.

Alternating least squares optimises one core at a time while the others are fixed. The normal equations of a core need
one product with the tensor, and the Gram matrix of the other cores, which is a product of small transfer matrices.
Source: Zhao et al. 2016, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple

import numpy as np

from graphwright.surgery.factorise.factors import LowRank, TensorRing, parameters, split, to_cores, to_tensor
from graphwright.surgery.matrices import finite

CONVERGED = 1e-11
"""Relative error, or its change in a sweep, at which sweeping stops."""
CANDIDATES, PROBE = 4, 20
"""Random starts, and sweeps before they are compared; enough to recover random rings of ranks 2 and 3."""


def refine(tensor: np.ndarray, cores: Sequence[np.ndarray], sweeps: int) -> tuple[list[np.ndarray], list[float]]:
    """Improve the cores of a ring or train by sweeps of alternating least squares; the ranks stay fixed.

    Args:
        tensor: the approximated tensor [p_1 .. p_d].
        cores: cores [r_{k-1}, p_k, r_k] to start from.
        sweeps: upper limit of the number of sweeps; a sweep that does not lower the error is the last and is dropped.
    Returns: the cores; the relative errors before the first sweep and after each sweep.
    """
    d, norm = tensor.ndim, float(np.linalg.norm(tensor))
    best = [np.array(core, np.float64) for core in cores]
    errors = [relative_error(tensor, best)]
    if norm == 0.0 or d == 1:
        return best, errors
    unfolded = [_unfold(tensor, k) for k in range(d)]
    current = [core.copy() for core in best]
    for _ in range(sweeps):
        others = np.empty(0)
        for k in range(d):
            others = _subchain(current, k)  # [rest, r_k r_{k-1}]
            current[k] = _solve(unfolded[k] @ others, _gram(current, k), current[k].shape)
        error = float(np.linalg.norm(unfolded[-1] - _rows(current[-1]) @ others.T)) / norm
        if error >= errors[-1]:
            break
        best = [core.copy() for core in current]
        errors.append(error)
        if error < CONVERGED or errors[-2] - error < CONVERGED * errors[-2]:
            break
    return best, errors


def recover(
    tensor: np.ndarray, ranks: Sequence[int], sweeps: int, restarts: int = 3, seed: int = 0, tol: float = 1e-9
) -> tuple[list[np.ndarray], list[float]]:
    """Fit a ring of given ranks r_0 .. r_{d-1} from random cores, up to `restarts` times, until its error is <= `tol`.

    Each start is the best of several random candidates, compared after a few sweeps.
    Returns: the cores; the relative errors before the first sweep and after each sweep.
    """
    found: list[tuple[list[np.ndarray], list[float]]] = []
    rng = np.random.default_rng(seed)
    closed = [*ranks, ranks[0]]

    def drawn() -> list[np.ndarray]:
        return [rng.standard_normal((closed[k], p, closed[k + 1])) for k, p in enumerate(tensor.shape)]

    while len(found) < max(restarts, 1) and not (found and found[-1][1][-1] <= tol):
        probed = [refine(tensor, drawn(), min(PROBE, sweeps)) for _ in range(CANDIDATES)]
        start, errors = min(probed, key=lambda each: each[1][-1])
        cores, more = refine(tensor, start, sweeps - min(PROBE, sweeps))
        found.append((cores, [*errors, *more[1:]]))
    return min(found, key=lambda each: each[1][-1])


def contract(cores: Sequence[np.ndarray]) -> np.ndarray:
    """Multiply the cores of a ring or train out to the full tensor."""
    full = _subchain(cores, len(cores) - 1) @ _rows(cores[-1]).T
    return full.reshape([core.shape[1] for core in cores])


def relative_error(tensor: np.ndarray, cores: Sequence[np.ndarray]) -> float:
    """‖T - ring‖ / ‖T‖ of a tensor T and the ring or train of its cores; 0 if both are zero."""
    norm, lost = float(np.linalg.norm(tensor)), float(np.linalg.norm(tensor - contract(cores)))
    return lost / norm if norm else lost


def _unfold(tensor: np.ndarray, k: int) -> np.ndarray:
    """Unfold a tensor to [p_k, p_{k+1} .. p_d p_1 .. p_{k-1}]: mode k, then the others in the order of the ring."""
    d = tensor.ndim
    order = [(k + i) % d for i in range(d)]
    return np.ascontiguousarray(tensor.transpose(order).reshape(tensor.shape[k], -1))


def _rows(core: np.ndarray) -> np.ndarray:
    """Reshape a core [r, p, r'] to [p, r' r]."""
    return core.transpose(1, 2, 0).reshape(core.shape[1], -1)


def _subchain(cores: Sequence[np.ndarray], k: int) -> np.ndarray:
    """Contract all cores except k, in ring order from k + 1, to a matrix [modes, r_k r_{k-1}]."""
    chain, *rest = (*cores[k + 1 :], *cores[:k])
    for core in rest:
        wide = chain.reshape(-1, chain.shape[-1]) @ core.reshape(core.shape[0], -1)
        chain = wide.reshape(chain.shape[0], -1, core.shape[2])
    return chain.transpose(1, 0, 2).reshape(chain.shape[1], -1)


def _gram(cores: Sequence[np.ndarray], k: int) -> np.ndarray:
    """Return the Gram matrix [r_k r_{k-1}, r_k r_{k-1}] of the columns of `_subchain`, without computing them."""
    pairs = []
    for core in (*cores[k + 1 :], *cores[:k]):
        left, p, right = core.shape
        flat = core.transpose(1, 0, 2).reshape(p, left * right)
        pair = (flat.T @ flat).reshape(left, right, left, right).transpose(0, 2, 1, 3)
        pairs.append(pair.reshape(left * left, right * right))
    total = reduce(np.matmul, pairs)
    a, b = cores[k].shape[2], cores[k].shape[0]
    return total.reshape(a, a, b, b).transpose(0, 2, 1, 3).reshape(a * b, a * b)


def _solve(right: np.ndarray, gram: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Solve the normal equations for a core of the given shape; use the minimum-norm solution if they are singular."""
    scale = np.trace(gram) / len(gram)
    try:
        np.linalg.cholesky(gram - 1e-13 * scale * np.eye(len(gram)))
        found = np.linalg.solve(gram, right.T).T
    except np.linalg.LinAlgError:
        found = right @ np.linalg.pinv(gram, rcond=1e-12, hermitian=True)
    return found.reshape(shape[1], shape[2], shape[0]).transpose(2, 0, 1)


class Unfolding(NamedTuple):
    """The SVD of a tensor [p_1 .. p_d] as a matrix [p_1, p_2 · .. · p_d]: the first step of fitting a train or ring."""

    shape: tuple[int, ...]
    u: np.ndarray
    s: np.ndarray
    vt: np.ndarray

    @staticmethod
    def of(tensor: np.ndarray) -> Unfolding:
        """Compute the SVD of a tensor as the matrix [p_1, p_2 · .. · p_d]."""
        u, s, vt = np.linalg.svd(tensor.reshape(tensor.shape[0], -1), full_matrices=False)
        return Unfolding(tensor.shape, u, s, vt)

    @property
    def norm(self) -> float:
        """Frobenius norm of the tensor."""
        return float(np.linalg.norm(self.s))


def rank_within(s: np.ndarray, lost: float) -> int:
    """Return the smallest rank >= 1 for which the dropped singular values have a norm of at most `lost`."""
    tail = np.sqrt(np.cumsum(s[::-1] ** 2)[::-1])  # tail[r]: norm of the values dropped at rank r
    return max(int(np.count_nonzero(tail > lost)), 1)


def train(first: Unfolding, *, error: float = 0.0, ranks: Sequence[int] | None = None) -> list[np.ndarray]:
    """Compute the cores [r_{k-1}, p_k, r_k] of a tensor train (TT-SVD), with r_0 = r_d = 1.

    Args:
        first: SVD of the tensor as the matrix [p_1, p_2 · .. · p_d].
        error: allowed relative error; each of the d - 1 SVDs drops at most error · norm / √(d - 1).
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
    """Split what remains after the first core, `rest` [r_1, p_2 .. p_d, last], into cores of `sizes` p_2 .. p_d.

    Each SVD keeps at most the rank given in `ranks`, or if that is None, drops singular values of a norm <= `lost`.
    """
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
    """A decomposition by the methods `svd` and `asvd`: an SVD, which is truncated to obtain factors of any rank.

    Attributes:
        u, s, vt: SVD of W for `svd`, of W L for `asvd`.
        root: L, the Cholesky factor of the Gram matrix of the inputs; None for `svd`.
        low, high: smallest and largest allowed rank.
    """

    u: np.ndarray
    s: np.ndarray
    vt: np.ndarray
    root: np.ndarray | None
    low: int
    high: int

    @staticmethod
    def of(w: np.ndarray, gram: np.ndarray | None = None, min_rank: int = 1, max_rank: int | None = None) -> LowRankFit:
        """Decompose a matrix [out, in]. With a Gram matrix Σ x xᵀ / N of inputs x, the error is that of the outputs."""
        root = None
        if gram is not None:
            floor = RIDGE * float(np.trace(gram)) / len(gram)
            root = np.linalg.cholesky(gram + (floor or 1.0) * np.eye(len(gram)))
        u, s, vt = np.linalg.svd(w if root is None else w @ root, full_matrices=False)
        most = min(len(s), max_rank or len(s))
        return LowRankFit(u, s, vt, root, min(min_rank, most), most)

    def at(self, rank: int) -> LowRank:
        """Return the factors of a given rank; each factor contains the square roots of the singular values."""
        half = np.sqrt(self.s[:rank])
        inner = half[:, None] * self.vt[:rank]
        if self.root is not None:
            inner = np.linalg.solve(self.root.T, inner.T).T
        return LowRank(self.u[:, :rank] * half, inner)

    def error(self, rank: int) -> float:
        """Return the relative Frobenius error at a rank: of the weights for `svd`, of the layer outputs for `asvd`."""
        whole = float(np.linalg.norm(self.s))
        return float(np.linalg.norm(self.s[rank:])) / whole if whole else 0.0

    def rank_for(self, error: float) -> int:
        """Return the smallest rank whose relative error is at most `error`."""
        return rank_within(self.s, error * float(np.linalg.norm(self.s)))

    def within_error(self, error: float) -> LowRank:
        """Return the factors of the smallest allowed rank with at most this error; else of rank `high`."""
        return self.at(min(max(self.rank_for(error), self.low), self.high))

    def within_params(self, params: int) -> LowRank | None:
        """Return the factors of the largest allowed rank within `params` parameters; None if rank `low` needs more."""
        rank = min(params // (len(self.u) + self.vt.shape[1]), self.high)
        return self.at(rank) if rank >= self.low else None


def svd(w: np.ndarray, rank: int) -> LowRank:
    """Return the truncated SVD of a matrix [out, in]; its squared error is the sum of the dropped squared σ.

    Raises: NonFiniteWeight if the matrix contains NaN or infinity.
    """
    return LowRankFit.of(finite(np.asarray(w, np.float64))).at(rank)


def asvd(w: np.ndarray, rank: int, gram: np.ndarray) -> LowRank:
    """Return the factors of least error of y = x · Wᵀ for inputs x with Gram matrix `gram`. Raises: NonFiniteWeight."""
    return LowRankFit.of(finite(np.asarray(w, np.float64)), finite(np.asarray(gram, np.float64), "gram")).at(rank)


def ring(first: Unfolding, *, error: float = 0.0, ranks: Sequence[int] | None = None) -> list[np.ndarray]:
    """Compute the cores [r_{k-1}, p_k, r_k] of a tensor ring, with r_d = r_0.

    Without `ranks`, r_0 is chosen to minimise the number of entries; for r_0 = 1 the result is a tensor train.

    Args:
        first: SVD of the tensor as the matrix [p_1, p_2 · .. · p_d].
        error: allowed relative error. The first SVD drops at most √(2/d) · error · norm, each of the d - 2 others at
            most error · norm / √d; the squares add up to (error · norm)².
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
    """Return the cores of a ring with ranks r_0 = `outer`, r_1 = `inner`; the first core is U of the SVD `first`."""
    p, rank = first.shape[0], outer * inner
    u, rest = np.zeros((p, rank)), np.zeros((rank, first.vt.shape[1]))
    kept = min(rank, len(first.s))
    u[:, :kept], rest[:kept] = first.u[:, :kept], first.s[:kept, None] * first.vt[:kept]
    head = u.reshape(p, outer, inner).transpose(1, 0, 2)
    moved = rest.reshape(outer, inner, -1).transpose(1, 2, 0).reshape(inner, -1)
    return [head, *sweep(np.ascontiguousarray(moved), first.shape[1:], outer, lost, ranks)]


BISECTIONS = 14
"""Steps of the bisection that fits the error of a train or ring to a number of parameters."""


class RingMethod:
    """A matrix to factor as a tensor train or, if `closed`, a ring; fits of all accuracies share the first SVD."""

    def __init__(self, w: np.ndarray, order: int, closed: bool, pad: bool, sweeps: int) -> None:
        self.w, self.closed, self.sweeps = w, closed, sweeps
        self.out, self.inner = split(w.shape[0], order, pad), split(w.shape[1], order, pad)[::-1]

    @cached_property
    def tensor(self) -> np.ndarray:
        """The matrix, reshaped to one axis per pair of an output and an input mode."""
        return to_tensor(self.w, self.out, self.inner)

    @cached_property
    def first(self) -> Unfolding:
        """The SVD of the tensor as a matrix with its first axis as rows, computed at first use."""
        return Unfolding.of(self.tensor)

    def within_error(self, error: float) -> TensorRing:
        """Return a train or ring of few parameters whose relative error is at most `error`."""
        arrays = (ring if self.closed else train)(self.first, error=error)
        if self.sweeps:
            arrays = refine(self.tensor, arrays, self.sweeps)[0]
        return TensorRing(to_cores(arrays, self.out, self.inner), (self.w.shape[0], self.w.shape[1]))

    def within_params(self, params: int) -> TensorRing | None:
        """Find a train or ring of least error within `params` parameters by bisection; None if rank 1 needs more."""
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


Fit = LowRankFit | RingMethod
"""All decompositions of one matrix by one method."""
METHODS: dict[str, Callable[..., Fit]] = {
    "svd": lambda w, gram, o: LowRankFit.of(w, None, o.min_rank, o.max_rank),
    "asvd": lambda w, gram, o: LowRankFit.of(w, gram, o.min_rank, o.max_rank),
    "tt": lambda w, gram, o: RingMethod(w, o.order, False, o.pad, o.sweeps),
    "tr": lambda w, gram, o: RingMethod(w, o.order, True, o.pad, o.sweeps),
}
"""Name -> fit of a matrix, given the Gram matrix of its inputs or None, and `CompressOptions`."""
