"""Functions of tensors: those written with operators alone, and names that read better in front."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import float32, int64
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
    """`a` where the bool condition holds, else `b`; all three broadcast. The gradient reaches the taken branch alone.

    Raises: DTypeError for a condition that is not bool, ShapeError.
    """
    return call("where", as_tensor(condition), a, b)


def maximum(a: Any, b: Any) -> Tensor:
    """The larger of two, elementwise; a tie gives each half of the gradient."""
    return call("maximum", as_tensor(a), b)


def minimum(a: Any, b: Any) -> Tensor:
    """The smaller of two, elementwise; a tie gives each half of the gradient."""
    return call("minimum", as_tensor(a), b)


def matmul(a: Any, b: Any) -> Tensor:
    """Matrix product with numpy's rules for ranks and leading axes; floating operands.

    Raises: ShapeError where the contracted sizes differ or leading axes do not broadcast.
    """
    return call("matmul", as_tensor(a), as_tensor(b))


def outer(a: Tensor, b: Tensor) -> Tensor:
    """[m] and [n] to a[i]·b[j]: [m, n]. Raises: ShapeError for other ranks."""
    if a.ndim != 1 or b.ndim != 1:
        raise ShapeError("outer takes two vectors", got=f"{a.spec}, {b.spec}")
    return a.reshape(-1, 1) * b


def lerp(a: Any, b: Any, weight: Any) -> Tensor:
    """Between `a` (weight 0) and `b` (weight 1, up to rounding): a + weight·(b - a)."""
    a = as_tensor(a)
    return a + (b - a) * weight


def stack(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors of one shape behind one another along a new axis.

    Raises: ShapeError for shapes that differ, UsageError for no tensors.
    """
    if not tensors:
        raise UsageError("nothing to stack", expected="at least one tensor")
    at = axis_of(axis, tensors[0].ndim + 1)
    if any(t.shape != tensors[0].shape for t in tensors):
        raise ShapeError("stacked tensors share one shape", got=", ".join(str(t.spec) for t in tensors))
    shape = tensors[0].shape
    return call("concat", *(t.reshape(*shape[:at], 1, *shape[at:]) for t in tensors), axis=at)


def sort(x: Any, axis: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Values in order, and their indices; equal ones keep their order, NaN is the largest."""
    return as_tensor(x).sort(axis, descending)


def argsort(x: Any, axis: int = -1, descending: bool = False) -> Tensor:
    """Indices of the sorted values, int64; equal ones keep their order."""
    return as_tensor(x).argsort(axis, descending)


def topk(x: Any, k: int, axis: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The k largest (or smallest) values in order, and their indices; of equal ones the lowest index first.

    Raises: ShapeError for a k that the axis does not have.
    """
    return as_tensor(x).topk(k, axis, largest)


# -- moments and norms -------------------------------------------------------------------------------------------------
def var(x: Tensor, axis: Axes = None, keepdims: bool = False, correction: int = 1) -> Tensor:
    """Σ (x - mean)² / (n - correction) over axes (all by default); NaN for n ≤ correction, as in torch.

    Statistics of 16-bit floats are float32, rounded once. Raises: DTypeError for integers.
    """
    axes = axes_of(axis, x.ndim)
    if x.dtype.is_low:
        return var(x.to(float32), axes, keepdims, correction).to(x.dtype)
    apart = x - x.mean(axes, keepdims=True)
    return (apart * apart).sum(axes, keepdims) / float(max(prod(x.shape[a] for a in axes) - correction, 0))


def std(x: Tensor, axis: Axes = None, keepdims: bool = False, correction: int = 1) -> Tensor:
    """√var over axes (all by default), with gradient 0 where it is 0."""
    if x.dtype.is_low:
        return std(x.to(float32), axis, keepdims, correction).to(x.dtype)
    return _root(var(x, axis, keepdims, correction), lambda v: v.sqrt())


def norm(x: Tensor, p: float = 2, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """(Σ |x|ᵖ)^(1/p) over axes (all by default), with gradient 0 where it is 0.

    Args:
        p: > 0; `inf` is the largest |x|, `-inf` the smallest, 0 the number of entries that are not 0.
    Raises: UsageError for another p below 0.
    """
    if x.dtype.is_low:
        return norm(x.to(float32), p, axis, keepdims).to(x.dtype)
    if p == 0:
        return (x != 0.0).to(x.dtype).sum(axis, keepdims)
    if p in (inf, -inf):
        return x.abs().amax(axis, keepdims) if p > 0 else x.abs().amin(axis, keepdims)
    if p < 0:
        raise UsageError("no norm of this order", expected="p >= 0, inf or -inf", got=p)
    if p == 1:
        return x.abs().sum(axis, keepdims)
    if p == 2:
        return _root((x * x).sum(axis, keepdims), lambda total: total.sqrt())
    powers = _root(x.abs(), lambda size: size**p)
    return _root(powers.sum(axis, keepdims), lambda total: total ** (1.0 / p))


def _root(x: Tensor, function: Any) -> Tensor:
    """A function with value 0 at 0, and gradient 0 there where its own would be infinite or NaN."""
    none = x == 0.0
    return where(none, 0.0, function(where(none, 1.0, x)))


# -- entries by place --------------------------------------------------------------------------------------------------
def cat(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors behind one another along an axis; dtypes promote.

    Raises: ShapeError where other axes differ, UsageError for no tensors.
    """
    if not tensors:
        raise UsageError("nothing to join", expected="at least one tensor")
    return call("concat", *tensors, axis=axis)


def like(value: Any, x: Tensor) -> Tensor:
    """A number, array or tensor in the dtype of another; a Python number loses no digits on the way."""
    return (value if hasattr(value, "__gw_op__") else as_tensor(np.asarray(value))).to(x.dtype)


def _places(index: Any) -> Tensor:
    return as_tensor(index).to(int64)


def gather(x: Tensor, axis: int, index: Any) -> Tensor:
    """Entries of x by place along an axis, an index for each: y[i, j] = x[index[i, j], j] for axis 0.

    Args:
        index: ints of as many axes as x, none longer than that of x beside `axis`.
    Raises: ShapeError, DTypeError; IndexOutOfRange for a place outside 0..n-1.
    """
    return call("gather", x, _places(index), axis=axis)


def scatter(x: Tensor, axis: int, index: Any, src: Any) -> Tensor:
    """X with values written at places along an axis: y[index[i, j], j] = src[i, j] for axis 0; of repeats the last.

    Args:
        src: a tensor of the shape of the index, or a number.
    Raises: as `gather`.
    """
    index = _places(index)
    return call("scatter", x, index, like(src, x).expand(*index.shape), axis=axis)


def scatter_add(x: Tensor, axis: int, index: Any, src: Any) -> Tensor:
    """X with values added at places along an axis, repeats in order. Raises: as `gather`."""
    return call("scatter_add", x, _places(index), src, axis=axis)


def index_select(x: Tensor, axis: int, index: Any) -> Tensor:
    """Entries of an axis by places of any shape, which stand in its stead; negative ones count from the end.

    Raises: IndexOutOfRange.
    """
    return call("index", x, _places(index), axis=axis)


def index_add(x: Tensor, axis: int, index: Any, src: Any) -> Tensor:
    """X with slices added at places of an axis, repeats in order. Raises: IndexOutOfRange, ShapeError."""
    return call("index_add", x, src, _places(index), axis=axis)


def index_put(x: Tensor, index: Sequence[Any], values: Any, accumulate: bool = False) -> Tensor:
    """X with values written (or added) at the places of index arrays, one per leading axis, broadcast together.

    Raises: IndexOutOfRange, ShapeError.
    """
    return call("index_add" if accumulate else "index_put", x, like(values, x), *map(_places, index), axis=0)


def one_hot(ids: Any, classes: int | None = None, *, out: Tensor | None = None) -> Tensor:
    """1 at the place of each id along a new last axis, else 0; int64.

    Args:
        classes: size of that axis; the largest id and one more by default, outside traces.
    Raises: IndexOutOfRange for an id outside.
    """
    ids = as_tensor(ids)
    return call("one_hot", ids, classes=_count(ids) if classes is None else classes, out=out)


def tril(x: Any, diagonal: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Entries (i, j) of the last two axes with j ≤ i + diagonal; the others are 0. Raises: ShapeError."""
    return call("tril", as_tensor(x), diagonal=diagonal, out=out)


def triu(x: Any, diagonal: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Entries (i, j) of the last two axes with j ≥ i + diagonal; the others are 0. Raises: ShapeError."""
    return call("triu", as_tensor(x), diagonal=diagonal, out=out)


def bincount(ids: Any, length: int | None = None) -> Tensor:
    """How often each of 0 .. length - 1 is among the ids; int64.

    Args:
        length: the largest id and one more by default, outside traces.
    Raises: IndexOutOfRange for an id outside.
    """
    ids = as_tensor(ids)
    return call("bincount", ids, length=_count(ids) if length is None else length)


def _count(ids: Tensor) -> int:
    host = ids.numpy()
    return int(host.max()) + 1 if host.size else 0


def nonzero(x: Any, *, size: int | None = None, fill: int = -1) -> Tensor:
    """Places [count, ndim] int64 of the entries that are not 0, row by row.

    Args:
        size: give so many rows whatever the count: the first ones, or all and then rows of `fill`. In a trace, where
            only a run knows the count, it must be said.
    Raises: TraceError in a trace without `size`.
    """
    x = as_tensor(x)
    if size is not None:
        return call("nonzero", x, size=size, fill=fill)
    return as_tensor(np.argwhere(x.numpy("float32" if x.dtype.as_bits else None)).astype(np.int64))


def repeat_interleave(x: Any, repeats: Any, axis: int | None = None, *, total: int | None = None) -> Tensor:
    """Each entry of an axis repeated in place: a b -> a a b b; of the flat array without an axis.

    Args:
        repeats: a number, or int64 [n], how often each entry (0 leaves it out); [1] for all alike.
        total: sum of the counts, the size of the axis of the result. In a trace it must be said.
    Raises: ShapeError for counts of another number than entries, or below 0; UsageError for another total;
        TraceError in a trace without it, where another total than that of a run raises IndexOutOfRange there.
    """
    x = as_tensor(x)
    x, axis = (x.flatten(), 0) if axis is None else (x, axis_of(axis, x.ndim))
    if isinstance(repeats, int):
        return call("repeat_interleave", x, repeats=repeats, axis=axis)
    counts, n = _places(repeats), x.shape[axis]
    if counts.shape not in ((n,), (1,)):
        raise ShapeError("a count for each entry", where=f"axis {axis}", expected=(n,), got=counts.spec)
    counts = counts.expand(n)
    if total is None or not counts.symbolic:
        host = counts.numpy()
        if (host < 0).any():
            raise ShapeError("an entry cannot be repeated less than 0 times", got=int(host.min()))
        if total not in (None, int(host.sum())):
            raise UsageError("the counts have another total", expected=total, got=int(host.sum()))
        return index_select(x, axis, np.repeat(np.arange(n), host))
    none, one = as_tensor(np.zeros(total + 1, np.int64)), call("full_like", counts, value=1.0)
    ends = scatter_add(none, 0, counts.cumsum(0), one)  # how many entries end at each place
    return index_select(x, axis, ends[:total].cumsum(0))


def pad(x: Tensor, widths: Sequence[tuple[int, int]], mode: str = "constant", value: float = 0.0) -> Tensor:
    """The last axes made longer: see the op.

    Args:
        widths: (before, after) for each of the last axes, in their order.
        mode: `constant` (by `value`), `reflect` or `replicate`.
    Raises: ShapeError for an axis too small to reflect.
    """
    return call("pad", x, widths=tuple((int(a), int(b)) for a, b in widths), mode=mode, value=value)
