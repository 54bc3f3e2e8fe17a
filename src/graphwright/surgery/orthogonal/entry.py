"""What enters the ways to an orthonormal factor: numbers, and of a size that their squares can be taken."""

from __future__ import annotations

import numpy as np

from graphwright.surgery.matrices import finite


def in_range(w: np.ndarray) -> np.ndarray:
    """W, or W over its largest entry where products of entries would leave the range of its dtype.

    The orthonormal factor is the same. Raises: NonFiniteWeight.
    """
    largest = max(finite(w).max(initial=0.0), -w.min(initial=0.0))
    far = float(np.finfo(w.dtype).max) ** (1 / 3)  # two factors, and a third for sums over rows
    return w if largest == 0 or 1 / far < largest < far else w / largest
