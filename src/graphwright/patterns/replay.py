"""Apply changes to a pattern: for undo, redo, rollback, and journals of programs."""

# pyright: reportPrivateUsage=false
# The files of this folder share private attributes of a pattern.
from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphwright.graph import EdgeArray, EdgeId, NodeArray, NotUndoable, RemovedEdges
from graphwright.graph.handles import INDEX, INDEX_BITS

from ..errors import UsageError
from . import edits, growth
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
    for start, end in pairwise(borders):
        try:
            if start < end:
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


def _add_rows(self: Pattern, rows: dict[str, Array], bits: Array) -> None:
    source, target = rows["source"].astype(np.int64), rows["target"].astype(np.int64)
    generation = rows["generation"].astype(np.int64)
    found = self._index.find_many(source, target, self._source, self._target)
    if len(found) and found.max() >= 0:
        row = int(np.argmax(found))
        q, k = (int(self._numbers[each[row]]) for each in (target, source))
        raise NotUndoable("the change adds an edge that exists", where=f"query block {q}, key block {k}",
                          fix="undo later edits first")  # fmt: skip
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
    nodes = (NodeArray(self._node_ids[each[back]]) for each in (blocks.q, blocks.k))
    saved = {name: value[back] for name, value in values.items()}
    record = RemovedEdges(EdgeArray(handles[back]), *nodes, saved, outgoing[back], incoming[back])
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
        q, k = (int(self._numbers[rows[end][row]]) for end in ("target", "source"))
        raise NotUndoable("the change refers to an edge that does not exist", where=f"query block {q}, key block {k}",
                          fix="undo later edits first")  # fmt: skip
    return slots


_PERFORM = {ADD: _add_rows, CUT: _cut_rows, WRITE: _write_rows}
