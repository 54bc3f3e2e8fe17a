"""Methods that compute the orthonormal factor of a matrix: polar, QR, Newton-Schulz."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from graphwright.errors import ShapeError
from graphwright.surgery.errors import check_choices
from graphwright.surgery.matrices import finite


def in_range(w: np.ndarray) -> np.ndarray:
    """Return W, divided by its largest entry if products of entries would overflow or underflow.

    The division does not change the orthonormal factor. Raises: NonFiniteWeight for NaN or infinity.
    """
    largest = max(finite(w).max(initial=0.0), -w.min(initial=0.0))
    far = float(np.finfo(w.dtype).max) ** (1 / 3)  # products of two entries, with room for sums over rows
    return w if largest == 0 or 1 / far < largest < far else w / largest


PROBES = 64
"""Number of random directions in which the gain is measured."""


def gram_error(w: np.ndarray) -> float:
    """Return the largest entry of |WᵀW - I| for a tall or square matrix W, of |WWᵀ - I| for a wide matrix."""
    gram = w.T @ w if w.shape[0] >= w.shape[1] else w @ w.T
    gram[np.diag_indices_from(gram)] -= 1
    return float(np.abs(gram).max(initial=0.0))


def is_orthogonal(w: np.ndarray, tol: float = 1e-8) -> bool:
    """Return whether the columns of a tall matrix, or the rows of a wide matrix, are orthonormal within `tol`."""
    w = np.asarray(w, np.float64)
    return bool(np.isfinite(w).all()) and gram_error(w) <= tol


def condition(w: np.ndarray) -> float:
    """σ_max / σ_min over all min(out, in) singular values; infinite if σ_min is 0 within rounding."""
    sigma = np.linalg.svd(w, compute_uv=False)
    floor = sigma[0] * max(w.shape) * np.finfo(np.float64).eps
    return float(sigma[0] / sigma[-1]) if sigma[-1] > floor else float("inf")


def gain(w: np.ndarray, probes: int = PROBES, seed: int = 0) -> tuple[float, float]:
    """Return the smallest and largest ‖W d‖ / ‖d‖ over random d; for a wide matrix over d in the span of its rows."""
    rng = np.random.default_rng(seed)
    d = rng.standard_normal((w.shape[1], probes))
    if w.shape[0] < w.shape[1]:
        d = w.T @ rng.standard_normal((w.shape[0], probes))
    lengths = np.linalg.norm(d, axis=0)
    found = np.linalg.norm(w @ d, axis=0)[lengths > 0] / lengths[lengths > 0]
    return (float(found.min()), float(found.max())) if found.size else (0.0, 0.0)


ROWS = 256
"""Rows per product: enough for full speed, with little temporary memory."""


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Set A := A B in place, for A [m, n] and B [n, n], and return A."""
    for start in range(0, len(a), ROWS):
        a[start : start + ROWS] = a[start : start + ROWS] @ b
    return a


WELL_CONDITIONED = 1e-12
"""Smallest ratio of eigenvalues of WᵀW (condition number 10⁶) for which they are accurate enough."""
FAR, NEAR, STEPS = 1e-2, 1e-8, 3
"""Cosine between columns that is too large for a first-order step; negligible cosine; largest number of steps."""
SMALL = 32
"""Width up to which an SVD is the fastest method."""


def polar(w: np.ndarray, *, special: bool = False) -> np.ndarray:
    """Return the nearest matrix with orthonormal columns (out >= in) or rows (out < in).

    The result is orthonormal even for rank-deficient and zero matrices. It is computed from the eigenvectors of the
    Gram matrix, which is faster than an SVD, or by SVD for ill-conditioned matrices.

    Args:
        w: matrix [out, in]; it is converted to float64.
        special: return the nearest rotation of a square matrix: if the nearest matrix has determinant -1, the
            direction of the smallest singular value is flipped.
    Returns: the matrix, float64 [out, in].
    Raises: NonFiniteWeight for NaN or infinity.
    """
    w = in_range(np.asarray(w, np.float64))
    if w.shape[0] < w.shape[1]:
        return polar(w.T).T
    if special:
        return _by_svd(w, special)
    quick = _by_gram(w) if w.shape[1] > SMALL else None
    return _by_svd(w) if quick is None else quick


def second_factor(w: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return the factor P of W = Q P (tall W) or W = P Q (wide W); P is symmetric if Q is the polar factor of W."""
    return q.T @ w if w.shape[0] >= w.shape[1] else w @ q.T


def _by_svd(w: np.ndarray, special: bool = False) -> np.ndarray:
    u, _, vt = np.linalg.svd(w, full_matrices=False)
    if special and np.linalg.det(u @ vt) < 0:
        u[:, -1] *= -1
    return u @ vt


def _by_gram(w: np.ndarray) -> np.ndarray | None:
    """Return the polar factor Q = R C^-½ Vᵀ: R = W V, C = RᵀR, V eigenvectors of WᵀW; None for ill-conditioned W.

    The eigenvectors have an error of ε κ², so that C = S² + F, S = diag(s), is not quite diagonal. To first order, C^-½
    is S^-1 minus F_ij / (s_i s_j (s_i + s_j)) (Higham 2008, "Functions of Matrices", section 6.1: the derivative of the
    square root solves a Sylvester equation). The error of an entry of C scales with the lengths of its two columns, so
    Q is orthonormal to ε. A second step of this kind removes the second-order error.
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
    """Set R := R C^-½ to first order, C = RᵀR, if the columns are nearly orthogonal; return their largest cosine."""
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


QUINTIC = (3.4445, -4.7750, 2.0315)
QUINTIC_STEPS, CUBIC_STEPS = 8, 30
TOLERANCE = {np.dtype(np.float32): 2e-6, np.dtype(np.float64): 1e-12}


def newton_schulz(w: np.ndarray, *, tol: float | None = None, polish: bool = True) -> np.ndarray:
    """Return the polar factor of a matrix [out, in] by matrix products, in float32 for float32 input, else in float64.

    Args:
        tol: the cubic steps stop if max |XᵀX - I| <= tol for the result X; default 2e-6 in float32, 1e-12 in float64.
        polish: False skips the cubic steps: singular values are then between 0.68 and 1.2, not 1.
    Returns: the polar factor, which is computed by SVD if the steps do not converge, as for a singular matrix.
    Raises: NonFiniteWeight for NaN or infinity.
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
    """Set X := X (a I + (b I + c M) M) for M = XᵀX, in place: one quintic Newton-Schulz step."""
    a, b, c = (x.dtype.type(v) for v in QUINTIC)
    m, diagonal = x.T @ x, np.diag_indices(x.shape[1])
    inner = c * m
    inner[diagonal] += b
    multiply(inner, m)[diagonal] += a
    multiply(x, inner)


def _cubic(x: np.ndarray, tol: float) -> bool:
    """Return True if max |M - I| <= tol for M = XᵀX; else set X := X (I - (M - I) / 2) in place and return False."""
    m, diagonal = x.T @ x, np.diag_indices(x.shape[1])
    m[diagonal] -= 1
    if max(m.max(), -m.min()) <= tol:
        return True
    m *= x.dtype.type(-0.5)
    m[diagonal] += 1
    multiply(x, m)
    return False


def qr(w: np.ndarray) -> np.ndarray:
    """Return Q, float64 [out, in], of W = Q R (out >= in), or of W = L Q (out < in), with diag(R) >= 0.

    Q is unique if W has full rank. Linearly dependent columns are replaced by orthonormal columns.

    Raises: NonFiniteWeight for NaN or infinity.
    """
    w = in_range(np.asarray(w, np.float64))
    if w.shape[0] < w.shape[1]:
        return qr(w.T).T
    q, r = np.linalg.qr(w)
    q *= np.where(np.diagonal(r) < 0, -1.0, 1.0)
    return q


METHODS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"polar": polar, "qr": qr, "newton_schulz": newton_schulz}
"""Name -> function from a float64 matrix to its orthonormal factor."""


def orthonormal(w: np.ndarray, method: str = "polar", special: bool = False) -> np.ndarray:
    """Return the orthonormal factor by `polar`, `qr` or `newton_schulz`; with `special` the nearest rotation.

    Raises: ShapeError if `special` is True, and the method is not `polar` or the matrix is not square.
    """
    check_choices({"method": method}, {"method": METHODS})
    if not special:
        return METHODS[method](w)
    if method != "polar":
        raise ShapeError("special=True works with method='polar' only", where="special", got=f"method={method!r}",
                         fix="pass method='polar' or special=False")  # fmt: skip
    if w.shape[0] != w.shape[1]:
        raise ShapeError("special=True needs a square matrix", where="special", expected="[n, n]", got=list(w.shape))
    return polar(w, special=True)
