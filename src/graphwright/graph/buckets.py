"""One direction of the adjacency: per node a list of edge slots, stored in chained blocks of fixed size.

`items[b*B : b*B + B]` are the entries of block b. Only the tail block of a list is partly filled, and each edge stores
its index in `items`, so a deletion swaps in the last entry: O(1) at any degree. Free blocks form a LIFO list; undoing
insertions and deletions in reverse order restores the index of every edge.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from graphwright.graph import kernels
from graphwright.graph.slots import Array, CellCounter, Column, SlotTable, aligned, aligned_copy, cells_of, grown

from ..errors import UsageError
from .errors import CapacityError
from .handles import INDEX

NONE = -1
MAX_ENTRIES = INDEX
BULK_MIN = 256
"""Batches with fewer rows run as a loop of single edits, which is faster than loading compiled code."""


class Buckets:
    """The out-lists or the in-lists of a graph, over the slots of its node and edge tables."""

    def __init__(self, nodes: SlotTable, edges: SlotTable, block: int, counter: CellCounter | None) -> None:
        if not 1 <= block <= 1 << 16:
            raise UsageError("block must be 1 to 65536 edges", got=block)
        self.block, self._counter = block, counter
        self._head = nodes.attach("head", NONE)
        self._tail = nodes.attach("tail", NONE)
        self._degree = nodes.attach("degree", 0)
        self._position = edges.attach("position", NONE)
        self.state = [0, 0]  # blocks ever used, top of the free list
        self.capacity = 0
        self._blocks = [np.empty(0, np.int32) for _ in range(4)]  # items, next, prev, free
        nodes.on_grow.append(self._bind)
        edges.on_grow.append(self._bind)
        self._bind()

    def _bind(self) -> None:
        self.degree: Any = self._degree.cells
        self._cells = (self._head.cells, self._tail.cells, self.degree, self._position.cells,
                       *(cells_of(b, self._counter) for b in self._blocks))  # fmt: skip
        self.append = partial(kernels.append, self._cells, self.state, self.block)
        self.remove = partial(kernels.remove, self._cells, self.state, self.block)
        self.restore = partial(kernels.restore, self._cells, self.state, self.block)
        self.fits = partial(kernels.fits, self._cells, self.state, self.block)

    # -- single -----------------------------------------------------------------------------------------------------
    def last(self, node: int) -> int:
        """Return the edge at the end of a non-empty list."""
        return kernels.last_edge(self._cells, self.block, node)

    def edges(self, node: int) -> list[int]:
        """Return the edge slots of a node in bucket order."""
        left, block, at, items = self.degree[node], self.block, self._cells[0][node], self._cells[4]
        if left <= block:
            return items[at * block : at * block + left].tolist()
        found: list[int] = []
        while left > 0:
            found += items[at * block : at * block + min(left, block)].tolist()
            left -= block
            at = self._cells[5][at]
        return found

    def reserve(self, blocks: int) -> None:
        """Reserve `blocks` blocks. Raises CapacityError if an index would exceed 31 bits."""
        if blocks <= self.capacity:
            return
        most = MAX_ENTRIES // self.block
        if blocks > most:
            raise CapacityError("bucket indices are limited to 31 bits", expected=f"<= {most} blocks", got=blocks)
        self.capacity = min(grown(self.capacity, blocks), most)
        for i, old in enumerate(self._blocks):
            new = aligned(self.capacity * (self.block if i == 0 else 1), np.int32)
            new[: len(old)], new[len(old) :] = old, NONE
            self._blocks[i] = new
        self._bind()

    def room(self, node: int) -> None:
        """Make sure that the next `append` or `restore` finds a block. Raises CapacityError before any write."""
        used, free = self.state
        if not free and used == self.capacity and self.degree[node] % self.block == 0:
            self.reserve(used + 1)

    # -- many -------------------------------------------------------------------------------------------------------
    def room_many(self, nodes: Array) -> None:
        """Reserve room for one more edge at each of `nodes`."""
        needed = self._run("blocks_needed", nodes)
        self.reserve(self.state[0] + max(int(needed) - self.state[1], 0))

    def append_many(self, nodes: Array, edges: Array) -> None:
        """Run `append` for each pair, in order; needs `room_many`."""
        self._run("append_many", nodes, edges)

    def remove_many(self, nodes: Array, edges: Array) -> Array:
        """Run `remove` for each pair, in order; return the indices."""
        left = np.empty(len(edges), np.int64)
        self._run("remove_many", nodes, edges, left=left)
        return left

    def restore_many(self, nodes: Array, edges: Array, positions: Array, owner: Column) -> int:
        """Run `restore` for each row, in order, while it `fits`; return how many did. Needs `room_many`."""
        return int(self._run("restore_many", nodes, edges, positions, owner=owner))

    def move_many(self, old: Array, new: Array, edges: Array) -> Array:
        """Run `remove` from `old` and `append` to `new` where they differ, in order; return the old indices, or -1."""
        left = np.full(len(edges), NONE)
        self._run("move_many", old, new, edges, left=left)
        return left

    def unmove_many(self, nodes: Array, edges: Array, positions: Array, owner: Column) -> tuple[Array, int]:
        """Undo `move_many` for rows given in reverse: put each edge back to `nodes` at `positions`; set `owner`.

        Returns the indices that were left, or -1, and how many rows were done before one did not fit.
        """
        left = np.full(len(edges), NONE)
        return left, int(self._run("unmove_many", nodes, edges, positions, left=left, owner=owner))

    def drain_many(self, into: Buckets, nodes: Array, ends: tuple[Column, Column]) -> Array:
        """Remove all edges of nodes from these out-lists and the in-lists `into`; `ends` are their sources and targets.

        Returns: edge slots, indices here and indices there, each in the order of removal.
        """
        bound = int(self.degrees[nodes].sum()) + int(into.degrees[nodes].sum())
        rows = np.empty((3, bound), np.int64)
        if bound < BULK_MIN:
            cells = tuple(end.cells for end in ends)
            sides = self._cells, self.state, self.block, into._cells, into.state
            done = kernels.drain(*sides, nodes.tolist(), cells, rows)
        else:
            states = [np.array(side.state, np.int64) for side in (self, into)]
            data = tuple(end.data for end in ends)
            sides = self.tables(), states[0], self.block, into.tables(), states[1]
            done = kernels.compiled().drain(*sides, nodes, data, rows)
            self.state[:], into.state[:] = (state.tolist() for state in states)
        return rows[:, :done].copy()

    def _run(self, kernel: str, *rows: Array, left: Array | None = None, owner: Column | None = None) -> Any:
        """Run a kernel on rows: as Python if they are few, else compiled."""
        few = len(rows[0]) < BULK_MIN
        extra: list[Any] = [] if left is None else [left]
        if owner is not None:
            extra.append(owner.cells if few else owner.data)
        if few:
            lists = [row.tolist() for row in rows]
            return getattr(kernels, kernel)(self._cells, self.state, self.block, *lists, *extra)
        state = np.array(self.state, np.int64)
        same = [np.ascontiguousarray(row, np.int64) for row in rows]  # so that each kernel is compiled once
        result = getattr(kernels.compiled(), kernel)(self.tables(), state, self.block, *same, *extra)
        self.state[:] = state.tolist()
        return result

    def tables(self) -> tuple[Array, ...]:
        """Return the buffers: head, tail, degree, position, items, next, prev, free."""
        inner = (self._head.data, self._tail.data, self._degree.data, self._position.data)
        return (*inner, *self._blocks)

    # -- state ------------------------------------------------------------------------------------------------------
    @property
    def positions(self) -> Array:
        """The index of each edge slot in `items`; stale for dead slots."""
        return self._position.data

    @property
    def degrees(self) -> Array:
        """The length of each node slot's list; 0 for dead slots."""
        return self._degree.data

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks, slack included; the columns count with their tables."""
        return sum(b.nbytes for b in self._blocks)

    def copy_from(self, other: Buckets) -> None:
        """Take over blocks and free list; the columns come with the tables."""
        self.state[:], self.capacity = other.state, other.capacity
        self._blocks = [aligned_copy(b) for b in other._blocks]
        self._bind()

    def load(self, degree: Array, items: Array, blocks: Array, free: Array) -> None:
        """Rebuild all lists: `items` and `blocks` are list by list in node order, `free` from the bottom."""
        size, lengths = self.block, -(-degree // self.block)
        first = np.cumsum(lengths) - lengths  # position in `blocks` of each list's head
        self.reserve(len(blocks) + len(free))
        head, tail, degrees, position, held, after, before, unused = self.tables()
        filled = np.flatnonzero(degree)
        head[filled] = blocks[first[filled]]
        tail[filled] = blocks[first[filled] + lengths[filled] - 1]
        degrees[: len(degree)] = degree
        inner = np.repeat(np.arange(len(degree)), lengths)
        same = np.flatnonzero(inner[1:] == inner[:-1])
        after[blocks], before[blocks] = NONE, NONE
        after[blocks[same]], before[blocks[same + 1]] = blocks[same + 1], blocks[same]
        at = np.arange(len(items)) - np.repeat(np.cumsum(degree) - degree, degree)
        positions = blocks[np.repeat(first, degree) + at // size] * size + at % size
        held[positions], position[items] = items, positions
        unused[: len(free)] = free
        self.state[:] = len(blocks) + len(free), len(free)
