"""Indexing of tensors: `tensor[...]`, `tensor[...] = value`, gather, scatter and other functions of indices.

The rules of `[...]` are those of numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import NDArray, from_numpy, int64
from graphwright.array.indexing import IndexPlan, index_plan
from graphwright.autograd.apply import TensorBase, as_tensor
from graphwright.autograd.functions import cast_like
from graphwright.autograd.modes import grad_enabled
from graphwright.autograd.recorder import active_recorder
from graphwright.errors import DTypeError, ShapeError, UsageError
from graphwright.ops import call
from graphwright.ops.axes import axis_of

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor


# -- square brackets ---------------------------------------------------------------------------------------------------
def get_item(x: Tensor, index: Any) -> Tensor:
    """`x[index]`: a view for positive steps, a copy for negative steps and index arrays.

    Raises: ShapeError, DTypeError, UsageError for an invalid index; TraceError for a traced mask, whose number of true
        entries is known only in a run.
    """
    plan = index_plan(x.shape, index)
    part = _view(x, plan)
    return call("index", part, *map(_int64, plan.ids), axis=plan.axis) if plan.ids else part


def _view(x: Any, plan: IndexPlan) -> Any:
    reversed_axes = []
    for axis, (start, size, step) in enumerate(plan.slices):
        if step < 0 and size > 1:
            start, step = start + (size - 1) * step, -step
            reversed_axes.append(axis)
        if (start, size, step) != (0, x.shape[axis], 1):
            x = call("slice", x, axis=axis, start=start, size=size, step=max(step, 1))
    if reversed_axes:
        x = call("flip", x, axes=tuple(reversed_axes))
    if plan.drop:
        x = call("squeeze", x, axes=plan.drop)
    if plan.new:
        x = call("unsqueeze", x, axes=plan.new)
    return x if plan.order is None else call("permute", x, axes=plan.order)


def set_item(x: Tensor, index: Any, value: Any) -> None:
    """`x[index] = value`, in the memory of x. On a tape or in a trace, the write is recorded.

    Raises: ShapeError, DTypeError, UsageError for an invalid index, or a value that does not broadcast; TraceError for
        a traced mask; LeafModified, ViewModified, TraceMutation for a write that tape or trace cannot record.
    """
    value = cast_like(value, x)
    plan = index_plan(x.shape, index)
    ids = [i for i in plan.ids if isinstance(i, TensorBase)]
    traced = active_recorder.get() is not None and any(t.symbolic or t.is_variable for t in (x, value, *ids))
    if not traced and not (grad_enabled() and (x.requires_grad or value.requires_grad)):
        assert isinstance(value.data, NDArray)
        items = index if isinstance(index, tuple) else (index,)
        x.own()[tuple(item.data if isinstance(item, TensorBase) else item for item in items)] = value.data
        return
    while value.ndim > len(plan.shape) and value.shape[0] == 1:
        value = call("squeeze", value, axes=(0,))
    whole = all(part == (0, n, 1) for part, n in zip(plan.slices, x.shape, strict=True))
    if whole and not (plan.ids or plan.drop or plan.new):
        x.copy_(value)
    elif plan.ids and whole and not plan.new and plan.order is None:
        call("index_put", x, value, *map(_int64, plan.ids), axis=plan.axis, out=x)
    else:  # assign by the coordinates of the entries along every axis
        grids = [np.broadcast_to(g, x.shape) for g in np.ogrid[tuple(slice(n) for n in x.shape)]]
        coordinates = [get_item(as_tensor(from_numpy(g)), index) for g in grids]
        call("index_put", x, value, *coordinates, axis=0, out=x)


def _int64(index: Any) -> Tensor:
    """Return an index tensor as int64. Raises: DTypeError for masks and floats, as torch."""
    ids = as_tensor(index)
    if ids.dtype.kind not in ("int", "uint") and (ids.dtype.kind == "bool" or ids.size):  # [] is float32
        fix = "index.to('int64')" if ids.dtype.is_float else "use mask.nonzero(), or x[mask]"
        raise DTypeError("the index does not hold integers", expected="an integer dtype", got=ids.spec, fix=fix)
    return ids.to(int64)


# -- gather and scatter ------------------------------------------------------------------------------------------------
def gather(x: Tensor, axis: int, index: Any) -> Tensor:
    """y[i, j] = x[index[i, j], j] for axis 0.

    Args:
        index: ints with as many axes as x; only `axis` may be longer than in x.
    Raises: ShapeError, DTypeError; IndexOutOfRange for an index outside 0..n-1.
    """
    return call("gather", x, _int64(index), axis=axis)


def scatter(x: Tensor, axis: int, index: Any, src: Any) -> Tensor:
    """Return a copy y of x with y[index[i, j], j] = src[i, j] for axis 0; for a repeated index the last value wins.

    Args:
        src: a tensor of the shape of the index, or a number.
    Raises: ShapeError, DTypeError, IndexOutOfRange.
    """
    index = _int64(index)
    return call("scatter", x, index, cast_like(src, x).expand(*index.shape), axis=axis)


def scatter_add(x: Tensor, axis: int, index: Any, src: Any) -> Tensor:
    """Return a copy y of x with y[index[i, j], j] += src[i, j] for axis 0, in order.

    Raises: ShapeError, DTypeError, IndexOutOfRange.
    """
    return call("scatter_add", x, _int64(index), src, axis=axis)


def index_select(x: Tensor, axis: int, index: Any) -> Tensor:
    """Select entries of an axis by indices; the axes of the index replace it. Negative indices count from the end.

    Raises: IndexOutOfRange.
    """
    return call("index", x, _int64(index), axis=axis)


def index_add(x: Tensor, axis: int, index: Any, src: Any) -> Tensor:
    """Return a copy y of x with y[index[i]] += src[i] for axis 0, in the order of i.

    Raises: IndexOutOfRange, ShapeError.
    """
    return call("index_add", x, src, _int64(index), axis=axis)


def index_put(x: Tensor, index: Sequence[Any], values: Any, accumulate: bool = False) -> Tensor:
    """Return a copy y of x with y[index] = values, or += with `accumulate`; `index` holds int arrays or masks.

    Raises: IndexOutOfRange, ShapeError, DTypeError for indices that are not ints or bools; TraceError for a traced
    mask.
    """
    ids = index_plan(x.shape, tuple(map(as_tensor, index))).ids
    op = "index_add" if accumulate else "index_put"
    return call(op, x, cast_like(values, x), *map(_int64, ids), axis=0)


def one_hot(ids: Any, classes: int | None = None, *, out: Tensor | None = None) -> Tensor:
    """Encode ids as one-hot vectors along a new last axis, int64.

    Args:
        classes: size of that axis; the largest id + 1 by default, required in a trace.
    Raises: IndexOutOfRange.
    """
    ids = as_tensor(ids)
    return call("one_hot", ids, classes=_count(ids) if classes is None else classes, out=out)


def bincount(ids: Any, length: int | None = None) -> Tensor:
    """Count how often each of 0 .. length - 1 occurs among the ids; int64.

    Args:
        length: the largest id + 1 by default, required in a trace.
    Raises: IndexOutOfRange.
    """
    ids = as_tensor(ids)
    return call("bincount", ids, length=_count(ids) if length is None else length)


def _count(ids: Tensor) -> int:
    host = ids.numpy()
    return int(host.max()) + 1 if host.size else 0


def nonzero(x: Any, *, size: int | None = None, fill: int = -1) -> Tensor:
    """Return the indices [count, ndim] int64 of the nonzero entries, in row-major order.

    Args:
        size: number of rows of the result, which is truncated or filled up with rows of `fill`. Required in a trace,
            because the count is known only in a run.
    Raises: TraceError in a trace without `size`.
    """
    x = as_tensor(x)
    if size is not None:
        return call("nonzero", x, size=size, fill=fill)
    return as_tensor(np.argwhere(x.numpy("float32" if x.dtype.as_bits else None)).astype(np.int64))


def repeat_interleave(x: Any, repeats: Any, axis: int | None = None, *, total: int | None = None) -> Tensor:
    """Repeat each entry along an axis: a b -> a a b b. Without an axis, x is flattened first.

    Args:
        repeats: an int, or int64 counts, [n] for the n entries or [1] for all; a count of 0 omits the entry.
        total: sum of the counts, the size of the axis of the result; required in a trace.
    Raises: ShapeError for a wrong number of counts or a negative one; UsageError if `total` is not their sum;
        TraceError in a trace without `total`. A run whose counts do not sum to the `total` of its trace raises
        IndexOutOfRange.
    """
    x = as_tensor(x)
    x, axis = (x.flatten(), 0) if axis is None else (x, axis_of(axis, x.ndim))
    if isinstance(repeats, int):
        return call("repeat_interleave", x, repeats=repeats, axis=axis)
    counts, n = _int64(repeats), x.shape[axis]
    if counts.shape not in ((n,), (1,)):
        raise ShapeError("repeats has a wrong length", where=f"axis {axis}", expected=f"[{n}] or [1]", got=counts.spec)
    counts = counts.expand(n)
    if total is None or not counts.symbolic:
        host = counts.numpy()
        if (host < 0).any():
            raise ShapeError("repeats has a negative count", expected=">= 0", got=int(host.min()))
        if total not in (None, int(host.sum())):
            raise UsageError("total is not the sum of repeats", expected=int(host.sum()), got=total)
        return index_select(x, axis, np.repeat(np.arange(n), host))
    none, one = as_tensor(np.zeros(total + 1, np.int64)), call("full_like", counts, value=1.0)
    ends = scatter_add(none, 0, counts.cumsum(0), one)  # how many entries end at each index of the result
    return index_select(x, axis, ends[:total].cumsum(0))
