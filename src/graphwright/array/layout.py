"""Layout: shape, strides and offset of a view, in elements. Pure arithmetic shared by eager views and the planner.

Invariant: a layout never touches memory; the same function answers for an array at hand and for a slot in a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from graphwright.errors import ShapeError, UsageError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where element (i, j, ...) of a view lies: offset + Σ index · stride, counted in elements."""

    shape: Shape
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def contiguous(self) -> bool:
        """True if the elements lie in row-major order without gaps."""
        return is_row_major(self.shape, self.strides)


def row_major(shape: Shape) -> tuple[int, ...]:
    """Strides of a contiguous array."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_row_major(shape: Shape, strides: tuple[int, ...]) -> bool:
    """True if strides differ from row-major only on axes of size 1, or the array is empty."""
    if 0 in shape:
        return True
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


def reshape(layout: Layout, shape: Shape) -> Layout | None:
    """The same elements under another shape, or None when only a copy can give it (numpy's no-copy rule)."""
    if is_row_major(layout.shape, layout.strides):
        return Layout(shape, row_major(shape), layout.offset)
    old = [(n, s) for n, s in zip(layout.shape, layout.strides, strict=True) if n != 1]
    strides: list[int] = []
    at, rest = len(old) - 1, 0  # `rest`: how much of the current run of mergeable old axes is still to be covered
    step = 0
    for size in reversed(shape):
        if size == 1:
            strides.append(step or 1)
            continue
        if rest == 0:
            if at < 0:
                return None
            rest, step = old[at]
            at -= 1
            while at >= 0 and old[at][1] == old[at + 1][1] * old[at + 1][0]:
                rest *= old[at][0]
                at -= 1
        if rest % size:
            return None
        strides.append(step)
        step *= size
        rest //= size
        if rest == 1:
            rest = 0
    if at >= 0 or rest:
        return None
    return Layout(shape, tuple(reversed(strides)), layout.offset)


def permute(layout: Layout, axes: tuple[int, ...]) -> Layout:
    """Axes in another order."""
    return Layout(tuple(layout.shape[a] for a in axes), tuple(layout.strides[a] for a in axes), layout.offset)


def expand(layout: Layout, shape: Shape) -> Layout:
    """Broadcast to `shape`: new and repeated axes get stride 0."""
    lead = len(shape) - len(layout.shape)
    strides = [0] * lead + [
        0 if have == 1 and want != 1 else stride
        for have, want, stride in zip(layout.shape, shape[lead:], layout.strides, strict=True)
    ]
    return Layout(shape, tuple(strides), layout.offset)


def narrow(layout: Layout, axis: int, start: int, length: int, step: int = 1) -> Layout:
    """`length` entries of one axis from `start`, `step` apart (step may be negative)."""
    shape = (*layout.shape[:axis], length, *layout.shape[axis + 1 :])
    strides = (*layout.strides[:axis], layout.strides[axis] * step, *layout.strides[axis + 1 :])
    return Layout(shape, strides, layout.offset + start * layout.strides[axis])


def squeeze(layout: Layout, axis: int | None = None) -> Layout:
    """Without an axis of size 1, or without all of them."""
    drop = [a for a, n in enumerate(layout.shape) if n == 1] if axis is None else [axis]
    keep = tuple(a for a in range(len(layout.shape)) if a not in drop)
    return permute(layout, keep)


def unsqueeze(layout: Layout, axis: int) -> Layout:
    """With a new axis of size 1 before `axis`."""
    shape, strides = layout.shape, layout.strides
    return Layout((*shape[:axis], 1, *shape[axis:]), (*strides[:axis], 0, *strides[axis:]), layout.offset)


def diagonal(layout: Layout, first: int, second: int, shift: int = 0) -> Layout:
    """The elements at (i, i + shift) of two axes, as a last axis in their place."""
    rows, columns = layout.shape[first], layout.shape[second]
    size = max(0, min(rows + min(shift, 0), columns - max(shift, 0)))
    a, b = layout.strides[first], layout.strides[second]
    rest = [i for i in range(len(layout.shape)) if i not in (first, second)]
    offset = layout.offset + (max(-shift, 0) * a + max(shift, 0) * b if size else 0)
    kept = permute(layout, tuple(rest))
    return Layout((*kept.shape, size), (*kept.strides, a + b), offset)


def split(layout: Layout, axis: int, sizes: Sequence[int]) -> list[Layout]:
    """Pieces of these sizes behind one another along an axis."""
    starts = accumulate(sizes, initial=0)
    return [narrow(layout, axis, start, size) for start, size in zip(starts, sizes, strict=False)]


def picked(layout: Layout, index: Any) -> Layout:
    """What an index of ints, slices of any step, `...` and None shows. Raises: ShapeError, UsageError."""
    given = index if isinstance(index, tuple) else (index,)
    used = sum(1 for i in given if i is not None and i is not Ellipsis)
    dots = [at for at, i in enumerate(given) if i is Ellipsis]
    if len(dots) > 1 or used > len(layout.shape):
        raise ShapeError("too many indices", expected=f"at most {len(layout.shape)}", got=index)
    at = dots[0] if dots else len(given)
    full = (slice(None),) * (len(layout.shape) - used)
    axis = 0
    for i in (*given[:at], *full, *given[at + 1 :]):
        if i is None:
            layout = unsqueeze(layout, axis)
            axis += 1
        elif isinstance(i, slice):
            start, stop, step = i.indices(layout.shape[axis])
            size = len(range(start, stop, step))
            layout = narrow(layout, axis, start if size else 0, size, step)
            axis += 1
        elif isinstance(i, int | np.integer) and not isinstance(i, bool):
            size = layout.shape[axis]
            if not -size <= i < size:
                raise ShapeError("index out of range", where=f"axis {axis}", expected=f"-{size}..{size - 1}", got=i)
            layout = squeeze(narrow(layout, axis, int(i) % size, 1), axis)
        else:
            raise UsageError("a view is indexed by ints, slices, ... and None", got=type(i).__name__)
    return layout


def span(layout: Layout) -> tuple[int, int]:
    """First element and one past the last element that the layout reaches; (offset, offset) if it is empty."""
    if prod(layout.shape) == 0:
        return layout.offset, layout.offset
    reach = [(n - 1) * s for n, s in zip(layout.shape, layout.strides, strict=True)]
    return layout.offset + sum(r for r in reach if r < 0), layout.offset + sum(r for r in reach if r > 0) + 1
