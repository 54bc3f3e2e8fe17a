"""Indexing `x[...]` by numpy's rules: a view for slices and ints, a gather for index arrays.

An `IndexPlan` depends only on shape and index. This file executes it for arrays, `autograd/indexing.py` for tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphwright.array import layout as views
from graphwright.array.backend import backend
from graphwright.array.device import Device
from graphwright.array.dtype import int64
from graphwright.array.layout import Layout, Shape
from graphwright.array.ndarray import NDArray, empty, from_numpy
from graphwright.array.sizes import Size
from graphwright.array.spec import broadcast_shapes
from graphwright.errors import DTypeError, IndexOutOfRange, ShapeError, UsageError


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """The steps of computing `x[index]`, in this order: slice, drop axes, insert axes, permute, gather.

    Attributes:
        slices: start, size and step along each axis of the array.
        drop: axes of the array that are indexed by an int.
        new: indices at which axes of size 1 are inserted, once the axes in `drop` are removed.
        order: permutation that moves the axes with index arrays to the front; None if these are adjacent already.
        axis: first axis with an index array, after the permutation.
        ids: the index arrays, one per axis from `axis` on; empty if the result is a view.
        shape: shape of the result.
    """

    slices: tuple[tuple[int, int, int], ...]
    drop: tuple[int, ...]
    new: tuple[int, ...]
    order: tuple[int, ...] | None
    axis: int
    ids: tuple[Any, ...]
    shape: Shape

    def view(self, layout: Layout) -> Layout:
        """Return the layout of the view from which the index arrays gather; without them, the view is the result."""
        for axis, (start, size, step) in enumerate(self.slices):
            layout = views.narrow(layout, axis, start, size, step)
        kept = [(n, s) for a, (n, s) in enumerate(zip(layout.shape, layout.strides, strict=True)) if a not in self.drop]
        for axis in self.new:
            kept.insert(axis, (1, 0))
        layout = Layout(tuple(n for n, _ in kept), tuple(s for _, s in kept), layout.offset)
        return layout if self.order is None else views.permute(layout, self.order)


def index_plan(shape: Sequence[int], index: Any) -> IndexPlan:
    """Return the plan of `x[index]` for an array x of this shape.

    Args:
        index: ints, slices of any step, `...`, None, arrays, lists, tuples or ranges of ints (negative ones count from
            the end), bool masks, True and False (masks without axes); or a tuple of them.
    Raises: ShapeError for too many indices, a mask of the wrong shape, index arrays that do not broadcast,
        or an int that is out of range; DTypeError for a float array; UsageError for anything else.
    """
    items, apart = _items(tuple(shape), index if isinstance(index, tuple) else (index,))
    arrays = [i for i, item in enumerate(items) if _is_array(item)]
    if arrays:  # next to index arrays, ints count as index arrays
        items = [np.asarray(i, np.int64) if isinstance(i, int) else i for i in items]
        arrays = [i for i, item in enumerate(items) if _is_array(item)]
    slices, drop, new, kept = [], [], [], []
    axis = 0
    for item in items:
        if item is None or isinstance(item, _Added):
            new.append(len(kept))
            kept.append(1)
            continue
        n = shape[axis]
        if isinstance(item, int):
            if not -_here(n) <= _here(item) < _here(n):
                raise ShapeError("index out of range", where=f"axis {axis}", expected=f"{-n}..{n - 1}", got=item)
            slices.append((item + n if item < 0 else item, 1, 1))
            drop.append(axis)
        else:
            slices.append(_entries(item, n) if isinstance(item, slice) else (0, n, 1))
            kept.append(slices[-1][1])
        axis += 1
    ids = tuple(item.ids if isinstance(item := items[i], _Added) else item for i in arrays)
    order, first = None, 0
    if ids:
        first = arrays[0]
        if apart or arrays != list(range(first, first + len(arrays))):
            order = (*arrays, *(a for a in range(len(kept)) if a not in arrays))
            kept, first = [kept[a] for a in order], 0
        picked = broadcast_shapes(*(tuple(i.shape) for i in ids))
        kept[first : first + len(ids)] = picked
    return IndexPlan(tuple(slices), tuple(drop), tuple(new), order, first, ids, tuple(kept))


def _here(size: Any) -> int:
    """Return a size as an int; a named size of a trace as its value there, which a run checks again."""
    return getattr(size, "here", size)


def _entries(item: slice, n: Any) -> tuple[Any, Any, int]:
    """Return start, size and step of a slice of an axis of size n; n and its ends may be named sizes of a trace.

    Ends inside the axis need no comparison, because a run checks them. Where an end is clamped to the axis, the code
    depends on the comparison, which the trace notes.
    """
    if not any(isinstance(v, Size) for v in (n, item.start, item.stop)):
        start, stop, step = item.indices(n)
        size = len(range(start, stop, step))
        return (start if size else 0), size, step
    step = 1 if item.step is None else int(item.step)
    if step < 0:
        raise UsageError(
            "a slice of a named size has a negative step", got=step, fix="x.flip(axis), then a positive step"
        )
    start, stop = (_inside(default if v is None else v, n) for v, default in ((item.start, 0), (item.stop, n)))
    if _here(stop) < _here(start) and stop < start:
        return 0, 0, step
    return start, (stop - start + step - 1) // step, step


def _inside(end: Any, n: Any) -> Any:
    """Return an end of a slice counted from the front, between 0 and n."""
    if _here(end) < 0 and end < 0:
        end = end + n
        if _here(end) < 0 and end < 0:
            return 0
    return n if _here(end) > _here(n) and end > n else end


@dataclass(frozen=True, slots=True)
class _Added:
    """An index True or False. It inserts an axis of size 1, from which `ids` selects: [0] for True, [] for False."""

    ids: np.ndarray


def _items(shape: Shape, index: tuple[Any, ...]) -> tuple[list[Any], bool]:
    """Expand `...` and masks.

    Returns: (a list of one int, slice or index array per axis, and None or `_Added` per inserted axis; whether the
    `...` stands between index arrays: then their axes come first in the result, even if the `...` spans no axis).
    """
    given = [_read(item) for item in index]
    used = sum(map(_axes, given))
    dots = [i for i, item in enumerate(given) if item is Ellipsis]
    if len(dots) > 1:
        raise ShapeError("an index contains `...` more than once", got=f"{len(dots)} times")
    if used > len(shape):
        limit = f"at most {len(shape)}, for shape {shape}"
        raise ShapeError("too many indices (a mask counts once per axis)", expected=limit, got=used)
    at = dots[0] if dots else len(given)
    apart = all(any(_is_array(i) or isinstance(i, int) for i in part) for part in (given[:at], given[at:]))
    items: list[Any] = []
    axis = 0
    for item in [*given[:at], *[slice(None)] * (len(shape) - used), *given[at + 1 :]]:
        items += _mask_indices(item, shape[axis : axis + _axes(item)]) if _is_mask(item) else [item]
        axis += _axes(item)
    return items, apart


def _read(item: Any) -> Any:
    """Check one item of an index; convert integers to int and lists to arrays. Raises: UsageError, DTypeError."""
    if isinstance(item, slice) and item.step is not None and not item.step:
        raise UsageError("the step of a slice is 0", expected="a step other than 0", got=item)
    if item is None or item is Ellipsis or isinstance(item, slice):
        return item
    if isinstance(item, bool):
        return np.asarray(item)
    if isinstance(item, int | np.integer):
        return item if isinstance(item, Size) else int(item)
    if isinstance(item, list | tuple | range):
        try:
            item = np.asarray(item)
        except ValueError as error:
            expected = "nested lists of equal lengths and depths"
            raise ShapeError("a list in an index is not rectangular", expected=expected, got=item) from error
        item = item if item.size else item.astype(np.int64)
    if not _is_array(item):
        raise UsageError("invalid index", expected="int, slice, ..., None, int array or mask", got=type(item).__name__)
    if not _is_mask(item) and item.dtype.kind not in ("i", "u", "int", "uint"):  # numpy's kinds and ours
        raise DTypeError("an index array has an invalid dtype", expected="an integer dtype or bool", got=item.dtype)
    return item.astype(np.int64) if item.dtype.kind in ("i", "u") else item


def _is_array(item: Any) -> bool:
    return isinstance(item, _Added) or (hasattr(item, "shape") and hasattr(item, "dtype"))


def _is_mask(item: Any) -> bool:
    return not isinstance(item, _Added) and _is_array(item) and item.dtype.kind in ("b", "bool")


def _axes(item: Any) -> int:
    """Return how many axes of the array one item of an index consumes."""
    return 0 if item is None or item is Ellipsis else len(item.shape) if _is_mask(item) else 1


def _mask_indices(mask: Any, shape: Shape) -> tuple[Any, ...]:
    """Return the indices of the true entries of a mask in row-major order, as one array per axis."""
    if tuple(mask.shape) != shape:
        raise ShapeError("the mask does not have the shape of the indexed axes", expected=shape, got=tuple(mask.shape))
    host = mask.to_numpy() if isinstance(mask, NDArray) else np.asarray(mask)
    return np.nonzero(host) if host.shape else (_Added(np.zeros(int(host), np.int64)),)


def read(x: NDArray, index: Any) -> NDArray:
    """Return `x[index]`: a view, or a new array if there are index arrays."""
    plan = index_plan(x.shape, index)
    source = x.view(plan.view(x.layout))
    if not plan.ids:
        return source
    out = empty(plan.shape, x.dtype, x.device)
    _run("index", out, [_row_major(source), *(_int64(i, x.device) for i in plan.ids)], plan)
    return out


def write(x: NDArray, index: Any, value: Any) -> None:
    """Assign `x[index] = value`; the value is broadcast and cast. Where an index occurs twice, the last value remains.

    Raises: the errors of `index_plan`; ShapeError if the value does not broadcast; ReadOnlyArray; IndexOutOfRange. All
        are raised before anything is written.
    """
    plan = index_plan(x.shape, index)
    target = x.view(plan.view(x.layout))
    values = _values(value, plan.shape, x)
    x.writable()
    if not plan.ids:
        backend(x.device).copy(target, values)
        return
    inner = _row_major(target)
    _run("index_put", inner, [inner, _row_major(values), *(_int64(i, x.device) for i in plan.ids)], plan)
    if inner is not target:
        backend(x.device).copy(target, inner)


def _row_major(array: NDArray) -> NDArray:
    """Return the array itself if it is row-major, else a row-major copy."""
    return array if array.contiguous and min(array.strides, default=0) >= 0 else array.copy()


def _run(kernel: str, out: NDArray, ins: Sequence[NDArray], plan: IndexPlan) -> None:
    kernels, attrs = backend(out.device), {"axis": plan.axis}
    scratch = kernels.workspace(kernel, [out.spec], [a.spec for a in ins], attrs)
    try:
        for call in kernels.bind(kernel, [out], ins, attrs, [empty(s.sizes, s.dtype, out.device) for s in scratch]):
            call()
    except IndexError as error:
        sizes = ins[0].shape[plan.axis : plan.axis + len(plan.ids)]
        limits = f"indices into axes of sizes {sizes}"
        raise IndexOutOfRange("an index array is out of range", expected=limits, got=str(error)) from error


def _int64(ids: Any, device: Device) -> NDArray:
    array = (ids if isinstance(ids, NDArray) else from_numpy(np.asarray(ids))).to(device)
    if array.dtype is int64:
        return array
    return empty(array.shape, int64, array.device).copy_from(array)


def _values(value: Any, shape: Shape, x: NDArray) -> NDArray:
    """Return `value` in the dtype and on the device of x, broadcast to `shape`; a copy if it shares memory with x."""
    array = (value if isinstance(value, NDArray) else from_numpy(np.asarray(value))).to(x.device)
    while len(array.shape) > len(shape) and array.shape[0] == 1:  # as in numpy, leading axes of size 1 are ignored
        array = array.view(Layout(array.shape[1:], array.strides[1:], array.offset))
    if broadcast_shapes(array.shape, shape) != shape:
        raise ShapeError("the value does not broadcast to the indexed shape", expected=shape, got=array.shape)
    if array.storage is x.storage:
        array = array.copy()
    if array.dtype is not x.dtype:
        array = empty(array.shape, x.dtype, x.device).copy_from(array)
    return array.view(views.expand(array.layout, shape))
