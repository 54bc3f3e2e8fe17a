"""Linear algebra under torch's names (`gw.linalg`): determinants, inverses, factorisations, norms.

Factorisations run on the host, outside traces; see `factorisations`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import inf, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphwright.array import broadcast_shapes, int64
from graphwright.autograd import factorisations
from graphwright.autograd.functions import stack, where
from graphwright.autograd.names import TOP, named
from graphwright.autograd.products import cross as _cross
from graphwright.autograd.reductions import norm as vector
from graphwright.errors import DTypeError, ShapeError, UsageError
from graphwright.ops import call

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor

__all__ = [
    "cholesky", "cond", "cross", "det", "diagonal", "eigh", "eigvalsh", "inv", "lstsq", "matmul", "matrix_exp",
    "matrix_norm", "matrix_power", "matrix_rank", "multi_dot", "norm", "pinv", "qr", "slogdet", "solve",
    "solve_triangular", "svd", "svdvals", "tensorinv", "tensorsolve", "vander", "vecdot", "vector_norm",
]  # fmt: skip


class Eigen(NamedTuple):
    """Eigenvalues in ascending order, and eigenvectors as columns."""

    eigenvalues: Tensor
    eigenvectors: Tensor


class Singular(NamedTuple):
    """A = U diag(S) Vh."""

    U: Tensor
    S: Tensor
    Vh: Tensor


class QR(NamedTuple):
    """A = QR with orthonormal columns of Q and an upper triangle R."""

    Q: Tensor
    R: Tensor


class LogDet(NamedTuple):
    """Sign and logarithm of the absolute value of a determinant."""

    sign: Tensor
    logabsdet: Tensor


class Solution(NamedTuple):
    """A solution of a least-squares problem, with the singular values of A."""

    solution: Tensor
    singular_values: Tensor


def _matrix(x: Tensor, where: str, square: bool = False) -> Tensor:
    if x.ndim < 2 or (square and x.shape[-1] != x.shape[-2]):
        expected = "square matrices [..., n, n]" if square else "matrices [..., n, m]"
        raise ShapeError("not a matrix", where=where, expected=expected, got=x.spec)
    if not x.dtype.is_float or x.dtype.is_low:
        raise DTypeError("unsupported dtype", where=where, expected="float32 or float64", got=x.spec)
    return x


# -- determinants, inverses, systems -----------------------------------------------------------------------------------
@named()
def slogdet(A: Tensor) -> LogDet:
    """Return sign and ln |det A| of [..., n, n]. Raises: ShapeError, DTypeError."""
    return LogDet(*factorisations.log_determinant(_matrix(A, "slogdet", True)))


@named()
def det(A: Tensor) -> Tensor:
    """Return the determinants of [..., n, n]; the gradient is g times the cofactors. Raises: ShapeError, DTypeError."""
    return factorisations.determinant(_matrix(A, "det", True))


@named()
def logdet(A: Tensor) -> Tensor:
    """Return ln det A of [..., n, n]; NaN for a negative determinant. Raises: ShapeError, DTypeError."""
    sign, size = slogdet(A)
    return where(sign < 0.0, float("nan"), size)


@named(name="inverse")
def inv(A: Tensor) -> Tensor:
    """Return the inverses of [..., n, n]. Raises: ShapeError, DTypeError; ComputeError for a singular matrix.

    In a trace, a singular matrix gives infinity or NaN, and there is one matrix.
    """
    x = _matrix(A, "inv", True)
    if x.symbolic and x.ndim == 2:
        return call("solve", x, factorisations.eye(x))
    return factorisations.inverse(x)


def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """Return X with AX = B, or XA = B: A [..., n, n], B a vector [n], a batch of them, or matrices.

    Raises: ShapeError, DTypeError; ComputeError for a singular matrix.
    """
    _matrix(A, "solve", True)
    if B.dtype is not A.dtype:
        raise DTypeError("the operands have different dtypes", where="solve", expected=A.dtype, got=B.spec)
    if not B.ndim:
        raise ShapeError("the right side is 0-d", where="solve", expected="a vector or matrices", got=B.spec)
    vectors = B.ndim == 1 or (A.ndim - 1 == B.ndim and B.shape == A.shape[:-1])
    if not left:
        if vectors:
            raise ShapeError("vectors have no right solution", where="solve", expected="matrices", got=B.spec)
        return solve(A.mT, B.mT).mT
    right = B.unsqueeze(-1) if vectors else B
    if right.shape[-2] != A.shape[-1]:
        raise ShapeError("the operands have different sizes", where="solve", expected=A.shape[-1], got=B.spec)
    lead = broadcast_shapes(A.shape[:-2], right.shape[:-2])
    made = factorisations.solve(A.expand(*lead, *A.shape[-2:]), right.expand(*lead, *right.shape[-2:]))
    return made.squeeze(-1) if vectors else made


def solve_triangular(
    A: Tensor, B: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:  # fmt: skip
    """`solve` with the upper or lower triangle of A, whose diagonal counts as ones if `unitriangular`."""
    _matrix(A, "solve_triangular", True)
    skipped = int(unitriangular)
    triangle = A.triu(skipped) if upper else A.tril(-skipped)
    return solve(triangle + factorisations.eye(A) if unitriangular else triangle, B, left=left)


def cholesky(A: Tensor, *, upper: bool = False) -> Tensor:
    """Return the lower L with A = LLᵀ, or the upper Lᵀ. Raises: ShapeError, DTypeError; ComputeError."""
    made = factorisations.cholesky(_matrix(A, "cholesky", True))
    return made.mT if upper else made


def eigh(A: Tensor, UPLO: str = "L") -> Eigen:
    """Return the eigenvalues and eigenvectors of symmetric [..., n, n], of which one triangle is read.

    The gradient of the eigenvectors is infinite at equal eigenvalues. Raises: ShapeError, DTypeError, UsageError.
    """
    if UPLO not in ("L", "U"):
        raise UsageError("unknown triangle", where="eigh", expected="L or U", got=UPLO)
    return Eigen(*factorisations.eigh(_matrix(A, "eigh", True), UPLO == "L"))


def eigvalsh(A: Tensor, UPLO: str = "L") -> Tensor:
    """Return the eigenvalues of symmetric [..., n, n] in ascending order."""
    return eigh(A, UPLO).eigenvalues


def svd(A: Tensor, full_matrices: bool = True) -> Singular:
    """Return U, S, Vh with A = U diag(S) Vh of [..., n, m]; S descends. Raises: ShapeError, DTypeError.

    Args:
        full_matrices: square U and Vh; the columns and rows beyond those of S have no gradient.
    """
    return Singular(*factorisations.svd(_matrix(A, "svd"), full_matrices))


def svdvals(A: Tensor) -> Tensor:
    """Return the singular values of [..., n, m] in descending order."""
    return svd(A, full_matrices=False).S


def qr(A: Tensor, mode: str = "reduced") -> QR:
    """Return Q, R with A = QR of [..., n, m]. Raises: ShapeError, DTypeError; UsageError for another mode.

    Args:
        mode: `reduced`, or `complete` for a square Q, which has no gradient for n > m.
    """
    if mode not in ("reduced", "complete"):
        raise UsageError("unknown mode", where="qr", expected="reduced or complete", got=mode)
    return QR(*factorisations.qr(_matrix(A, "qr"), mode == "complete"))


def pinv(A: Tensor, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Tensor:
    """Return the pseudoinverses [..., m, n]; singular values up to max(atol, rtol·the largest) count as 0.

    Args:
        atol, rtol: numbers or tensors [...]; by default 0 and the eps of the dtype times the larger size.
        hermitian: whether to read the lower triangle only, of symmetric matrices.
    """
    return factorisations.pseudoinverse(_symmetric(_matrix(A, "pinv"), hermitian), atol, rtol)


def _symmetric(A: Tensor, hermitian: bool) -> Tensor:
    """Return the symmetric matrix that the lower triangle of A says, whose gradient is spread over both triangles."""
    if not hermitian:
        return A
    even = (A + A.mT) * 0.5
    return even + (A.tril() + A.tril(-1).mT - even).detach()


def lstsq(A: Tensor, B: Tensor, rcond: float | None = None, *, driver: str | None = None) -> Solution:
    """Return the X [..., m, k] of least norm that minimises ‖AX - B‖, with the singular values of A.

    Args:
        driver: ignored, the solution is that of `pinv`.
    """
    return Solution(pinv(A, rtol=rcond) @ B, svdvals(A.detach()))


def matrix_rank(A: Tensor, tol: Any = None, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Tensor:
    """Return the number of singular values above max(atol, rtol·the largest), int64; the arguments are as in `pinv`.

    Args:
        tol: an `atol` with an `rtol` of 0.
    """
    if tol is not None:
        atol, rtol = tol, 0.0
    return factorisations.above(svdvals(_symmetric(A.detach(), hermitian)), A, atol, rtol).to(int64).sum(-1)


def cond(A: Tensor, p: Any = None) -> Tensor:
    """Return the condition number ‖A‖ₚ‖A⁻¹‖ₚ, ∞ for a singular matrix; by default the ratio of the singular values."""
    if p in (None, 2, -2):
        s = svdvals(A)
        if not s.shape[-1]:
            return s.sum(-1)
        first, last = s.select(-1, 0), s.select(-1, s.shape[-1] - 1)
        return last / first if p == -2 else first / last
    singular = det(A.detach()) == 0.0
    regular = where(singular.unsqueeze(-1).unsqueeze(-1), factorisations.eye(A), A)
    return where(singular, inf, matrix_norm(regular, p) * matrix_norm(inv(regular), p))


@named()
def cholesky_solve(input: Tensor, L: Tensor, upper: bool = False) -> Tensor:
    """Return X with AX = B for B [..., n, k] and the factor L of A = LLᵀ, or LᵀL if `upper`. Raises: as `solve`."""
    lower = L.mT if upper else L
    return solve_triangular(lower.mT, solve_triangular(lower, input, upper=False), upper=True)


@named()
def cholesky_inverse(L: Tensor, upper: bool = False) -> Tensor:
    """Return A⁻¹ from the factor L of A = LLᵀ, or LᵀL if `upper`. Raises: as `inv`."""
    lower = _matrix(L, "cholesky_inverse", True).triu().mT if upper else _matrix(L, "cholesky_inverse", True).tril()
    return inv(lower @ lower.mT)


def matmul(input: Tensor, other: Tensor) -> Tensor:
    """Return the product of matrices or vectors, as `input @ other`."""
    return input @ other


def tensorinv(A: Tensor, ind: int = 2) -> Tensor:
    """Return the inverse of the map whose first `ind` axes are those of the result.

    Raises: UsageError for `ind` below 1, ShapeError unless both groups of axes have as many entries.
    """
    if ind < 1:
        raise UsageError("ind is out of range", where="tensorinv", expected=">= 1", got=ind)
    rows, columns = A.shape[:ind], A.shape[ind:]
    return inv(_square(A, "tensorinv", rows, columns)).reshape(*columns, *rows)


def tensorsolve(A: Tensor, B: Tensor, dims: Sequence[int] | None = None) -> Tensor:
    """Return X with tensordot(A, X, X.ndim) = B; the axes `dims` of A are moved to its end before.

    Raises: ShapeError unless A has as many entries in its first axes as in the others.
    """
    moved = A if dims is None else A.movedim(tuple(dims), tuple(range(A.ndim - len(dims), A.ndim)))
    rows, columns = moved.shape[: B.ndim], moved.shape[B.ndim :]
    return solve(_square(moved, "tensorsolve", rows, columns), B.reshape(-1)).reshape(*columns)


def _square(A: Tensor, where: str, rows: tuple[int, ...], columns: tuple[int, ...]) -> Tensor:
    if prod(rows) != prod(columns):
        raise ShapeError("the axes are no square matrix", where=where, expected=f"{prod(rows)} entries", got=columns)
    return A.reshape(prod(rows), prod(columns))


# -- the older names of torch ------------------------------------------------------------------------------------------
@named(name="cholesky")
def _of_cholesky(input: Tensor, upper: bool = False) -> Tensor:
    """`linalg.cholesky`."""
    return cholesky(input, upper=upper)


@named(name="svd")
def _of_svd(input: Tensor, some: bool = True) -> tuple[Tensor, ...]:
    """`linalg.svd`, but return V instead of its transpose; square U and V unless `some`."""
    u, s, vh = svd(input, full_matrices=not some)
    return u, s, vh.mT


@named(name="qr")
def _of_qr(input: Tensor, some: bool = True) -> tuple[Tensor, ...]:
    """`linalg.qr`; `complete` unless `some`."""
    return qr(input, "reduced" if some else "complete")


@named(name="pinverse")
def _of_pinv(input: Tensor, rcond: float = 1e-15) -> Tensor:
    """`linalg.pinv` with a relative bound."""
    return pinv(input, rtol=rcond)


@named(TOP, name="chain_matmul")
def _of_multi_dot(*matrices: Tensor) -> Tensor:
    """`linalg.multi_dot`."""
    return multi_dot(matrices)


# -- norms and products ------------------------------------------------------------------------------------------------
def vector_norm(x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """(Σ |x|ᵖ)^(1/p) over axes, all by default."""
    return vector(x, ord, dim, keepdim, dtype)


def matrix_norm(
    A: Tensor, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None
) -> Tensor:  # fmt: skip
    """Return a norm of matrices: `fro`, `nuc`, ±1, ±2, ±inf, on two axes. Raises: UsageError, ShapeError."""
    x = A if dtype is None else A.to(dtype)
    axes = tuple(dim)
    if len(axes) != 2 or x.ndim < 2:
        got = f"{A.spec}, {dim}"
        raise ShapeError("a matrix norm needs two axes", where="matrix_norm", expected="two axes", got=got)
    last = x.movedim(axes, (-2, -1))
    if ord == "fro":
        made = vector(last, 2, (-2, -1))
    elif ord in ("nuc", 2, -2):
        s = svdvals(last)
        made = s.sum(-1) if ord == "nuc" else _extreme(s, ord > 0)
    elif ord in (1, -1, inf, -inf):
        sums = last.abs().sum(-2 if abs(ord) == 1 else -1)
        made = _extreme(sums, ord > 0)
    else:
        raise UsageError("unknown order of a norm", where="matrix_norm", expected="fro, nuc, ±1, ±2 or ±inf", got=ord)
    for axis in sorted(a % x.ndim for a in axes) if keepdim else ():
        made = made.unsqueeze(axis)
    return made


def _extreme(x: Tensor, largest: bool) -> Tensor:
    """Return the largest or smallest entry along the last axis, 0 of none."""
    if not x.shape[-1]:
        return x.sum(-1)
    return x.amax(-1) if largest else x.amin(-1)


def norm(A: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """`vector_norm`, or with an order and two axes `matrix_norm`; without an order the 2-norm of all entries."""
    if ord is not None and ((dim is None and A.ndim == 2) or (not isinstance(dim, int | None) and len(dim) == 2)):
        return matrix_norm(A, ord, (-2, -1) if dim is None else dim, keepdim, dtype=dtype)
    if ord is not None and dim is None and A.ndim > 2:
        raise ShapeError("a norm with an order needs axes", where="norm", expected="dim", got=A.spec)
    return vector_norm(A, 2 if ord is None else ord, dim, keepdim, dtype=dtype)


@named()
def matrix_power(A: Tensor, n: int) -> Tensor:
    """Return the n-th power of [..., n, n], by repeated squaring; a negative n inverts first.

    Raises: ShapeError, DTypeError; UsageError unless n is an int.
    """
    if not isinstance(n, int | np.integer):
        raise UsageError("the power is not an int", where="matrix_power", expected="an int", got=n)
    base = _matrix(A, "matrix_power", True) if n >= 0 else inv(A)
    made, n = factorisations.eye(A).expand(*A.shape), abs(n)
    while n:
        made = made @ base if n & 1 else made
        base, n = base @ base if n > 1 else base, n >> 1
    return made


@named()
def matrix_exp(A: Tensor) -> Tensor:
    """Σ Aᵏ/k! of [..., n, n], by scaling and squaring a Taylor series. Raises: ShapeError, DTypeError."""
    x = _matrix(A, "matrix_exp", True)
    size = float(matrix_norm(x.detach(), 1).amax().item()) if x.numel() else 0.0
    halvings = max(int(np.ceil(np.log2(size))) + 2, 0) if 0 < size < inf else 0
    x, unit = x * 0.5**halvings, factorisations.eye(A)
    made = unit + x * 0.0
    for k in range(18, 0, -1):
        made = unit + x @ made / float(k)
    for _ in range(halvings):
        made = made @ made
    return made


def multi_dot(tensors: Sequence[Tensor]) -> Tensor:
    """Multiply matrices; the first and the last may be vectors. Raises: ShapeError for fewer than two."""
    if len(tensors) < 2:
        raise ShapeError("too few matrices", where="multi_dot", expected="at least 2", got=len(tensors))
    return reduce(lambda a, b: a @ b, tensors)


def vecdot(x: Tensor, y: Tensor, *, dim: int = -1) -> Tensor:
    """Σ x·y along an axis, after broadcasting."""
    return (x * y).sum(dim)


def cross(input: Tensor, other: Tensor, *, dim: int = -1) -> Tensor:
    """Return the cross product along an axis of size 3, after broadcasting. Raises: ShapeError."""
    return _cross(input, other, dim)


def diagonal(A: Tensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """Return a diagonal of the last two axes, as a view."""
    return A.diagonal(offset, dim1, dim2)


def vander(x: Tensor, N: int | None = None) -> Tensor:
    """Return the powers 1, x, x², ... of vectors [..., n] as columns."""
    x = x if x.ndim else x.unsqueeze(0)
    return stack([x**k for k in range(x.shape[-1] if N is None else N)], -1)
