"""The polar factor: the nearest matrix with orthonormal columns (tall) or rows (wide), in Frobenius norm.

W = U S Vᵀ has the factor Q = U Vᵀ. Source: Higham 1986, "Computing the polar decomposition - with applications".
"""

from __future__ import annotations

import numpy as np

from graphwright.surgery.orthogonal.entry import in_range
from graphwright.surgery.orthogonal.products import multiply

WELL_CONDITIONED = 1e-12
"""Smallest ratio of eigenvalues of WᵀW, so condition number 10⁶, up to which they are accurate enough to start from."""
FAR, NEAR, STEPS = 1e-2, 1e-8, 3
"""Cosines between columns: too large for a first-order step, and so small that it leaves nothing; steps at most."""
SMALL = 32
"""Up to this width an SVD is as fast as anything."""


def polar(w: np.ndarray, *, special: bool = False) -> np.ndarray:
    """Nearest matrix with orthonormal columns (out >= in) or rows (out < in).

    Rank-deficient matrices, zero ones too, get a full orthonormal factor. Well-conditioned ones are solved through the
    eigenvectors of their Gram matrix, which is faster than an SVD; others by SVD.

    Args:
        w: [out, in]; computed in float64.
        special: of a square matrix the nearest rotation: where det(U Vᵀ) is -1 the direction of the smallest singular
            value is flipped.
    Returns: float64 [out, in].
    Raises: NonFiniteWeight.
    """
    w = in_range(np.asarray(w, np.float64))
    if w.shape[0] < w.shape[1]:
        return polar(w.T).T
    if special:
        return _by_svd(w, special)
    quick = _by_gram(w) if w.shape[1] > SMALL else None
    return _by_svd(w) if quick is None else quick


def stretch(w: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The other factor: W = Q P of a tall matrix, W = P Q of a wide one; symmetric for the polar Q."""
    return q.T @ w if w.shape[0] >= w.shape[1] else w @ q.T


def _by_svd(w: np.ndarray, special: bool = False) -> np.ndarray:
    u, _, vt = np.linalg.svd(w, full_matrices=False)
    if special and np.linalg.det(u @ vt) < 0:
        u[:, -1] *= -1
    return u @ vt


def _by_gram(w: np.ndarray) -> np.ndarray | None:
    """Q = R C^-½ Vᵀ for R = W V and C = RᵀR, with the eigenvectors V of WᵀW; None for an ill-conditioned W.

    The eigenvectors carry an error of ε κ², so C = S² + F is not quite diagonal. To first order C^-½ is S^-1 less
    F_ij / (s_i s_j (s_i + s_j)) (Higham 2008, "Functions of Matrices", section 6.1: the derivative of the square root
    solves a Sylvester equation); an entry of C is as accurate as the two columns are long, so Q is orthonormal to ε.
    What is of second order goes with one more such step.
    """
    eigenvalues, v = np.linalg.eigh(w.T @ w)
    if eigenvalues[0] <= WELL_CONDITIONED * eigenvalues[-1]:
        return None
    r = w @ v
    del w
    for _ in range(STEPS):
        off = _straighten(r)
        if off > FAR:
            return None
        if off <= NEAR:
            return multiply(r, v.T)
    return None


def _straighten(r: np.ndarray) -> float:
    """R := R C^-½ to first order, in place; returns the largest cosine between two columns before, beyond FAR alone."""
    c = r.T @ r
    s = np.sqrt(np.diagonal(c))
    c /= -s
    c /= s[:, None]
    np.fill_diagonal(c, 0.0)
    off = max(c.max(), -c.min())
    if off <= FAR:
        c /= s[:, None] + s
        np.fill_diagonal(c, 1 / s)
        multiply(r, c)
    return float(off)
