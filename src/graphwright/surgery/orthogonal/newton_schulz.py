"""Newton-Schulz: the polar factor by matrix products alone, for devices on which those are the fastest thing there is.

Quintic steps bring all singular values near 1, cubic ones the rest of the way. Source: Björck and Bowie 1971 for the
cubic step; the quintic coefficients are Keller Jordan's (Muon, 2024).
"""

from __future__ import annotations

import numpy as np

from graphwright.surgery.orthogonal.entry import in_range
from graphwright.surgery.orthogonal.polar import polar
from graphwright.surgery.orthogonal.products import multiply

QUINTIC = (3.4445, -4.7750, 2.0315)
QUINTIC_STEPS, CUBIC_STEPS = 8, 30
TOLERANCE = {np.dtype(np.float32): 2e-6, np.dtype(np.float64): 1e-12}


def newton_schulz(w: np.ndarray, *, tol: float | None = None, polish: bool = True) -> np.ndarray:
    """The polar factor of a float32 or float64 matrix [out, in], in its dtype.

    Args:
        tol: of max |XᵀX - I| at which the cubic steps end; 2e-6 in float32, 1e-12 in float64.
        polish: False leaves the cubic steps out: singular values are then between 0.68 and 1.2, not 1.
    Returns: the factor, by SVD where the steps do not converge, as for a singular matrix.
    Raises: NonFiniteWeight.
    """
    w = np.asarray(w)
    if w.dtype not in TOLERANCE:
        w = w.astype(np.float64)
    w = in_range(w)
    if w.shape[0] < w.shape[1]:
        return newton_schulz(w.T, tol=tol, polish=polish).T
    bound = float(np.sqrt(np.abs(w).sum(0).max() * np.abs(w).sum(1).max())) if w.size else 0.0
    if bound == 0.0:
        return polar(w).astype(w.dtype)
    x = w / w.dtype.type(bound)
    for _ in range(QUINTIC_STEPS):
        _quintic(x)
    if not polish:
        return x
    for _ in range(CUBIC_STEPS):
        if _cubic(x, TOLERANCE[w.dtype] if tol is None else tol):
            return x
    return polar(w).astype(w.dtype)


def _quintic(x: np.ndarray) -> None:
    """X := X (a I + (b I + c M) M) for M = XᵀX, in place."""
    a, b, c = (x.dtype.type(v) for v in QUINTIC)
    m, diagonal = x.T @ x, np.diag_indices(x.shape[1])
    inner = c * m
    inner[diagonal] += b
    multiply(inner, m)[diagonal] += a
    multiply(x, inner)


def _cubic(x: np.ndarray, tol: float) -> bool:
    """True if max |M - I| <= tol; else X := X (I - (M - I) / 2), in place."""
    m, diagonal = x.T @ x, np.diag_indices(x.shape[1])
    m[diagonal] -= 1
    if max(m.max(), -m.min()) <= tol:
        return True
    m *= x.dtype.type(-0.5)
    m[diagonal] += 1
    multiply(x, m)
    return False
