"""How far two computations of one value agree, where both may give infinities or NaN."""

from __future__ import annotations

import numpy as np


def largest_difference(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Return (largest |a - b|, largest finite |a|) of two arrays of one shape; 0 for empty ones.

    Equal infinities, and NaN in both, do not differ; a NaN or an infinity in one of them only differs by infinity. The
    second number is 0 if no entry of `a` is finite.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    with np.errstate(invalid="ignore"):  # inf - inf
        gaps = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    gap = float(np.where(np.isnan(gaps), np.inf, gaps).max(initial=0.0))
    return gap, float(np.abs(a[np.isfinite(a)]).max(initial=0.0))
