"""Layout: shape, strides and offset of a view, in elements, and functions that compute the layouts of views.

Invariant: these functions access no memory. Arrays and the slots of a plan share them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

from graphwright.array.sizes import Size, total
from graphwright.errors import ShapeError

Shape = Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a view: element (i, j, ...) is element offset + i·strides[0] + j·strides[1] + ... of the buffer."""

    shape: Shape
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def contiguous(self) -> bool:
        """True if the elements are in row-major order without gaps."""
        return is_row_major(self.shape, self.strides)


def row_major(shape: Shape) -> tuple[int, ...]:
    """Return the strides of a contiguous array."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_row_major(shape: Shape, strides: tuple[int, ...]) -> bool:
    """Return True if the array is empty, or its strides differ from row-major ones only on axes of size 1."""
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
    """Return the layout of the same elements in a new shape, or None if that needs a copy (numpy's no-copy rule)."""
    if is_row_major(layout.shape, layout.strides):
        return Layout(shape, row_major(shape), layout.offset)
    old = [(n, s) for n, s in zip(layout.shape, layout.strides, strict=True) if n != 1]
    strides: list[int] = []
    at, rest = len(old) - 1, 0  # `rest`: size of the current run of mergeable old axes not yet covered
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
    """Return the layout with its axes permuted."""
    return Layout(tuple(layout.shape[a] for a in axes), tuple(layout.strides[a] for a in axes), layout.offset)


def expand(layout: Layout, shape: Shape) -> Layout:
    """Broadcast to `shape`; new and repeated axes get stride 0."""
    lead = len(shape) - len(layout.shape)
    strides = [0] * lead + [
        0 if have == 1 and want != 1 else stride
        for have, want, stride in zip(layout.shape, shape[lead:], layout.strides, strict=True)
    ]
    return Layout(shape, tuple(strides), layout.offset)


def narrow(layout: Layout, axis: int, start: int, length: int, step: int = 1) -> Layout:
    """Select `length` entries of one axis from `start` with `step`, which may be negative."""
    shape = (*layout.shape[:axis], length, *layout.shape[axis + 1 :])
    strides = (*layout.strides[:axis], layout.strides[axis] * step, *layout.strides[axis + 1 :])
    return Layout(shape, strides, layout.offset + start * layout.strides[axis])


def squeeze(layout: Layout, axis: int | None = None) -> Layout:
    """Remove one axis of size 1, or by default every one."""
    drop = [a for a, n in enumerate(layout.shape) if n == 1] if axis is None else [axis]
    keep = tuple(a for a in range(len(layout.shape)) if a not in drop)
    return permute(layout, keep)


def unsqueeze(layout: Layout, axis: int) -> Layout:
    """Insert an axis of size 1 before `axis`."""
    shape, strides = layout.shape, layout.strides
    return Layout((*shape[:axis], 1, *shape[axis:]), (*strides[:axis], 0, *strides[axis:]), layout.offset)


def diagonal_size(rows: int, columns: int, offset: int) -> int:
    """Return the length of the diagonal (i, i + offset) of a matrix."""
    return max(min(rows + min(offset, 0), columns - max(offset, 0)), 0)


def diagonal_entries(columns: int, offset: int) -> tuple[int, int]:
    """Return (first, step) of the flat indices of the diagonal (i, i + offset) in a row-major matrix."""
    return (offset if offset >= 0 else -offset * columns), columns + 1


def diagonal(layout: Layout, a: int, b: int, offset: int) -> Layout:
    """Replace axes a and b by one last axis, which runs along the diagonal (i, i + offset)."""
    rest = [axis for axis in range(len(layout.shape)) if axis not in (a, b)]
    size = diagonal_size(layout.shape[a], layout.shape[b], offset)
    start = max(-offset, 0) * layout.strides[a] + max(offset, 0) * layout.strides[b]
    shape = (*(layout.shape[axis] for axis in rest), size)
    strides = (*(layout.strides[axis] for axis in rest), layout.strides[a] + layout.strides[b])
    return Layout(shape, strides, layout.offset + (start if size else 0))


def split(layout: Layout, axis: int, sizes: Sequence[int]) -> list[Layout]:
    """Split an axis into consecutive pieces of these sizes."""
    starts = accumulate(sizes, initial=0)
    return [narrow(layout, axis, start, size) for start, size in zip(starts, sizes, strict=False)]


def span(layout: Layout) -> tuple[int, int]:
    """Return the range (first, end) of buffer elements that a layout reaches; (offset, offset) if it is empty."""
    if prod(layout.shape) == 0:
        return layout.offset, layout.offset
    reach = [(n - 1) * s for n, s in zip(layout.shape, layout.strides, strict=True)]
    return layout.offset + sum(r for r in reach if r < 0), layout.offset + sum(r for r in reach if r > 0) + 1


def per_axis(value: int | Sequence[int], rank: int, name: str) -> Sizes:
    """Return one value per axis; an int is repeated. Raises: ShapeError naming `name` if `value` has another length."""
    sizes = (value,) * rank if isinstance(value, int) else tuple(value)
    if len(sizes) != rank:
        raise ShapeError("wrong number of values", where=name, expected=f"an int, or one per axis ({rank})", got=value)
    return sizes


def trailing(shape: Sequence[Any], rank: int) -> tuple[Any, ...]:
    """Return the last `rank` sizes of a shape."""
    return tuple(shape[len(shape) - rank :])


@dataclass(frozen=True, slots=True)
class Window:
    """A sliding window: `kernel` entries `dilation` apart, moved by `stride`, `padding` at both ends of each axis."""

    kernel: Sizes
    stride: Sizes
    padding: Sizes
    dilation: Sizes

    @staticmethod
    def of(kernel: Sequence[int], attrs: Mapping[str, Any]) -> Window:
        """Return the window of an op with attributes `attrs`; stride None means the kernel size. Raises: ShapeError."""
        kernel, rank = tuple(kernel), len(kernel)
        stride, padding, dilation = (
            per_axis(kernel if attrs.get(name, default) is None else attrs.get(name, default), rank, name)
            for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
        )
        if not rank or min(kernel + stride + dilation) < 1 or min(padding) < 0:
            got = f"kernel {kernel}, stride {stride}, padding {padding}, dilation {dilation}"
            limits = "at least one axis; kernel, stride and dilation at least 1, padding at least 0"
            raise ShapeError("invalid window", expected=limits, got=got)
        return Window(kernel, stride, padding, dilation)

    @property
    def entries(self) -> int:
        """Number of entries in one window."""
        return prod(self.kernel)

    @property
    def extent(self) -> Sizes:
        """Distance from a window's first entry to one past its last, along each axis."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True))

    @property
    def plain(self) -> bool:
        """True if there is one window of one entry at each position: kernel 1, stride 1, no padding."""
        return self.entries == 1 and set(self.stride) == {1} and not any(self.padding)

    def padded(self, sizes: Sequence[Any]) -> tuple[Any, ...]:
        """Return the sizes including the padding at both ends of each axis."""
        return tuple([total((n, 2 * p)) for n, p in zip(sizes, self.padding, strict=True)])

    def counts(self, sizes: Sequence[Any]) -> tuple[Any, ...]:
        """Return the number of windows along each axis. Raises: ShapeError if no window fits, as far as known."""
        if len(sizes) != len(self.kernel):
            raise ShapeError("wrong number of spatial axes", expected=f"{len(self.kernel)} sizes", got=sizes)
        padded = self.padded(tuple(sizes))
        room = [total((n, -e)) for n, e in zip(padded, self.extent, strict=True)]
        if any(isinstance(r, int) and r < 0 for r in room):
            most = f"at most {padded}"
            raise ShapeError("the window is larger than the padded axes", expected=most, got=self.extent)
        pairs = zip(room, self.stride, strict=True)
        return tuple([r // s + 1 if isinstance(r, int) else (Size.of(r) // s + 1).dim for r, s in pairs])

    def spread(self, counts: Sequence[Any], rest: Sizes) -> tuple[Any, ...]:
        """Return the output sizes of a transposed convolution. Its input has one entry per window: sizes `counts`.

        `rest` is its `output_padding`. Raises: ShapeError, also if `rest` is not less than the stride.
        """
        if len(counts) != len(self.kernel) or any(isinstance(n, int) and n < 1 for n in counts):
            expected = f"{len(self.kernel)} ints of at least 1"
            raise ShapeError("invalid spatial sizes of a transposed convolution", expected=expected, got=counts)
        if any(not 0 <= r < s for r, s in zip(rest, self.stride, strict=True)):
            raise ShapeError("invalid output_padding", expected=f"0 <= output_padding < stride {self.stride}", got=rest)
        sizes = tuple(
            ((Size.of(n) - 1) * s + e - 2 * p + r).dim
            for n, s, e, p, r in zip(counts, self.stride, self.extent, self.padding, rest, strict=True)
        )
        if any(isinstance(n, int) and n < 1 for n in sizes):
            raise ShapeError("the padding leaves no output", expected="output sizes of at least 1", got=sizes)
        return sizes

    def rest(self, sizes: Sizes) -> Sizes:
        """Return the number of entries after the last window of each axis: `output_padding` of the transposed op."""
        room = zip(self.padded(sizes), self.extent, self.stride, strict=True)
        return tuple((n - e) % s for n, e, s in room)
