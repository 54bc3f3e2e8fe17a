"""Layout: shape, strides and offset of a view, in elements. Pure arithmetic shared by eager views and the planner.

Invariant: a layout never touches memory; the same function answers for an array at hand and for a slot in a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

from graphwright.errors import ShapeError

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


Sizes = tuple[int, ...]


def per_axis(value: int | Sequence[int], rank: int, name: str) -> Sizes:
    """One number for all axes, or one each, as a tuple. Raises: ShapeError for another count."""
    sizes = (value,) * rank if isinstance(value, int) else tuple(value)
    if len(sizes) != rank:
        raise ShapeError("one number, or one per spatial axis", where=name, expected=rank, got=value)
    return sizes


def trailing(shape: Sequence[Any], rank: int) -> tuple[Any, ...]:
    """The last `rank` sizes of a shape."""
    return tuple(shape[len(shape) - rank :])


@dataclass(frozen=True, slots=True)
class Window:
    """A window of `kernel` entries, `dilation` apart, moved by `stride` over axes padded by `padding` on both sides."""

    kernel: Sizes
    stride: Sizes
    padding: Sizes
    dilation: Sizes

    @staticmethod
    def of(kernel: Sequence[int], attrs: Mapping[str, Any]) -> Window:
        """From the attributes of an op: `stride` None is the kernel's size. Raises: ShapeError for sizes below 1."""
        kernel, rank = tuple(kernel), len(kernel)
        stride, padding, dilation = (
            per_axis(kernel if attrs.get(name, default) is None else attrs.get(name, default), rank, name)
            for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
        )
        if not rank or min(kernel + stride + dilation) < 1 or min(padding) < 0:
            raise ShapeError(
                "no such window",
                expected="kernel, stride and dilation at least 1, padding at least 0",
                got=f"kernel {kernel}, stride {stride}, padding {padding}, dilation {dilation}",
            )
        return Window(kernel, stride, padding, dilation)

    @property
    def entries(self) -> int:
        """Entries of one window."""
        return prod(self.kernel)

    @property
    def extent(self) -> Sizes:
        """From a window's first entry to one past its last."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True))

    @property
    def plain(self) -> bool:
        """True for windows of one entry, one at each place."""
        return self.entries == 1 and set(self.stride) == {1} and not any(self.padding)

    def padded(self, sizes: Sizes) -> Sizes:
        """Sizes with the padding of both sides."""
        return tuple(n + 2 * p for n, p in zip(sizes, self.padding, strict=True))

    def places(self, sizes: Sequence[Any]) -> Sizes:
        """How many windows fit along each axis. Raises: ShapeError if none does, or a size is a name."""
        if len(sizes) != len(self.kernel) or any(isinstance(n, str) for n in sizes):
            raise ShapeError("known sizes of the spatial axes", expected=f"{len(self.kernel)} numbers", got=sizes)
        room = [n - e for n, e in zip(self.padded(tuple(sizes)), self.extent, strict=True)]
        if min(room) < 0:
            raise ShapeError("the window is larger than the padded axes", expected=self.padded(tuple(sizes)), got=self)
        return tuple(r // s + 1 for r, s in zip(room, self.stride, strict=True))

    def spread(self, places: Sequence[Any], rest: Sizes) -> Sizes:
        """Sizes that have so many windows and, behind the last one, `rest` entries: fewer than the stride.

        Raises: ShapeError.
        """
        if len(places) != len(self.kernel) or any(isinstance(n, str) for n in places) or min(places) < 1:
            raise ShapeError(
                "known numbers of places", expected=f"{len(self.kernel)} numbers of at least 1", got=places
            )
        if any(not 0 <= r < s for r, s in zip(rest, self.stride, strict=True)):
            raise ShapeError("output_padding is at least 0 and below the stride", expected=self.stride, got=rest)
        sizes = tuple(
            (n - 1) * s + e - 2 * p + r
            for n, s, e, p, r in zip(places, self.stride, self.extent, self.padding, rest, strict=True)
        )
        if min(sizes) < 1:
            raise ShapeError("nothing is left between the padding", expected="sizes of at least 1", got=sizes)
        return sizes

    def rest(self, sizes: Sizes) -> Sizes:
        """Entries behind the last window along each axis, which a transpose has to be told."""
        room = zip(self.padded(sizes), self.extent, self.stride, strict=True)
        return tuple((n - e) % s for n, e, s in room)
