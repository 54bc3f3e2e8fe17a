"""Products of vectors and matrices, distances and powers, under torch's names."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.autograd.apply import as_tensor
from graphwright.autograd.einsum import Labels, contract
from graphwright.autograd.functions import stack, wide
from graphwright.autograd.names import TOP, named
from graphwright.autograd.shapes import broadcast_tensors, ints
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
    return tensordot(input, other, ((-1,), (-1,)))


def _added(input: Any, product: Tensor, beta: Any, alpha: Any) -> Tensor:
    if product.dtype.kind == "bool":
        return (as_tensor(input) & bool(beta)) | (product & bool(alpha))
    if not product.dtype.is_float:
        beta, alpha = int(beta), int(alpha)
    scaled = product if alpha == 1 else product * alpha
    if beta == 0:
        return scaled
    return (input if beta == 1 else as_tensor(input) * beta) + scaled


@named(in_place=True)
def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta·x + alpha·(A @ B) of matrices."""
    return _added(input, mat1.mm(mat2), beta, alpha)


@named(in_place=True)
def addmv(input: Tensor, mat: Tensor, vec: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta·x + alpha·(A @ v)."""
    return _added(input, mat.mv(vec), beta, alpha)


@named(in_place=True)
def baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta·x + alpha·(A @ B) of batches of matrices."""
    return _added(input, batch1.bmm(batch2), beta, alpha)


@named(in_place=True)
def addbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta·x + alpha·Σ (A @ B) over batches of matrices."""
    return _added(input, batch1.bmm(batch2).sum(0, dtype=batch1.dtype), beta, alpha)


@named(in_place=True)
def addr(input: Tensor, vec1: Tensor, vec2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta·x + alpha·a[i]·b[j]."""
    return _added(input, vec1.outer(vec2), beta, alpha)


@named(TOP)
def tensordot(a: Tensor, b: Tensor, dims: Any = 2) -> Tensor:
    """Contract axes: the last `dims` of a with the first of b, or the two given lists of axes; sizes of 1 broadcast.

    Raises: ShapeError.
    """
    if not isinstance(dims, Sequence):
        dims = range(a.ndim - dims, a.ndim), range(dims) if dims >= 0 else (0, 0)
    left, right = ([axis_of(i, x.ndim) for i in ints((d,))] for d, x in zip(dims, (a, b), strict=True))
    if len(left) != len(right) or len(set(left)) < len(left) or len(set(right)) < len(right):
        expected, got = "equally many different axes of both", f"{tuple(left)}, {tuple(right)}"
        raise ShapeError("the axes do not pair up", where="tensordot", expected=expected, got=got)
    names: list[Labels] = [[f"{side}{i}" for i in range(x.ndim)] for side, x in (("a", a), ("b", b))]
    free = {name for row, used in zip(names, (left, right), strict=True) for i, name in enumerate(row) if i not in used}
    for i, j in zip(left, right, strict=True):
        names[1][j] = names[0][i]
    return contract(a, names[0], b, names[1], free)[0]


@named()
def kron(input: Tensor, other: Tensor) -> Tensor:
    """Kronecker product: each entry of a times b, as blocks."""
    n = builtins.max(input.ndim, other.ndim)
    a, b = (x.reshape(*(1,) * (n - x.ndim), *x.shape) for x in (input, other))
    wide = a.reshape(*(s for d in a.shape for s in (d, 1))) * b.reshape(*(s for d in b.shape for s in (1, d)))
    return wide.reshape(*(p * q for p, q in zip(a.shape, b.shape, strict=True)))


@named()
def cross(input: Tensor, other: Tensor, dim: int | None = None) -> Tensor:
    """Cross product along an axis of size 3, by default the first one; other axes broadcast. Raises: ShapeError."""
    dim = next((a for a, n in enumerate(input.shape) if n == 3), 0) if dim is None else dim
    at = axis_of(dim, input.ndim)
    if input.ndim != other.ndim or not input.shape[at] == other.shape[at] == 3:
        got = f"{input.spec}, {other.spec}"
        raise ShapeError("invalid operands of a cross product", expected=f"size 3 along axis {dim}", got=got)
    a, b = broadcast_tensors(input, other)
    following, previous = (lambda x: x.roll(-1, at)), (lambda x: x.roll(1, at))
    return following(a) * previous(b) - previous(a) * following(b)


@named(TOP)
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """⟨a, b⟩ / (max(‖a‖, eps)·max(‖b‖, eps)) along an axis, after broadcasting; computed in float32 or wider."""
    units = [x / x.norm(2, dim, True).clamp(min=eps) for x in broadcast_tensors(wide(x1), wide(x2))]
    return _narrow((units[0] * units[1]).sum(dim), x1, x2)


@named(TOP)
def pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    """‖a - b + eps‖ₚ over the last axis, computed in float32 or wider."""
    return _narrow((wide(x1) - wide(x2) + eps).norm(p, dim=-1, keepdim=keepdim), x1, x2)


def _narrow(made: Tensor, x1: Tensor, x2: Tensor) -> Tensor:
    """Return a result in the dtype of the operands."""
    return made.to(x1.dtype) if x1.dtype is x2.dtype and x1.dtype.is_low else made


@named(TOP)
def pdist(input: Tensor, p: float = 2.0) -> Tensor:
    """The p-norms of the differences of all pairs of rows, in row-major order of the upper triangle."""
    first, second = np.triu_indices(input.shape[0], 1)
    rows = [input.index_select(0, ids.astype(np.int64)) for ids in (first, second)]
    return (rows[0] - rows[1]).norm(p, dim=-1)


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
