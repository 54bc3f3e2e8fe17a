"""Linear algebra under torch's names (`gw.linalg`): determinants, inverses, factorisations, norms.

Factorisations run in numpy on the host, outside traces. Their gradients are tensor code, so that they have further
gradients. Sources: Giles 2008, "Collected matrix derivative results"; Townsend 2016, "Differentiating the SVD".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphwright.array import broadcast_shapes, finfo, int64
from graphwright.autograd.apply import as_tensor
from graphwright.autograd.function import Function
from graphwright.autograd.functions import cat, maximum, stack, where
from graphwright.autograd.names import TOP, named
from graphwright.autograd.products import cross as _cross
from graphwright.autograd.reductions import norm as vector
from graphwright.errors import ComputeError, DTypeError, ShapeError, UsageError
from graphwright.ops import call

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor

__all__ = [
    "cholesky", "cond", "cross", "det", "diagonal", "eigh", "eigvalsh", "inv", "lstsq", "matrix_exp", "matrix_norm",
    "matrix_power", "matrix_rank", "multi_dot", "norm", "pinv", "qr", "slogdet", "solve", "solve_triangular", "svd",
    "svdvals", "vander", "vecdot", "vector_norm",
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


# -- factorisations of numpy -------------------------------------------------------------------------------------------
def _on_host(function: Callable[..., Any], *operands: Tensor, **options: Any) -> Any:
    """Run a function of `np.linalg`. Raises: ComputeError if it finds no result."""
    try:
        made = function(*(x.detach().numpy() for x in operands), **options)
    except np.linalg.LinAlgError as error:
        fix = "check the matrix, or add a multiple of the identity"
        raise ComputeError(str(error).lower(), where=function.__name__, got=operands[0].spec, fix=fix) from error
    kind, there = operands[0].dtype, operands[0].device
    parts = [
        as_tensor(np.asarray(part)).to(dtype=kind, device=there)
        for part in (made if isinstance(made, tuple) else (made,))
    ]
    return tuple(parts) if isinstance(made, tuple) else parts[0]


def _matrix(x: Tensor, where: str, square: bool = False) -> Tensor:
    if x.ndim < 2 or (square and x.shape[-1] != x.shape[-2]):
        expected = "square matrices [..., n, n]" if square else "matrices [..., n, m]"
        raise ShapeError("not a matrix", where=where, expected=expected, got=x.spec)
    if not x.dtype.is_float or x.dtype.is_low:
        raise DTypeError("unsupported dtype", where=where, expected="float32 or float64", got=x.spec)
    return x


class _Inverse(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        made = _on_host(np.linalg.inv, a)
        ctx.save(made)
        return made

    @staticmethod
    def vjp(ctx: Any, g: Tensor, needs: Any) -> Tensor:
        (y,) = ctx.saved
        return -(y.mT @ g @ y.mT)


class _Solve(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        made = _on_host(np.linalg.solve, a, b)
        ctx.save(a, made)
        return made

    @staticmethod
    def vjp(ctx: Any, g: Tensor, needs: Any) -> tuple[Tensor, Tensor]:
        a, x = ctx.saved
        back = _Solve.apply(a.mT, g)
        return -(back @ x.mT), back


class _LogDet(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save(a)
        return _on_host(np.linalg.slogdet, a)

    @staticmethod
    def vjp(ctx: Any, g: tuple[Any, Any], needs: Any) -> Tensor:
        (a,) = ctx.saved
        return a * 0.0 if g[1] is None else g[1].unsqueeze(-1).unsqueeze(-1) * _Inverse.apply(a).mT


class _Cholesky(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        made = _on_host(np.linalg.cholesky, a)
        ctx.save(made)
        return made

    @staticmethod
    def vjp(ctx: Any, g: Tensor, needs: Any) -> Tensor:
        (lower,) = ctx.saved
        inner = (lower.mT @ g).tril()
        inner = inner - _diagonal_matrix(inner) * 0.5
        half = _Solve.apply(lower.mT, _Solve.apply(lower.mT, inner.mT).mT)
        return (half + half.mT) * 0.5


class _Eigh(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, lower: bool) -> tuple[Tensor, Tensor]:
        made = _on_host(np.linalg.eigh, a, UPLO="L" if lower else "U")
        ctx.save(*made)
        return made

    @staticmethod
    def vjp(ctx: Any, g: tuple[Any, Any], needs: Any) -> tuple[Tensor, None]:
        values, vectors = ctx.saved
        inner = g[0].diag_embed() if g[0] is not None else vectors * 0.0
        if g[1] is not None:
            inner = inner + vectors.mT @ g[1] * _gaps(values, values)
        return vectors @ inner @ vectors.mT, None


class _Svd(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, full: bool) -> tuple[Tensor, Tensor, Tensor]:
        made = _on_host(np.linalg.svd, a, full_matrices=full)
        ctx.save(*made)
        return made

    @staticmethod
    def vjp(ctx: Any, g: tuple[Any, Any, Any], needs: Any) -> tuple[Tensor, None]:
        u, s, vh = ctx.saved
        k = s.shape[-1]
        u, vh = u.narrow(-1, 0, k), vh.narrow(-2, 0, k)
        gu, gv = (x if x is None else x.narrow(axis, 0, k) for x, axis in ((g[0], -1), (g[2], -2)))
        row, column, squares = s.unsqueeze(-2), s.unsqueeze(-1), s * s
        inner = g[1].diag_embed() if g[1] is not None else u.mT @ u * 0.0
        total, gaps = None, _gaps(squares, squares)
        if gu is not None:
            rotated = u.mT @ gu
            inner = inner + (rotated - rotated.mT) * gaps * row
            total = (gu - u @ rotated) / row @ vh
        if gv is not None:
            rotated = vh @ gv.mT
            inner = inner + column * ((rotated - rotated.mT) * gaps)
            rest = u @ ((gv - rotated.mT @ vh) / column)
            total = rest if total is None else total + rest
        made = u @ inner @ vh
        return made if total is None else made + total, None


class _Pinv(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, atol: Any, rtol: Any) -> Tensor:
        u, s, vh = _on_host(np.linalg.svd, a, full_matrices=False)
        kept = _above(s, a, atol, rtol)
        made = (vh.mT * where(kept, 1.0 / where(kept, s, 1.0), 0.0).unsqueeze(-2)) @ u.mT
        ctx.save(a, made)
        return made

    @staticmethod
    def vjp(ctx: Any, g: Tensor, needs: Any) -> tuple[Tensor, None, None]:  # Golub and Pereyra 1973, eq. 4.12
        a, p = ctx.saved
        left = g.mT @ p @ p.mT
        right = p.mT @ p @ g.mT
        return left - a @ (p @ left) + right - (right @ p) @ a - p.mT @ g @ p.mT, None, None


class _Qr(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, complete: bool) -> tuple[Tensor, Tensor]:
        made = _on_host(np.linalg.qr, a, mode="complete" if complete else "reduced")
        ctx.save(*made)
        return made

    @staticmethod
    def vjp(ctx: Any, g: tuple[Any, Any], needs: Any) -> tuple[Tensor, None]:
        q, r = ctx.saved
        n, m = r.shape[-2:]
        if n > m:
            raise UsageError("complete QR factors of a tall matrix have no gradient", where="qr", got=r.spec)
        gq, gr = (x * 0.0 if part is None else part for part, x in zip(g, (q, r), strict=True))
        rest = gr.narrow(-1, n, m - n)  # A = [B, C] with B = QR', C = QR": C depends on Q and R" only
        gq, gr = gq + q @ r.narrow(-1, n, m - n) @ rest.mT, gr.narrow(-1, 0, n)
        r = r.narrow(-1, 0, n)
        inner = r @ gr.mT - gq.mT @ q
        symmetric = inner.tril() + inner.tril(-1).mT
        made = _Solve.apply(r, (gq + q @ symmetric).mT).mT
        return (cat([made, q @ rest], -1) if m > n else made), None


class _Det(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        made = _on_host(np.linalg.det, a)
        ctx.save(a, made)
        return made

    @staticmethod
    def vjp(ctx: Any, g: Tensor, needs: Any) -> Tensor:
        a, made = ctx.saved
        if bool((made != 0.0).all().item()):
            return (g * det(a)).unsqueeze(-1).unsqueeze(-1) * _Inverse.apply(a).mT
        u, s, vh = _Svd.apply(a, False)  # the cofactors of U diag(S) Vh: det U · det Vh · U diag(Π of other S) Vh
        ones = as_tensor(np.eye(s.shape[-1], dtype=bool))
        others = where(ones, 1.0, s.unsqueeze(-2)).prod(-1)
        signs = (g * det(u) * det(vh)).unsqueeze(-1).unsqueeze(-1)
        return signs * ((u * others.unsqueeze(-2)) @ vh)


def _gaps(a: Tensor, b: Tensor) -> Tensor:
    """1 / (b_j - a_i) off the diagonal, 0 on it."""
    gap = b.unsqueeze(-2) - a.unsqueeze(-1)
    none = as_tensor(np.eye(a.shape[-1], dtype=bool))
    return where(none, 0.0, 1.0 / where(none, 1.0, gap))


def _eye(like: Tensor) -> Tensor:
    """Return the identity [n, n] for matrices [..., n, n]."""
    return as_tensor(np.eye(like.shape[-1])).to(like.dtype)


def _diagonal_matrix(x: Tensor) -> Tensor:
    return x.diagonal(0, -2, -1).diag_embed()


# -- determinants, inverses, systems -----------------------------------------------------------------------------------
@named()
def slogdet(A: Tensor) -> LogDet:
    """Return sign and ln |det A| of [..., n, n]. Raises: ShapeError, DTypeError."""
    return LogDet(*_LogDet.apply(_matrix(A, "slogdet", True)))


@named()
def det(A: Tensor) -> Tensor:
    """Return the determinants of [..., n, n]; the gradient is g times the cofactors. Raises: ShapeError, DTypeError."""
    return _Det.apply(_matrix(A, "det", True))


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
        return call("solve", x, _eye(x))
    return _Inverse.apply(x)


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
    made = _Solve.apply(A.expand(*lead, *A.shape[-2:]), right.expand(*lead, *right.shape[-2:]))
    return made.squeeze(-1) if vectors else made


def solve_triangular(
    A: Tensor, B: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:  # fmt: skip
    """`solve` with the upper or lower triangle of A, whose diagonal counts as ones if `unitriangular`."""
    _matrix(A, "solve_triangular", True)
    skipped = int(unitriangular)
    triangle = A.triu(skipped) if upper else A.tril(-skipped)
    return solve(triangle + _eye(A) if unitriangular else triangle, B, left=left)


def cholesky(A: Tensor, *, upper: bool = False) -> Tensor:
    """Return the lower L with A = LLᵀ, or the upper Lᵀ. Raises: ShapeError, DTypeError; ComputeError."""
    made = _Cholesky.apply(_matrix(A, "cholesky", True))
    return made.mT if upper else made


def eigh(A: Tensor, UPLO: str = "L") -> Eigen:
    """Return the eigenvalues and eigenvectors of symmetric [..., n, n], of which one triangle is read.

    The gradient of the eigenvectors is infinite at equal eigenvalues. Raises: ShapeError, DTypeError, UsageError.
    """
    if UPLO not in ("L", "U"):
        raise UsageError("unknown triangle", where="eigh", expected="L or U", got=UPLO)
    return Eigen(*_Eigh.apply(_matrix(A, "eigh", True), UPLO == "L"))


def eigvalsh(A: Tensor, UPLO: str = "L") -> Tensor:
    """Return the eigenvalues of symmetric [..., n, n] in ascending order."""
    return eigh(A, UPLO).eigenvalues


def svd(A: Tensor, full_matrices: bool = True) -> Singular:
    """Return U, S, Vh with A = U diag(S) Vh of [..., n, m]; S descends. Raises: ShapeError, DTypeError.

    Args:
        full_matrices: square U and Vh; the columns and rows beyond those of S have no gradient.
    """
    return Singular(*_Svd.apply(_matrix(A, "svd"), full_matrices))


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
    return QR(*_Qr.apply(_matrix(A, "qr"), mode == "complete"))


def pinv(A: Tensor, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Tensor:
    """Return the pseudoinverses [..., m, n]; singular values up to max(atol, rtol·the largest) count as 0.

    Args:
        atol, rtol: numbers or tensors [...]; by default 0 and the eps of the dtype times the larger size.
        hermitian: whether to read the lower triangle only, of symmetric matrices.
    """
    return _Pinv.apply(_symmetric(_matrix(A, "pinv"), hermitian), atol, rtol)


def _symmetric(A: Tensor, hermitian: bool) -> Tensor:
    """Return the symmetric matrix that the lower triangle of A says, whose gradient is spread over both triangles."""
    if not hermitian:
        return A
    even = (A + A.mT) * 0.5
    return even + (A.tril() + A.tril(-1).mT - even).detach()


def _above(s: Tensor, A: Tensor, atol: Any, rtol: Any) -> Tensor:
    if not s.shape[-1]:
        return s > 0.0
    if rtol is None:
        eps = finfo(A.dtype).eps * max(A.shape[-2:])
        rtol = eps if atol is None else where(as_tensor(atol) > 0.0, 0.0, eps)
    least, relative = (as_tensor(0.0 if t is None else t).to(A.dtype).unsqueeze(-1) for t in (atol, rtol))
    return s > maximum(s.detach().amax(-1, True) * relative, least)


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
    return _above(svdvals(_symmetric(A.detach(), hermitian)), A, atol, rtol).to(int64).sum(-1)


def cond(A: Tensor, p: Any = None) -> Tensor:
    """Return the condition number ‖A‖ₚ‖A⁻¹‖ₚ, ∞ for a singular matrix; by default the ratio of the singular values."""
    if p in (None, 2, -2):
        s = svdvals(A)
        if not s.shape[-1]:
            return s.sum(-1)
        first, last = s.select(-1, 0), s.select(-1, s.shape[-1] - 1)
        return last / first if p == -2 else first / last
    singular = det(A.detach()) == 0.0
    regular = where(singular.unsqueeze(-1).unsqueeze(-1), _eye(A), A)
    return where(singular, inf, matrix_norm(regular, p) * matrix_norm(inv(regular), p))


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
    made, n = _eye(A).expand(*A.shape), abs(n)
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
    x, eye = x * 0.5**halvings, _eye(A)
    made = eye + x * 0.0
    for k in range(18, 0, -1):
        made = eye + x @ made / float(k)
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
