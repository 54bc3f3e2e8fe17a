"""Functions of several tensors under torch's names: choices, products, joining, triangles, padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import float32
from graphwright.autograd.apply import TensorBase, as_tensor, device_of
from graphwright.autograd.named_sizes import traced
from graphwright.autograd.names import TOP, named
from graphwright.errors import ShapeError, UsageError
from graphwright.ops import call
from graphwright.ops.axes import axis_of

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor


# -- choices and products ----------------------------------------------------------------------------------------------
@named(TOP)
def where(condition: Any, input: Any = None, other: Any = None) -> Any:
    """Select `input` where the bool condition is true, else `other`; all three broadcast.

    Unselected entries get gradient 0. With the condition alone: the indices of its true entries, as `nonzero`
    gives with `as_tuple`. Raises: DTypeError if the condition is not bool, ShapeError.
    """
    if input is None and other is None:
        return as_tensor(condition).nonzero(as_tuple=True)
    return call("where", as_tensor(condition), input, other)


@named()
def maximum(input: Any, other: Any) -> Tensor:
    """Return the larger of two operands, elementwise; on a tie each operand gets half of the gradient."""
    return call("maximum", as_tensor(input), other)


@named()
def minimum(input: Any, other: Any) -> Tensor:
    """Return the smaller of two operands, elementwise; on a tie each operand gets half of the gradient."""
    return call("minimum", as_tensor(input), other)


@named()
def matmul(input: Any, other: Any) -> Tensor:
    """Multiply matrices of floating tensors; vectors and leading axes are treated as in numpy.

    Raises: ShapeError if the contracted sizes differ or leading axes do not broadcast.
    """
    return call("matmul", as_tensor(input), as_tensor(other))


@named(also="ger")
def outer(input: Tensor, vec2: Tensor) -> Tensor:
    """a[i]·b[j]: [m] and [n] to [m, n]. Raises: ShapeError unless both are vectors."""
    if input.ndim != 1 or vec2.ndim != 1:
        got = f"{input.spec}, {vec2.spec}"
        raise ShapeError("an operand of outer is not a vector", expected="[m] and [n]", got=got)
    return input.reshape(-1, 1) * vec2


@named(TOP, also="concat concatenate")
def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors along an axis; dtypes promote. A tensor [0] joins tensors of any number of axes, as in torch.

    Raises: ShapeError if the sizes of other axes differ, UsageError for an empty sequence.
    """
    if not tensors:
        raise UsageError("cat got no tensors", expected="at least one tensor")
    tensors = [t if isinstance(t, TensorBase) else as_tensor(t) for t in tensors]
    parts = [t for t in tensors if t.shape != (0,)] if any(t.ndim != 1 for t in tensors) else tensors
    return call("concat", *parts, axis=dim)


@named(TOP)
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Stack tensors of one shape along a new axis. Raises: ShapeError if shapes differ, UsageError for no tensors."""
    if not tensors:
        raise UsageError("stack got no tensors", expected="at least one tensor")
    shape = tensors[0].shape
    at = axis_of(dim, len(shape) + 1)
    if any(t.shape != shape for t in tensors):
        got = ", ".join(str(t.spec) for t in tensors)
        raise ShapeError("stacked tensors have different shapes", expected="one shape", got=got)
    return call("concat", *(t.reshape(*shape[:at], 1, *shape[at:]) for t in tensors), axis=at)


def wide(x: Any) -> Tensor:
    """Return x in float32 if its dtype is a narrower float."""
    x = as_tensor(x)
    return x.to(float32) if x.dtype.is_low else x


def cast_like(value: Any, x: Tensor) -> Tensor:
    """Return a tensor of the dtype of `x`; a Python float is converted from float64, not through float32.

    What is not a tensor goes to the device of `x`.
    """
    if traced(value):
        return value.tensor(x.dtype)
    if hasattr(value, "__gw_op__"):
        return value.to(x.dtype)
    return as_tensor(np.asarray(value), x.dtype, device_of(x))


@named(in_place=True)
def masked_fill(input: Tensor, mask: Tensor, value: Any) -> Tensor:
    """Replace entries by `value` where the bool mask, which broadcasts, is true; these get gradient 0.

    Raises: ShapeError for a value that is not a number or a 0-d tensor.
    """
    number = cast_like(value, input)
    if number.ndim:
        raise ShapeError("the value is not 0-d", where="masked_fill", expected="a number", got=number.spec)
    return call("where", mask, number, input)


# -- triangles and padding ---------------------------------------------------------------------------------------------
@named(in_place=True)
def tril(input: Any, diagonal: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Keep entries (i, j) of the last two axes with j ≤ i + diagonal; others are 0. Raises: ShapeError."""
    return call("tril", as_tensor(input), diagonal=diagonal, out=out)


@named(in_place=True)
def triu(input: Any, diagonal: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Keep entries (i, j) of the last two axes with j ≥ i + diagonal; others are 0. Raises: ShapeError."""
    return call("triu", as_tensor(input), diagonal=diagonal, out=out)


def pad(x: Tensor, widths: Sequence[tuple[int, int]], mode: str = "constant", value: float = 0.0) -> Tensor:
    """Pad the last axes.

    Args:
        widths: (before, after) for each of the last axes, in axis order.
        mode: `constant` (with `value`), `reflect` or `replicate`.
    Raises: ShapeError for an axis too small to reflect.
    """
    return call("pad", x, widths=tuple((int(a), int(b)) for a, b in widths), mode=mode, value=value)
