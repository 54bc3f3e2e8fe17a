"""A typed column over slots, and the cells single edits read it through.

Bulk edits use `data` (a numpy array, 64-byte aligned, or a list for `object`); single edits use `cells`, a memoryview
of the same buffer (half the price of a numpy scalar access). Invariant: growing replaces `data` and `cells` together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import numpy as np
import numpy.typing as npt

from ..errors import DTypeError, UsageError

Array = npt.NDArray[Any]
ALIGNMENT = 64  # bytes: one cache line


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """How a column is declared; a bare dtype, or a pair (dtype, default), stands for the short forms.

    Args:
        dtype: a bool, integer or float numpy dtype, or `object` (kept as a list of Python values).
        default: value of rows that give none; None means zero, or None for `object`. Shared by rows: immutable.
        encode: for `object` columns, value -> JSON value, used by `Graph.hash` and `Graph.to_dict`.
        decode: its inverse, used by `Graph.from_dict`.
    """

    dtype: Any
    default: Any = None
    encode: Callable[[Any], Any] | None = None
    decode: Callable[[Any], Any] | None = None

    @staticmethod
    def of(declared: Any) -> ColumnSpec:
        """The full form of a declaration."""
        if isinstance(declared, ColumnSpec):
            return declared
        return ColumnSpec(*cast("tuple[Any, ...]", declared)) if isinstance(declared, tuple) else ColumnSpec(declared)


class CellCounter:
    """Counts the cells that single edits read or write, for `Graph(debug_counters=True)`."""

    def __init__(self) -> None:
        self.touched = 0


class CountedCells:
    """Cells that report each access to a counter; slices count their length."""

    __slots__ = ("_cells", "_counter")

    def __init__(self, cells: Any, counter: CellCounter) -> None:
        self._cells, self._counter = cells, counter

    def __getitem__(self, key: Any) -> Any:
        value = self._cells[key]
        self._counter.touched += len(value) if isinstance(key, slice) else 1
        return value

    def __setitem__(self, key: int, value: Any) -> None:
        self._cells[key] = value
        self._counter.touched += 1


class Column:
    """One typed column; see `ColumnSpec` for what may be declared."""

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
            raise DTypeError("a column holds bools, integers, floats or objects", where=name, got=self.dtype)

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` rows; new rows hold the default."""
        old = len(self.data)
        if is_list(self.data):
            self._bind(self.data + [self.default] * (capacity - old))
        else:
            data = aligned(capacity, self.dtype)
            data[:old], data[old:] = self.data, self.default
            self._bind(data)

    def copy_from(self, other: Column) -> None:
        """Take over the rows of `other`."""
        self._bind(list(other.data) if is_list(other.data) else aligned_copy(other.data))

    def take(self, slots: Array) -> Array:
        """The rows at `slots`, copied."""
        if is_list(self.data):
            rows = np.empty(len(slots), object)
            data = self.data
            rows[:] = [data[i] for i in slots.tolist()]
            return rows
        return self.data[slots]

    def put(self, slots: Array, rows: Any) -> None:
        """Write rows that `cast` has checked."""
        if is_list(self.data):
            for i, value in zip(slots.tolist(), rows, strict=True):
                self.data[i] = value
        else:
            self.data[slots] = rows

    def cast(self, values: Any, count: int) -> Any:
        """`values` (one value or `count` of them) as `count` rows of this column's dtype, or a typed error.

        Raises DTypeError for a kind or range that a single write would refuse too, UsageError for a wrong length.
        """
        if self.dtype == object:
            # only lists and object arrays are rows; a str, a dict or a tuple is one value for all rows
            many = is_list(values) or (is_array(values) and values.ndim == 1)
            rows: Any = list(values) if many else [values] * count
        else:
            rows = self._numeric(np.asarray(values))
            rows = np.broadcast_to(rows, count) if rows.ndim == 0 else rows
        if (self.dtype != object and np.ndim(rows) != 1) or len(rows) != count:
            raise UsageError("one value, or one per row", where=self.name, expected=count, got=np.shape(values))
        return rows

    def _numeric(self, given: Array) -> Array:
        if given.dtype == object:  # Python integers beyond 64 bits land here
            raise DTypeError("values of mixed or unknown type", where=self.name, expected=self.dtype, got=given.dtype)
        if self.dtype.kind in "iu" and given.dtype.kind in "iub":
            cast = given.astype(self.dtype)
            fits = cast == given  # numpy compares integers of different types by value
            if not fits.all():
                bad = given if given.ndim == 0 else given[~fits][0]
                raise DTypeError("value out of range", where=self.name, expected=self.dtype, got=bad)
            return cast
        if self.dtype.kind == "f" and given.dtype.kind in "iubf":
            with np.errstate(over="ignore"):  # by way of float64, as a single write goes
                return given.astype(np.float64).astype(self.dtype)
        if self.dtype.kind == "b" and given.dtype.kind in "iubf":
            return given.astype(bool)
        raise DTypeError("value of the wrong kind", where=self.name, expected=self.dtype, got=given.dtype)

    def _bind(self, data: Any) -> None:
        self.data = data
        self.cells = cells_of(data, self._counter)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """`isinstance`, for a list of anything."""
    return isinstance(value, list)


def is_array(value: object) -> TypeGuard[Array]:
    """`isinstance`, for an array of any dtype."""
    return isinstance(value, np.ndarray)


def cells_of(data: Any, counter: CellCounter | None = None) -> Any:
    """The scalar-access view of a buffer; wrapped if a counter listens."""
    cells: Any = data
    if is_array(data) and data.dtype != np.float16:  # no memoryview access for half floats before 3.12
        cells = memoryview(cast(Any, data))
    return cells if counter is None else CountedCells(cells, counter)


def aligned(count: int, dtype: npt.DTypeLike) -> Array:
    """An uninitialised array whose first byte lies on a cache line."""
    size = count * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[start : start + size].view(dtype)


def aligned_copy(data: Array) -> Array:
    """A copy of `data` on a cache line."""
    copy = aligned(len(data), data.dtype)
    copy[:] = data
    return copy


def grown(capacity: int, need: int) -> int:
    """The next capacity: half as much again, at least `need`."""
    return max(need, capacity + capacity // 2, 16)
