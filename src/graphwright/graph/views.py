"""Nodes and edges as tables: iterate over handles, read and write columns of the live rows, compare to get masks.

`g.edges()` gives handles, `g.edges["w"]` the live rows of a column in slot order, `g.edges["w"] < t` a `Mask` for bulk
edits. Invariant: a mask holds handles, so using it after one of its rows was deleted raises `StaleHandle`.
"""

# pyright: reportPrivateUsage=false
# The files of this folder share private attributes of a graph.
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from graphwright.graph.slots import Array, SlotTable, is_array

from ..errors import UsageError
from .handles import Handle, HandleArray, Ids

if TYPE_CHECKING:
    from graphwright.graph.graph import Graph

A = TypeVar("A", bound=HandleArray[Any])


class Mask:
    """One flag for each row that was live when the mask was made; `& | ^ ~` combine masks of the same rows."""

    __slots__ = ("flags", "rows")

    def __init__(self, rows: Ids, flags: Array) -> None:
        self.rows, self.flags = rows, flags

    @property
    def ids(self) -> Ids:
        """Packed handles of the rows that are set, in slot order."""
        return self.rows[self.flags]

    @property
    def count(self) -> int:
        """Number of rows that are set."""
        return int(np.count_nonzero(self.flags))

    def _with(self, other: Mask | Array, combine: Callable[[Array, Array], Array]) -> Mask:
        if isinstance(other, Mask) and not np.array_equal(self.rows, other.rows):
            raise UsageError("the masks are over different rows", expected="two masks of one table at the same version",
                             fix="compare the columns again, to make new masks")  # fmt: skip
        flags = np.asarray(other)
        if flags.shape != self.flags.shape or flags.dtype != bool:
            expected, got = f"bool of shape {self.flags.shape}", f"{flags.dtype} of shape {flags.shape}"
            raise UsageError("cannot combine a mask with this array", expected=expected, got=got)
        return Mask(self.rows, combine(self.flags, flags))

    def __and__(self, other: Mask | Array) -> Mask:
        return self._with(other, np.logical_and)

    def __or__(self, other: Mask | Array) -> Mask:
        return self._with(other, np.logical_or)

    def __xor__(self, other: Mask | Array) -> Mask:
        return self._with(other, np.logical_xor)

    def __invert__(self) -> Mask:
        return Mask(self.rows, ~self.flags)

    def __len__(self) -> int:
        return len(self.flags)

    def __bool__(self) -> bool:
        raise UsageError("the truth value of a mask is ambiguous", fix="mask.count, or np.asarray(mask).any()")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.flags, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        return f"Mask({self.count} of {len(self)})"


class ColumnView(NDArrayOperatorsMixin):
    """The live rows of one column in slot order, read on access.

    It behaves like an array of these rows; comparisons give a `Mask`. `view[...]` reads and writes by a handle, an
    array of handles, a mask, or `:` for all rows. Writing is an edit: it takes the lock and increments the version.
    Because `==` gives a mask, a view is not hashable.
    """

    __slots__ = ("_graph", "_table", "name")

    def __init__(self, graph: Graph, table: SlotTable, name: str) -> None:
        table.column(name)
        self._graph, self._table, self.name = graph, table, name

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the column."""
        return self._table.column(self.name).dtype

    def __len__(self) -> int:
        return self._table.live

    def __iter__(self) -> Iterator[Any]:
        return iter(np.asarray(self).tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        rows = self._table.column(self.name).take(self._table.live_slots())
        return rows if dtype is None else rows.astype(dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        views = [x for x in inputs if isinstance(x, ColumnView)]
        result = getattr(ufunc, method)(*(np.asarray(x) if isinstance(x, ColumnView) else x for x in inputs), **kwargs)
        if method == "__call__" and views and is_array(result) and ufunc in _COMPARISONS:
            table = views[0]._table
            return Mask(table.ids[table.live_slots()], result.astype(bool))
        return result

    def __getitem__(self, key: Any) -> Any:
        column = self._table.column(self.name)
        if isinstance(key, Handle):
            return column.cells[self._table.slot(key)]
        return column.take(self._slots(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        with self._graph.writing():
            column = self._table.column(self.name)
            if isinstance(key, Handle):
                self._table.update(self._table.slot(key), {self.name: value})
            else:
                slots = self._slots(key)
                column.put(slots, column.cast(value, len(slots)))
            self._graph.version += 1

    def _slots(self, key: Any) -> Array:
        if key is Ellipsis or (isinstance(key, slice) and key == slice(None)):
            return self._table.live_slots()
        if isinstance(key, slice):
            raise UsageError("a column cannot be sliced: its rows are addressed by handle", fix="np.asarray(view)[a:b]")
        return self._table.slots_of(selected(self._table, key), distinct=False)

    def __repr__(self) -> str:
        return f"ColumnView({self.name!r}, {self.dtype}, {len(self)} live rows)"


def packed(handles: Any) -> Ids:
    """Return one handle, a sequence or an array of handles as int64. Raises: UsageError."""
    if not isinstance(handles, np.ndarray | HandleArray | int | np.integer):
        handles = list(handles)
    ids = np.asarray(handles)
    if (ids.size and ids.dtype.kind not in "iu") or ids.ndim > 1:
        expected, got = "a handle, or a list or 1-d array of handles", f"{ids.dtype} of shape {ids.shape}"
        raise UsageError("not an array of handles", expected=expected, got=got)
    return ids.astype(np.int64, copy=False)


def selected(table: SlotTable, which: Any) -> Ids:
    """Return the packed handles that `which` selects: handles, a `Mask`, or a bool array over the live rows."""
    if isinstance(which, Mask):
        return which.ids
    if is_array(which) and which.dtype == bool:
        if which.shape != (table.live,):
            raise UsageError("the mask does not have one flag per live row", expected=f"shape ({table.live},)",
                             got=f"shape {which.shape}")  # fmt: skip
        return table.ids[table.live_slots()[which]]
    try:
        return np.atleast_1d(packed(which))
    except TypeError:
        raise UsageError("not a selection of rows", expected="handles, a mask, or a bool per live row",
                         got=which) from None  # fmt: skip


_COMPARISONS = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}


class TableView(Generic[A]):
    """`g.nodes` or `g.edges`: the elements of one kind as a table."""

    __slots__ = ("_graph", "_handles", "_table")

    def __init__(self, graph: Graph, table: SlotTable, handles: type[A]) -> None:
        self._graph, self._table, self._handles = graph, table, handles

    def __call__(self) -> A:
        """Return a copy of the live handles in slot order, so that editing while iterating is safe."""
        return self._handles(self._table.ids[self._table.live_slots()])

    def __getitem__(self, name: str) -> ColumnView:
        """Return a view of the live rows of the column `name`."""
        return ColumnView(self._graph, self._table, name)

    def __setitem__(self, name: str, value: Any) -> None:
        self[name][:] = value

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self._table.columns)

    def add_column(self, name: str, dtype: Any, default: Any = None) -> None:
        """Declare another column; existing rows get the default. `dtype` may be a ColumnSpec.

        Raises: UsageError if the name is taken or invalid; DTypeError for an unsupported dtype.
        """
        with self._graph.writing():
            self._table.add_column(name, dtype if default is None else (dtype, default))
            self._graph.version += 1

    def __len__(self) -> int:
        return self._table.live

    def __iter__(self) -> Iterator[Any]:
        return iter(self())

    def __contains__(self, handle: object) -> bool:
        return isinstance(handle, int) and self._table.owns(handle)
