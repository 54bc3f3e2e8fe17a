"""Indexing of tensors: `tensor[...]`, `tensor[...] = value`, gather, scatter and other functions of indices.

The rules of `[...]` are those of numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import NDArray, bool_, broadcast_shapes, from_numpy, int64, uint8
from graphwright.array.indexing import IndexPlan, index_plan
from graphwright.array.sizes import dim_of
from graphwright.autograd.apply import TensorBase, as_tensor, device_of
from graphwright.autograd.functions import cast_like
from graphwright.autograd.modes import is_grad_enabled
from graphwright.autograd.named_sizes import traced
from graphwright.autograd.names import TOP, named
from graphwright.autograd.recorder import active_recorder
from graphwright.autograd.reductions import changes, scan
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
    return call("index", part, *_beside(x, plan), axis=plan.axis) if plan.ids else part


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
    elif not x.ndim:  # a mask without axes
        value = value.expand(*plan.shape)
        if value.numel():
            x.copy_(value.reshape())
    elif plan.ids and whole and not plan.new and plan.order is None:
        call("index_put", x, value, *_beside(x, plan), axis=plan.axis, out=x)
    else:  # assign by the coordinates of the entries along every axis
        grids = [np.broadcast_to(g, x.shape) for g in np.ogrid[tuple(slice(n) for n in x.shape)]]
        coordinates = [_moved(get_item(as_tensor(from_numpy(g)), index), x) for g in grids]
        call("index_put", x, value, *coordinates, axis=0, out=x)


def _beside(x: Tensor, plan: IndexPlan) -> list[Tensor]:
    """Return the index arrays of a plan as tensors on the device of x, wherever they are."""
    return [_moved(_int64(ids), x) for ids in plan.ids]


def _moved(made: Tensor, x: Tensor) -> Tensor:
    """Return what was computed on the host on the device of x."""
    return made if made.symbolic else made.to(device=device_of(x))


def _int64(index: Any, x: Tensor | None = None) -> Tensor:
    """Return an index tensor as int64; what is not a tensor goes to the device of x.

    Raises: DTypeError for masks and floats, as torch.
    """
    ids = as_tensor(index) if x is None or isinstance(index, TensorBase) else _moved(as_tensor(index), x)
    if ids.dtype.kind not in ("int", "uint") and (ids.dtype.kind == "bool" or ids.numel()):  # [] is float32
        fix = "index.to('int64')" if ids.dtype.is_float else "use mask.nonzero(), or x[mask]"
        raise DTypeError("the index does not hold integers", expected="an integer dtype", got=ids.spec, fix=fix)
    return ids.to(int64)


# -- gather and scatter ------------------------------------------------------------------------------------------------
@named()
def take_along_dim(input: Tensor, indices: Any, dim: int | None = None) -> Tensor:
    """Like `gather` along an axis, or of the flattened tensor; the other axes of both broadcast."""
    ids = _int64(indices, input)
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
    ids = _int64(index, input)
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
    index = _int64(index, input)
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
    """Return the leading entries of `source` in the shape of the index, broadcast if it is 0-d. Raises: ShapeError."""
    if not source.ndim:
        return source.expand(*index.shape)
    if source.ndim != index.ndim:
        raise ShapeError("the values have another number of axes than the index", expected=index.spec, got=source.spec)
    for axis, n in enumerate(index.shape):
        source = source.narrow(axis, 0, n) if source.shape[axis] > n else source
    return source


@named(in_place=True, scalars=True)
def scatter_add(input: Tensor, dim: int, index: Any, src: Any) -> Tensor:
    """Return a copy y of x with y[index[i, j], j] += src[i, j] for axis 0, in order.

    Raises: ShapeError, DTypeError, IndexOutOfRange.
    """
    index, values = _int64(index, input), as_tensor(src)
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
    ids = _int64(index, input)
    values = _of_index(as_tensor(src), ids)
    none, one = call("full_like", input, value=0.0), call("full_like", values, value=1.0)
    hits = call("scatter_add", none, ids, one, axis=dim)
    own = (hits == 0) | include_self
    if reduce == "prod":
        return _combined("mul", input, values, ids, dim, hits > 0, include_self)
    start = call("where", own, input, cast_like(0.0, input))
    if reduce in ("amax", "amin"):
        op = "maximum" if reduce == "amax" else "minimum"
        best = _combined(op, input.detach(), values.detach(), ids, dim, hits > 0, include_self)
        theirs, own = values == call("gather", best, ids, axis=dim), own & (input == best)
        start = call("where", own, input, call("where", best.isnan(), best, cast_like(0.0, input)))
        values, one = call("where", theirs, values, cast_like(0.0, values)), theirs.to(values.dtype)
        hits = call("scatter_add", none, ids, one, axis=dim)
    total = call("scatter_add", start, ids, values, axis=dim)
    if reduce == "sum":
        return total
    count = call("maximum", hits + own.to(input.dtype), cast_like(1, input))
    return total / count if input.dtype.is_float else call("floor_divide", total, count)


def _combined(op: str, x: Tensor, values: Tensor, ids: Tensor, dim: int, hit: Tensor, with_own: bool) -> Tensor:
    """Combine the values of each index along an axis, and the entry of x if `with_own`, by an associative op."""
    ordered, order = ids.sort(dim)
    at = axis_of(dim, ids.ndim)

    def combine(a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return call("where", a[1] == b[1], call(op, a[0], b[0]), b[0]), b[1]

    values, _ = scan(combine, (call("gather", values, order, axis=at), ordered), at)
    last = changes(ordered, at).roll(-1, at)  # where the values of an index are complete
    values = call("where", last, values, cast_like(0.0, values))
    whole = call("scatter_add", call("full_like", x, value=0.0), ordered, values, axis=at)
    return call("where", hit, call(op, x, whole) if with_own else whole, x)


@named(in_place=True, scalars=True)
def index_reduce(
    input: Tensor, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Tensor:  # fmt: skip
    """Combine source[i] into a copy of x at index[i] for axis 0, as `scatter_reduce`."""
    at, ids, values = _slices("index_reduce", input, dim, index, source)
    ids = ids.reshape(*(-1 if a == at else 1 for a in range(input.ndim))).expand(*values.shape)
    return scatter_reduce(input, at, ids, values, reduce, include_self=include_self)


@named(in_place=True)
def put(input: Tensor, index: Any, source: Any, accumulate: bool = False) -> Tensor:
    """Return a copy y with y.flatten()[index] = source, or += with `accumulate`.

    Raises: IndexOutOfRange, ShapeError.
    """
    ids, values = _int64(index, input).reshape(-1), as_tensor(source).reshape(-1)
    if ids.shape != values.shape:
        raise ShapeError("there is not one value per index", where="put", expected=ids.spec, got=values.spec)
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
    index = (*(slice(None),) * axis_of(dim, input.ndim), slice(start, end, step))
    return _written(input, index, _of_shape(src, input[index].shape))


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

    A 0-d index counts as a vector. Raises: IndexOutOfRange.
    """
    return call("index", input, _vector(index, input), axis=dim)


def _vector(index: Any, x: Tensor) -> Tensor:
    ids = _int64(index, x)
    return ids if ids.ndim else ids.reshape(1)


@named()
def take(input: Tensor, index: Any) -> Tensor:
    """Select entries of the flattened tensor by indices. Raises: IndexOutOfRange."""
    return call("index", input.reshape(-1), _int64(index, input), axis=0)


@named(in_place=True, scalars=True)
def index_add(input: Tensor, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Tensor:
    """Return a copy y of x with y[index[i]] += alpha·source[i] for axis 0, in the order of i.

    Raises: IndexOutOfRange, ShapeError, DTypeError, also for a floating alpha of integers.
    """
    at, ids, values = _slices("index_add", input, dim, index, source)
    if isinstance(alpha, float) and not input.dtype.is_float:
        raise DTypeError("alpha is floating, but the tensor is not", where="index_add", expected="an int", got=alpha)
    return call("index_add", input, values if alpha == 1 else values * alpha, ids, axis=at)


def _slices(where: str, x: Tensor, dim: int, index: Any, source: Any) -> tuple[int, Tensor, Tensor]:
    """Return an axis, the indices as a vector, and the source. Raises: ShapeError unless it has a slice per index."""
    at, ids, values = axis_of(dim, x.ndim), _vector(index, x), as_tensor(source)
    shape = (*x.shape[:at], *ids.shape, *x.shape[at + 1 :])
    if values.shape != shape:
        raise ShapeError("the source has a wrong shape", where=where, expected=shape, got=values.spec)
    _one_dtype(where, x, values)
    return at, ids, values


@named(in_place=True, scalars=True)
def index_copy(input: Tensor, dim: int, index: Any, source: Any) -> Tensor:
    """Return a copy y of x with y[index[i]] = source[i] for axis 0. Raises: IndexOutOfRange, ShapeError, DTypeError."""
    at, ids, values = _slices("index_copy", input, dim, index, source)
    return call("index_put", input, values, ids, axis=at)


@named(in_place=True, scalars=True)
def index_fill(input: Tensor, dim: int, index: Any, value: Any) -> Tensor:
    """Return a copy y of x with y[index[i]] = value, a number, for axis 0. Raises: IndexOutOfRange, ShapeError."""
    number = cast_like(value, input)
    if number.numel() != 1:
        raise ShapeError("the value is not a number", where="index_fill", expected="one entry", got=number.spec)
    return call("index_put", input, number.reshape(), _vector(index, input), axis=dim)


@named(in_place=True)
def index_put(input: Tensor, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Tensor:
    """Return a copy y of x with y[indices] = values, or += with `accumulate`; `indices` are int arrays or masks.

    Raises: IndexOutOfRange, ShapeError, DTypeError for indices that are not ints or bools; TraceError for a traced
    mask.
    """
    ids = index_plan(input.shape, tuple(map(as_tensor, indices))).ids
    op = "index_add" if accumulate else "index_put"
    return call(op, input, cast_like(values, input), *(_moved(_int64(i), input) for i in ids), axis=0)


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
        found = _moved(as_tensor(np.argwhere(x.numpy()).astype(np.int64)), x)
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
    counts, n = _vector(repeats, x), x.shape[axis]
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
    none, one = _moved(as_tensor(np.zeros(output_size + 1, np.int64)), x), call("full_like", counts, value=1.0)
    ends = scatter_add(none, 0, counts.cumsum(0), one)  # how many entries end at each index of the result
    return index_select(x, axis, ends[:output_size].cumsum(0))


# -- on the host: outside traces, since the size of the result is known only in a run ----------------------------------
HOST = "outside traces only"


@named(differs=HOST)
def masked_select(input: Tensor, mask: Any) -> Tensor:
    """Return the entries where the bool mask, which broadcasts, is true, as a vector. Outside traces.

    Raises: DTypeError for a mask that is not bool, ShapeError.
    """
    wide, chosen = _chosen("masked_select", input, mask)
    return take(wide, chosen)


def _chosen(where: str, x: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
    """Return x broadcast with a mask, and the flat indices of the true entries. Raises: DTypeError, ShapeError."""
    known = as_tensor(mask)
    if known.dtype is not bool_:
        raise DTypeError("the mask is not bool", where=where, expected="bool", got=known.spec)
    shape = broadcast_shapes(x.shape, known.shape)
    chosen = np.flatnonzero(np.broadcast_to(known.detach().numpy(), shape))
    return x.expand(*shape), _moved(as_tensor(chosen.astype(np.int64)), x)


@named(in_place=True, differs=HOST)
def masked_scatter(input: Tensor, mask: Any, source: Any) -> Tensor:
    """Return a copy in which the entries where the mask is true are the first entries of `source`. Outside traces.

    Raises: DTypeError for a mask that is not bool, ShapeError for too few entries.
    """
    given = as_tensor(source)
    _one_dtype("masked_scatter", input, given)
    wide, chosen = _chosen("masked_scatter", input, mask)
    count = chosen.numel()
    if count > given.numel():
        raise ShapeError("the source has too few entries", where="masked_scatter", expected=count, got=given.spec)
    return put(wide, chosen, given.reshape(-1).narrow(0, 0, count))
