"""Functions of tensors: selection, products, sorting, moments and norms. Many are methods of Tensor as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import float32
from graphwright.array.layout import Shape
from graphwright.autograd.apply import as_tensor
from graphwright.errors import ShapeError, UsageError
from graphwright.ops import call
from graphwright.ops.axes import axes_of, axis_of

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor

Axes = int | Shape | None


# -- choices and products ----------------------------------------------------------------------------------------------
def where(condition: Any, a: Any, b: Any) -> Tensor:
    """Select `a` where the bool condition is true, else `b`; all three broadcast. Unselected entries get gradient 0.

    Raises: DTypeError if the condition is not bool, ShapeError.
    """
    return call("where", as_tensor(condition), a, b)


def maximum(a: Any, b: Any) -> Tensor:
    """Return the larger of two operands, elementwise; on a tie each operand gets half of the gradient."""
    return call("maximum", as_tensor(a), b)


def minimum(a: Any, b: Any) -> Tensor:
    """Return the smaller of two operands, elementwise; on a tie each operand gets half of the gradient."""
    return call("minimum", as_tensor(a), b)


def matmul(a: Any, b: Any) -> Tensor:
    """Multiply matrices of floating tensors; vectors and leading axes are treated as in numpy.

    Raises: ShapeError if the contracted sizes differ or leading axes do not broadcast.
    """
    return call("matmul", as_tensor(a), as_tensor(b))


def outer(a: Tensor, b: Tensor) -> Tensor:
    """a[i]·b[j]: [m] and [n] to [m, n]. Raises: ShapeError unless both are vectors."""
    if a.ndim != 1 or b.ndim != 1:
        raise ShapeError("an operand of outer is not a vector", expected="[m] and [n]", got=f"{a.spec}, {b.spec}")
    return a.reshape(-1, 1) * b


def lerp(a: Any, b: Any, weight: Any) -> Tensor:
    """a + weight·(b - a): linear interpolation, exact at weight 0, up to rounding at weight 1."""
    a = as_tensor(a)
    return a + (b - a) * weight


def cat(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Concatenate tensors along an axis; dtypes promote.

    Raises: ShapeError if the sizes of other axes differ, UsageError for an empty sequence.
    """
    if not tensors:
        raise UsageError("cat got no tensors", expected="at least one tensor")
    return call("concat", *tensors, axis=axis)


def stack(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Stack tensors of one shape along a new axis. Raises: ShapeError if shapes differ, UsageError for no tensors."""
    if not tensors:
        raise UsageError("stack got no tensors", expected="at least one tensor")
    shape = tensors[0].shape
    at = axis_of(axis, len(shape) + 1)
    if any(t.shape != shape for t in tensors):
        got = ", ".join(str(t.spec) for t in tensors)
        raise ShapeError("stacked tensors have different shapes", expected="one shape", got=got)
    return call("concat", *(t.reshape(*shape[:at], 1, *shape[at:]) for t in tensors), axis=at)


def cast_like(value: Any, x: Tensor) -> Tensor:
    """Return a tensor of the dtype of `x`; a Python float is converted from float64, not through float32."""
    return (value if hasattr(value, "__gw_op__") else as_tensor(np.asarray(value))).to(x.dtype)


def masked_fill(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    """Replace entries of x by `value` where the bool mask, which broadcasts, is true; these get gradient 0."""
    return call("where", mask, cast_like(value, x), x)


# -- sorting and triangles ---------------------------------------------------------------------------------------------
def sort(x: Any, axis: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Return the sorted values and their indices; stable, NaN is the largest."""
    return call("sort", as_tensor(x), axis=axis, descending=descending)


def argsort(x: Any, axis: int = -1, descending: bool = False) -> Tensor:
    """Return the indices that sort an axis, int64; stable, NaN is the largest."""
    return sort(x, axis, descending)[1]


def topk(x: Any, k: int, axis: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """Return the k largest (or smallest) values in order, and their indices; equal values by ascending index.

    Raises: ShapeError if k exceeds the size of the axis.
    """
    return call("topk", as_tensor(x), k=k, axis=axis, largest=largest)


def tril(x: Any, diagonal: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Keep entries (i, j) of the last two axes with j ≤ i + diagonal; others are 0. Raises: ShapeError."""
    return call("tril", as_tensor(x), diagonal=diagonal, out=out)


def triu(x: Any, diagonal: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Keep entries (i, j) of the last two axes with j ≥ i + diagonal; others are 0. Raises: ShapeError."""
    return call("triu", as_tensor(x), diagonal=diagonal, out=out)


def pad(x: Tensor, widths: Sequence[tuple[int, int]], mode: str = "constant", value: float = 0.0) -> Tensor:
    """Pad the last axes.

    Args:
        widths: (before, after) for each of the last axes, in axis order.
        mode: `constant` (with `value`), `reflect` or `replicate`.
    Raises: ShapeError for an axis too small to reflect.
    """
    return call("pad", x, widths=tuple((int(a), int(b)) for a, b in widths), mode=mode, value=value)


# -- moments and norms -------------------------------------------------------------------------------------------------
def var(x: Tensor, axis: Axes = None, keepdims: bool = False, correction: int = 1) -> Tensor:
    """Σ (x - mean)² / (n - correction) over axes (all by default); NaN for n ≤ correction, as in torch.

    For 16-bit floats the statistics are float32, rounded once. Raises: DTypeError for integers.
    """
    axes = axes_of(axis, x.ndim)
    if x.dtype.is_low:
        return var(x.to(float32), axes, keepdims, correction).to(x.dtype)
    deviation = x - x.mean(axes, keepdims=True)
    return (deviation * deviation).sum(axes, keepdims) / float(max(prod(x.shape[a] for a in axes) - correction, 0))


def std(x: Tensor, axis: Axes = None, keepdims: bool = False, correction: int = 1) -> Tensor:
    """√(Σ (x - mean)² / (n - correction)) over axes (all by default), with gradient 0 where the result is 0."""
    if x.dtype.is_low:
        return std(x.to(float32), axis, keepdims, correction).to(x.dtype)
    return _zero_safe(var(x, axis, keepdims, correction), lambda v: v.sqrt())


def norm(x: Tensor, p: float = 2, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """(Σ |x|ᵖ)^(1/p) over axes (all by default), with gradient 0 where the norm is 0.

    Args:
        p: a number > 0, or `inf` for the largest |x|, `-inf` for the smallest, 0 for the number of nonzero entries.
    Raises: UsageError for a finite p below 0.
    """
    if x.dtype.is_low:
        return norm(x.to(float32), p, axis, keepdims).to(x.dtype)
    if p == 0:
        return (x != 0.0).to(x.dtype).sum(axis, keepdims)
    if p in (inf, -inf):
        return x.abs().amax(axis, keepdims) if p > 0 else x.abs().amin(axis, keepdims)
    if p < 0:
        raise UsageError("the order of a norm is negative and finite", expected="p >= 0, inf or -inf", got=p)
    if p == 1:
        return x.abs().sum(axis, keepdims)
    if p == 2:
        return _zero_safe((x * x).sum(axis, keepdims), lambda total: total.sqrt())
    powers = _zero_safe(x.abs(), lambda size: size**p)
    return _zero_safe(powers.sum(axis, keepdims), lambda total: total ** (1.0 / p))


def _zero_safe(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function that maps 0 to 0, with gradient 0 at 0 instead of infinity or NaN."""
    zero = x == 0.0
    return where(zero, 0.0, function(where(zero, 1.0, x)))
