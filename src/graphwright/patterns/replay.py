"""Apply changes to a pattern: for undo, redo, rollback, and journals of programs."""

# pyright: reportPrivateUsage=false
# The files of this folder share private attributes of a pattern.
from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphwright.graph import EdgeArray, EdgeId, NodeArray, NotUndoable, RemovedEdge, RemovedEdges, as_edge, as_node
from graphwright.graph.handles import INDEX, INDEX_BITS

from ..errors import UsageError
from . import edits, growth, pair_index
from .changes import ADD, CUT, MASK, SCALARS, WRITE, PatternChange
from .masks import Blocks

if TYPE_CHECKING:
    from .pattern import Pattern

Array = npt.NDArray[Any]


def perform(self: Pattern, change: PatternChange) -> None:
    """Apply a change. Raises: NotUndoable, with the pattern unchanged, if it does not fit the pattern."""
    before, after = change.tokens or (self.tokens, self.tokens)
    grows, shrinks = sum(after) > sum(before), sum(after) < sum(before)
    if change.tokens is not None and before != self.tokens:
        raise NotUndoable("the pattern has another length than before the change", expected=before, got=self.tokens,
                          fix="undo later edits first")  # fmt: skip
    if grows:
        growth.resize(self, after, change.segments)
    op = change.rows["op"]
    borders = [0, *(np.flatnonzero(np.diff(op)) + 1).tolist(), len(op)]
    singles: list[Any] | None = None
    for start, end in pairwise(borders):
        try:
            if end == start + 1 and op[start] != WRITE:
                if singles is None:  # rows as tuples: edits of one edge run without arrays
                    singles = list(zip(*(change.rows[name].tolist() for name in _SINGLE), strict=True))
                _one(self, singles[start], change.bits)
            elif start < end:
                rows = {name: array[start:end] for name, array in change.rows.items()}
                _PERFORM[int(op[start])](self, rows, change.bits)
        except UsageError:
            if start:
                done = {name: array[:start] for name, array in change.rows.items()}
                perform(self, PatternChange(done, change.bits).invert())
            if grows:
                growth.resize(self, before, None)
            raise
    if shrinks:
        growth.resize(self, after, None)
    if change.lists is not None:
        self.graph.restore_lists(change.lists[1])
    written = (op == WRITE) & (change.rows["column"] == _GATE)
    if written.any() or (change.rows["gate"] >= 0).any():
        edits.count_gates(self)


_SINGLE = ("op", "source", "target", "generation", "outgoing", "incoming", "kind", "new_mask", *SCALARS)


def _one(self: Pattern, row: tuple[Any, ...], bits: Array) -> None:
    """Add or cut one edge, given the values of _SINGLE; the same as `_add_rows` and `_cut_rows`."""
    op, source, target, generation, outgoing, incoming, kind, mask, gate, score, birth, pinned = row
    index, ids = self._index, self._node_cells
    slot = pair_index.find(index.cells, source, target, self._source_cells, self._target_cells)
    if (slot >= 0) == (op == ADD):
        raise _unfit(self, source, target, exists=op == ADD)
    if op == CUT:
        edits.cut(self, as_edge(self._edge_cells[slot]))
        return
    held = -1 if mask < 0 else edits.keep_mask(self, bits[mask])
    columns = {"kind": kind, "bits": held, "gate": gate, "score": score, "birth": birth, "pinned": pinned}
    ahead = self.graph.next_edge()
    ends = as_node(ids[source]), as_node(ids[target])
    if generation >= ahead.generation:
        edge = self.graph.add_edge(*ends, **columns)
    else:
        edge = as_edge(EdgeId.kind_bit | generation << INDEX_BITS | ahead.index)
        try:
            self.graph.restore_edge(RemovedEdge(edge, *ends, columns, outgoing, incoming))
        except UsageError:
            self._pool.release(np.array([held]))
            raise
    edits.index_one(self, edge.index)


def _unfit(self: Pattern, source: int, target: int, exists: bool) -> NotUndoable:
    what = "the change adds an edge that exists" if exists else "the change refers to an edge that does not exist"
    q, k = int(self._numbers[target]), int(self._numbers[source])
    return NotUndoable(what, where=f"query block {q}, key block {k}", fix="undo later edits first")


def _add_rows(self: Pattern, rows: dict[str, Array], bits: Array) -> None:
    source, target = rows["source"].astype(np.int64), rows["target"].astype(np.int64)
    generation = rows["generation"].astype(np.int64)
    found = self._index.find_many(source, target, self._source, self._target)
    if len(found) and found.max() >= 0:
        row = int(np.argmax(found))
        raise _unfit(self, int(source[row]), int(target[row]), exists=True)
    at = 0
    while at < len(source):  # runs of edges that are new, and of edges that are restored
        ahead = self.graph.next_edges(len(source) - at)
        fresh = generation[at:] >= ahead.generation
        length = int(np.argmax(fresh != fresh[0])) or len(fresh)
        part = slice(at, at + length)
        own = rows["new_mask"][part]
        blocks = Blocks(source[part], target[part], rows["kind"][part], bits[own[own >= 0]])
        columns = {name: rows[name][part] for name in SCALARS}
        if fresh[0]:
            edits.insert(self, source[part], target[part], blocks, **columns)
        else:
            handles = EdgeId.kind_bit | generation[part] << INDEX_BITS | ahead.ids[:length] & INDEX
            _restore(self, handles, blocks, columns, rows["outgoing"][part], rows["incoming"][part])
        at += length


def _restore(
    self: Pattern, handles: Array, blocks: Blocks, columns: dict[str, Array], outgoing: Array, incoming: Array
) -> None:
    """Restore removed edges, in this order; `blocks.q` and `blocks.k` are the node slots of their ends."""
    rows, _ = edits.stored(self, blocks)
    values = {**columns, "kind": blocks.kind, "bits": rows}
    back = slice(None, None, -1)  # a record has the order of removal
    sources, targets = (NodeArray(self._node_ids[each[back]]) for each in (blocks.q, blocks.k))
    saved = {name: value[back] for name, value in values.items()}
    record = RemovedEdges(EdgeArray(handles[back]), sources, targets, saved, outgoing[back], incoming[back])
    try:
        self.graph.restore_edges(record)
    except UsageError:
        self._pool.release(rows)
        raise
    self._index.insert_many(handles & INDEX, self._source, self._target)
    edits.count(self)


def _cut_rows(self: Pattern, rows: dict[str, Array], bits: Array) -> None:
    edits.cut_many(self, self._edge_ids[_slots(self, rows)])


def _write_rows(self: Pattern, rows: dict[str, Array], bits: Array) -> None:
    slots = _slots(self, rows)
    for number, name in enumerate(SCALARS):
        here = rows["column"] == number
        self._columns[name][slots[here]] = rows["new"][here].astype(SCALARS[name])
    here = rows["column"] == MASK
    kind, own = rows["new"][here].astype(np.uint8), rows["new_mask"][here]
    edits.set_masks(self, slots[here], kind, bits[own[own >= 0]])


def _slots(self: Pattern, rows: dict[str, Array]) -> Array:
    """Return the edge slots of the pairs of a change. Raises: NotUndoable for a pair without an edge."""
    slots = self._index.find_many(rows["source"], rows["target"], self._source, self._target)
    if len(slots) and slots.min() < 0:
        row = int(np.argmin(slots))
        raise _unfit(self, int(rows["source"][row]), int(rows["target"][row]), exists=False)
    return slots


_GATE = list(SCALARS).index("gate")
_PERFORM = {ADD: _add_rows, CUT: _cut_rows, WRITE: _write_rows}
