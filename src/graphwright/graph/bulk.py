"""Bulk edits; the result equals that of a loop of single edits, down to handles and adjacency-list positions.

Everything is checked before the first write: handles, duplicates, column types and ranges, capacity. The functions are
methods of `Graph`. Small batches run in plain Python; only large ones load compiled code.
"""

# pyright: reportPrivateUsage=false
# The files of this folder share private attributes of a graph.
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.graph.slots import Array, Column, SlotTable

from ..errors import UsageError
from .buckets import NONE, Buckets
from .errors import NotUndoable
from .handles import EdgeArray, Handle, HandleArray, NodeArray
from .records import RemovedEdges, RemovedNodes, RewiredEdges, check_record
from .views import Mask, packed, selected

if TYPE_CHECKING:
    from graphwright.graph.graph import Graph

Handles = HandleArray[Any] | Iterable[int] | Array  # handles in any form: an array of them, a sequence, or packed int64


def add_nodes(self: Graph, n: int, /, **columns: Any) -> NodeArray:
    """Add `n` nodes; each keyword sets a column, to one value for all nodes or to one value per node.

    Raises: UsageError for an undeclared column or a wrong length, DTypeError, CapacityError; then nothing is added.
    """
    with self._lock:
        table = self._node_table
        if n < 0:
            raise UsageError("the number of nodes is negative", expected="n >= 0", got=n)
        rows = _rows(table, columns, n)
        slots = table.issue_many(n)
        _write(slots, rows)
        self.version += 1
        return NodeArray(table.ids[slots])


def add_edges(self: Graph, src: Handles | Handle, dst: Handles | Handle, **columns: Any) -> EdgeArray:
    """Add an edge for each pair of `src` and `dst`; a single handle is paired with all of the other side.

    Raises: StaleHandle with the first bad row, UsageError, DTypeError, CapacityError; then nothing is added.
    """
    with self._lock:
        table = self._edge_table
        sources, targets = np.atleast_1d(packed(src)), np.atleast_1d(packed(dst))
        if len(sources) != len(targets) and 1 not in (len(sources), len(targets)):
            got = f"{len(sources)} sources, {len(targets)} targets"
            raise UsageError("src and dst differ in length", expected="equal lengths, or one handle", got=got)
        sources, targets = np.broadcast_arrays(sources, targets)
        s, t = (self._node_table.slots_of(ids, distinct=False) for ids in (sources, targets))
        rows = _rows(table, columns, len(s))
        self._out.room_many(s)
        self._in.room_many(t)
        slots = table.issue_many(len(s))
        _write(slots, rows)
        self._source.data[slots], self._target.data[slots] = s, t
        self._out.append_many(s, slots)
        self._in.append_many(t, slots)
        self.version += 1
        return EdgeArray(table.ids[slots])


def remove_edges(self: Graph, which: Handles | Mask) -> RemovedEdges:
    """Remove the edges of an id array, a sequence of handles, or a mask over the live edges (in slot order).

    Raises: StaleHandle with the first bad row, UsageError for a duplicate id; then nothing is removed.
    """
    with self._lock:
        slots = self._edge_table.slots_of(selected(self._edge_table, which), distinct=True)
        s, t = self._source.data[slots], self._target.data[slots]
        out_positions = self._out.remove_many(s, slots)
        in_positions = self._in.remove_many(t, slots)
        self.version += 1
        return _released(self, slots, out_positions, in_positions)


def remove_nodes(self: Graph, which: Handles | Mask) -> RemovedNodes:
    """Remove nodes with all their edges, node by node as `remove_node` does.

    Raises: StaleHandle with the first bad row, UsageError for a duplicate id; then nothing is removed.
    """
    with self._lock:
        table = self._node_table
        slots = table.slots_of(selected(table, which), distinct=True)
        edges = _released(self, *self._out.drain_many(self._in, slots, (self._source, self._target)))
        columns = {name: column.take(slots) for name, column in table.columns.items()}
        nodes = NodeArray(table.ids[slots])
        table.release_many(slots)
        self.version += 1
        return RemovedNodes(nodes, columns, edges)


def clear(self: Graph) -> RemovedNodes:
    """Remove all nodes and edges, last node first, and return the undo record. No old handle is issued again."""
    with self._lock:
        return remove_nodes(self, self._node_table.ids[self._node_table.live_slots()[::-1]])


def rewire_edges(
    self: Graph, ids: Handles | Mask, src: Handles | Handle | None = None, dst: Handles | Handle | None = None
) -> RewiredEdges:
    """Change the sources, targets or both of edges, in order; a single handle is the new end of all edges.

    Raises: StaleHandle with the first bad row, UsageError for a duplicate edge; then nothing changes.
    """
    with self._lock:
        slots = self._edge_table.slots_of(selected(self._edge_table, ids), distinct=True)
        old = self._source.data[slots], self._target.data[slots]
        new: list[Array] = []
        for given, kept in zip((src, dst), old, strict=True):
            if given is None:
                new.append(kept)
            else:
                rows = packed(given)
                if rows.ndim and len(rows) != len(slots):
                    wanted, got = f"one handle, or {len(slots)} handles", f"{len(rows)} handles"
                    raise UsageError("new endpoints and edges differ in number", expected=wanted, got=got)
                new.append(self._node_table.slots_of(np.broadcast_to(rows, len(slots)), distinct=False))
        sides = (self._out, self._source), (self._in, self._target)
        for (side, _), before, after in zip(sides, old, new, strict=True):
            side.room_many(after[before != after])
        positions: list[Array] = []
        for (side, owner), before, after in zip(sides, old, new, strict=True):
            positions.append(side.move_many(before, after, slots))
            owner.data[slots] = after
        ids_of = self._node_table.ids
        s, t, new_s, new_t = (NodeArray(ids_of[end]) for end in (*old, *new))
        self.version += 1
        return RewiredEdges(EdgeArray(self._edge_table.ids[slots]), s, t, positions[0], positions[1], new_s, new_t)


def restore_edges(self: Graph, record: RemovedEdges) -> EdgeArray:
    """Undo a bulk removal, or redo a bulk insertion, restoring handles, columns and adjacency-list positions.

    Raises: NotUndoable if later edits were not undone first, StaleHandle if an endpoint is gone; then nothing changes.
    """
    check_record(record, RemovedEdges)
    with self._lock:
        _revive_edges(self, record)
        self.version += 1
        return record.edges


def restore_nodes(self: Graph, record: RemovedNodes) -> NodeArray:
    """Undo a bulk removal of nodes, edges included.

    Raises: NotUndoable if later edits were not undone first; then nothing changes.
    """
    check_record(record, RemovedNodes)
    with self._lock:
        table, handles = self._node_table, record.nodes.ids[::-1]
        slots = table.check_revive_many(handles)
        table.revive_many(slots, handles)
        try:
            _revive_edges(self, record.edges)
        except UsageError:
            table.release_many(slots[::-1])
            raise
        _write(slots[::-1], _rows(table, record.columns, len(slots)))
        self.version += 1
        return record.nodes


def restore_rewires(self: Graph, record: RewiredEdges) -> RewiredEdges:
    """Undo a bulk rewire, also of adjacency-list positions; return a record with which this function redoes it.

    Raises: NotUndoable if later edits were not undone first; then nothing changes.
    """
    check_record(record, RewiredEdges)
    with self._lock:
        back = slice(None, None, -1)
        slots = self._edge_table.slots_of(record.edges.ids[back], distinct=True)
        left: list[Array] = []
        sides = (
            (self._out, self._source, record.sources, record.new_sources, record.out_positions),
            (self._in, self._target, record.targets, record.new_targets, record.in_positions),
        )
        for _, owner, _, new, _ in sides:
            if not np.array_equal(self._node_table.ids[owner.data[slots]], new.ids[back]):
                raise NotUndoable("a later edit rewired one of these edges", fix="undo later edits first")
        for side, owner, old, _, positions in sides:
            nodes = self._node_table.slots_of(old.ids[back], distinct=False)
            side.room_many(nodes[positions[back] != NONE])
            before = owner.data[slots]
            gone, done = side.unmove_many(nodes, slots, positions[back], owner)
            if done < len(slots):
                _redo(side, owner, before[:done], slots[:done], gone[:done])
                if left:
                    _redo(self._out, self._source, record.new_sources.index[back], slots, left[0])
                raise NotUndoable("a later edit changed adjacency lists of these edges", fix="undo later edits first")
            left.append(gone)
        self.version += 1
        new_ends = (record.new_sources[back], record.new_targets[back])
        return RewiredEdges(record.edges[back], *new_ends, left[0], left[1], record.sources[back], record.targets[back])


def _rows(table: SlotTable, given: Any, count: int) -> list[tuple[Column, Any]]:
    for name in given:
        table.column(name)
    return [(c, c.cast(given.get(name, c.default), count)) for name, c in table.columns.items()]


def _write(slots: Array, rows: list[tuple[Column, Any]]) -> None:
    for column, values in rows:
        column.put(slots, values)


def _released(self: Graph, slots: Array, out_positions: Array, in_positions: Array) -> RemovedEdges:
    table, node_ids = self._edge_table, self._node_table.ids
    sources, targets = (NodeArray(node_ids[end.data[slots]]) for end in (self._source, self._target))
    columns = {name: column.take(slots) for name, column in table.columns.items()}
    record = RemovedEdges(EdgeArray(table.ids[slots]), sources, targets, columns, out_positions, in_positions)
    table.release_many(slots)
    return record


def _revive_edges(self: Graph, record: RemovedEdges) -> None:
    table, handles = self._edge_table, record.edges.ids[::-1]
    slots = table.check_revive_many(handles)
    s, t = (self._node_table.slots_of(ends.ids[::-1], distinct=False) for ends in (record.sources, record.targets))
    rows = _rows(table, record.columns, len(slots))
    self._out.room_many(s)
    self._in.room_many(t)
    self._source.data[slots], self._target.data[slots] = s, t
    done = self._out.restore_many(s, slots, record.out_positions[::-1], self._source)
    fitted = done == len(slots)
    if fitted:
        entered = self._in.restore_many(t, slots, record.in_positions[::-1], self._target)
        fitted = entered == len(slots)
        if not fitted:
            self._in.remove_many(t[:entered][::-1], slots[:entered][::-1])
    if not fitted:
        self._out.remove_many(s[:done][::-1], slots[:done][::-1])
        raise NotUndoable("a later edit changed adjacency lists of these edges", fix="undo later edits first")
    table.revive_many(slots, handles)
    _write(slots[::-1], rows)


def _redo(side: Buckets, owner: Column, nodes: Array, slots: Array, positions: Array) -> None:
    back = slice(None, None, -1)
    side.unmove_many(nodes[back], slots[back], positions[back], owner)
