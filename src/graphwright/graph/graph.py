"""The editable graph: a directed multigraph with stable handles and exactly undoable edits.

A graph has two slot tables with typed columns, and per node an out-list and an in-list of edge slots; no tensors.
Invariants: every live edge is once in its source's out-list and once in its target's in-list; a handle names one
element forever; an edit that raises leaves the graph unchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

from graphwright.graph import bulk, sorting, state
from graphwright.graph.slots import SlotTable

from ..errors import UsageError
from .buckets import NONE, Buckets
from .errors import EditBusy, NotUndoable
from .handles import EDGE_BIT, INDEX, EdgeArray, EdgeId, NodeArray, NodeId, as_edge, as_node
from .records import RemovedEdge, RemovedNode, RewiredEdge, check_record
from .views import TableView

MAX_GENERATION = INDEX

_removed_edge = cast("Callable[[tuple[Any, ...]], RemovedEdge]", partial(tuple[Any, ...].__new__, RemovedEdge))
"""Make a record from its fields; half the time of calling the dataclass."""


class Graph:
    """A directed multigraph; parallel edges and self-loops are allowed.

    Args:
        node_columns: name -> dtype, (dtype, default) or ColumnSpec, one value per node.
        edge_columns: the same per edge.
        block: number of edges per memory block of an adjacency list.
        max_generation: a slot is retired after it has issued `max_generation - 1` handles.
        debug_counters: count the array elements that single edits read or write, in `cells_touched`; slow.
        timeout: seconds an edit waits for another thread's edit before `EditBusy`.

    Functions in the list `on_move` are called after any array of `buffers()` was reallocated.
    """

    def __init__(
        self, node_columns: Mapping[str, Any] | None = None, edge_columns: Mapping[str, Any] | None = None,
        block: int = 16, max_generation: int = MAX_GENERATION, debug_counters: bool = False, timeout: float = 5.0,
    ) -> None:  # fmt: skip
        self._counter = [0] if debug_counters else None
        self._node_table = SlotTable(NodeId, node_columns or {}, max_generation, self._counter)
        self._edge_table = SlotTable(EdgeId, edge_columns or {}, max_generation, self._counter)
        self._source = self._edge_table.attach("source", NONE)
        self._target = self._edge_table.attach("target", NONE)
        self._out = Buckets(self._node_table, self._edge_table, block, self._counter)
        self._in = Buckets(self._node_table, self._edge_table, block, self._counter)
        self._node_table.on_grow.append(self._bind)
        self._edge_table.on_grow.append(self._bind)
        self.on_move: list[Callable[[], None]] = []
        for part in (self._node_table, self._edge_table, self._out, self._in):
            part.on_grow.append(self._moved)
        self._bind()
        self.block, self.max_generation = block, max_generation
        self.version = 0
        self._lock = EditLock(timeout)
        self._acquire, self._release = self._lock.acquire, self._lock.release

    def _bind(self) -> None:
        self._node_ids, self._edge_ids = self._node_table.id_cells, self._edge_table.id_cells
        self._src, self._dst = self._source.cells, self._target.cells

    def _moved(self) -> None:
        for rebind in self.on_move:
            rebind()

    # -- single edits ------------------------------------------------------------------------------------------------
    def add_node(self, **columns: Any) -> NodeId:
        """Add a node; columns not given get their default. O(1).

        Raises: UsageError for an undeclared column, DTypeError for a value that the column cannot hold, CapacityError.
        """
        if not self._acquire(False):  # half the time of `with self._lock`, for the three hottest edits
            self._lock.wait()
        try:
            nodes = self._node_table
            slot = nodes.peek()
            nodes.fill(slot, columns)
            self.version += 1
            return as_node(nodes.issue(slot))
        finally:
            self._release()

    def add_edge(self, src: NodeId, dst: NodeId, **columns: Any) -> EdgeId:
        """Add an edge from `src` to `dst` at the end of both their lists. O(1).

        Raises: StaleHandle, UsageError for an undeclared column, DTypeError for a value it cannot hold, CapacityError.
        """
        if not self._acquire(False):
            self._lock.wait()
        try:
            nodes, edges = self._node_table, self._edge_table
            source, target = nodes.slot(src), nodes.slot(dst)
            slot = edges.peek()
            edges.fill(slot, columns)
            self._out.room(source)
            self._in.room(target)
            self._src[slot] = source
            self._dst[slot] = target
            self._out.append(source, slot)
            self._in.append(target, slot)
            self.version += 1
            return as_edge(edges.issue(slot))
        finally:
            self._release()

    def remove_edge(self, e: EdgeId) -> RemovedEdge:
        """Remove an edge; its handle is stale at once. O(1) at any degree. Raises StaleHandle."""
        if not self._acquire(False):
            self._lock.wait()
        try:
            slot = self._edge_table.slot(e)
            self.version += 1
            return self._drop_edge(slot)
        finally:
            self._release()

    def remove_node(self, n: NodeId) -> RemovedNode:
        """Remove a node and its edges: first its out-edges, then its in-edges, each from the list's end. O(degree).

        Raises: StaleHandle.
        """
        with self._lock:
            node = self._node_table.slot(n)
            edges: list[RemovedEdge] = []
            for side in (self._out, self._in):
                while side.degree[node]:
                    edges.append(self._drop_edge(side.last(node)))
            columns = self._node_table.read(node)
            self._node_table.release(node)
            self.version += 1
            return RemovedNode(as_node(n), columns, tuple(edges))

    def rewire_edge(self, e: EdgeId, src: NodeId | None = None, dst: NodeId | None = None) -> RewiredEdge:
        """Change the source, target or both of an edge; it moves to the end of a changed endpoint's list. O(1).

        The edge keeps its handle, its columns, and its position in the list of an unchanged endpoint.
        Raises: StaleHandle, CapacityError.
        """
        with self._lock:
            nodes = self._node_table
            slot = self._edge_table.slot(e)
            old_source, old_target = self._src[slot], self._dst[slot]
            source = old_source if src is None else nodes.slot(src)
            target = old_target if dst is None else nodes.slot(dst)
            self._out.room(source)
            self._in.room(target)
            out_position = in_position = NONE
            if source != old_source:
                out_position = self._out.remove(old_source, slot)
                self._out.append(source, slot)
                self._src[slot] = source
            if target != old_target:
                in_position = self._in.remove(old_target, slot)
                self._in.append(target, slot)
                self._dst[slot] = target
            self.version += 1
            old, new = self._handles(old_source, old_target), self._handles(source, target)
            return RewiredEdge(as_edge(e), *old, out_position, in_position, *new)

    def _drop_edge(self, slot: int) -> RemovedEdge:
        edges = self._edge_table
        source, target = self._src[slot], self._dst[slot]
        edge = as_edge(self._edge_ids[slot])
        columns = edges.read(slot)
        out_position, in_position = self._out.remove(source, slot), self._in.remove(target, slot)
        edges.release(slot)
        ends = self._handles(source, target)
        return _removed_edge((edge, *ends, columns, out_position, in_position))

    def next_node(self) -> NodeId:
        """Return the handle that the next `add_node` will return. O(1)."""
        return as_node(self._node_table.next_handle())

    def next_edge(self) -> EdgeId:
        """Return the handle that the next `add_edge` will return. O(1)."""
        return as_edge(self._edge_table.next_handle())

    def next_edges(self, count: int) -> EdgeArray:
        """Return the handles that the next `count` calls of `add_edge` will return."""
        return EdgeArray(self._edge_table.next_handles(count))

    @property
    def edge_slots(self) -> int:
        """Number of edge slots ever used: one more than the greatest index of a handle."""
        return self._edge_table.size

    # -- restores ----------------------------------------------------------------------------------------------------
    def restore_edge(self, record: RemovedEdge) -> EdgeId:
        """Undo the removal of an edge, or redo its insertion with the record that undoing the insertion returned. O(1).

        The edge gets back its handle, columns and positions in both lists. Columns declared since get their default.
        Raises: NotUndoable if later edits were not undone first; StaleHandle if an endpoint is gone.
        """
        check_record(record, RemovedEdge)
        with self._lock:
            source, target = self._node_table.slot(record.source), self._node_table.slot(record.target)
            slot = self._edge_table.check_revive(record.edge)
            out_fits = self._out.fits(source, record.out_position, self._src)
            if not (out_fits and self._in.fits(target, record.in_position, self._dst)):
                what = f"a later edit changed the adjacency lists of {record.edge!r}"
                raise NotUndoable(what, fix="undo later edits first")
            self._out.room(source)
            self._in.room(target)
            self._edge_table.fill(slot, record.columns)
            self._src[slot], self._dst[slot] = source, target
            self._out.restore(source, slot, record.out_position)
            self._in.restore(target, slot, record.in_position)
            self._edge_table.revive(slot, record.edge)
            self.version += 1
            return as_edge(record.edge)

    def restore_node(self, record: RemovedNode) -> NodeId:
        """Undo the removal of a node, or redo its insertion, and restore the edges removed with it. O(degree).

        Raises: NotUndoable if later edits were not undone first.
        """
        check_record(record, RemovedNode)
        with self._lock:
            nodes = self._node_table
            slot = nodes.check_revive(record.node)
            nodes.fill(slot, record.columns)
            nodes.revive(slot, record.node)
            restored: list[EdgeId] = []
            try:
                for edge in reversed(record.edges):
                    restored.append(Graph.restore_edge(self, edge))
            except UsageError:
                for edge_id in reversed(restored):
                    self._drop_edge(edge_id & INDEX)
                nodes.release(slot)
                raise
            self.version += 1
            return as_node(record.node)

    def restore_rewire(self, record: RewiredEdge) -> RewiredEdge:
        """Undo a rewire, also of adjacency-list positions; return a record with which this method redoes it. O(1).

        Raises: NotUndoable if later edits were not undone first; StaleHandle.
        """
        check_record(record, RewiredEdge)
        with self._lock:
            slot = self._edge_table.slot(record.edge)
            source, target = self._node_table.slot(record.source), self._node_table.slot(record.target)
            now = self._handles(self._src[slot], self._dst[slot])
            if now != (record.new_source, record.new_target):
                what = f"cannot undo the rewiring of {record.edge!r}: a later edit rewired it again"
                raise NotUndoable(what, fix="undo later edits first")
            out_position = self._put_back(self._out, self._src, slot, source, record.out_position)
            try:
                in_position = self._put_back(self._in, self._dst, slot, target, record.in_position)
            except NotUndoable:
                self._put_back(self._out, self._src, slot, record.new_source & INDEX, out_position)
                raise
            self.version += 1
            return RewiredEdge(record.edge, *now, out_position, in_position, record.source, record.target)

    def _put_back(self, side: Buckets, owner: Any, slot: int, node: int, position: int) -> int:
        if position == NONE:
            return NONE
        side.room(node)
        now = owner[slot]
        left = side.remove(now, slot)
        if not side.fits(node, position, owner):
            side.restore(now, slot, left)
            edge = as_edge(self._edge_ids[slot])
            raise NotUndoable(f"a later edit changed the adjacency lists of {edge!r}", fix="undo later edits first")
        side.restore(node, slot, position)
        owner[slot] = node
        return left

    # -- bulk edits, in bulk.py --------------------------------------------------------------------------------------
    add_nodes = bulk.add_nodes
    add_edges = bulk.add_edges
    remove_nodes = bulk.remove_nodes
    remove_edges = bulk.remove_edges
    rewire_edges = bulk.rewire_edges
    restore_nodes = bulk.restore_nodes
    restore_edges = bulk.restore_edges
    restore_rewires = bulk.restore_rewires
    clear = bulk.clear

    # -- orders of lists, in sorting.py ------------------------------------------------------------------------------
    save_lists = sorting.save_lists
    sort_lists = sorting.sort_lists
    restore_lists = sorting.restore_lists

    # -- columns -----------------------------------------------------------------------------------------------------
    @property
    def nodes(self) -> TableView[NodeArray]:
        """The table of nodes: `nodes()` returns all handles, `nodes[name]` is the column of this name."""
        return TableView(self, self._node_table, NodeArray)

    @property
    def edges(self) -> TableView[EdgeArray]:
        """The table of edges: `edges()` returns all handles, `edges[name]` is the column of this name."""
        return TableView(self, self._edge_table, EdgeArray)

    def node(self, n: NodeId, name: str) -> Any:
        """Return one column of one node. Raises StaleHandle, UsageError for an undeclared column."""
        slot = self._node_table.slot(n)
        try:
            return self._node_table.cells[name][slot]
        except KeyError:
            raise self._node_table.no_column(name) from None

    def edge(self, e: EdgeId, name: str) -> Any:
        """Return one column of one edge. Raises StaleHandle, UsageError for an undeclared column."""
        slot = self._edge_table.slot(e)
        try:
            return self._edge_table.cells[name][slot]
        except KeyError:
            raise self._edge_table.no_column(name) from None

    def set_node(self, n: NodeId, /, **columns: Any) -> None:
        """Write columns of one node, all or none. Raises StaleHandle, UsageError, DTypeError."""
        with self._lock:
            self._node_table.update(self._node_table.slot(n), columns)
            self.version += 1

    def set_edge(self, e: EdgeId, /, **columns: Any) -> None:
        """Write columns of one edge, all or none. Raises StaleHandle, UsageError, DTypeError."""
        with self._lock:
            self._edge_table.update(self._edge_table.slot(e), columns)
            self.version += 1

    # -- queries -----------------------------------------------------------------------------------------------------
    @property
    def node_count(self) -> int:
        """Number of nodes."""
        return self._node_table.live

    @property
    def edge_count(self) -> int:
        """Number of edges."""
        return self._edge_table.live

    def contains(self, handle: int) -> bool:
        """Return True if a handle of a node or an edge is alive here; the same as `handle in graph`."""
        return (self._edge_table if handle & EDGE_BIT else self._node_table).owns(handle)

    def __contains__(self, handle: object) -> bool:
        return isinstance(handle, int) and self.contains(handle)

    def endpoints(self, e: EdgeId) -> tuple[NodeId, NodeId]:
        """Return the source and target of an edge. Raises StaleHandle."""
        slot = self._edge_table.slot(e)
        return self._handles(self._src[slot], self._dst[slot])

    def source(self, e: EdgeId) -> NodeId:
        """Return the source of an edge. Raises StaleHandle."""
        return as_node(self._node_ids[self._src[self._edge_table.slot(e)]])

    def target(self, e: EdgeId) -> NodeId:
        """Return the target of an edge. Raises StaleHandle."""
        return as_node(self._node_ids[self._dst[self._edge_table.slot(e)]])

    def out_edges(self, n: NodeId) -> tuple[EdgeId, ...]:
        """Return a copy of the out-edges of a node, in adjacency-list order. O(degree). Raises StaleHandle."""
        return self._edges_at(self._out, n)

    def in_edges(self, n: NodeId, by: str | None = None) -> tuple[EdgeId, ...]:
        """Return a copy of the in-edges of a node, in adjacency-list order or sorted by the edge column `by`.

        O(degree), to sort O(degree · log degree). Removing an edge changes the order of the list; to keep an order of
        edges, store it in a column. Raises StaleHandle, UsageError for an undeclared column.
        """
        return self._edges_at(self._in, n) if by is None else self._handles_of(self._sorted_in(n, by))

    def sources(self, n: NodeId, by: str, column: str) -> tuple[list[NodeId], list[Any]]:
        """Return the sources of a node's in-edges and the edges' values of a column, both sorted by the column `by`.

        O(degree · log degree). Raises StaleHandle, UsageError for an undeclared column.
        """
        slots, ids, src = self._sorted_in(n, by), self._node_ids, self._src
        cells = self._cells_of(column)
        return [as_node(ids[src[slot]]) for slot in slots], [cells[slot] for slot in slots]

    def successors(self, n: NodeId) -> tuple[NodeId, ...]:
        """Return the distinct targets of a node's out-edges, in the edges' order. O(degree). Raises StaleHandle."""
        return self._nodes_at(self._out.edges(self._node_table.slot(n)), self._dst)

    def predecessors(self, n: NodeId) -> tuple[NodeId, ...]:
        """Return the distinct sources of a node's in-edges, in the edges' order. O(degree). Raises StaleHandle."""
        return self._nodes_at(self._in.edges(self._node_table.slot(n)), self._src)

    def neighbors(self, n: NodeId) -> tuple[NodeId, ...]:
        """Return the successors, then the predecessors that are not successors. O(degree). Raises StaleHandle."""
        return tuple(dict.fromkeys(self.successors(n) + self.predecessors(n)))

    def out_degree(self, n: NodeId) -> int:
        """Return the number of out-edges of a node. O(1). Raises StaleHandle."""
        return self._out.degree[self._node_table.slot(n)]

    def in_degree(self, n: NodeId) -> int:
        """Return the number of in-edges of a node. O(1). Raises StaleHandle."""
        return self._in.degree[self._node_table.slot(n)]

    def has_edge(self, u: NodeId, v: NodeId) -> bool:
        """Return True if there is an edge from `u` to `v`; scans the shorter of the two lists. Raises StaleHandle."""
        return bool(self._between(u, v))

    def edges_between(self, u: NodeId, v: NodeId) -> tuple[EdgeId, ...]:
        """Return all parallel edges from `u` to `v`, in slot order; scans the shorter list. Raises StaleHandle."""
        ids = self._edge_ids
        return tuple(as_edge(ids[slot]) for slot in sorted(self._between(u, v)))

    def _between(self, u: NodeId, v: NodeId) -> list[int]:
        source, target = self._node_table.slot(u), self._node_table.slot(v)
        if self._out.degree[source] <= self._in.degree[target]:
            return [e for e in self._out.edges(source) if self._dst[e] == target]
        return [e for e in self._in.edges(target) if self._src[e] == source]

    def _edges_at(self, side: Buckets, n: NodeId) -> tuple[EdgeId, ...]:
        return self._handles_of(side.edges(self._node_table.slot(n)))

    def _handles_of(self, slots: list[int]) -> tuple[EdgeId, ...]:
        packed: Callable[[int], int] = self._edge_ids.__getitem__
        return tuple(map(as_edge, map(packed, slots)))

    def _sorted_in(self, n: NodeId, by: str) -> list[int]:
        """Return the slots of a node's in-edges, sorted by the edge column `by`."""
        slots, key = self._in.edges(self._node_table.slot(n)), self._cells_of(by).__getitem__
        return sorted(slots, key=key) if len(slots) > 1 else slots

    def _cells_of(self, column: str) -> Any:
        """Return the cells of an edge column. Raises: UsageError for an undeclared one."""
        return self._edge_table.column(column).cells

    def _nodes_at(self, edges: list[int], end: Any) -> tuple[NodeId, ...]:
        ids = self._node_ids
        other: Callable[[int], int] = end.__getitem__
        return tuple(as_node(ids[slot]) for slot in dict.fromkeys(map(other, edges)))

    def _handles(self, source: int, target: int) -> tuple[NodeId, NodeId]:
        ids = self._node_ids
        return as_node(ids[source]), as_node(ids[target])

    # -- whole graph, in state.py ------------------------------------------------------------------------------------
    hash = state.structure_hash
    to_dict = state.to_dict
    from_dict = classmethod(state.from_dict)
    copy = state.copy
    snapshot = state.snapshot
    memory = state.memory
    csr = state.csr
    csc = state.csc
    adjacency = state.adjacency
    normalized_adjacency = state.normalized_adjacency
    from_coo = classmethod(state.from_coo)

    buffers = state.buffers

    def reserve(self, nodes: int = 0, edges: int = 0) -> None:
        """Reserve memory for this many nodes and edges in total. Raises CapacityError."""
        with self._lock:
            self._node_table.reserve(nodes)
            self._edge_table.reserve(edges)

    @property
    def cells_touched(self) -> int:
        """Number of array elements that single edits and queries have read or written. Needs `debug_counters=True`."""
        if self._counter is None:
            raise UsageError("cells_touched was not counted: debug counters are off", fix="Graph(debug_counters=True)")
        return self._counter[0]

    @property
    def describe(self) -> Callable[[Any], tuple[str | None, str | None]] | None:
        """A function that maps a removed handle to (what it named, edit that removed it) for `StaleHandle`; or None."""
        return self._node_table.describe

    @describe.setter
    def describe(self, ask: Callable[[Any], tuple[str | None, str | None]] | None) -> None:
        self._node_table.describe = self._edge_table.describe = ask

    # -- one writer at a time ----------------------------------------------------------------------------------------
    @contextmanager
    def locked(self, timeout: float | None = None) -> Generator[None]:
        """Hold the edit lock for a `with` block; other threads' edits wait. Raises EditBusy after `timeout` seconds."""
        self._lock.wait(timeout)
        try:
            yield
        finally:
            self._lock.__exit__()

    def writing(self) -> AbstractContextManager[None]:
        """Return a context that locks the graph for writing columns."""
        return self.locked()

    @property
    def timeout(self) -> float:
        """Seconds that an edit waits for another thread's edit."""
        return self._lock.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._lock.timeout = seconds

    def __repr__(self) -> str:
        return f"Graph({self.node_count} nodes, {self.edge_count} edges, version {self.version})"


class EditLock:
    """A re-entrant lock; another thread waits at most `timeout` seconds for it, then raises `EditBusy`."""

    __slots__ = ("acquire", "release", "timeout")

    def __init__(self, timeout: float) -> None:
        lock = threading.RLock()
        self.acquire, self.release, self.timeout = lock.acquire, lock.release, timeout

    def wait(self, timeout: float | None = None) -> None:
        """Take the lock within `timeout` seconds (by default the lock's own timeout). Raises EditBusy."""
        timeout = self.timeout if timeout is None else timeout
        if not self.acquire(timeout=timeout):
            raise EditBusy("another thread is editing this graph", expected=f"the edit lock within {timeout} s",
                           fix="read through graph.snapshot(), or set a longer graph.timeout")  # fmt: skip

    def __enter__(self) -> None:
        if not self.acquire(False):
            self.wait()

    def __exit__(self, *_: object) -> None:
        self.release()


def warmup() -> None:
    """Compile the bulk edits before their first use, by running each on a large graph; numba caches the code."""
    graph = Graph(edge_columns={"weight": "f4"})
    nodes = graph.add_nodes(2048)
    edges = graph.add_edges(nodes[:-1], nodes[1:], weight=0.0)
    graph.restore_rewires(graph.rewire_edges(edges, dst=nodes[:-1]))
    graph.restore_edges(graph.remove_edges(edges))
    graph.remove_nodes(nodes)
