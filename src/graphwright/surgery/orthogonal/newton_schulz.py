"""Newton-Schulz: the polar factor by matrix products alone, for devices on which those are the fastest thing there is.

Quintic steps bring all singular values near 1, cubic ones the rest of the way. Source: Björck and Bowie 1971 for the
cubic step; the quintic coefficients are Keller Jordan's (Muon, 2024).
"""

from __future__ import annotations

import numpy as np

from graphwright.surgery.orthogonal.polar import polar

QUINTIC = (3.4445, -4.7750, 2.0315)
QUINTIC_STEPS, CUBIC_STEPS = 8, 30
TOLERANCE = {np.dtype(np.float32): 2e-6, np.dtype(np.float64): 1e-12}


def newton_schulz(w: np.ndarray, *, tol: float | None = None, polish: bool = True) -> np.ndarray:
    """The polar factor of a float32 or float64 matrix [out, in], in its dtype.

    Args:
        w: finite.
        tol: of max |XᵀX - I| at which the cubic steps end; 2e-6 in float32, 1e-12 in float64.
        polish: False leaves the cubic steps out: singular values are then between 0.68 and 1.2, not 1.
    Returns: the factor, by SVD where the steps do not converge, as for a singular matrix.
    """
    w = np.asarray(w)
    if w.dtype not in TOLERANCE:
        w = w.astype(np.float64)
    if w.shape[0] < w.shape[1]:
        return newton_schulz(w.T, tol=tol, polish=polish).T
    bound = float(np.sqrt(np.abs(w).sum(0).max() * np.abs(w).sum(1).max())) if w.size else 0.0
    if bound == 0.0:
        return polar(w).astype(w.dtype)
    x = w / w.dtype.type(bound)
    a, b, c = (w.dtype.type(v) for v in QUINTIC)
    eye = np.eye(w.shape[1], dtype=w.dtype)
    for _ in range(QUINTIC_STEPS):
        m = x.T @ x
        x = x @ (a * eye + (b * eye + c * m) @ m)
    if not polish:
        return x
    for _ in range(CUBIC_STEPS):
        m = x.T @ x
        if np.abs(m - eye).max() <= (TOLERANCE[w.dtype] if tol is None else tol):
            return x
        x = x @ (w.dtype.type(1.5) * eye - w.dtype.type(0.5) * m)
    return polar(w).astype(w.dtype)
