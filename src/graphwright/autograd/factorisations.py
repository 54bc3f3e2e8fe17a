"""Factorisations, inverses and determinants of matrices, on the host, with gradients.

They run in numpy, outside traces. Their gradients are tensor code, so that they have further gradients. Sources: Giles
2008, "Collected matrix derivative results"; Townsend 2016, "Differentiating the SVD".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import finfo
from graphwright.autograd.apply import as_tensor
from graphwright.autograd.create import device_of
from graphwright.autograd.function import Function
from graphwright.autograd.functions import cat, maximum, where
from graphwright.autograd.modes import is_grad_enabled
from graphwright.errors import ComputeError, UsageError

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor


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


class _Inverse(Function):
    """A⁻¹ of [..., n, n]."""

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
    """X with AX = B: [..., n, n] and [..., n, k] to [..., n, k]."""

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


class _LogDeterminant(Function):
    """Sign and ln |det A| of [..., n, n]."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save(a)
        return _on_host(np.linalg.slogdet, a)

    @staticmethod
    def vjp(ctx: Any, g: tuple[Any, Any], needs: Any) -> Tensor:
        (a,) = ctx.saved
        return a * 0.0 if g[1] is None else g[1].unsqueeze(-1).unsqueeze(-1) * _Inverse.apply(a).mT


class _Cholesky(Function):
    """The lower L with A = LLᵀ of [..., n, n]."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        made = _on_host(np.linalg.cholesky, a)
        ctx.save(made)
        return made

    @staticmethod
    def vjp(ctx: Any, g: Tensor, needs: Any) -> Tensor:
        (lower,) = ctx.saved
        inner = (lower.mT @ g).tril()
        inner = inner - inner.diagonal(0, -2, -1).diag_embed() * 0.5
        half = _Solve.apply(lower.mT, _Solve.apply(lower.mT, inner.mT).mT)
        return (half + half.mT) * 0.5


class _Eigh(Function):
    """Eigenvalues and eigenvectors of symmetric [..., n, n], of which one triangle is read."""

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
    """U, S, Vh with A = U diag(S) Vh of [..., n, m]."""

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
    """The pseudoinverse [..., m, n]; singular values that are not `above` the bounds count as 0."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, atol: Any, rtol: Any) -> Tensor:
        u, s, vh = _on_host(np.linalg.svd, a, full_matrices=False)
        kept = above(s, a, atol, rtol)
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
    """Q, R with A = QR of [..., n, m]."""

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


class _Determinant(Function):
    """det A of [..., n, n]; the gradient is g times the cofactors, also of singular matrices."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        made = _on_host(np.linalg.det, a)
        ctx.save(a, made)
        return made

    @staticmethod
    def vjp(ctx: Any, g: Tensor, needs: Any) -> Tensor:
        a, made = ctx.saved
        least = 0.0
        if is_grad_enabled():  # near a singular matrix, terms of the second gradient would cancel
            least = (a * a).sum(-1).sqrt().prod(-1) * finfo(a.dtype).eps ** 0.5
        if bool((made.abs() > least).all().item()):
            return (g * _Determinant.apply(a)).unsqueeze(-1).unsqueeze(-1) * _Inverse.apply(a).mT
        return g.unsqueeze(-1).unsqueeze(-1) * _Cofactors.apply(a)


class _Cofactors(Function):
    """The cofactors of [..., n, n], also of singular matrices; they have a first gradient only.

    Those of A = U diag(s) Vh are det U · det Vh · U diag(Pᵢᵢ) Vh, where Pᵢⱼ is the product of all s but sᵢ and sⱼ.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        u, s, vh = _on_host(np.linalg.svd, a)
        sign = (_on_host(np.linalg.det, u) * _on_host(np.linalg.det, vh)).unsqueeze(-1).unsqueeze(-1)
        rest = _on_host(_products_of_others, s)
        ctx.save(u, vh, rest, sign)
        return sign * ((u * rest.diagonal(0, -2, -1).unsqueeze(-2)) @ vh)

    @staticmethod
    def vjp(ctx: Any, g: Tensor, needs: Any) -> Tensor:
        u, vh, rest, sign = ctx.saved
        inner, rest = u.mT @ g @ vh.mT, where(eye(u) > 0.0, 0.0, rest)
        diagonal = (rest @ inner.diagonal(0, -2, -1).unsqueeze(-1)).squeeze(-1)
        return sign * (u @ (diagonal.diag_embed() - rest * inner.mT) @ vh)


def _products_of_others(s: np.ndarray) -> np.ndarray:
    """Return [..., n, n]: the products of all s [..., n] except two, or on the diagonal except one."""
    rows = np.where(np.eye(s.shape[-1]) > 0, 1.0, s[..., None, :])  # row i without sᵢ
    ones = np.ones_like(rows[..., :1])
    before = np.cumprod(np.concatenate([ones, rows[..., :-1]], -1), -1)
    after = np.cumprod(np.concatenate([ones, rows[..., :0:-1]], -1), -1)[..., ::-1]
    return before * after


def _gaps(a: Tensor, b: Tensor) -> Tensor:
    """1 / (b_j - a_i) off the diagonal, 0 on it."""
    gap = b.unsqueeze(-2) - a.unsqueeze(-1)
    none = eye(a) > 0.0
    return where(none, 0.0, 1.0 / where(none, 1.0, gap))


def eye(like: Tensor) -> Tensor:
    """Return the identity [n, n] for matrices [..., n, n]."""
    return as_tensor(np.eye(like.shape[-1])).to(dtype=like.dtype, device=device_of(like))


def above(s: Tensor, A: Tensor, atol: Any, rtol: Any) -> Tensor:
    """True for singular values s of A above max(atol, rtol·the largest); by default 0 and eps times the larger size."""
    if not s.shape[-1]:
        return s > 0.0
    if rtol is None:
        eps = finfo(A.dtype).eps * max(A.shape[-2:])
        rtol = eps if atol is None else where(as_tensor(atol) > 0.0, 0.0, eps)
    least, relative = (as_tensor(0.0 if t is None else t).to(A.dtype).unsqueeze(-1) for t in (atol, rtol))
    return s > maximum(s.detach().amax(-1, True) * relative, least)


determinant, log_determinant, inverse = _Determinant.apply, _LogDeterminant.apply, _Inverse.apply
solve, pseudoinverse = _Solve.apply, _Pinv.apply
cholesky, eigh, svd, qr = _Cholesky.apply, _Eigh.apply, _Svd.apply, _Qr.apply
