"""One direction of the adjacency: per node a list of edge slots, kept in chained blocks of fixed size.

`items[b*B : b*B + B]` are the places of block b. Only the tail block of a list is part-filled, and each edge knows its
place, so deleting is a swap with the last item: the same few cells whatever the degree. Blocks go to a LIFO free list;
undone in reverse order, an insertion or deletion gives every edge its old place back.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.graph.slots import Array, CellCounter, Column, SlotTable, aligned, aligned_copy, cells_of, grown

from ..errors import UsageError
from .errors import CapacityError
from .handles import INDEX

NONE = -1
MAX_PLACES = INDEX
BULK_MIN = 256
"""Batches below this many rows run as a loop of single edits: faster than loading compiled code, and equal to it."""


class Buckets:
    """The out-lists or the in-lists of a graph, over the slots of its node and edge tables."""

    def __init__(self, nodes: SlotTable, edges: SlotTable, block: int, counter: CellCounter | None) -> None:
        if not 1 <= block <= 1 << 16:
            raise UsageError("a block holds 1 to 65536 edges", got=block)
        self.block, self._counter = block, counter
        self._head = nodes.attach("head", NONE)
        self._tail = nodes.attach("tail", NONE)
        self._degree = nodes.attach("degree", 0)
        self._place = edges.attach("place", NONE)
        self.block_count = 0  # blocks ever used
        self.free_top = 0
        self.capacity = 0
        self._blocks = [np.empty(0, np.int32) for _ in range(4)]  # items, next, prev, free
        nodes.on_grow.append(self._bind)
        edges.on_grow.append(self._bind)
        self._bind()

    # -- single -----------------------------------------------------------------------------------------------------
    def append(self, node: int, edge: int) -> int:
        """Put an edge at the end of a node's list; returns its place."""
        count = self.degree[node]
        if offset := count % self.block:
            place = self.tail[node] * self.block + offset
            self.degree[node] = count + 1
        else:
            place = self._open_last(node)
        self.items[place] = edge
        self.place[edge] = place
        return place

    def remove(self, node: int, edge: int) -> int:
        """Take an edge out of a node's list, the last one moves into its place; returns the place it had."""
        place = self.place[edge]
        count = self.degree[node] - 1
        tail = self.tail[node]
        last = tail * self.block + count % self.block
        if place != last:
            moved = self.items[last]
            self.items[place] = moved
            self.place[moved] = place
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
        return place

    def restore(self, node: int, edge: int, place: int) -> None:
        """The inverse of `remove`: the edge gets `place` back, the item there returns to the end of the list."""
        last = self._open_last(node)
        if place != last:
            moved = self.items[place]
            self.items[last] = moved
            self.place[moved] = last
        self.items[place] = edge
        self.place[edge] = place

    def fits(self, node: int, place: int, owner: Any) -> bool:
        """Whether `restore` at `place` is right now an inverse: it is the list's next place, or held by the list."""
        count = self.degree[node]
        if count % self.block:
            block = self.tail[node]
        else:
            block = self.free[self.free_top - 1] if self.free_top else self.block_count
        if place == block * self.block + count % self.block:
            return True
        edge = self.items[place] if 0 <= place < self.block_count * self.block else NONE
        return edge != NONE and owner[edge] == node

    def last(self, node: int) -> int:
        """The edge at the end of a list that is not empty."""
        return self.items[self.tail[node] * self.block + (self.degree[node] - 1) % self.block]

    def edges(self, node: int) -> list[int]:
        """Edge slots of a node in bucket order."""
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
        """Make room for `blocks` blocks. Raises CapacityError where a place would leave 31 bits."""
        if blocks <= self.capacity:
            return
        most = MAX_PLACES // self.block
        if blocks > most:
            raise CapacityError("a bucket place has 31 bits", expected=f"<= {most} blocks", got=blocks)
        self.capacity = min(grown(self.capacity, blocks), most)
        for i, old in enumerate(self._blocks):
            new = aligned(self.capacity * (self.block if i == 0 else 1), np.int32)
            new[: len(old)], new[len(old) :] = old, NONE
            self._blocks[i] = new
        self._bind()

    def room(self, node: int) -> None:
        """Make sure the next `append` or `restore` finds a block. Raises CapacityError before anything is written."""
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
        """`room` for one more edge at each of `nodes`, all together."""
        if len(nodes) < BULK_MIN:
            needed, extra = 0, dict.fromkeys(nodes.tolist(), 0)
            for node in nodes.tolist():
                needed += (self.degree[node] + extra[node]) % self.block == 0
                extra[node] += 1
        else:
            needed = kernels().blocks_needed(self._degree.data, nodes.astype(np.int64), self.block)
        self.reserve(self.block_count + max(needed - self.free_top, 0))

    def append_many(self, nodes: Array, edges: Array) -> None:
        """`append` for each pair, in order; needs `room_many`."""
        if len(nodes) < BULK_MIN:
            for node, edge in zip(nodes.tolist(), edges.tolist(), strict=True):
                self.append(node, edge)
        else:
            self._run("append_many", [nodes, edges])

    def remove_many(self, nodes: Array, edges: Array) -> Array:
        """`remove` for each pair, in order; returns the places."""
        if len(nodes) < BULK_MIN:
            pairs = zip(nodes.tolist(), edges.tolist(), strict=True)
            return np.array([self.remove(node, edge) for node, edge in pairs], np.int64)
        left = np.empty(len(edges), np.int64)
        self._run("remove_many", [nodes, edges, left])
        return left

    def restore_many(self, nodes: Array, edges: Array, places: Array, owner: Column) -> int:
        """`restore` for each row, in order, as long as it `fits`; returns how many did. Needs `room_many`."""
        if len(nodes) < BULK_MIN:
            rows = zip(nodes.tolist(), edges.tolist(), places.tolist(), strict=True)
            for done, (node, edge, place) in enumerate(rows):
                if not self.fits(node, place, owner.cells):
                    return done
                self.restore(node, edge, place)
            return len(nodes)
        return int(self._run("restore_many", [nodes, edges, places], owner.data))

    def move_many(self, old: Array, new: Array, edges: Array) -> Array:
        """`remove` from `old` and `append` to `new` where they differ, in order; returns the places left, or -1."""
        if len(edges) < BULK_MIN:
            places: list[int] = []
            for a, b, edge in zip(old.tolist(), new.tolist(), edges.tolist(), strict=True):
                places.append(NONE if a == b else self.remove(a, edge))
                if a != b:
                    self.append(b, edge)
            return np.array(places, np.int64)
        left = np.full(len(edges), NONE)
        self._run("move_many", [old, new, edges, left])
        return left

    def unmove_many(self, nodes: Array, edges: Array, places: Array, owner: Column) -> tuple[Array, int]:
        """The inverse of `move_many` for rows given in reverse: each edge back to `nodes` at `places`; sets `owner`.

        Returns the places left, or -1, and how many rows were done before one did not fit.
        """
        left = np.full(len(edges), NONE)
        if len(edges) >= BULK_MIN:
            return left, int(self._run("unmove_many", [nodes, edges, places, left], owner.data))
        rows = zip(nodes.tolist(), edges.tolist(), places.tolist(), strict=True)
        for done, (node, edge, place) in enumerate(rows):
            if place == NONE:
                continue
            now = owner.cells[edge]
            left[done] = self.remove(now, edge)
            if not self.fits(node, place, owner.cells):
                self.restore(now, edge, int(left[done]))
                return left, done
            self.restore(node, edge, place)
            owner.cells[edge] = node
        return left, len(edges)

    def tables(self) -> tuple[Array, ...]:
        """The buffers themselves: head, tail, degree, place, items, next, prev, free."""
        inner = (self._head.data, self._tail.data, self._degree.data, self._place.data)
        return (*inner, *self._blocks)

    def _run(self, kernel: str, rows: list[Array], *owner: Array) -> Any:
        same = [np.ascontiguousarray(row, np.int64) for row in rows]  # one compiled version of each kernel
        with self.lent() as (tables, state):
            return getattr(kernels(), kernel)(tables, state, self.block, *same, *owner)

    def lent(self) -> _Lent:
        """A context that lends buffers and counters to compiled code and takes the counters back."""
        return _Lent(self)

    # -- state ------------------------------------------------------------------------------------------------------
    @property
    def places(self) -> Array:
        """Place of each edge slot; dead slots hold stale values."""
        return self._place.data

    @property
    def degrees(self) -> Array:
        """Length of each node slot's list; 0 for dead ones."""
        return self._degree.data

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks, with slack; the columns count with their tables."""
        return sum(b.nbytes for b in self._blocks)

    def copy_from(self, other: Buckets) -> None:
        """Take over blocks and free list; the columns come with the tables."""
        self.block_count, self.free_top, self.capacity = other.block_count, other.free_top, other.capacity
        self._blocks = [aligned_copy(b) for b in other._blocks]
        self._bind()

    def load(self, degree: Array, items: Array, blocks: Array, free: Array) -> None:
        """Build all lists anew: `items` and `blocks` run list by list in node order, `free` from the bottom."""
        size, lengths = self.block, -(-degree // self.block)
        first = np.cumsum(lengths) - lengths  # position in `blocks` of each list's head
        self.reserve(len(blocks) + len(free))
        head, tail, degrees, place, held, after, before, unused = self.tables()
        filled = np.flatnonzero(degree)
        head[filled] = blocks[first[filled]]
        tail[filled] = blocks[first[filled] + lengths[filled] - 1]
        degrees[: len(degree)] = degree
        inner = np.repeat(np.arange(len(degree)), lengths)
        same = np.flatnonzero(inner[1:] == inner[:-1])
        after[blocks], before[blocks] = NONE, NONE
        after[blocks[same]], before[blocks[same + 1]] = blocks[same + 1], blocks[same]
        at = np.arange(len(items)) - np.repeat(np.cumsum(degree) - degree, degree)
        places = blocks[np.repeat(first, degree) + at // size] * size + at % size
        held[places], place[items] = items, places
        unused[: len(free)] = free
        self.block_count, self.free_top = len(blocks) + len(free), len(free)

    def _bind(self) -> None:
        self.head, self.tail, self.degree = self._head.cells, self._tail.cells, self._degree.cells
        self.place = self._place.cells
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
    """The compiled loops of bulk edits."""
    from . import kernels as compiled  # loads numba: only when a batch is large enough to pay for it

    return compiled
