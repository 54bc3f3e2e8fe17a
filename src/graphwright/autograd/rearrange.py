"""The methods of a tensor that move, repeat and pick entries, each one call of an op; names and orders are torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from graphwright.array.layout import Shape
from graphwright.autograd import functions
from graphwright.autograd.operators import Operators
from graphwright.errors import ShapeError
from graphwright.ops import call
from graphwright.ops.axes import axes_of, axis_of

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor


class Rearranging(Operators):
    """What a tensor does with the places of its entries."""

    __slots__ = ()
    __hash__ = Operators.__hash__

    # -- views -------------------------------------------------------------------------------------------------------
    def squeeze(self, axis: int | Shape | None = None) -> Tensor:
        """Without axes of size 1: all of them, or those named (of which longer ones stay, as in torch)."""
        named = axes_of(axis, self.ndim)
        axes = tuple(a for a in named if self.shape[a] == 1)
        return call("squeeze", self, axes=axes) if axes else cast("Tensor", self)

    def unsqueeze(self, axis: int) -> Tensor:
        """With a new axis of size 1, at this place of the result."""
        return call("unsqueeze", self, axes=(axis,))

    def flatten(self, start: int = 0, end: int = -1) -> Tensor:
        """Axes start..end, both included, joined into one; a scalar becomes a vector of one."""
        return call("flatten", self, start=start, end=end) if self.ndim else self.unsqueeze(0)

    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
        """Entries (i, i + offset) of two axes, as a last axis instead of them; a view."""
        return call("diagonal", self, offset=offset, axes=(axis1, axis2))

    def narrow(self, axis: int, start: int, length: int) -> Tensor:
        """`length` entries of an axis from `start`; a view. Raises: ShapeError past the end."""
        return call("slice", self, axis=axis, start=start, size=length)

    def split(self, size: int | Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
        """Pieces along an axis: of `size` each, the last one the rest, or of the sizes given; views.

        Raises: ShapeError unless given sizes add up to the axis.
        """
        total = self.shape[axis_of(axis, self.ndim)]
        if isinstance(size, int):
            if size < 1:
                raise ShapeError("pieces have at least one entry", expected="at least 1", got=size)
            sizes = [min(size, total - at) for at in range(0, total, size)] or [0]
        else:
            sizes = list(size)
        if sum(sizes) != total or min(sizes, default=0) < 0:
            raise ShapeError("the sizes of the pieces make up the axis", expected=total, got=tuple(sizes))
        return tuple(self.narrow(axis, sum(sizes[:i]), n) for i, n in enumerate(sizes))

    def chunk(self, count: int, axis: int = 0) -> tuple[Tensor, ...]:
        """At most `count` pieces of equal size along an axis, the last one smaller where it does not divide; views."""
        if count < 1:
            raise ShapeError("at least one chunk", expected="at least 1", got=count)
        return self.split(max(-(-self.shape[axis_of(axis, self.ndim)] // count), 1), axis)

    # -- moved and repeated ------------------------------------------------------------------------------------------
    def flip(self, *axes: int) -> Tensor:
        """Axes read from their end."""
        return call("flip", self, axes=_ints(axes))

    def roll(self, shifts: int | Shape, axes: int | Shape | None = None) -> Tensor:
        """Entries moved along axes, those that leave at one end entering at the other; of the flat array without."""
        if axes is None:
            return self.flatten().roll(shifts, 0).reshape(self.shape)
        return call("roll", self, shifts=_tuple(shifts), axes=_tuple(axes))

    def tile(self, *repeats: int) -> Tensor:
        """The whole, repeated along each axis: a b -> a b a b; missing counts are 1, as in torch."""
        counts = _ints(repeats)
        return call("tile", self, repeats=(*(1,) * (self.ndim - len(counts)), *counts))

    def repeat(self, *repeats: int) -> Tensor:
        """As `tile`, with a count for each axis at least. Raises: ShapeError for fewer."""
        return call("tile", self, repeats=_ints(repeats))

    def repeat_interleave(self, repeats: int | Tensor, axis: int | None = None, *, total: int | None = None) -> Tensor:
        """Each entry of an axis repeated in place: a b -> a a b b: see `functions.repeat_interleave`."""
        return functions.repeat_interleave(self, repeats, axis, total=total)

    def tril(self, diagonal: int = 0) -> Tensor:
        """The lower triangle of the last two axes, zeros above."""
        return call("tril", self, diagonal=diagonal)

    def triu(self, diagonal: int = 0) -> Tensor:
        """The upper triangle of the last two axes, zeros below."""
        return call("triu", self, diagonal=diagonal)

    # -- picked and written by place ---------------------------------------------------------------------------------
    def gather(self, axis: int, index: Tensor) -> Tensor:
        """Entries by place along an axis, an index for each: see `functions.gather`."""
        return functions.gather(cast("Tensor", self), axis, index)

    def scatter(self, axis: int, index: Tensor, src: Any) -> Tensor:
        """With values written at places along an axis: see `functions.scatter`."""
        return functions.scatter(cast("Tensor", self), axis, index, src)

    def scatter_add(self, axis: int, index: Tensor, src: Tensor) -> Tensor:
        """With values added at places along an axis: see `functions.scatter_add`."""
        return functions.scatter_add(cast("Tensor", self), axis, index, src)

    def index_select(self, axis: int, index: Tensor) -> Tensor:
        """Entries of an axis by a vector of places; a negative one counts from the end."""
        return functions.index_select(cast("Tensor", self), axis, index)

    def index_add(self, axis: int, index: Tensor, src: Tensor) -> Tensor:
        """With slices added at places of an axis, repeats in order."""
        return functions.index_add(cast("Tensor", self), axis, index, src)

    def masked_fill(self, mask: Tensor, value: Any) -> Tensor:
        """`value` where the bool mask, broadcast, holds; the gradient flows where it does not."""
        return call("where", mask, functions.like(value, cast("Tensor", self)), self)

    def nonzero(self, *, size: int | None = None, fill: int = -1) -> Tensor:
        """Places [count, ndim] int64 of the entries that are not 0, row by row: see `functions.nonzero`."""
        return functions.nonzero(self, size=size, fill=fill)


def _tuple(value: int | Sequence[int]) -> Shape:
    return (value,) if isinstance(value, int) else tuple(value)


def _ints(values: tuple[Any, ...]) -> Shape:
    """Numbers given one by one, or as one tuple."""
    return tuple(values[0]) if len(values) == 1 and not isinstance(values[0], int) else values
