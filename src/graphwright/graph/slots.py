"""Slot tables: occupied indices, their generations and their columns.

`ids[i]` is the packed handle of the element in slot i, or -1; a handle is alive iff `ids[handle.index] == handle`,
one comparison that checks kind, generation and liveness. `high[i]` is the next generation to issue. Invariants: `high`
never decreases, not even on undo, so no handle is issued twice; the free list is LIFO, so undo finds its slot on top; a
slot whose `high` reaches `max_generation` is retired: it is never issued again, but undo can revive it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import numpy as np
import numpy.typing as npt

from ..errors import DTypeError, UsageError
from .errors import CapacityError, NotUndoable, StaleHandle
from .handles import EDGE_BIT, INDEX, INDEX_BITS, EdgeId, Ids, NodeId

DEAD = -1
MAX_SLOTS = INDEX
RESERVED = {"self", "src", "dst"}  # parameters of add_edge


class SlotTable:
    """The slots, free list and columns of all nodes, or of all edges; methods `*_many` use numpy."""

    def __init__(
        self, kind: type[NodeId] | type[EdgeId], columns: Mapping[str, Any], max_generation: int,
        counter: CellCounter | None,
    ) -> None:  # fmt: skip
        if not 2 <= max_generation <= INDEX:
            raise UsageError("max_generation is out of range", expected="2 to 2^31 - 1", got=max_generation)
        self.kind, self.max_generation, self._counter = kind, max_generation, counter
        self.kind_bit = kind.kind_bit
        self.size = 0  # slots ever used
        self.live = 0
        self.free_top = 0
        self.capacity = 0
        self._ids = Column("ids", (np.int64, DEAD), counter)
        self._high = Column("high", (np.int32, 1), counter)
        self._free = np.empty(0, np.int32)
        self._inner = [self._ids, self._high]
        self.columns: dict[str, Column] = {}
        self.on_grow: list[Callable[[], None]] = []
        self.describe: Callable[[Any], tuple[str | None, str | None]] | None = None
        self._bind()
        for name, declared in columns.items():
            self.add_column(name, declared)

    # -- columns ----------------------------------------------------------------------------------------------------
    def add_column(self, name: str, declared: Any) -> None:
        """Declare a column; existing rows get its default. Raises: UsageError if the name is taken or invalid."""
        if not name.isidentifier() or name in RESERVED:
            expected = f"an identifier other than {', '.join(sorted(RESERVED))}"
            raise UsageError("invalid column name", got=name, expected=expected)
        if name in self.columns:
            raise UsageError("a column of this name exists already", got=name)
        column = Column(name, declared, self._counter)
        column.grow(self.capacity)
        self.columns[name] = column
        self._bind()

    def attach(self, name: str, default: int) -> Column:
        """Add an internal int32 column that grows with the others and is hidden from users."""
        column = Column(name, (np.int32, default), self._counter)
        column.grow(self.capacity)
        self._inner.append(column)
        return column

    def column(self, name: str) -> Column:
        """Return the column called `name`. Raises: UsageError that lists the columns."""
        try:
            return self.columns[name]
        except KeyError:
            raise self.no_column(name) from None

    def no_column(self, name: str) -> UsageError:
        """Return the error for the unknown column `name`."""
        return UsageError("no such column", where=name, expected=sorted(self.columns) or "none declared")

    def fill(self, slot: int, given: Mapping[str, Any]) -> None:
        """Write the `given` columns of a new slot, and defaults to the others. Raises: DTypeError, UsageError."""
        get, name = given.get, ""
        try:
            for name, cells, default in self.fields:
                cells[slot] = get(name, default)
        except (TypeError, ValueError, OverflowError) as error:
            raise self._refused(name, given[name]) from error
        if given and not given.keys() <= self.columns.keys():
            raise self.no_column(next(n for n in given if n not in self.columns))

    def update(self, slot: int, given: Mapping[str, Any]) -> None:
        """Write the `given` columns of a live slot, all of them or none."""
        name, old = "", {each: self.column(each).cells[slot] for each in given}
        try:
            for name, value in given.items():
                self.columns[name].cells[slot] = value
        except (TypeError, ValueError, OverflowError) as error:
            for done, value in old.items():
                self.columns[done].cells[slot] = value
            raise self._refused(name, given[name]) from error

    def read(self, slot: int) -> dict[str, Any]:
        """Return the values of a slot by column name."""
        return {name: cells[slot] for name, cells, _ in self.fields}

    def _refused(self, name: str, value: Any) -> DTypeError:
        return DTypeError("the column cannot hold this value", where=name, expected=self.columns[name].dtype, got=value)

    # -- single -----------------------------------------------------------------------------------------------------
    def slot(self, handle: int) -> int:
        """Return the index of a live handle. Raises: StaleHandle."""
        try:
            index = handle & INDEX
            if self.id_cells[index] == handle:
                return index
        except (IndexError, TypeError):
            pass
        raise self.stale(handle)

    def owns(self, handle: int) -> bool:
        """Return True if a handle is alive in this table."""
        try:
            return self.id_cells[handle & INDEX] == handle
        except IndexError:
            return False

    def peek(self) -> int:
        """Return the slot that `issue` takes next, growing a full table. Raises: CapacityError."""
        if self.free_top:
            return self.free_cells[self.free_top - 1]
        if self.size == self.capacity:
            self.reserve(self.size + 1)
        return self.size

    def next_handle(self) -> int:
        """Return the packed handle that the next `issue` will return."""
        slot = self.peek()
        return self.kind_bit | self.high_cells[slot] << INDEX_BITS | slot

    def issue(self, slot: int) -> int:
        """Occupy the slot that `peek` returned; return the packed handle."""
        packed = self.kind_bit | self.high_cells[slot] << INDEX_BITS | slot
        self.id_cells[slot] = packed
        if self.free_top:
            self.free_top -= 1
        else:
            self.size += 1
        self.live += 1
        return packed

    def release(self, slot: int) -> None:
        """Remove the element of a slot; push the slot onto the free list unless it is retired."""
        self.id_cells[slot] = DEAD
        self.live -= 1
        high = self.high_cells[slot] + 1
        if high <= self.max_generation:
            self.high_cells[slot] = high
        if high < self.max_generation:
            if self.free_top == len(self._free):
                self._grow_free(self.free_top + 1)
            self.free_cells[self.free_top] = slot
            self.free_top += 1
        for cells in self.object_cells:
            cells[slot] = None  # a dead row must not keep objects alive

    def check_revive(self, handle: int) -> int:
        """Return the slot of a dead handle, after checking that undo can revive it now. Raises: NotUndoable."""
        slot = handle & INDEX
        if handle & EDGE_BIT == self.kind_bit and slot < self.size and self.id_cells[slot] == DEAD:
            high = self.high_cells[slot]
            retired = high == self.max_generation
            on_top = self.free_top and self.free_cells[self.free_top - 1] == slot
            if 0 < ((handle >> INDEX_BITS) & INDEX) < high and (retired or on_top):
                return slot
        lost = self.kind.from_int(handle)
        what = f"cannot restore {lost}: it exists already, is of a different graph, or was not the last to be removed"
        raise NotUndoable(what, fix="restore each record once, in the reverse order of the edits")

    def revive(self, slot: int, handle: int) -> None:
        """Make a dead handle that `check_revive` accepted live again; `high` does not change."""
        self.id_cells[slot] = handle
        self.live += 1
        if self.high_cells[slot] < self.max_generation:
            self.free_top -= 1

    def stale(self, handle: object, where: object = None) -> UsageError:
        """Return the error for a stale handle; it says what the handle named and which edit removed that."""
        if isinstance(handle, np.integer):
            handle = int(cast("int", handle))
        index = generation = 0
        if isinstance(handle, int) and handle > 0 and handle & EDGE_BIT == self.kind_bit:
            index, generation = handle & INDEX, (handle >> INDEX_BITS) & INDEX
        if not generation:
            return UsageError(f"not a {self.kind.__name__}", where=where, got=repr(handle))
        if index >= self.size or generation >= self._high.data[index]:  # `high` is the next one to issue
            what = f"{self.kind(index, generation)} was never issued by this graph; is it of a different program?"
            return StaleHandle(index, generation, what=what, where=where, issued=False)
        was, by = self.describe(self.kind(index, generation)) if self.describe else (None, None)
        return StaleHandle(index, generation, was, by, what=f"{self.kind(index, generation)} is gone", where=where)

    # -- many -------------------------------------------------------------------------------------------------------
    def slots_of(self, handles: Ids, *, distinct: bool) -> Array:
        """Return the slots of live handles. Raises: StaleHandle; UsageError for a duplicate if `distinct` is set."""
        slots = handles & INDEX
        known = slots < self.size
        alive = np.zeros(len(slots), bool)
        alive[known] = self.ids[slots[known]] == handles[known]
        if not alive.all():
            row = int(np.argmin(alive))
            raise self.stale(int(handles[row]), where=f"row {row}")
        if distinct:
            seen = np.zeros(self.size, bool)
            seen[slots] = True
            if np.count_nonzero(seen) != len(slots):
                _, first, counts = np.unique(slots, return_index=True, return_counts=True)
                row = int(first[np.argmax(counts > 1)])
                twice = self.kind.from_int(int(handles[row]))
                raise UsageError(f"{twice} is given more than once", where=f"row {row}", fix="pass unique ids")
        return slots

    def next_handles(self, count: int) -> Ids:
        """Return the packed handles that the next `count` calls of `issue` will return."""
        reused = min(count, self.free_top)
        self.reserve(self.size + count - reused)
        top = self._free[self.free_top - reused : self.free_top][::-1]
        slots = np.concatenate([top.astype(np.int64), np.arange(self.size, self.size + count - reused)])
        return self.kind_bit | self._high.data[slots].astype(np.int64) << INDEX_BITS | slots

    def issue_many(self, count: int) -> Array:
        """Occupy and return the slots that `count` calls of `issue` would occupy, in the same order."""
        handles, reused = self.next_handles(count), min(count, self.free_top)
        slots = handles & INDEX
        self.ids[slots] = handles
        self.free_top -= reused
        self.size += count - reused
        self.live += count
        return slots

    def release_many(self, slots: Array) -> None:
        """Release distinct live slots, in order."""
        self.ids[slots] = DEAD
        self.live -= len(slots)
        high = np.minimum(self._high.data[slots].astype(np.int64) + 1, self.max_generation)
        self._high.data[slots] = high
        freed = slots[high < self.max_generation]
        self._grow_free(self.free_top + len(freed))
        self._free[self.free_top : self.free_top + len(freed)] = freed
        self.free_top += len(freed)
        if self.object_cells:
            for slot in slots.tolist():
                for cells in self.object_cells:
                    cells[slot] = None

    def check_revive_many(self, handles: Ids) -> Array:
        """Return the slots of dead handles, if undo can revive all of them in this order. Raises: NotUndoable."""
        slots = handles & INDEX
        if len(slots) and (slots.max() >= self.size or (handles & EDGE_BIT != self.kind_bit).any()):
            raise NotUndoable("cannot restore these elements: the record belongs to a different graph")
        high = self._high.data[slots]
        stacked = slots[high < self.max_generation]
        top = self._free[max(self.free_top - len(stacked), 0) : self.free_top][::-1]
        old = ((handles >> INDEX_BITS) & INDEX) < high
        if not (old.all() and (self.ids[slots] == DEAD).all() and np.array_equal(top, stacked)):
            what = "cannot restore these elements: they exist already, or were not the last to be removed"
            raise NotUndoable(what, fix="restore each record once, in the reverse order of the edits")
        return slots

    def revive_many(self, slots: Array, handles: Ids) -> None:
        """Make dead handles that `check_revive_many` accepted live again."""
        self.free_top -= int(np.count_nonzero(self._high.data[slots] < self.max_generation))
        self.ids[slots] = handles
        self.live += len(slots)

    def live_slots(self) -> Array:
        """Return the occupied slots, ascending."""
        used = self.ids[: self.size]
        return np.arange(self.size) if self.live == self.size else np.flatnonzero(used > 0)

    # -- room -------------------------------------------------------------------------------------------------------
    def reserve(self, capacity: int) -> None:
        """Reserve `capacity` slots. Raises: CapacityError beyond 2^31 - 1."""
        if capacity <= self.capacity:
            return
        if capacity > MAX_SLOTS:
            raise CapacityError(f"too many {self.kind.__name__[:4].lower()}s", expected=f"<= {MAX_SLOTS}", got=capacity)
        more = min(grown(self.capacity, capacity), MAX_SLOTS)
        try:
            for column in (*self._inner, *self.columns.values()):
                column.grow(more)
            self.capacity = more
        finally:  # where memory is short, some columns are longer than the table
            self._bind()
            for rebind in self.on_grow:
                rebind()

    def copy_from(self, other: SlotTable) -> None:
        """Copy the slots, free list and columns of a table with the same column declarations."""
        self.size, self.live, self.free_top, self.capacity = other.size, other.live, other.free_top, other.capacity
        for mine, theirs in zip(self._inner, other._inner, strict=True):
            mine.copy_from(theirs)
        for name, theirs in other.columns.items():
            self.columns[name].copy_from(theirs)
        self._free = aligned_copy(other._free)
        self._bind()
        for rebind in self.on_grow:
            rebind()

    @property
    def free_slots(self) -> Array:
        """The free list from bottom to top."""
        return self._free[: self.free_top]

    @free_slots.setter
    def free_slots(self, slots: Array) -> None:
        self.free_top, self._free = len(slots), np.array(slots, np.int32)
        self._bind()

    @property
    def nbytes(self) -> int:
        """Bytes of memory, unused capacity included; values of object columns are not counted."""
        inner = sum(c.data.nbytes for c in self._inner) + self._free.nbytes
        return inner + sum(8 * len(c.data) if is_list(c.data) else c.data.nbytes for c in self.columns.values())

    def _grow_free(self, need: int) -> None:
        if need > len(self._free):
            free = np.empty(grown(len(self._free), need), np.int32)
            free[: self.free_top] = self._free[: self.free_top]
            self._free, self.free_cells = free, cells_of(free, self._counter)

    def _bind(self) -> None:
        self.ids: Ids = self._ids.data
        self.high: Array = self._high.data
        self.id_cells, self.high_cells = self._ids.cells, self._high.cells
        self.free_cells = cells_of(self._free, self._counter)
        self.fields = [(name, c.cells, c.default) for name, c in self.columns.items()]
        self.cells = {name: c.cells for name, c in self.columns.items()}
        self.object_cells = [c.cells for c in self.columns.values() if is_list(c.data)]


Array = npt.NDArray[Any]
ALIGNMENT = 64  # bytes: one cache line


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """The declaration of a column; callers may also write only `dtype`, or the pair `(dtype, default)`."""

    dtype: Any  # a bool, integer or float numpy dtype, or `object` (kept as a list of Python values)
    default: Any = None  # of rows without a value; None means zero, or None for `object`. Shared by rows: immutable
    encode: Callable[[Any], Any] | None = None  # for `object`: value -> JSON, used by `Graph.hash` and `Graph.to_dict`
    decode: Callable[[Any], Any] | None = None  # its inverse, used by `Graph.from_dict`

    @staticmethod
    def of(declared: Any) -> ColumnSpec:
        """Return a declaration as a `ColumnSpec`; it may be a dtype or a pair (dtype, default)."""
        if isinstance(declared, ColumnSpec):
            return declared
        return ColumnSpec(*cast("tuple[Any, ...]", declared)) if isinstance(declared, tuple) else ColumnSpec(declared)


CellCounter = list[int]  # one number: the cells that single edits read or wrote, for `Graph(debug_counters=True)`


class CountedCells:
    """A wrapper of a buffer that counts the elements read and written."""

    __slots__ = ("_cells", "_counter")

    def __init__(self, cells: Any, counter: CellCounter) -> None:
        self._cells, self._counter = cells, counter

    def __getitem__(self, key: Any) -> Any:
        value = self._cells[key]
        self._counter[0] += len(value) if isinstance(key, slice) else 1
        return value

    def __setitem__(self, key: int, value: Any) -> None:
        self._cells[key] = value
        self._counter[0] += 1

    def __len__(self) -> int:
        return len(self._cells)


class Column:
    """One typed column of a slot table, with a row per slot; see `ColumnSpec`."""

    __slots__ = ("_counter", "cells", "data", "default", "dtype", "name", "spec")

    def __init__(self, name: str, declared: Any, counter: CellCounter | None = None) -> None:
        self.name, self.spec, self._counter = name, ColumnSpec.of(declared), counter
        self.dtype: np.dtype[Any] = np.dtype(self.spec.dtype)
        self.data: Any
        self.cells: Any
        if self.dtype == object:
            self.default = self.spec.default
            self._bind([])
        elif self.dtype.kind in "biuf" and self.dtype.itemsize <= 8:
            zero = np.zeros(1, self.dtype)
            zero[0] = 0 if self.spec.default is None else self.spec.default
            self.default = zero[0].item()
            self._bind(aligned(0, self.dtype))
        else:
            kinds = "bool, integer, float or object"
            raise DTypeError("unsupported column dtype", where=name, expected=kinds, got=self.dtype)

    def grow(self, capacity: int) -> None:
        """Reserve `capacity` rows; new rows hold the default."""
        old = len(self.data)
        if capacity <= old:
            return
        if is_list(self.data):
            self._bind(self.data + [self.default] * (capacity - old))
        else:
            data = aligned(capacity, self.dtype)
            data[:old], data[old:] = self.data, self.default
            self._bind(data)

    def copy_from(self, other: Column) -> None:
        """Copy the rows of `other`."""
        self._bind(list(other.data) if is_list(other.data) else aligned_copy(other.data))

    def take(self, slots: Array) -> Array:
        """Return a copy of the rows at `slots`."""
        if is_list(self.data):
            rows = np.empty(len(slots), object)
            data = self.data
            rows[:] = [data[i] for i in slots.tolist()]
            return rows
        return self.data[slots]

    def put(self, slots: Array, rows: Any) -> None:
        """Write `rows`, a result of `cast`, to `slots`."""
        if is_list(self.data):
            for i, value in zip(slots.tolist(), rows, strict=True):
                self.data[i] = value
        else:
            self.data[slots] = rows

    def cast(self, values: Any, count: int) -> Any:
        """Return `values` (one value or `count` of them) as `count` rows of this column's dtype.

        Raises: DTypeError for a type or range that a single write would refuse, UsageError for a wrong length.
        """
        if self.dtype == object:
            # only lists and object arrays are rows; a str, dict or tuple is one value for all rows
            many = is_list(values) or (is_array(values) and values.ndim == 1)
            rows: Any = list(values) if many else [values] * count
        else:
            rows = self._numeric(np.asarray(values))
            rows = np.broadcast_to(rows, count) if rows.ndim == 0 else rows
        if (self.dtype != object and np.ndim(rows) != 1) or len(rows) != count:
            wanted, got = f"one value, or {count} values", f"values of shape {np.shape(values)}"
            raise UsageError("wrong number of values for the column", where=self.name, expected=wanted, got=got)
        return rows

    def _numeric(self, given: Array) -> Array:
        if given.dtype == object:  # numpy makes object arrays of Python integers beyond 64 bits
            raise DTypeError("not all values are 64-bit numbers", where=self.name, expected=self.dtype, got=given.dtype)
        if self.dtype.kind in "iu" and given.dtype.kind in "iub":
            cast = given.astype(self.dtype)
            fits = cast == given  # numpy compares integers of different types by value
            if not fits.all():
                bad = given if given.ndim == 0 else given[~fits][0]
                raise DTypeError("a value does not fit the column", where=self.name, expected=self.dtype, got=bad)
            return cast
        if self.dtype.kind == "f" and given.dtype.kind in "iubf":
            with np.errstate(over="ignore"):  # through float64, as a single write does
                return given.astype(np.float64).astype(self.dtype)
        if self.dtype.kind == "b" and given.dtype.kind in "iubf":
            return given.astype(bool)
        raise DTypeError("wrong dtype for the column", where=self.name, expected=self.dtype, got=given.dtype)

    def _bind(self, data: Any) -> None:
        self.data = data
        self.cells = cells_of(data, self._counter)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """`isinstance(value, list)` for type checkers."""
    return isinstance(value, list)


def is_array(value: object) -> TypeGuard[Array]:
    """`isinstance(value, np.ndarray)` for type checkers."""
    return isinstance(value, np.ndarray)


def cells_of(data: Any, counter: CellCounter | None = None) -> Any:
    """Return a view of a buffer with fast access to single elements; `counter`, if given, counts the accesses."""
    cells: Any = data
    if is_array(data) and data.dtype != np.float16:  # memoryview does not support half floats before Python 3.12
        cells = memoryview(cast(Any, data))
    return cells if counter is None else CountedCells(cells, counter)


def aligned(count: int, dtype: npt.DTypeLike) -> Array:
    """Return an uninitialised array aligned to a cache line."""
    size = count * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[start : start + size].view(dtype)


def aligned_copy(data: Array) -> Array:
    """Return a copy of `data` aligned to a cache line."""
    copy = aligned(len(data), data.dtype)
    copy[:] = data
    return copy


def grown(capacity: int, need: int) -> int:
    """Return the next capacity: 1.5 times the old one, at least `need`."""
    return max(need, capacity + capacity // 2, 16)
