"""Handles of nodes and edges: an index, a generation and a kind, packed into one positive 63-bit integer.

A handle is an `int`, so it hashes and compares as fast as one and is stored in int64 arrays directly. The kind bit
makes a `NodeId` never equal to an `EdgeId`. Invariant: a graph issues no handle twice, so a handle names one element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Generic, Self, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

INDEX_BITS = 31
INDEX = (1 << INDEX_BITS) - 1
"""Mask of the index; also the largest generation. The index `INDEX` itself is never issued."""
EDGE_BIT = 1 << 62

Ids = npt.NDArray[np.int64]


class Handle(int):
    """A slot (table index) and a generation, packed into an integer; base of `NodeId` and `EdgeId`.

    Args:
        index: slot, 0 <= index < 2^31 - 1.
        generation: 1 <= generation < 2^31.
    """

    __slots__ = ()
    kind_bit: ClassVar[int] = 0

    def __new__(cls, index: int, generation: int) -> Self:  # noqa: D102  # documented by the class
        if not (0 <= index < INDEX and 1 <= generation <= INDEX):
            raise ValueError(f"{cls.__name__}({index}, {generation}): needs 0 <= index < 2^31-1, 0 < generation < 2^31")
        return int.__new__(cls, cls.kind_bit | generation << INDEX_BITS | index)

    @classmethod
    def from_int(cls, packed: int) -> Self:
        """Return the handle with this packed integer. Raises ValueError if it is not a handle of this class."""
        packed = int(packed)
        if packed & EDGE_BIT != cls.kind_bit:
            raise ValueError(f"{packed} is not a packed {cls.__name__}")
        return cls(packed & INDEX, (packed & ~EDGE_BIT) >> INDEX_BITS)

    @property
    def index(self) -> int:
        """The slot: the index of the node or edge in the graph's table."""
        return self & INDEX

    @property
    def generation(self) -> int:
        """The number of handles that the slot has issued, up to and including this one."""
        return (self >> INDEX_BITS) & INDEX

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.index}, {self.generation})"

    def __getnewargs__(self) -> tuple[int, int]:  # pyright: ignore[reportIncompatibleMethodOverride]  # copy() and deepcopy() rebuild from these
        return self.index, self.generation


class NodeId(Handle):
    """Handle of a node."""

    __slots__ = ()


class EdgeId(Handle):
    """Handle of an edge."""

    __slots__ = ()
    kind_bit: ClassVar[int] = EDGE_BIT


H = TypeVar("H", bound=Handle)

as_node = cast("Callable[[int], NodeId]", partial(int.__new__, NodeId))
"""Convert a packed integer to a NodeId without a check; only for values of a graph's own tables."""
as_edge = cast("Callable[[int], EdgeId]", partial(int.__new__, EdgeId))


class HandleArray(Generic[H]):
    """A read-only int64 array of handles; indexing by an int and iteration give handles, a slice gives an array.

    `np.asarray` gives the packed integers without copying them. Arrays compare by value and are not hashable.
    """

    __slots__ = ("ids",)
    of: ClassVar[Callable[[int], Any]]

    def __init__(self, ids: Iterable[int] | npt.NDArray[Any]) -> None:
        packed = np.asarray(ids if isinstance(ids, np.ndarray | HandleArray) else list(ids), dtype=np.int64)
        self.ids: Ids = packed.view()
        self.ids.flags.writeable = False

    @property
    def index(self) -> Ids:
        """The slot of each handle."""
        return self.ids & INDEX

    @property
    def generation(self) -> Ids:
        """The generation of each handle."""
        return (self.ids >> INDEX_BITS) & INDEX

    def tolist(self) -> list[H]:
        """Return the handles as a list."""
        return list(self)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[H]:
        return map(type(self).of, self.ids.tolist())

    @overload
    def __getitem__(self, key: int) -> H: ...
    @overload
    def __getitem__(self, key: slice | Sequence[int] | npt.NDArray[Any]) -> Self: ...
    def __getitem__(self, key: int | slice | Sequence[int] | npt.NDArray[Any]) -> H | Self:
        picked = self.ids[key]
        return type(self)(picked) if picked.ndim else type(self).of(int(picked))

    def __contains__(self, handle: object) -> bool:
        return isinstance(handle, int) and bool((self.ids == handle).any())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HandleArray):
            return NotImplemented
        array = cast("HandleArray[Any]", other)
        return type(self) is type(array) and np.array_equal(self.ids, array.ids)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.ids, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:6])) + (", ..." if len(self) > 6 else "")
        return f"{type(self).__name__}([{shown}], len={len(self)})"


class NodeArray(HandleArray[NodeId]):
    """A `HandleArray` of nodes: its elements are `NodeId`s."""

    __slots__ = ()
    of = staticmethod(as_node)


class EdgeArray(HandleArray[EdgeId]):
    """A `HandleArray` of edges: its elements are `EdgeId`s."""

    __slots__ = ()
    of = staticmethod(as_edge)
