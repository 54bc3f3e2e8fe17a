"""The ways to an orthonormal factor, by name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from graphwright.errors import ShapeError, UsageError
from graphwright.surgery.matrices import finite


def in_range(w: np.ndarray) -> np.ndarray:
    """W, or W over its largest entry where products of entries would leave the range of its dtype.

    The orthonormal factor is the same. Raises: NonFiniteWeight.
    """
    largest = max(finite(w).max(initial=0.0), -w.min(initial=0.0))
    far = float(np.finfo(w.dtype).max) ** (1 / 3)  # two factors, and a third for sums over rows
    return w if largest == 0 or 1 / far < largest < far else w / largest


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


ROWS = 256
"""Rows at a time: enough for a full-speed product, and little beside a matrix."""


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A := A B for A [m, n] and a square B [n, n], in the memory of A, which it returns."""
    for start in range(0, len(a), ROWS):
        a[start : start + ROWS] = a[start : start + ROWS] @ b
    return a


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


METHODS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"polar": polar, "qr": qr, "newton_schulz": newton_schulz}
"""Name -> float64 [out, in] to its orthonormal factor."""


def orthonormal(w: np.ndarray, method: str = "polar", special: bool = False) -> np.ndarray:
    """The orthonormal factor of a matrix. Raises: UsageError, ShapeError for `special` of one that is not square."""
    if method not in METHODS:
        raise UsageError("no such method", where="method", expected=", ".join(METHODS), got=method)
    if not special:
        return METHODS[method](w)
    if method != "polar" or w.shape[0] != w.shape[1]:
        raise ShapeError(
            "the nearest rotation is a polar factor of a square matrix", where="special",
            expected="method='polar', [n, n]", got=f"{method!r}, {list(w.shape)}",
        )  # fmt: skip
    return polar(w, special=True)
