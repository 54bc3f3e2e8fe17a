"""Alternating least squares for tensor trains and rings: optimise one core at a time while the others are fixed.

The normal equations of a core need the Gram matrix of the other cores, which is a product of small transfer matrices,
and one product with the tensor. Source: Zhao et al. 2016, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

CONVERGED = 1e-11
"""Relative error, or its change in a sweep, at which sweeping stops."""
CANDIDATES, PROBE = 4, 20
"""Random starts, and sweeps after which they are compared; enough to recover planted rings of ranks 2 and 3."""


def refine(tensor: np.ndarray, cores: Sequence[np.ndarray], sweeps: int) -> tuple[list[np.ndarray], list[float]]:
    """Improved cores of the same ranks, and the relative error before and after each sweep, which never rises.

    Args:
        tensor: [p_1 .. p_d].
        cores: [r_{k-1}, p_k, r_k] to start from.
        sweeps: upper limit.
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
    """A ring of given ranks r_0 .. r_{d-1} from random cores, restarted until the error is at most `tol`.

    Each start is the best of several candidates after a few sweeps, by when most bad candidates have stalled.
    """
    best: tuple[list[np.ndarray], list[float]] | None = None
    rng = np.random.default_rng(seed)
    closed = [*ranks, ranks[0]]

    def drawn() -> list[np.ndarray]:
        return [rng.standard_normal((closed[k], p, closed[k + 1])) for k, p in enumerate(tensor.shape)]

    for _ in range(max(restarts, 1)):
        probed = [refine(tensor, drawn(), min(PROBE, sweeps)) for _ in range(CANDIDATES)]
        start, errors = min(probed, key=lambda found: found[1][-1])
        cores, more = refine(tensor, start, sweeps - min(PROBE, sweeps))
        if best is None or more[-1] < best[1][-1]:
            best = cores, [*errors, *more[1:]]
        if best[1][-1] <= tol:
            break
    assert best is not None
    return best


def contract(cores: Sequence[np.ndarray]) -> np.ndarray:
    """The full tensor of a ring or train."""
    k = len(cores) - 1
    last = cores[k]
    full = _subchain(cores, k) @ _rows(last).T
    return full.reshape([core.shape[1] for core in cores])


def relative_error(tensor: np.ndarray, cores: Sequence[np.ndarray]) -> float:
    """‖T - ring‖ / ‖T‖; 0 where both are zero."""
    norm, lost = float(np.linalg.norm(tensor)), float(np.linalg.norm(tensor - contract(cores)))
    return lost / norm if norm else lost


def _unfold(tensor: np.ndarray, k: int) -> np.ndarray:
    """[p_k, p_{k+1} .. p_d p_1 .. p_{k-1}]: mode k, then the others in the order of the ring."""
    d = tensor.ndim
    order = [(k + i) % d for i in range(d)]
    return np.ascontiguousarray(tensor.transpose(order).reshape(tensor.shape[k], -1))


def _rows(core: np.ndarray) -> np.ndarray:
    """[r, p, r'] as [p, r' r]."""
    return core.transpose(1, 2, 0).reshape(core.shape[1], -1)


def _subchain(cores: Sequence[np.ndarray], k: int) -> np.ndarray:
    """Contraction of all cores but k, in ring order from k + 1: [modes, r_k r_{k-1}]."""
    d = len(cores)
    chain = cores[(k + 1) % d]
    for i in range(2, d):
        core = cores[(k + i) % d]
        chain = (chain.reshape(-1, chain.shape[-1]) @ core.reshape(core.shape[0], -1)).reshape(
            chain.shape[0], -1, core.shape[2]
        )
    return chain.transpose(1, 0, 2).reshape(chain.shape[1], -1)


def _gram(cores: Sequence[np.ndarray], k: int) -> np.ndarray:
    """Gram matrix of the subchain's columns, [r_k r_{k-1}, r_k r_{k-1}], without forming the subchain."""
    d, total = len(cores), None
    for i in range(1, d):
        core = cores[(k + i) % d]
        left, p, right = core.shape
        flat = core.transpose(1, 0, 2).reshape(p, left * right)
        pair = (flat.T @ flat).reshape(left, right, left, right).transpose(0, 2, 1, 3)
        pair = pair.reshape(left * left, right * right)
        total = pair if total is None else total @ pair
    assert total is not None
    a, b = cores[k].shape[2], cores[k].shape[0]
    return total.reshape(a, a, b, b).transpose(0, 2, 1, 3).reshape(a * b, a * b)


def _solve(right: np.ndarray, gram: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The core from its normal equations; the minimum-norm solution if they are singular."""
    scale = np.trace(gram) / len(gram)
    try:
        np.linalg.cholesky(gram - 1e-13 * scale * np.eye(len(gram)))
        found = np.linalg.solve(gram, right.T).T
    except np.linalg.LinAlgError:
        found = right @ np.linalg.pinv(gram, rcond=1e-12, hermitian=True)
    return found.reshape(shape[1], shape[2], shape[0]).transpose(2, 0, 1)
