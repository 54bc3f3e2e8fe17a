"""The index of a pattern's pairs: (source, target) -> edge slot, by open addressing with linear probing.

`cells[i]` is an edge slot or -1; the pair of an edge is read from the graph's `source` and `target` columns, so that an
entry has 4 bytes. At most half the cells are filled. Erasing moves later entries of the same run back, so that no
tombstones are left. Each function runs as plain Python for single edits and compiled for batches.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
import numpy.typing as npt

from graphwright.graph.slots import cells_of

NONE = -1
SMALL = 256  # batches with fewer rows run as plain Python
LEAST = 32  # cells

Cells = Any  # a memoryview, or an array in compiled code


class PairIndex:
    """The edges of a graph by their pair of node slots; the graph has no parallel edges."""

    def __init__(self, counter: list[int] | None = None) -> None:
        self.count, self._counter = 0, counter
        self._data = np.full(LEAST, NONE, np.int32)
        self.cells = cells_of(self._data, counter)

    @property
    def nbytes(self) -> int:
        """Bytes of the cells."""
        return self._data.nbytes

    @property
    def capacity(self) -> int:
        """Number of cells."""
        return len(self._data)

    def insert_many(self, slots: npt.NDArray[Any], source: npt.NDArray[Any], target: npt.NDArray[Any]) -> int:
        """Add edges whose ends are in the columns `source` and `target`; return how many precede the first duplicate.

        If an edge has the pair of another one, the edges before it are erased again, and the index is unchanged.
        """
        self.reserve(self.count + len(slots), source, target)
        done = _call("insert_many", self._data, self.cells, slots, source, target)
        if done < len(slots):
            _call("erase_many", self._data, self.cells, slots[:done], source, target)
        else:
            self.count += done
        return done

    def erase_many(self, slots: npt.NDArray[Any], source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
        """Remove edges, while the columns still have their ends."""
        _call("erase_many", self._data, self.cells, slots, source, target)
        self.count -= len(slots)

    def find_many(
        self, sources: npt.NDArray[Any], targets: npt.NDArray[Any], source: npt.NDArray[Any], target: npt.NDArray[Any]
    ) -> npt.NDArray[np.int64]:
        """Return the edge slot of each pair, -1 for a pair without an edge."""
        found = np.empty(len(sources), np.int64)
        _call("find_many", self._data, self.cells, sources, source, target, targets, found)
        return found

    def reserve(self, count: int, source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
        """Have cells for `count` edges at a load of at most one half."""
        if 2 * count <= len(self._data):
            return
        slots = self._data[self._data != NONE]
        self._data = np.full(max(2 * count, len(self._data) * 3 // 2), NONE, np.int32)
        self.cells = cells_of(self._data, self._counter)
        _call("insert_many", self._data, self.cells, slots, source, target)


def _call(name: str, data: Any, cells: Any, rows: npt.NDArray[Any], source: Any, target: Any, *more: Any) -> int:
    """Call a function of this module with `rows` as int64; compiled if they are many."""
    if len(rows) < SMALL:
        lists = [each.tolist() if i == 0 else each for i, each in enumerate(more)]
        return globals()[name](cells, rows.tolist(), cells_of(source), cells_of(target), *lists)
    wide = [np.ascontiguousarray(each, np.int64) if i == 0 else each for i, each in enumerate(more)]
    return int(compiled()[name](data, np.ascontiguousarray(rows, np.int64), source, target, *wide) or 0)


@cache
def compiled() -> dict[str, Any]:
    """Return the compiled functions of this module by name; they call each other's compiled forms. Loads numba."""
    from graphwright.native import njit

    wrap: Any = njit(cache=True, error_model="numpy", _nrt=False)
    space = dict(globals())
    for name in ("home", "search", "find", "insert", "erase", "insert_many", "erase_many", "find_many"):
        function = globals()[name]
        space[name] = wrap(FunctionType(function.__code__, space, name))
    return space


def home(size: int, source: int, target: int) -> int:
    """Return the cell where the search for a pair begins: its hash, scaled to `size`. All products fit 63 bits."""
    h = (source * 0x9E3779B1 ^ target * 0x85EBCA77) & 0x7FFFFFFF
    h = (h ^ h >> 15) * 0x2C1B3C6D & 0x7FFFFFFF
    h = h ^ h >> 13
    return h * size >> 31


def search(cells: Cells, s: int, t: int, source: Cells, target: Cells) -> int:
    """Return the cell of the edge from node slot `s` to `t`, or the empty cell where it would be entered."""
    size = len(cells)
    at = home(size, s, t)
    slot = cells[at]
    while slot != -1 and (source[slot] != s or target[slot] != t):
        at += 1
        if at == size:
            at = 0
        slot = cells[at]
    return at


def find(cells: Cells, s: int, t: int, source: Cells, target: Cells) -> int:
    """Return the slot of the edge from node slot `s` to `t`, or -1."""
    return cells[search(cells, s, t, source, target)]


def insert(cells: Cells, slot: int, source: Cells, target: Cells) -> bool:
    """Add an edge; return False if an edge with its pair is in the index."""
    at = search(cells, source[slot], target[slot], source, target)
    if cells[at] != -1:
        return False
    cells[at] = slot
    return True


def erase(cells: Cells, slot: int, source: Cells, target: Cells) -> None:
    """Remove an edge, and move the entries after it that were displaced past its cell."""
    size = len(cells)
    at = home(size, source[slot], target[slot])
    while cells[at] != slot:
        at += 1
        if at == size:
            at = 0
    gap = at
    while True:
        at += 1
        if at == size:
            at = 0
        other = cells[at]
        if other == -1:
            break
        first = home(size, source[other], target[other])
        reach, hole = at - first, at - gap  # distances from the entry's home and from the gap, modulo the size
        if reach < 0:
            reach += size
        if hole < 0:
            hole += size
        if reach >= hole:
            cells[gap] = other
            gap = at
    cells[gap] = -1


def insert_many(cells: Cells, slots: Cells, source: Cells, target: Cells) -> int:
    """Add edges until one has a pair that is in the index; return the number added."""
    for i in range(len(slots)):
        if not insert(cells, slots[i], source, target):
            return i
    return len(slots)


def erase_many(cells: Cells, slots: Cells, source: Cells, target: Cells) -> None:
    """Remove edges."""
    for i in range(len(slots)):
        erase(cells, slots[i], source, target)


def find_many(cells: Cells, sources: Cells, source: Cells, target: Cells, targets: Cells, found: Cells) -> None:
    """Write the slot of each pair's edge to `found`, or -1."""
    for i in range(len(sources)):
        found[i] = find(cells, sources[i], targets[i], source, target)


def warmup() -> None:
    """Compile the functions for batches, by calling each once; numba caches the code."""
    index, ends = PairIndex(), np.arange(SMALL, dtype=np.int32)
    index.insert_many(ends, ends, ends)
    index.find_many(ends, ends, ends, ends)
    index.erase_many(ends, ends, ends)
