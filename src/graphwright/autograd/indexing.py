"""Indexing of tensors: `tensor[...]`, `tensor[...] = value`, gather, scatter and other functions of indices.

The rules of `[...]` are those of numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import NDArray, bool_, broadcast_shapes, float64, from_numpy, int32, int64, uint8
from graphwright.array.indexing import IndexPlan, index_plan
from graphwright.array.sizes import dim_of
from graphwright.autograd.apply import TensorBase, as_tensor
from graphwright.autograd.functions import cast_like
from graphwright.autograd.modes import is_grad_enabled
from graphwright.autograd.named_sizes import traced
from graphwright.autograd.names import TOP, named
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
    items = index if isinstance(index, tuple) else (index,)
    if any(map(traced, items)) and any(isinstance(item, TensorBase | np.ndarray | list) for item in items):
        index = tuple(item.tensor() if traced(item) else item for item in items)
    plan = index_plan(x.shape, index)
    part = _view(x, plan)
    return call("index", part, *map(_int64, plan.ids), axis=plan.axis) if plan.ids else part


def _view(x: Any, plan: IndexPlan) -> Any:
    reversed_axes = []
    for axis, (start, size, step) in enumerate(plan.slices):
        if step < 0 and size > 1:
            start, step = start + (size - 1) * step, -step
            reversed_axes.append(axis)
        if (dim_of(start), dim_of(size), step) != (0, x.spec.shape[axis], 1):
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
    if not traced and not (is_grad_enabled() and (x.requires_grad or value.requires_grad)):
        assert isinstance(value.data, NDArray)
        items = index if isinstance(index, tuple) else (index,)
        x.own()[tuple(item.data if isinstance(item, TensorBase) else item for item in items)] = value.data
        return
    while value.ndim > len(plan.shape) and value.shape[0] == 1:
        value = call("squeeze", value, axes=(0,))
    parts = ((dim_of(start), dim_of(size), step) for start, size, step in plan.slices)
    whole = all(part == (0, n, 1) for part, n in zip(parts, x.spec.shape, strict=True))
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
    if ids.dtype.kind not in ("int", "uint") and (ids.dtype.kind == "bool" or ids.numel()):  # [] is float32
        fix = "index.to('int64')" if ids.dtype.is_float else "use mask.nonzero(), or x[mask]"
        raise DTypeError("the index does not hold integers", expected="an integer dtype", got=ids.spec, fix=fix)
    return ids.to(int64)


# -- gather and scatter ------------------------------------------------------------------------------------------------
@named()
def take_along_dim(input: Tensor, indices: Any, dim: int | None = None) -> Tensor:
    """Like `gather` along an axis, or of the flattened tensor; the other axes of both broadcast."""
    ids = _int64(indices)
    if dim is None:
        return gather(input.reshape(-1), 0, ids.reshape(-1))
    at = axis_of(dim, input.ndim)
    if ids.ndim != input.ndim:
        raise ShapeError("the indices have another number of axes", expected=input.ndim, got=ids.spec)
    n = input.shape[at]
    ids = call("where", ids < 0, ids + n, ids)
    shapes = [(*x.shape[:at], 1, *x.shape[at + 1 :]) for x in (input, ids)]
    both = broadcast_shapes(*shapes)
    x, ids = (t.expand(*both[:at], t.shape[at], *both[at + 1 :]) for t in (input, ids))
    return gather(x, at, ids)


@named()
def gather(input: Tensor, dim: int, index: Any) -> Tensor:
    """y[i, j] = x[index[i, j], j] for axis 0.

    Args:
        index: ints with as many axes as x; only `axis` may be longer than in x.
    Raises: ShapeError, DTypeError; IndexOutOfRange for an index outside 0..n-1.
    """
    ids = _int64(index)
    if ids.ndim != input.ndim and not ids.numel():
        return input.new_empty(ids.shape)
    if not input.ndim:
        axis_of(dim, 1)
        return call("gather", input.reshape(1), ids.reshape(-1), axis=0).reshape(*ids.shape)
    return call("gather", input, ids, axis=dim)


@named(in_place=True, scalars=True)
def scatter(
    input: Tensor, dim: int, index: Any, src: Any = None, *, value: Any = None, reduce: str | None = None
) -> Tensor:
    """Return a copy y of x with y[index[i, j], j] = src[i, j] for axis 0; for a repeated index the last value wins.

    Args:
        src, value: a tensor of at least the shape of the index, of the dtype of x, or a number.
        reduce: `add` or `multiply` to combine the values with the entries of x instead.
    Raises: ShapeError, DTypeError, IndexOutOfRange; UsageError for another `reduce`.
    """
    index = _int64(index)
    if reduce is not None:
        if reduce not in ("add", "multiply"):
            raise UsageError("unknown reduction", where="scatter", expected="add or multiply", got=reduce)
        given = cast_like(value if src is None else src, input)
        kind = "sum" if reduce == "add" else "prod"
        return scatter_reduce(input, dim, index, _of_index(given, index), kind)
    if isinstance(src, TensorBase):
        _one_dtype("scatter", input, src)
    source = cast_like(value if src is None else src, input)
    return call("scatter", input, index, _of_index(source, index), axis=dim)


def _of_index(source: Tensor, index: Tensor) -> Tensor:
    """Return the leading entries of `source` in the shape of the index, broadcast if it is a number."""
    if source.ndim != index.ndim:
        return source.expand(*index.shape)
    for axis, n in enumerate(index.shape):
        source = source.narrow(axis, 0, n) if source.shape[axis] > n else source
    return source


@named(in_place=True, scalars=True)
def scatter_add(input: Tensor, dim: int, index: Any, src: Any) -> Tensor:
    """Return a copy y of x with y[index[i, j], j] += src[i, j] for axis 0, in order.

    Raises: ShapeError, DTypeError, IndexOutOfRange.
    """
    index, values = _int64(index), as_tensor(src)
    _one_dtype("scatter_add", input, values)
    return call("scatter_add", input, index, _of_index(values, index), axis=dim)


def _one_dtype(where: str, x: Tensor, src: Any) -> None:
    if src.dtype is not x.dtype:
        what = "the values have another dtype than the tensor"
        raise DTypeError(what, where=where, expected=x.dtype, got=src.spec, fix=f"src.to({x.dtype.name!r})")


@named(in_place=True, scalars=True)
def scatter_reduce(
    input: Tensor, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> Tensor:  # fmt: skip
    """Combine the entries src[i, j] into a copy of x at [index[i, j], j] for axis 0; equal extrema share the gradient.

    Args:
        reduce: `sum`, `prod`, `mean`, `amax` or `amin`.
        include_self: whether the entry of x takes part where others are combined.
    Raises: UsageError for another `reduce`; ShapeError, DTypeError, IndexOutOfRange.
    """
    if reduce not in ("sum", "prod", "mean", "amax", "amin"):
        expected = "sum, prod, mean, amax or amin"
        raise UsageError("unknown reduction", where="scatter_reduce", expected=expected, got=reduce)
    if input.dtype is bool_:
        made = scatter_reduce(input.to(uint8), dim, index, as_tensor(src).to(uint8), reduce, include_self=include_self)
        return made.to(bool_)
    ids = _int64(index)
    values = _of_index(as_tensor(src), ids)
    none, one = call("full_like", input, value=0.0), call("full_like", values, value=1.0)
    hits = call("scatter_add", none, ids, one, axis=dim)
    own = (hits == 0) | include_self
    start = call("where", own, input, cast_like(1.0 if reduce == "prod" else 0.0, input))
    if reduce == "prod":
        n = ids.shape[axis_of(dim, ids.ndim)] if ids.ndim else 1
        for turn, taken in enumerate(_turns(ids, dim, n)):
            mine = taken == turn
            factor = call("scatter_add", none, ids, call("where", mine, values, none_like(values)), axis=dim)
            start = start * call("where", call("scatter_add", none, ids, mine.to(input.dtype), axis=dim) > 0, factor, 1)
        return start
    if reduce in ("amax", "amin"):
        order = values.detach().sort(dim, reduce == "amin")
        seen = call("where", own, input.detach(), call("scatter", input.detach(), ids, values.detach(), axis=dim))
        latest = call("scatter", seen, call("gather", ids, order[1], axis=dim), order[0], axis=dim)
        best = call("maximum" if reduce == "amax" else "minimum", seen, latest)
        theirs = values == call("gather", best, ids, axis=dim)
        mine = own & (input == best)
        start = call("where", mine, input, cast_like(0.0, input))
        values, one = call("where", theirs, values, none_like(values)), theirs.to(values.dtype)
        own, hits = mine, call("scatter_add", none, ids, one, axis=dim)
    total = call("scatter_add", start, ids, values, axis=dim)
    if reduce == "sum":
        return total
    count = call("maximum", hits + own.to(input.dtype), cast_like(1, input))
    return total / count if input.dtype.is_float else call("floor_divide", total, count)


def none_like(x: Tensor) -> Tensor:
    """Return zeros like x."""
    return call("full_like", x, value=0.0)


def _turns(ids: Tensor, dim: int, n: int) -> list[Tensor]:
    """Return n times how many earlier entries along an axis have the same index."""
    at = axis_of(dim, ids.ndim) if ids.ndim else 0
    lined = (ids if ids.ndim else ids.unsqueeze(0)).transpose(at, -1)
    same = (lined.unsqueeze(-1) == lined.unsqueeze(-2)) & as_tensor(np.tril(np.ones((n, n), bool), -1))
    counts = same.sum(-1).transpose(at, -1)
    return [counts if ids.ndim else counts.squeeze(0)] * n


@named(in_place=True, scalars=True)
def index_reduce(
    input: Tensor, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Tensor:  # fmt: skip
    """Combine source[i] into a copy of x at index[i] for axis 0, as `scatter_reduce`."""
    at, values = axis_of(dim, input.ndim), as_tensor(source)
    ids = _int64(index).reshape(*(-1 if a == at else 1 for a in range(input.ndim))).expand(*values.shape)
    return scatter_reduce(input, at, ids, values, reduce, include_self=include_self)


@named(in_place=True)
def put(input: Tensor, index: Any, source: Any, accumulate: bool = False) -> Tensor:
    """Return a copy y with y.flatten()[index] = source, or += with `accumulate`. Raises: IndexOutOfRange."""
    ids, values = _int64(index).reshape(-1), as_tensor(source).reshape(-1)
    op = "index_add" if accumulate else "index_put"
    return call(op, input.reshape(-1), values, ids, axis=0).reshape(*input.shape)


def _of_shape(src: Any, shape: Sequence[int]) -> Tensor:
    values = as_tensor(src)
    if values.shape != shape:
        raise ShapeError("src does not have the shape of the part that it replaces", expected=shape, got=values.spec)
    return values


def _written(x: Tensor, index: Any, src: Any) -> Tensor:
    made = x.clone()
    set_item(made, index, src)
    return made


@named()
def select_scatter(input: Tensor, src: Any, dim: int, index: int) -> Tensor:
    """Return a copy of x in which `src` replaces one entry of an axis. Raises: ShapeError, IndexOutOfRange."""
    before = (slice(None),) * axis_of(dim, input.ndim)
    part = input[(*before, index)]
    return _written(input, (*before, index), _of_shape(src, part.shape))


@named()
def slice_scatter(
    input: Tensor, src: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """Return a copy of x in which `src` replaces a slice of an axis. Raises: ShapeError."""
    return _written(input, (*(slice(None),) * axis_of(dim, input.ndim), slice(start, end, step)), src)


@named()
def diagonal_scatter(input: Tensor, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Return a copy of x in which `src` replaces a diagonal. Raises: ShapeError."""
    last = input.movedim((dim1, dim2), (-2, -1))
    n, m = last.shape[-2:]
    rows = np.arange(max(-offset, 0), max(min(n, m - offset), 0))
    values = _of_shape(src, (*last.shape[:-2], len(rows)))
    return _written(last, (..., rows, rows + offset), values).movedim((-2, -1), (dim1, dim2))


@named(TOP)
def unravel_index(indices: Any, shape: Any) -> tuple[Tensor, ...]:
    """Return the index along each axis of entries of the flattened tensor."""
    ids, found = _int64(indices), []
    for n in reversed(tuple(shape) if not isinstance(shape, int) else (shape,)):
        found.append(ids % n)
        ids = ids // n
    return tuple(reversed(found))


@named(scalars=True)
def index_select(input: Tensor, dim: int, index: Any) -> Tensor:
    """Select entries of an axis by indices; the axes of the index replace it. Negative indices count from the end.

    Raises: IndexOutOfRange.
    """
    return call("index", input, _int64(index), axis=dim)


@named()
def take(input: Tensor, index: Any) -> Tensor:
    """Select entries of the flattened tensor by indices. Raises: IndexOutOfRange."""
    return call("index", input.reshape(-1), _int64(index), axis=0)


@named(in_place=True, scalars=True)
def index_add(input: Tensor, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Tensor:
    """Return a copy y of x with y[index[i]] += alpha·source[i] for axis 0, in the order of i.

    Raises: IndexOutOfRange, ShapeError.
    """
    ids, values, at = _int64(index), as_tensor(source), axis_of(dim, input.ndim)
    if values.shape != (*input.shape[:at], *ids.shape, *input.shape[at + 1 :]) and values.ndim:
        expected = f"that of the tensor, with {ids.numel()} along axis {at}"
        raise ShapeError("the source has a wrong shape", where="index_add", expected=expected, got=values.spec)
    return call("index_add", input, values if alpha == 1 else values * alpha, ids, axis=at)


@named(in_place=True, scalars=True)
def index_copy(input: Tensor, dim: int, index: Any, source: Any) -> Tensor:
    """Return a copy y of x with y[index[i]] = source[i] for axis 0. Raises: IndexOutOfRange, ShapeError."""
    return call("index_put", input, cast_like(source, input), _int64(index), axis=dim)


@named(in_place=True, scalars=True)
def index_fill(input: Tensor, dim: int, index: Any, value: Any) -> Tensor:
    """Return a copy y of x with y[index[i]] = value for axis 0. Raises: IndexOutOfRange."""
    index = _int64(index)
    at = axis_of(dim, input.ndim)
    shape = (*input.shape[:at], index.shape[0], *input.shape[at + 1 :])
    return index_copy(input, at, index, cast_like(value, input).expand(*shape))


@named(in_place=True)
def index_put(input: Tensor, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Tensor:
    """Return a copy y of x with y[indices] = values, or += with `accumulate`; `indices` are int arrays or masks.

    Raises: IndexOutOfRange, ShapeError, DTypeError for indices that are not ints or bools; TraceError for a traced
    mask.
    """
    ids = index_plan(input.shape, tuple(map(as_tensor, indices))).ids
    op = "index_add" if accumulate else "index_put"
    return call(op, input, cast_like(values, input), *map(_int64, ids), axis=0)


@named(TOP, differs="`F.one_hot` in torch, which exists too")
def one_hot(ids: Any, classes: int | None = None, *, out: Tensor | None = None) -> Tensor:
    """Encode ids as one-hot vectors along a new last axis, int64.

    Args:
        classes: size of that axis; the largest id + 1 by default, required in a trace.
    Raises: IndexOutOfRange.
    """
    ids = as_tensor(ids)
    return call("one_hot", ids, classes=_count(ids) if classes is None else classes, out=out)


@named()
def bincount(input: Any, weights: Any = None, minlength: int = 0, *, length: int | None = None) -> Tensor:
    """Count how often each of 0 .. length - 1 occurs among the ids, int64; or sum their `weights`.

    Args:
        length: by default the largest id + 1, at least `minlength`; required in a trace.
    Raises: IndexOutOfRange.
    """
    ids = as_tensor(input)
    length = max(_count(ids), minlength) if length is None else length
    if weights is None:
        return call("bincount", ids, length=length)
    values = as_tensor(weights)
    values = values if values.dtype.is_float else values.to(float64)
    return index_add(call("full_like", values, value=0.0).narrow(0, 0, 1).expand(length), 0, ids, values)


def _count(ids: Tensor) -> int:
    host = ids.numpy()
    return int(host.max()) + 1 if host.size else 0


@named(also="argwhere")
def nonzero(input: Any, *, as_tuple: bool = False, size: int | None = None, fill: int = -1) -> Any:
    """Return the indices [count, ndim] int64 of the nonzero entries, in row-major order.

    Args:
        as_tuple: return one vector of indices for each axis instead.
        size: number of rows of the result, which is truncated or filled up with rows of `fill`. Required in a trace,
            because the count is known only in a run.
    Raises: TraceError in a trace without `size`.
    """
    x = as_tensor(input)
    if as_tuple and not x.ndim:
        x = x.unsqueeze(0)
    if size is not None:
        found = call("nonzero", x, size=size, fill=fill)
    else:
        found = as_tensor(np.argwhere(x.numpy()).astype(np.int64))
    return tuple(found[:, axis] for axis in range(x.ndim)) if as_tuple else found


@named()
def repeat_interleave(input: Any, repeats: Any, dim: int | None = None, *, output_size: int | None = None) -> Tensor:
    """Repeat each entry along an axis: a b -> a a b b. Without an axis, x is flattened first.

    Args:
        repeats: an int, or int64 counts, [n] for the n entries or [1] for all; a count of 0 omits the entry.
        output_size: sum of the counts, the size of the axis of the result; required in a trace.
    Raises: ShapeError for a wrong number of counts or a negative one; UsageError if `output_size` is not their sum;
        TraceError in a trace without `output_size`. A run whose counts do not sum to that of its trace raises
        IndexOutOfRange.
    """
    x = as_tensor(input)
    x, axis = (x.flatten(), 0) if dim is None else (x, axis_of(dim, x.ndim))
    if isinstance(repeats, int):
        return call("repeat_interleave", x, repeats=repeats, axis=axis)
    counts, n = _int64(repeats), x.shape[axis]
    if counts.shape not in ((n,), (1,)):
        raise ShapeError("repeats has a wrong length", where=f"axis {axis}", expected=f"[{n}] or [1]", got=counts.spec)
    counts = counts.expand(n)
    if output_size is None or not counts.symbolic:
        host = counts.numpy()
        if (host < 0).any():
            raise ShapeError("repeats has a negative count", expected=">= 0", got=int(host.min()))
        if output_size not in (None, int(host.sum())):
            raise UsageError("output_size is not the sum of repeats", expected=int(host.sum()), got=output_size)
        return index_select(x, axis, np.repeat(np.arange(n), host))
    none, one = as_tensor(np.zeros(output_size + 1, np.int64)), call("full_like", counts, value=1.0)
    ends = scatter_add(none, 0, counts.cumsum(0), one)  # how many entries end at each index of the result
    return index_select(x, axis, ends[:output_size].cumsum(0))


# -- on the host: outside traces, since the size of the result is known only in a run ----------------------------------
HOST = "outside traces only"


def _host(x: Any) -> np.ndarray:
    return as_tensor(x).detach().numpy()


@named(differs=HOST)
def masked_select(input: Tensor, mask: Any) -> Tensor:
    """Return the entries where the bool mask, which broadcasts, is true, as a vector. Outside traces."""
    shape = np.broadcast_shapes(input.shape, as_tensor(mask).shape)
    chosen = np.flatnonzero(np.broadcast_to(_host(mask), shape))
    return take(input.expand(*shape), as_tensor(chosen.astype(np.int64)))


@named(in_place=True, differs=HOST)
def masked_scatter(input: Tensor, mask: Any, source: Any) -> Tensor:
    """Return a copy in which the entries where the mask is true are the first entries of `source`. Outside traces.

    Raises: DTypeError for a mask that is not bool, ShapeError for too few entries.
    """
    known, given = as_tensor(mask), as_tensor(source)
    if known.dtype.kind != "bool":
        raise DTypeError("the mask is not bool", where="masked_scatter", expected="bool", got=known.spec)
    _one_dtype("masked_scatter", input, given)
    shape = np.broadcast_shapes(input.shape, known.shape)
    chosen = np.flatnonzero(np.broadcast_to(_host(known), shape)).astype(np.int64)
    if len(chosen) > given.numel():
        raise ShapeError("the source has too few entries", where="masked_scatter", expected=len(chosen), got=given.spec)
    values = given.reshape(-1).narrow(0, 0, len(chosen))
    return index_copy(input.expand(*shape).reshape(-1), 0, as_tensor(chosen), values).reshape(*shape)


@named(differs=HOST)
def unique(
    input: Any, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """Return the different values in ascending order, the index of each entry's value, and counts. Outside traces."""
    x = as_tensor(input)
    values, inverse, counts = np.unique(_host(x), return_inverse=True, return_counts=True, axis=dim)
    inverse = inverse.reshape(x.shape) if dim is None else inverse.reshape(-1)
    return _parts(as_tensor(values).to(x.dtype), inverse, counts, return_inverse, return_counts)


@named(differs=HOST)
def unique_consecutive(
    input: Any, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """Return the entries that differ from the entry before, with run indices and run lengths. Outside traces.

    Args:
        dim: axis along which to compare slices, instead of all entries.
    """
    x = as_tensor(input)
    host = _host(x).reshape(-1) if dim is None else np.moveaxis(_host(x), axis_of(dim, x.ndim), 0)
    rows = host.reshape(len(host), int(np.prod(host.shape[1:])))
    starts = np.flatnonzero(np.concatenate([np.ones(min(len(rows), 1), bool), (rows[1:] != rows[:-1]).any(1)]))
    counts = np.diff(np.append(starts, len(rows)))
    inverse = np.repeat(np.arange(len(starts)), counts)
    values = host[starts] if dim is None else np.moveaxis(host[starts], 0, axis_of(dim, x.ndim))
    inverse = inverse.reshape(x.shape) if dim is None else inverse
    return _parts(as_tensor(values).to(x.dtype), inverse, counts, return_inverse, return_counts)


def _parts(values: Tensor, inverse: np.ndarray, counts: np.ndarray, with_inverse: bool, with_counts: bool) -> Any:
    extra = [
        as_tensor(part.astype(np.int64)) for part, wanted in ((inverse, with_inverse), (counts, with_counts)) if wanted
    ]
    return (values, *extra) if extra else values


@named(differs=HOST)
def histc(input: Any, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Count entries in equal bins from min to max, by default the range of the entries. Outside traces."""
    host = _host(input).ravel()
    low, high = (host.min(), host.max()) if min == max == 0 and host.size else (min, max)
    return as_tensor(np.histogram(host, bins, (low, high))[0].astype(np.float32)).to(as_tensor(input).dtype)


# -- membership and bins -----------------------------------------------------------------------------------------------
@named(TOP)
def isin(elements: Any, test_elements: Any, *, invert: bool = False) -> Tensor:
    """True where an entry equals one of the test elements."""
    found = (as_tensor(elements).unsqueeze(-1) == as_tensor(test_elements).reshape(-1)).any(-1)
    return ~found if invert else found


@named(TOP)
def searchsorted(
    sorted_sequence: Any, input: Any, *, out_int32: bool = False, right: bool = False, side: str | None = None,
    sorter: Any = None,
) -> Tensor:  # fmt: skip
    """Return the index before which each value keeps the last axis of a sorted sequence in order, int64.

    Args:
        out_int32: give int32.
        right: after equal entries instead of before them; `side` says it as `left` or `right`.
        sorter: indices that sort the sequence.
    Raises: UsageError for another `side`, or one that contradicts `right`; ShapeError.
    """
    if side not in (None, "left", "right") or (side == "left" and right):
        raise UsageError("unknown side", where="searchsorted", expected="left or right", got=side)
    ordered, x = as_tensor(sorted_sequence), as_tensor(input)
    if ordered.ndim > 1 and ordered.shape[:-1] != x.shape[:-1]:
        expected = f"leading axes {ordered.shape[:-1]}"
        raise ShapeError("the values do not fit the sequence", where="searchsorted", expected=expected, got=x.spec)
    if sorter is not None:
        ids = as_tensor(sorter)
        if ids.shape != ordered.shape or ids.dtype is not int64:
            expected = f"int64 {ordered.shape}"
            raise ShapeError("invalid sorter", where="searchsorted", expected=expected, got=ids.spec)
        ordered = ordered.gather(-1, ids)
    edges, values = ordered.unsqueeze(-2) if ordered.ndim > 1 else ordered, x.unsqueeze(-1)
    found = (edges <= values if right or side == "right" else edges < values).sum(-1)
    return found.to(int32) if out_int32 else found


@named(TOP)
def bucketize(input: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Tensor:
    """Return the index of the bucket of each value, between ascending boundaries. Raises: ShapeError."""
    edges = as_tensor(boundaries)
    if edges.ndim != 1:
        raise ShapeError("the boundaries are not a vector", where="bucketize", expected="[n]", got=edges.spec)
    return searchsorted(edges, input, out_int32=out_int32, right=right)
