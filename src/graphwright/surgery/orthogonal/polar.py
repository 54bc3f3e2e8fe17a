"""The polar factor: the nearest matrix with orthonormal columns (tall) or rows (wide), in Frobenius norm.

W = U S Vᵀ has the factor Q = U Vᵀ. Source: Higham 1986, "Computing the polar decomposition - with applications".
"""

from __future__ import annotations

import numpy as np

WELL_CONDITIONED = 1e-8
"""Smallest ratio of eigenvalues of WᵀW, so condition number 10⁴, up to which they are accurate enough to start from."""
SMALL = 32
"""Up to this width an SVD is as fast as anything."""


def polar(w: np.ndarray, *, special: bool = False) -> np.ndarray:
    """Nearest matrix with orthonormal columns (out >= in) or rows (out < in).

    Rank-deficient matrices, zero ones too, get a full orthonormal factor. Well-conditioned ones are solved through the
    eigenvectors of their Gram matrix, which is faster than an SVD; others by SVD.

    Args:
        w: [out, in], finite; computed in float64.
        special: of a square matrix the nearest rotation: where det(U Vᵀ) is -1 the direction of the smallest singular
            value is flipped.
    Returns: float64 [out, in].
    """
    w = np.asarray(w, np.float64)
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
    """Q from WᵀW = V Λ Vᵀ as W V Λ^-½ Vᵀ, then one Newton step on its rotation and cubic steps on its length.

    The eigenvectors carry an error of ε κ², and so does this Q. What the cubic step would leave of it is a small turn
    Ω, and in the basis V, where P = QᵀW is not quite symmetric then, (P - Pᵀ)_ij = -2 (σ_i + σ_j) Ω_ij.
    """
    scale = np.abs(w).max(initial=0.0)
    if scale == 0.0:
        return None
    w = w / scale
    eigenvalues, v = np.linalg.eigh(w.T @ w)
    if eigenvalues[0] < WELL_CONDITIONED * eigenvalues[-1]:
        return None
    sigma = np.sqrt(eigenvalues)
    rotated = w @ v  # columns of length σ
    q = rotated / sigma
    p = q.T @ rotated
    turn = (p - p.T) / (sigma[:, None] + sigma[None, :])
    if np.abs(turn).max() > 1e-3:
        return None
    q += q @ (0.5 * turn)
    gram = q.T @ q
    correction = -0.5 * gram
    correction[np.diag_indices_from(gram)] += 1.5
    return (q @ correction) @ v.T
