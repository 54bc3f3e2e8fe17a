"""One direction of the adjacency: per node a list of edge slots, stored in chained blocks of fixed size.

`items[b*B : b*B + B]` are the entries of block b. Only the tail block of a list is partly filled, and each edge stores
its index in `items`, so a deletion swaps in the last entry: O(1) at any degree. Free blocks form a LIFO list; undoing
insertions and deletions in reverse order restores the index of every edge.
"""

from __future__ import annotations

from typing import Any

import numpy as np

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
        self.block_count = 0  # blocks ever used
        self.free_top = 0
        self.capacity = 0
        self._blocks = [np.empty(0, np.int32) for _ in range(4)]  # items, next, prev, free
        nodes.on_grow.append(self._bind)
        edges.on_grow.append(self._bind)
        self._bind()

    # -- single -----------------------------------------------------------------------------------------------------
    def append(self, node: int, edge: int) -> int:
        """Append an edge to a node's list; return its index in `items`."""
        count = self.degree[node]
        if offset := count % self.block:
            position = self.tail[node] * self.block + offset
            self.degree[node] = count + 1
        else:
            position = self._open_last(node)
        self.items[position] = edge
        self.position[edge] = position
        return position

    def remove(self, node: int, edge: int) -> int:
        """Remove an edge from a node's list by moving the last entry into its index; return that index."""
        position = self.position[edge]
        count = self.degree[node] - 1
        tail = self.tail[node]
        last = tail * self.block + count % self.block
        if position != last:
            moved = self.items[last]
            self.items[position] = moved
            self.position[moved] = position
        self.items[last] = NONE
        self.degree[node] = count
        if count % self.block == 0:
            before = self.prev[tail]
            self.tail[node] = before
            if before == NONE:
                self.head[node] = NONE
            else:
                self.next[before] = NONE
            self.free[self.free_top] = tail
            self.free_top += 1
        return position

    def restore(self, node: int, edge: int, position: int) -> None:
        """Undo `remove`: put the edge back at `position` and its present entry back at the end of the list."""
        last = self._open_last(node)
        if position != last:
            moved = self.items[position]
            self.items[last] = moved
            self.position[moved] = last
        self.items[position] = edge
        self.position[edge] = position

    def fits(self, node: int, position: int, owner: Any) -> bool:
        """Return True if `restore` at `position` is a valid inverse now: the next index, or one in use."""
        count = self.degree[node]
        if count % self.block:
            block = self.tail[node]
        else:
            block = self.free[self.free_top - 1] if self.free_top else self.block_count
        if position == block * self.block + count % self.block:
            return True
        edge = self.items[position] if 0 <= position < self.block_count * self.block else NONE
        return edge != NONE and owner[edge] == node

    def last(self, node: int) -> int:
        """Return the edge at the end of a non-empty list."""
        return self.items[self.tail[node] * self.block + (self.degree[node] - 1) % self.block]

    def edges(self, node: int) -> list[int]:
        """Return the edge slots of a node in bucket order."""
        left, block, items = self.degree[node], self.block, self.items
        if left <= block:
            start = self.head[node] * block
            return items[start : start + left].tolist() if left else []
        found: list[int] = []
        at = self.head[node]
        while left > 0:
            found += items[at * block : at * block + min(left, block)].tolist()
            left -= block
            at = self.next[at]
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
        if not self.free_top and self.block_count == self.capacity and self.degree[node] % self.block == 0:
            self.reserve(self.block_count + 1)

    def _open_last(self, node: int) -> int:
        count = self.degree[node]
        offset = count % self.block
        self.degree[node] = count + 1
        if offset:
            return self.tail[node] * self.block + offset
        if self.free_top:
            self.free_top -= 1
            new = self.free[self.free_top]
        else:
            new = self.block_count
            self.block_count += 1
        tail = self.tail[node]
        self.prev[new], self.next[new] = tail, NONE
        if tail == NONE:
            self.head[node] = new
        else:
            self.next[tail] = new
        self.tail[node] = new
        return new * self.block

    # -- many -------------------------------------------------------------------------------------------------------
    def room_many(self, nodes: Array) -> None:
        """Reserve room for one more edge at each of `nodes`."""
        if len(nodes) < BULK_MIN:
            needed, extra = 0, dict.fromkeys(nodes.tolist(), 0)
            for node in nodes.tolist():
                needed += (self.degree[node] + extra[node]) % self.block == 0
                extra[node] += 1
        else:
            needed = kernels().blocks_needed(self._degree.data, nodes.astype(np.int64), self.block)
        self.reserve(self.block_count + max(needed - self.free_top, 0))

    def append_many(self, nodes: Array, edges: Array) -> None:
        """Run `append` for each pair, in order; needs `room_many`."""
        if len(nodes) < BULK_MIN:
            for node, edge in zip(nodes.tolist(), edges.tolist(), strict=True):
                self.append(node, edge)
        else:
            self._run("append_many", [nodes, edges])

    def remove_many(self, nodes: Array, edges: Array) -> Array:
        """Run `remove` for each pair, in order; return the indices."""
        if len(nodes) < BULK_MIN:
            pairs = zip(nodes.tolist(), edges.tolist(), strict=True)
            return np.array([self.remove(node, edge) for node, edge in pairs], np.int64)
        left = np.empty(len(edges), np.int64)
        self._run("remove_many", [nodes, edges, left])
        return left

    def restore_many(self, nodes: Array, edges: Array, positions: Array, owner: Column) -> int:
        """Run `restore` for each row, in order, while it `fits`; return how many did. Needs `room_many`."""
        if len(nodes) < BULK_MIN:
            rows = zip(nodes.tolist(), edges.tolist(), positions.tolist(), strict=True)
            for done, (node, edge, position) in enumerate(rows):
                if not self.fits(node, position, owner.cells):
                    return done
                self.restore(node, edge, position)
            return len(nodes)
        return int(self._run("restore_many", [nodes, edges, positions], owner.data))

    def move_many(self, old: Array, new: Array, edges: Array) -> Array:
        """Run `remove` from `old` and `append` to `new` where they differ, in order; return the old indices, or -1."""
        if len(edges) < BULK_MIN:
            positions: list[int] = []
            for a, b, edge in zip(old.tolist(), new.tolist(), edges.tolist(), strict=True):
                positions.append(NONE if a == b else self.remove(a, edge))
                if a != b:
                    self.append(b, edge)
            return np.array(positions, np.int64)
        left = np.full(len(edges), NONE)
        self._run("move_many", [old, new, edges, left])
        return left

    def unmove_many(self, nodes: Array, edges: Array, positions: Array, owner: Column) -> tuple[Array, int]:
        """Undo `move_many` for rows given in reverse: put each edge back to `nodes` at `positions`; set `owner`.

        Returns the indices that were left, or -1, and how many rows were done before one did not fit.
        """
        left = np.full(len(edges), NONE)
        if len(edges) >= BULK_MIN:
            return left, int(self._run("unmove_many", [nodes, edges, positions, left], owner.data))
        rows = zip(nodes.tolist(), edges.tolist(), positions.tolist(), strict=True)
        for done, (node, edge, position) in enumerate(rows):
            if position == NONE:
                continue
            now = owner.cells[edge]
            left[done] = self.remove(now, edge)
            if not self.fits(node, position, owner.cells):
                self.restore(now, edge, int(left[done]))
                return left, done
            self.restore(node, edge, position)
            owner.cells[edge] = node
        return left, len(edges)

    def tables(self) -> tuple[Array, ...]:
        """Return the buffers: head, tail, degree, position, items, next, prev, free."""
        inner = (self._head.data, self._tail.data, self._degree.data, self._position.data)
        return (*inner, *self._blocks)

    def _run(self, kernel: str, rows: list[Array], *owner: Array) -> Any:
        same = [np.ascontiguousarray(row, np.int64) for row in rows]  # so that each kernel is compiled once
        with self.lent() as (tables, state):
            return getattr(kernels(), kernel)(tables, state, self.block, *same, *owner)

    def lent(self) -> _Lent:
        """Pass buffers and counters to compiled code in a context, and take the counters back."""
        return _Lent(self)

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
        self.block_count, self.free_top, self.capacity = other.block_count, other.free_top, other.capacity
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
        self.block_count, self.free_top = len(blocks) + len(free), len(free)

    def _bind(self) -> None:
        self.head, self.tail, self.degree = self._head.cells, self._tail.cells, self._degree.cells
        self.position = self._position.cells
        self.items, self.next, self.prev, self.free = (cells_of(b, self._counter) for b in self._blocks)


class _Lent:
    """Counters of a `Buckets` as an array while compiled code runs."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._state = np.array([buckets.block_count, buckets.free_top], np.int64)

    def __enter__(self) -> tuple[tuple[Array, ...], Array]:
        return self._buckets.tables(), self._state

    def __exit__(self, *_: object) -> None:
        self._buckets.block_count, self._buckets.free_top = (int(x) for x in self._state)


def kernels() -> Any:
    """Return the compiled loops of bulk edits."""
    from . import kernels as compiled  # loads numba, so only for a large batch

    return compiled
