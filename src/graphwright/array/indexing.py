"""What `x[...]` means, by numpy's rules: a view where slices and numbers give one, else entries by index arrays.

An `IndexPlan` is made of a shape and an index alone; arrays carry it out here, tensors in `autograd/indexing.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphwright.array import layout as lay
from graphwright.array.backend import backend
from graphwright.array.dtype import int64
from graphwright.array.layout import Layout, Shape
from graphwright.array.ndarray import NDArray, empty, from_numpy
from graphwright.array.spec import broadcast_shapes
from graphwright.errors import DTypeError, IndexOutOfRange, ShapeError, UsageError


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """Slices first, then axes left out and put in, then index arrays for consecutive axes.

    Attributes:
        slices: start, size and step along each axis of the array.
        drop: axes of the array that a number picks one entry of.
        new: places of new axes of size 1 in what is left.
        order: the axes after that, indexed ones first; None to leave them.
        axis: where the indexed axes begin.
        ids: an index array per indexed axis; none for a view.
        shape: of the result.
    """

    slices: tuple[tuple[int, int, int], ...]
    drop: tuple[int, ...]
    new: tuple[int, ...]
    order: tuple[int, ...] | None
    axis: int
    ids: tuple[Any, ...]
    shape: Shape

    def view(self, layout: Layout) -> Layout:
        """The part of the array that the index arrays look into, or all of the result."""
        for axis, (start, size, step) in enumerate(self.slices):
            layout = lay.narrow(layout, axis, start, size, step)
        kept = [(n, s) for a, (n, s) in enumerate(zip(layout.shape, layout.strides, strict=True)) if a not in self.drop]
        for axis in self.new:
            kept.insert(axis, (1, 0))
        layout = Layout(tuple(n for n, _ in kept), tuple(s for _, s in kept), layout.offset)
        return layout if self.order is None else lay.permute(layout, self.order)


def index_plan(shape: Sequence[int], index: Any) -> IndexPlan:
    """The plan of `x[index]` for an array of a shape.

    Args:
        index: numbers, slices of any step, `...`, None, arrays or lists of ints (negative ones count from the end),
            masks of bool; or a tuple of them.
    Raises: ShapeError for too many of them, a mask of another shape, index arrays that do not broadcast,
        or a number outside its axis; DTypeError for an array of floats; UsageError for anything else.
    """
    items = _items(tuple(shape), index if isinstance(index, tuple) else (index,))
    arrays = [i for i, item in enumerate(items) if _is_array(item)]
    if arrays:  # numbers beside index arrays are index arrays themselves
        items = [np.asarray(i, np.int64) if isinstance(i, int) else i for i in items]
        arrays = [i for i, item in enumerate(items) if _is_array(item)]
    slices, drop, new, kept = [], [], [], []
    axis = 0
    for item in items:
        if item is None:
            new.append(len(kept))
            kept.append(1)
            continue
        n = shape[axis]
        if isinstance(item, int):
            slices.append((_inside(item, n, axis), 1, 1))
            drop.append(axis)
        else:
            start, stop, step = item.indices(n) if isinstance(item, slice) else (0, n, 1)
            size = len(range(start, stop, step))
            slices.append((start if size else 0, size, step))
            kept.append(size)
        axis += 1
    ids = tuple(items[i] for i in arrays)
    order, first = None, 0
    if ids:
        first = arrays[0]
        if arrays != list(range(first, first + len(arrays))):
            order = (*arrays, *(a for a in range(len(kept)) if a not in arrays))
            kept, first = [kept[a] for a in order], 0
        picked = broadcast_shapes(*(tuple(i.shape) for i in ids))
        kept[first : first + len(ids)] = picked
    return IndexPlan(tuple(slices), tuple(drop), tuple(new), order, first, ids, tuple(kept))


def _items(shape: Shape, index: tuple[Any, ...]) -> list[Any]:
    """One item per axis, None for a new one: `...` spelt out, masks as index arrays."""
    given = [_read(item) for item in index]
    used = sum(map(_axes, given))
    dots = [i for i, item in enumerate(given) if item is Ellipsis]
    if len(dots) > 1 or used > len(shape):
        raise ShapeError("too many indices", expected=f"at most {len(shape)}, and one ...", got=f"{used} for {shape}")
    at = dots[0] if dots else len(given)
    items: list[Any] = []
    axis = 0
    for item in [*given[:at], *[slice(None)] * (len(shape) - used), *given[at + 1 :]]:
        items += _places(item, shape[axis : axis + _axes(item)]) if _is_mask(item) else [item]
        axis += _axes(item)
    return items


def _read(item: Any) -> Any:
    """Numbers as int, lists as arrays. Raises: UsageError, DTypeError for what is no index."""
    if item is None or item is Ellipsis or isinstance(item, slice):
        return item
    if isinstance(item, int | np.integer):
        if isinstance(item, bool):
            raise UsageError("True and False are no indices", fix="a mask is an array of bool")
        return int(item)
    if isinstance(item, list):
        item = np.asarray(item)
        item = item if item.size else item.astype(np.int64)
    if not _is_array(item) or (_is_mask(item) and not item.shape):
        raise UsageError("indices are ints, slices, ..., None, arrays of ints and masks", got=type(item).__name__)
    if not _is_mask(item) and item.dtype.kind not in ("i", "u", "int", "uint"):  # numpy's names and ours
        raise DTypeError("an index is made of ints or bools", got=item.dtype)
    return item.astype(np.int64) if item.dtype.kind in ("i", "u") else item


def _is_array(item: Any) -> bool:
    return hasattr(item, "shape") and hasattr(item, "dtype")


def _is_mask(item: Any) -> bool:
    return _is_array(item) and item.dtype.kind in ("b", "bool")


def _axes(item: Any) -> int:
    """How many axes of the array an item stands for."""
    return 0 if item is None or item is Ellipsis else len(item.shape) if _is_mask(item) else 1


def _places(mask: Any, shape: Shape) -> tuple[np.ndarray, ...]:
    """Where a mask is true, row by row: an index array per axis."""
    if tuple(mask.shape) != shape:
        raise ShapeError("a mask has the shape of the axes it stands for", expected=shape, got=tuple(mask.shape))
    return np.nonzero(mask.to_numpy() if isinstance(mask, NDArray) else np.asarray(mask))


def _inside(i: int, n: int, axis: int) -> int:
    if not -n <= i < n:
        raise ShapeError("index out of range", where=f"axis {axis}", expected=f"{-n}..{n - 1}", got=i)
    return i % n


def read(x: NDArray, index: Any) -> NDArray:
    """`x[index]`: a view of x, or with index arrays a new array."""
    plan = index_plan(x.shape, index)
    source = x.view(plan.view(x.layout))
    if not plan.ids:
        return source
    out = empty(plan.shape, x.dtype, x.device)
    _run("index", out, [_row_major(source), *map(_int64, plan.ids)], plan)
    return out


def write(x: NDArray, index: Any, value: Any) -> None:
    """`x[index] = value`: the value broadcast to the places and converted to the dtype of x; repeats in order.

    Raises: as `index_plan`; ShapeError for a value that does not broadcast; ReadOnlyArray. x is then as before.
    """
    plan = index_plan(x.shape, index)
    target = x.view(plan.view(x.layout))
    values = _values(value, plan.shape, x)
    x.writable()
    if not plan.ids:
        backend(x.device).copy(target, values)
        return
    inner = _row_major(target)
    _run("index_put", inner, [inner, _row_major(values), *map(_int64, plan.ids)], plan)
    if inner is not target:
        backend(x.device).copy(target, inner)


def _row_major(array: NDArray) -> NDArray:
    """The array, or a copy of one that a kernel cannot walk through row by row."""
    return array if array.contiguous and min(array.strides, default=0) >= 0 else array.copy()


def _run(kernel: str, out: NDArray, ins: Sequence[NDArray], plan: IndexPlan) -> None:
    kernels, attrs = backend(out.device), {"axis": plan.axis}
    scratch = kernels.workspace(kernel, [out.spec], [a.spec for a in ins], attrs)
    try:
        for call in kernels.bind(kernel, [out], ins, attrs, [empty(s.sizes, s.dtype, out.device) for s in scratch]):
            call()
    except IndexError as error:
        raise IndexOutOfRange("an index array leaves its axis", expected=plan.view, got=str(error)) from error


def _int64(ids: Any) -> NDArray:
    array = ids if isinstance(ids, NDArray) else from_numpy(np.asarray(ids))
    if array.dtype is int64:
        return array
    return empty(array.shape, int64, array.device).copy_from(array)


def _values(value: Any, shape: Shape, x: NDArray) -> NDArray:
    """What is written, of the shape of the places; a copy if it lies in the memory that is written."""
    array = value if isinstance(value, NDArray) else from_numpy(np.asarray(value))
    while len(array.shape) > len(shape) and array.shape[0] == 1:  # as numpy: leading axes of size 1 do not count
        array = array.view(Layout(array.shape[1:], array.strides[1:], array.offset))
    if broadcast_shapes(array.shape, shape) != shape:
        raise ShapeError("the value does not broadcast to the places", expected=shape, got=array.shape)
    if array.storage is x.storage:
        array = array.copy()
    if array.dtype is not x.dtype:
        array = empty(array.shape, x.dtype, x.device).copy_from(array)
    return array.view(lay.expand(array.layout, shape))
