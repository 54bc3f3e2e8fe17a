"""Windows that slide over the trailing axes of an array: how many there are, and what they cover. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from graphwright.errors import ShapeError

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
