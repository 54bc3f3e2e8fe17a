"""Layout: shape, strides and offset of a view, in elements. Pure arithmetic shared by eager views and the planner.

Invariant: a layout never touches memory; the same function answers for an array at hand and for a slot in a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

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


def diagonal_size(rows: int, columns: int, offset: int) -> int:
    """Entries (i, i + offset) of a matrix."""
    return max(min(rows + min(offset, 0), columns - max(offset, 0)), 0)


def diagonal_places(columns: int, offset: int) -> tuple[int, int]:
    """First entry and step of a diagonal among the entries of a matrix, row by row."""
    return (offset if offset >= 0 else -offset * columns), columns + 1


def diagonal(layout: Layout, a: int, b: int, offset: int) -> Layout:
    """Entries (i, i + offset) of axes a and b, as a last axis instead of them."""
    rest = [axis for axis in range(len(layout.shape)) if axis not in (a, b)]
    size = diagonal_size(layout.shape[a], layout.shape[b], offset)
    start = max(-offset, 0) * layout.strides[a] + max(offset, 0) * layout.strides[b]
    return Layout(
        (*(layout.shape[axis] for axis in rest), size),
        (*(layout.strides[axis] for axis in rest), layout.strides[a] + layout.strides[b]),
        layout.offset + (start if size else 0),
    )


def split(layout: Layout, axis: int, sizes: Sequence[int]) -> list[Layout]:
    """Pieces of these sizes behind one another along an axis."""
    starts = accumulate(sizes, initial=0)
    return [narrow(layout, axis, start, size) for start, size in zip(starts, sizes, strict=False)]


def span(layout: Layout) -> tuple[int, int]:
    """First element and one past the last element that the layout reaches; (offset, offset) if it is empty."""
    if prod(layout.shape) == 0:
        return layout.offset, layout.offset
    reach = [(n - 1) * s for n, s in zip(layout.shape, layout.strides, strict=True)]
    return layout.offset + sum(r for r in reach if r < 0), layout.offset + sum(r for r in reach if r > 0) + 1
