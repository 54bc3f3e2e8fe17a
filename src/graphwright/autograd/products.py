"""Products of vectors and matrices, distances and powers, under torch's names."""

from __future__ import annotations

import builtins
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import float32
from graphwright.autograd.apply import as_tensor
from graphwright.autograd.functions import stack
from graphwright.autograd.names import TOP, named
from graphwright.autograd.shapes import broadcast_shapes
from graphwright.errors import ShapeError
from graphwright.ops import call
from graphwright.ops.axes import axis_of

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor


def _ranked(name: str, left: int, right: int, doc: str) -> None:
    def product(input: Tensor, mat2: Tensor) -> Tensor:
        if (input.ndim, mat2.ndim) != (left, right):
            expected = f"{left} and {right} axes"
            raise ShapeError("an operand has a wrong number of axes", where=name, expected=expected,
                             got=f"{input.spec}, {mat2.spec}")  # fmt: skip
        return call("matmul", input, mat2)

    product.__name__, product.__doc__ = name, doc
    named()(product)


_ranked("mm", 2, 2, "Multiply matrices [n, k] and [k, m]. Raises: ShapeError.")
_ranked("mv", 2, 1, "Multiply a matrix [n, k] and a vector [k]. Raises: ShapeError.")
_ranked("bmm", 3, 3, "Multiply batches of matrices [B, n, k] and [B, k, m]. Raises: ShapeError.")
_ranked("dot", 1, 1, "Σ a·b of vectors [n]. Raises: ShapeError.")
_ranked("vdot", 1, 1, "Σ a·b of vectors [n]. Raises: ShapeError.")


@named()
def inner(input: Tensor, other: Tensor) -> Tensor:
    """Σ a·b over the last axes: [..., k] and [..., k] to [..., ...]."""
    if not input.ndim or not other.ndim:
        return input * other
    flat = call("matmul", input.reshape(-1, input.shape[-1]), other.reshape(-1, other.shape[-1]).T)
    return flat.reshape(*input.shape[:-1], *other.shape[:-1])


def _added(input: Any, product: Tensor, beta: Any, alpha: Any) -> Tensor:
    if product.dtype.kind == "bool":
        return (as_tensor(input) & bool(beta)) | (product & bool(alpha))
    if not product.dtype.is_float:
        beta, alpha = int(beta), int(alpha)
    scaled = product if alpha == 1 else product * alpha
    if beta == 0:
        return scaled
    return (input if beta == 1 else as_tensor(input) * beta) + scaled


@named()
def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta·x + alpha·(A @ B) of matrices."""
    return _added(input, mat1.mm(mat2), beta, alpha)


@named()
def addmv(input: Tensor, mat: Tensor, vec: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta·x + alpha·(A @ v)."""
    return _added(input, mat.mv(vec), beta, alpha)


@named()
def baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta·x + alpha·(A @ B) of batches of matrices."""
    return _added(input, batch1.bmm(batch2), beta, alpha)


@named()
def addbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta·x + alpha·Σ (A @ B) over batches of matrices."""
    return _added(input, batch1.bmm(batch2).sum(0), beta, alpha)


@named()
def addr(input: Tensor, vec1: Tensor, vec2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta·x + alpha·a[i]·b[j]."""
    return _added(input, vec1.outer(vec2), beta, alpha)


@named(TOP)
def tensordot(a: Tensor, b: Tensor, dims: Any = 2) -> Tensor:
    """Contract axes: the last `dims` of a with the first of b, or the two given lists of axes."""
    if isinstance(dims, int):
        left, right = tuple(range(a.ndim - dims, a.ndim)), tuple(range(dims))
    else:
        left, right = (
            tuple(axis_of(i, x.ndim) for i in ([d] if isinstance(d, int) else d))
            for d, x in zip(dims, (a, b), strict=True)
        )
    for i, j in zip(left, right, strict=True):  # a size of 1 is contracted with all entries of the other axis
        if a.shape[i] != b.shape[j] and 1 in (a.shape[i], b.shape[j]):
            a = a if a.shape[i] == 1 else a.sum(i, True)
            b = b if b.shape[j] == 1 else b.sum(j, True)
    free_a, free_b = ([i for i in range(x.ndim) if i not in used] for x, used in ((a, left), (b, right)))
    inner_size = prod(a.shape[i] for i in left)
    made = call("matmul", a.permute(*free_a, *left).reshape(-1, inner_size),
                b.permute(*right, *free_b).reshape(inner_size, -1))  # fmt: skip
    return made.reshape(*(a.shape[i] for i in free_a), *(b.shape[i] for i in free_b))


@named()
def kron(input: Tensor, other: Tensor) -> Tensor:
    """Kronecker product: each entry of a times b, as blocks."""
    n = builtins.max(input.ndim, other.ndim)
    a, b = (x.reshape(*(1,) * (n - x.ndim), *x.shape) for x in (input, other))
    wide = a.reshape(*(s for d in a.shape for s in (d, 1))) * b.reshape(*(s for d in b.shape for s in (1, d)))
    return wide.reshape(*(p * q for p, q in zip(a.shape, b.shape, strict=True)))


@named()
def cross(input: Tensor, other: Tensor, dim: int = -1) -> Tensor:
    """Cross product along an axis of size 3. Raises: ShapeError."""
    if input.shape[axis_of(dim, input.ndim)] != 3:
        raise ShapeError("the axis of a cross product has another size", expected="3", got=input.spec)
    following, previous = (lambda x: x.roll(-1, dim)), (lambda x: x.roll(1, dim))
    return following(input) * previous(other) - previous(input) * following(other)


@named(TOP)
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """⟨a, b⟩ / (max(‖a‖, eps)·max(‖b‖, eps)) along an axis, after broadcasting."""
    a, b = _wide(x1), _wide(x2)
    shape = broadcast_shapes(a.shape, b.shape)
    made = [x.expand(*shape) for x in (a, b)]
    made = [x / x.norm(2, dim, True).clamp(min=eps) for x in made]
    return (made[0] * made[1]).sum(dim)


@named(TOP)
def pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    """‖a - b + eps‖ₚ over the last axis."""
    return (_wide(x1) - _wide(x2) + eps).norm(p, dim=-1, keepdim=keepdim)


@named(TOP)
def pdist(input: Tensor, p: float = 2.0) -> Tensor:
    """The p-norms of the differences of all pairs of rows, in row-major order of the upper triangle."""
    first, second = np.triu_indices(input.shape[0], 1)
    rows = [input.index_select(0, as_tensor(ids.astype(np.int64))) for ids in (first, second)]
    return (rows[0] - rows[1]).norm(p, dim=-1)


def _wide(x: Any) -> Tensor:
    x = as_tensor(x)
    return x.to(float32) if x.dtype.is_low else x


@named(TOP)
def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str = "") -> Tensor:
    """Return the p-norms of the differences of rows: [..., n, d] and [..., m, d] to [..., n, m].

    Args:
        compute_mode: ignored, differences are always computed.
    """
    return (x1.unsqueeze(-2) - x2.unsqueeze(-3)).norm(p, dim=-1)


@named(TOP)
def vander(x: Tensor, N: int | None = None, increasing: bool = False) -> Tensor:
    """Return the powers x^(N-1), ..., x, 1 of a vector as columns."""
    powers = range(x.shape[0] if N is None else N)
    return stack([x**k for k in (powers if increasing else reversed(powers))], -1)
