"""One direction of the adjacency: per node a list of edge slots, stored in chained blocks of fixed size.

`items[b*B : b*B + B]` are the entries of block b. Only the tail block of a list is partly filled, and each edge stores
its index in `items`, so a deletion swaps in the last entry: O(1) at any degree. Free blocks form a LIFO list; undoing
insertions and deletions in reverse order restores the index of every edge.

Each edit is one function, which runs as plain Python for single edits and compiled for large batches. Its argument
`tables` is (head, tail, degree, position, items, next, prev, free); `state`: [blocks ever used, top of the free list].
Blocks are reserved before an edit runs, so no edit allocates or fails.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

import numpy as np

from graphwright.graph.slots import Array, CellCounter, Column, SlotTable, aligned, aligned_copy, cells_of, grown

from ..errors import UsageError
from .errors import CapacityError
from .handles import INDEX

NONE = -1
MAX_ENTRIES = INDEX
BULK_MIN = 256  # batches with fewer rows run as a loop of single edits, which is faster than loading compiled code


class Buckets:
    """The out-lists (or the in-lists) of all nodes of a graph; all lists have their entries in one array, `items`.

    Nodes and edges are given by their slots (table indices).
    """

    def __init__(self, nodes: SlotTable, edges: SlotTable, block: int, counter: CellCounter | None) -> None:
        if not 1 <= block <= 1 << 16:
            raise UsageError("`block` is out of range", expected="1 to 65536 edges per block", got=block)
        self.block, self._counter = block, counter
        self._head = nodes.attach("head", NONE)
        self._tail = nodes.attach("tail", NONE)
        self._degree = nodes.attach("degree", 0)
        self._position = edges.attach("position", NONE)
        self.state = [0, 0]  # blocks ever used, top of the free list
        self.capacity = 0
        self._blocks = [np.empty(0, np.int32) for _ in range(4)]  # items, next, prev, free
        self.on_grow: list[Callable[[], None]] = []
        nodes.on_grow.append(self._bind)
        edges.on_grow.append(self._bind)
        self._bind()

    def _bind(self) -> None:
        self.degree: Any = self._degree.cells
        self._cells = (self._head.cells, self._tail.cells, self.degree, self._position.cells,
                       *(cells_of(b, self._counter) for b in self._blocks))  # fmt: skip
        self.append = partial(append, self._cells, self.state, self.block)
        self.remove = partial(remove, self._cells, self.state, self.block)
        self.restore = partial(restore, self._cells, self.state, self.block)
        self.fits = partial(fits, self._cells, self.state, self.block)
        self.last = partial(last_edge, self._cells, self.block)

    # -- single -----------------------------------------------------------------------------------------------------
    def edges(self, node: int) -> list[int]:
        """Return the slots of a node's edges, in the order of its list."""
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
        """Reserve memory for `blocks` blocks. Raises CapacityError if they have more than 2^31 - 1 entries."""
        if blocks <= self.capacity:
            return
        most = MAX_ENTRIES // self.block
        if blocks > most:
            expected = f"at most {most} blocks of {self.block} edges"
            raise CapacityError("too many edges for adjacency lists", expected=expected, got=f"{blocks} blocks")
        self.capacity = min(grown(self.capacity, blocks), most)
        for i, old in enumerate(self._blocks):
            new = aligned(self.capacity * (self.block if i == 0 else 1), np.int32)
            new[: len(old)], new[len(old) :] = old, NONE
            self._blocks[i] = new
        self._bind()
        for rebind in self.on_grow:
            rebind()

    def room(self, node: int) -> None:
        """Reserve the block that the next `append` or `restore` at a node may need. Raises CapacityError."""
        used, free = self.state
        if not free and used == self.capacity and self.degree[node] % self.block == 0:
            self.reserve(used + 1)

    # -- many -------------------------------------------------------------------------------------------------------
    def room_many(self, nodes: Array) -> None:
        """Reserve the blocks that are needed to append one edge to the list of each of `nodes`."""
        needed = self._run(blocks_needed, nodes)
        self.reserve(self.state[0] + max(int(needed) - self.state[1], 0))

    def append_many(self, nodes: Array, edges: Array) -> None:
        """Append each edge to its node's list, in order; call `room_many` first."""
        self._run(append_many, nodes, edges)

    def remove_many(self, nodes: Array, edges: Array) -> Array:
        """Remove each edge from its node's list, in order; return the indices in `items` that they had."""
        left = np.empty(len(edges), np.int64)
        self._run(remove_many, nodes, edges, left=left)
        return left

    def restore_many(self, nodes: Array, edges: Array, positions: Array, owner: Column) -> int:
        """Put removed edges back at `positions`, the indices in `items` that they had; return how many are back.

        Stops at the first index that is no longer valid. Call `room_many` first. `owner` is the column with the node of
        each edge.
        """
        return int(self._run(restore_many, nodes, edges, positions, owner=owner))

    def move_many(self, old: Array, new: Array, edges: Array) -> Array:
        """Move each edge from its `old` node's list to its `new` node's; return old indices, -1 for equal nodes."""
        left = np.full(len(edges), NONE)
        self._run(move_many, old, new, edges, left=left)
        return left

    def unmove_many(self, nodes: Array, edges: Array, positions: Array, owner: Column) -> tuple[Array, int]:
        """Undo `move_many`, given its edges in reverse order: move each back to its old node and its old index.

        `positions` are the old indices, as `move_many` returned them; `owner` is the column with the node of each edge.
        Returns the indices that the edges had until now (-1 if not moved), and the number of edges moved back, which
        is smaller than that of all edges if an old index is no longer valid.
        """
        left = np.full(len(edges), NONE)
        return left, int(self._run(unmove_many, nodes, edges, positions, left=left, owner=owner))

    def drain_many(self, into: Buckets, nodes: Array, ends: tuple[Column, Column]) -> Array:
        """Remove all edges of `nodes` from these out-lists and from the in-lists `into`; `ends` = (sources, targets).

        Returns: int64 [3, n] with edge slots, their out-list indices and in-list indices, in the order of removal.
        """
        bound = int((self.degrees[nodes] + into.degrees[nodes]).sum())
        rows = np.empty((3, bound), np.int64)
        if bound < BULK_MIN:
            sides = self._cells, self.state, self.block, into._cells, into.state
            done = drain(*sides, nodes.tolist(), tuple(end.cells for end in ends), rows)
        else:
            states = [np.array(side.state, np.int64) for side in (self, into)]
            sides = self.tables(), states[0], self.block, into.tables(), states[1]
            done = compiled()["drain"](*sides, nodes, tuple(end.data for end in ends), rows)
            self.state[:], into.state[:] = (state.tolist() for state in states)
        return rows[:, :done].copy()

    def _run(self, kernel: Callable[..., Any], *rows: Array, left: Any = None, owner: Column | None = None) -> Any:
        """Call a function of this module on the arrays `rows`, `left` and `owner`; compiled if `rows` are long."""
        few = len(rows[0]) < BULK_MIN
        extra: list[Any] = [] if left is None else [left]
        if owner is not None:
            extra.append(owner.cells if few else owner.data)
        if few:
            lists = [row.tolist() for row in rows]
            return kernel(self._cells, self.state, self.block, *lists, *extra)
        state = np.array(self.state, np.int64)
        same = [np.ascontiguousarray(row, np.int64) for row in rows]  # so that each kernel is compiled once
        result = compiled()[kernel.__name__](self.tables(), state, self.block, *same, *extra)
        self.state[:] = state.tolist()
        return result

    def tables(self) -> tuple[Array, ...]:
        """Return the arrays head, tail, degree (per node), position (per edge), items, next, prev (per block), free."""
        inner = (self._head.data, self._tail.data, self._degree.data, self._position.data)
        return (*inner, *self._blocks)

    # -- state ------------------------------------------------------------------------------------------------------
    @property
    def positions(self) -> Array:
        """The index of each edge slot in `items`; meaningless for free slots."""
        return self._position.data

    @property
    def degrees(self) -> Array:
        """The length of each node slot's list; 0 for free slots."""
        return self._degree.data

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks, unused capacity included; `SlotTable.nbytes` counts the columns."""
        return sum(b.nbytes for b in self._blocks)

    def copy_from(self, other: Buckets) -> None:
        """Copy the blocks and free list of `other`; `SlotTable.copy_from` copies the columns."""
        self.state[:], self.capacity = other.state, other.capacity
        self._blocks = [aligned_copy(b) for b in other._blocks]
        self._bind()

    def relist(self, items: Array, blocks: Array, free: Array, nodes: int) -> None:
        """Replace the order of all lists of the first `nodes` nodes, whose lengths stay; see `load`."""
        head, tail, degree, _, held, _, _, _ = self.tables()
        head[:nodes], tail[:nodes], held[:] = NONE, NONE, NONE
        self.load(degree[:nodes].astype(np.int64), items, blocks, free)

    def load(self, degree: Array, items: Array, blocks: Array, free: Array) -> None:
        """Rebuild all lists, given their lengths, their edges and block numbers in node order, and the free blocks."""
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


Cells = Any  # a memoryview, or an array in compiled code


@cache
def compiled() -> dict[str, Any]:
    """Return the compiled functions of this module by name; they call each other's compiled forms. Loads numba."""
    from graphwright.native import njit

    # _nrt=False: these loops own no array, and reference counts of ten of them cost 20 times the work (measured).
    wrap: Any = njit(cache=True, error_model="numpy", _nrt=False)
    space = dict(globals())
    for name, function in globals().items():
        if isinstance(function, FunctionType) and function.__module__ == __name__:
            space[name] = wrap(FunctionType(function.__code__, space, name))
    return space


def append(tables: Cells, state: Cells, block: int, node: int, edge: int) -> None:
    """Append an edge to a node's list. `tables` and `state`: see the module; `block`: edges per block."""
    _, tail, degree, position_of, items, _, _, _ = tables
    count = degree[node]
    if count % block:
        position = tail[node] * block + count % block
        degree[node] = count + 1
    else:
        position = open_last(tables, state, block, node)
    items[position] = edge
    position_of[edge] = position


def open_last(tables: Cells, state: Cells, block: int, node: int) -> int:
    """Add an entry to a node's list, and a block if the last one is full; return the entry's index in `items`."""
    head, tail, degree, _, _, after, before, free = tables
    count = degree[node]
    degree[node] = count + 1
    old = tail[node]
    if count % block:
        return old * block + count % block
    if state[1]:
        state[1] -= 1
        new = free[state[1]]
    else:
        new = state[0]
        state[0] += 1
    before[new] = old
    after[new] = -1
    if old == -1:
        head[node] = new
    else:
        after[old] = new
    tail[node] = new
    return new * block


def remove(tables: Cells, state: Cells, block: int, node: int, edge: int) -> int:
    """Remove an edge from a node's list by moving the last entry into its index; return that index."""
    head, tail, degree, position_of, items, after, before, free = tables
    position = position_of[edge]
    count = degree[node] - 1
    end = tail[node]
    last = end * block + count % block
    if position != last:
        moved = items[last]
        items[position] = moved
        position_of[moved] = position
    items[last] = -1
    degree[node] = count
    if count % block == 0:
        old = before[end]
        tail[node] = old
        if old == -1:
            head[node] = -1
        else:
            after[old] = -1
        free[state[1]] = end
        state[1] += 1
    return position


def restore(tables: Cells, state: Cells, block: int, node: int, edge: int, position: int) -> None:
    """Undo `remove`: put the edge back at `position`, and move the entry that is there now to the end of the list."""
    items, position_of = tables[4], tables[3]
    last = open_last(tables, state, block, node)
    if position != last:
        moved = items[position]
        items[last] = moved
        position_of[moved] = last
    items[position] = edge
    position_of[edge] = position


def fits(tables: Cells, state: Cells, block: int, node: int, position: int, owner: Cells) -> bool:
    """Return True if `restore` can use `position`: the index in `items` of an edge of the node, or of its next edge.

    `owner[e]` is the node of edge e.
    """
    count = tables[2][node]
    if count % block:
        at = tables[1][node]
    elif state[1]:
        at = tables[7][state[1] - 1]
    else:
        at = state[0]
    if position == at * block + count % block:
        return True
    if position < 0 or position >= state[0] * block:
        return False
    edge = tables[4][position]
    return edge != -1 and owner[edge] == node


def last_edge(tables: Cells, block: int, node: int) -> int:
    """Return the edge at the end of a non-empty list."""
    return tables[4][tables[1][node] * block + (tables[2][node] - 1) % block]


# -- many: `left` receives the old indices ----------------------------------------------------------------------------
def blocks_needed(tables: Cells, state: Cells, block: int, nodes: Cells) -> int:
    """Return the number of blocks that are added when one edge is appended at each of `nodes`."""
    degree = tables[2]
    needed = 0
    for node in nodes:  # counts up in the degrees themselves, then back down: needs no scratch buffer
        needed += degree[node] % block == 0
        degree[node] += 1
    for node in nodes:
        degree[node] -= 1
    return needed


def append_many(tables: Cells, state: Cells, block: int, nodes: Cells, edges: Cells) -> None:
    """Append each edge to the list of its node."""
    for i in range(len(edges)):
        append(tables, state, block, nodes[i], edges[i])


def remove_many(tables: Cells, state: Cells, block: int, nodes: Cells, edges: Cells, left: Cells) -> None:
    """Remove each edge from the list of its node, and write its index in `items` to `left`."""
    for i in range(len(edges)):
        left[i] = remove(tables, state, block, nodes[i], edges[i])


def restore_many(
    tables: Cells, state: Cells, block: int, nodes: Cells, edges: Cells, positions: Cells, owner: Cells
) -> int:
    """Put edges back at their old indices `positions` until one no longer fits; return the number put back."""
    for i in range(len(edges)):
        if not fits(tables, state, block, nodes[i], positions[i], owner):
            return i
        restore(tables, state, block, nodes[i], edges[i], positions[i])
    return len(edges)


def move_many(tables: Cells, state: Cells, block: int, old: Cells, new: Cells, edges: Cells, left: Cells) -> None:
    """Move each edge whose node changes to the end of the new node's list; write its old index in `items` to `left`."""
    for i in range(len(edges)):
        if old[i] != new[i]:
            left[i] = remove(tables, state, block, old[i], edges[i])
            append(tables, state, block, new[i], edges[i])


def unmove_many(
    tables: Cells, state: Cells, block: int, nodes: Cells, edges: Cells, positions: Cells, left: Cells, owner: Cells
) -> int:
    """Move edges back to `nodes` at their old indices `positions` (-1 if not moved), and write these nodes to `owner`.

    `left` receives the indices until now. Stops at the first index that no longer fits; returns how many edges precede.
    """
    for i in range(len(edges)):
        if positions[i] == -1:
            continue
        now = owner[edges[i]]
        here = remove(tables, state, block, now, edges[i])
        left[i] = here
        if not fits(tables, state, block, nodes[i], positions[i], owner):
            restore(tables, state, block, now, edges[i], here)
            return i
        restore(tables, state, block, nodes[i], edges[i], positions[i])
        owner[edges[i]] = nodes[i]
    return len(edges)


def drain(
    out: Cells, out_state: Cells, block: int, into: Cells, into_state: Cells, nodes: Cells, ends: Cells, rows: Cells
) -> int:
    """Remove all edges of each node, out-list first, from the end.

    The three rows of `rows` receive edge, index in the out-lists, index in the in-lists. `ends` are the source and
    target slots by edge slot. Returns the number of edges removed.
    """
    done = 0
    for node in nodes:
        while out[2][node]:
            edge = last_edge(out, block, node)
            rows[0, done] = edge
            rows[1, done] = remove(out, out_state, block, node, edge)
            rows[2, done] = remove(into, into_state, block, ends[1][edge], edge)
            done += 1
        while into[2][node]:
            edge = last_edge(into, block, node)
            rows[0, done] = edge
            rows[1, done] = remove(out, out_state, block, ends[0][edge], edge)
            rows[2, done] = remove(into, into_state, block, node, edge)
            done += 1
    return done
