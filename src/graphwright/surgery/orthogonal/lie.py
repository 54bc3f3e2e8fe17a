"""Rotations and their skew generators A: exp(A), the Cayley map and the logarithm.

Source of exp: Higham 2005, "The scaling and squaring method for the matrix exponential revisited".
"""

from __future__ import annotations

from math import ceil, log2

import numpy as np

from graphwright.errors import ShapeError, UsageError
from graphwright.surgery.errors import NotRotation
from graphwright.surgery.orthogonal.methods import gram_error

PADE = (64764752532480000, 32382376266240000, 7771770303897600, 1187353796428800, 129060195264000, 10559470521600,
        670442572800, 33522128640, 1323241920, 40840800, 960960, 16380, 182, 1)  # fmt: skip
"""Coefficients of the [13/13] Padé approximant of exp."""
PADE_NORM = 5.371920351148152
"""1-norm of A up to which the approximant is exact to float64."""
GENERIC = 1.1142
"""Weight of the imaginary part that separates eigenvalues; a number that is the tangent of no common half angle."""
TOLERANCE = 1e-8
"""Tolerance of the checks that a matrix is orthogonal, or skew."""


def skew(x: np.ndarray) -> np.ndarray:
    """Return the skew part (X - Xᵀ) / 2 of a square matrix."""
    x = _square(x)
    return (x - x.T) / 2


def so_generator(n: int, i: int, j: int) -> np.ndarray:
    """Return the generator of the rotation from axis i towards axis j: [n, n] with 1 at (j, i) and -1 at (i, j).

    Raises: UsageError if i = j, or if an axis is outside 0 .. n - 1.
    """
    if i == j or not (0 <= i < n and 0 <= j < n):
        raise UsageError("i and j are not two different axes of the matrix", got=(i, j),
                         expected=f"two different indices from 0 to {n - 1}")  # fmt: skip
    a = np.zeros((n, n))
    a[j, i], a[i, j] = 1.0, -1.0
    return a


def cayley(a: np.ndarray) -> np.ndarray:
    """(I - A/2)⁻¹ (I + A/2) of a skew matrix A: a rotation without eigenvalue -1, equal to exp(A) up to A³/12.

    Raises: UsageError if A is not skew.
    """
    half = _skew(a) / 2
    eye = np.eye(len(half))
    return np.linalg.solve(eye - half, eye + half)


def lie_exp(a: np.ndarray) -> np.ndarray:
    """exp(A) of a skew matrix A: a rotation. Raises: UsageError if A is not skew."""
    a = _skew(a)
    norm = float(np.abs(a).sum(0).max(initial=0.0))
    squarings = max(ceil(log2(norm / PADE_NORM)), 0) if norm else 0
    a = a / 2.0**squarings
    eye, c = np.eye(len(a)), PADE
    a2 = a @ a
    a4 = a2 @ a2
    a6 = a4 @ a2
    u = a @ (a6 @ (c[13] * a6 + c[11] * a4 + c[9] * a2) + c[7] * a6 + c[5] * a4 + c[3] * a2 + c[1] * eye)
    v = a6 @ (c[12] * a6 + c[10] * a4 + c[8] * a2) + c[6] * a6 + c[4] * a4 + c[2] * a2 + c[0] * eye
    q = np.linalg.solve(v - u, v + u)
    for _ in range(squarings):
        q = q @ q
    return q


def lie_log(q: np.ndarray) -> np.ndarray:
    """Return the skew matrix A with exp(A) = Q whose rotation angles are in (-π, π].

    The skew part K and the symmetric part S of Q commute, so that the Hermitian S + i c K has the eigenvectors of Q
    and, for a generic c, the same eigenspaces. Eigenvalues at or near -1 come in pairs: each pair is a rotation by
    about π in the plane of two real vectors.

    Raises: NotRotation if Q is not orthogonal, or has determinant -1.
    """
    q = _square(q)
    if not (error := gram_error(q)) <= TOLERANCE:
        raise NotRotation("the matrix is not orthogonal", expected=f"max |QᵀQ - I| <= {TOLERANCE:g}", got=error)
    if np.linalg.det(q) < 0:
        raise NotRotation("the matrix is a reflection, which has no real logarithm", expected="determinant 1",
                          got="determinant -1", fix="pass the nearest rotation, polar(w, special=True)")  # fmt: skip
    k, s = (q - q.T) / 2, (q + q.T) / 2
    _, v = np.linalg.eigh(s + 1j * GENERIC * k)
    eigenvalues = np.einsum("ij,ik,kj->j", v.conj(), q, v)
    flipped = np.abs(eigenvalues + 1) < 1e-6
    angles = np.where(flipped, 0.0, np.angle(eigenvalues))
    a = ((v * (1j * angles)) @ v.conj().T).real
    for b1, b2 in _planes(k, _real_basis(v[:, flipped])):
        angle = float(np.arctan2(b2 @ q @ b1, b1 @ q @ b1))
        a += (angle or np.pi) * (np.outer(b2, b1) - np.outer(b1, b2))
    return skew(a)


def _real_basis(v: np.ndarray) -> np.ndarray:
    """Return orthonormal real columns that span the space of `v`, which must be closed under complex conjugation."""
    u, _, _ = np.linalg.svd(np.concatenate([np.real(v), np.imag(v)], axis=1), full_matrices=False)
    return u[:, : v.shape[1]]


def _planes(k: np.ndarray, basis: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Split span(`basis`) into planes invariant under the skew K: orthonormal pairs, by descending rotation speed."""
    found = []
    small = basis.T @ k @ basis
    while len(small) > 1:
        scale = float(np.abs(small).max())
        _, vectors = np.linalg.eigh((small / scale).T @ (small / scale) if scale > 0 else np.eye(len(small)))
        b1 = vectors[:, -1]
        b2 = small @ b1
        if np.linalg.norm(b2) <= 1e-7 * scale or scale == 0.0:
            b2 = vectors[:, 0]
        b2 = b2 - b1 * (b1 @ b2)
        b2 /= np.linalg.norm(b2)
        found.append((basis @ b1, basis @ b2))
        rest = np.linalg.svd(np.stack([b1, b2]))[2][2:].T  # the orthogonal complement of the plane
        basis, small = basis @ rest, rest.T @ small @ rest
    return found


def _square(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64)
    if x.ndim != 2 or x.shape[0] != x.shape[1]:
        raise ShapeError("the matrix is not square", expected="[n, n]", got=list(x.shape))
    return x


def _skew(a: np.ndarray) -> np.ndarray:
    """Return the exactly skew part of a matrix. Raises: UsageError if the matrix is not skew within the tolerance."""
    a = _square(a)
    error = float(np.abs(a + a.T).max(initial=0.0))
    if not error <= TOLERANCE * max(1.0, float(np.abs(a).max(initial=0.0))):
        raise UsageError("the generator is not skew", expected="A = -Aᵀ", got=f"max |A + Aᵀ| = {error:.3g}",
                         fix="pass skew(A), the skew part")  # fmt: skip
    return (a - a.T) / 2
