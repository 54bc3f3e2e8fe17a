"""QR with a positive diagonal, the cheapest way to orthonormal columns: Householder reflections, as LAPACK has them."""

from __future__ import annotations

import numpy as np

from graphwright.surgery.orthogonal.entry import in_range


def qr(w: np.ndarray) -> np.ndarray:
    """Q of W = Q R (out >= in), or of W = L Q (out < in), with diag(R) >= 0, which makes it unique at full rank.

    Columns that depend on earlier ones get orthonormal ones of their own. Float64 [out, in].

    Raises: NonFiniteWeight.
    """
    w = in_range(np.asarray(w, np.float64))
    if w.shape[0] < w.shape[1]:
        return qr(w.T).T
    q, r = np.linalg.qr(w)
    q *= np.where(np.diagonal(r) < 0, -1.0, 1.0)
    return q
