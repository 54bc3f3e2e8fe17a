"""How orthogonal a matrix is: error, condition number, and what it does to the length of a vector."""

from __future__ import annotations

import numpy as np

PROBES = 64
"""Random directions by which the gain is measured."""


def gram_error(w: np.ndarray) -> float:
    """Largest |WᵀW - I| of a tall or square matrix, max |WWᵀ - I| of a wide one."""
    gram = w.T @ w if w.shape[0] >= w.shape[1] else w @ w.T
    gram[np.diag_indices_from(gram)] -= 1
    return float(np.abs(gram).max(initial=0.0))


def is_orthogonal(w: np.ndarray, tol: float = 1e-8) -> bool:
    """True if the columns of a tall matrix, or the rows of a wide one, are orthonormal within `tol`."""
    w = np.asarray(w, np.float64)
    return bool(np.isfinite(w).all()) and gram_error(w) <= tol


def condition(w: np.ndarray) -> float:
    """σ_max / σ_min over all min(out, in) singular values; infinite if one of them is 0 within rounding."""
    sigma = np.linalg.svd(w, compute_uv=False)
    floor = sigma[0] * max(w.shape) * np.finfo(np.float64).eps
    return float(sigma[0] / sigma[-1]) if sigma[-1] > floor else float("inf")


def gain(w: np.ndarray, probes: int = PROBES, seed: int = 0) -> tuple[float, float]:
    """Smallest and largest ‖W d‖ / ‖d‖ over random directions d; of a wide matrix in the span of its rows."""
    rng = np.random.default_rng(seed)
    d = rng.standard_normal((w.shape[1], probes))
    if w.shape[0] < w.shape[1]:
        d = w.T @ rng.standard_normal((w.shape[0], probes))
    lengths = np.linalg.norm(d, axis=0)
    found = np.linalg.norm(w @ d, axis=0)[lengths > 0] / lengths[lengths > 0]
    return (float(found.min()), float(found.max())) if found.size else (0.0, 0.0)
