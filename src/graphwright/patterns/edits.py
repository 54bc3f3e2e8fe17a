"""Edits of a pattern: each changes the graph, the pair index, the masks and the table together, and notes its rows.

Single edits run as plain Python; bulk edits use numpy and compiled loops, with the same result. Each function checks
everything before its first write.
"""

# pyright: reportPrivateUsage=false
# The files of this folder share private attributes of a pattern.
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from graphwright.graph import EdgeArray, EdgeId, NodeArray
from graphwright.graph.handles import INDEX, INDEX_BITS
from graphwright.graph.views import selected

from ..errors import UsageError
from . import masks, pair_index, table
from .changes import ADD, CUT, MASK, SCALARS, WRITE
from .errors import BlockRange, CausalityViolation, EdgeExists
from .masks import Blocks
from .rules import Pairs, Position
from .table import FULL, MASKED, RULE

if TYPE_CHECKING:
    from .pattern import Pattern

Array = npt.NDArray[Any]
_EDGES, _EDGE_SLOTS = table.EDGES, table.EDGE_SLOTS


# -- single -----------------------------------------------------------------------------------------------------------
def ends(self: Pattern, query: int, key: int, plane: int) -> tuple[int, int]:
    """Return the node slots of a key block and a query block. Raises: BlockRange."""
    try:
        if 0 <= query < self._rows and 0 <= key < self._key_blocks and 0 <= plane < self.planes:
            return self._key_cells[plane, key], self._query_cells[plane, query]
    except TypeError:
        raise UsageError("block numbers and planes are not integers", expected="integers",
                         got=f"query {query!r}, key {key!r}, plane {plane!r}") from None  # fmt: skip
    rows, columns = self.blocks
    if not 0 <= query < rows:
        raise BlockRange("query", query, rows)
    if not 0 <= key < columns:
        raise BlockRange("key", key, columns)
    raise BlockRange("plane", plane, self.planes)


def find(self: Pattern, query: int, key: int, plane: int) -> int:
    """Return the edge slot of two blocks, or -1. Raises: BlockRange."""
    source, target = ends(self, query, key, plane)
    return pair_index.find(self._index.cells, source, target, self._source_cells, self._target_cells)


def connect(self: Pattern, query: int, key: int, plane: int) -> EdgeId:
    """Add an edge; see `Pattern.connect`."""
    source, target = ends(self, query, key, plane)
    index = self._index
    cell = pair_index.search(index.cells, source, target, self._source_cells, self._target_cells)
    slot = index.cells[cell]
    if slot >= 0:
        raise EdgeExists(EdgeId.from_int(self._edge_cells[slot]), query, key, plane)
    kind, mask = kind_of(self, query, key)
    ids = self._node_cells
    row = -1 if mask is None else keep_mask(self, mask)
    nodes = cast("Any", ids[source]), cast("Any", ids[target])
    edge = self.graph.add_edge(*nodes, kind=kind, birth=self.steps, bits=row)
    slot = edge & INDEX
    if 2 * index.count + 2 > index.capacity:
        index_one(self, slot)
    else:
        index.cells[cell] = slot
        index.count += 1
        count(self)
    self._note((ADD, source, target, (edge >> INDEX_BITS) & INDEX, self._out_cells[slot], self._in_cells[slot],
                kind, -1, 0.0, self.steps, 0, mask))  # fmt: skip
    return edge


def index_one(self: Pattern, slot: int) -> None:
    """Enter a new edge into the pair index, and count it in the table."""
    index = self._index
    if 2 * index.count + 2 > index.capacity:
        index.reserve(index.count + 1, self._source, self._target)
    pair_index.insert(index.cells, slot, self._source_cells, self._target_cells)
    index.count += 1
    count(self)


def keep_mask(self: Pattern, mask: Array) -> int:
    """Store one packed mask in the pool; return its row."""
    row = int(self._pool.store(mask[None])[0])
    self._words[table.POOL] = self._pool.data.ctypes.data
    return row


def cut(self: Pattern, edge: EdgeId) -> None:
    """Remove an edge; see `Pattern.cut`."""
    slot = self._edge_table.slot(edge)  # raises StaleHandle
    source, target = self._source_cells[slot], self._target_cells[slot]
    pair_index.erase(self._index.cells, slot, self._source_cells, self._target_cells)
    self._index.count -= 1
    _, _, _, columns, outgoing, incoming = self.graph.remove_edge(edge)
    row, mask = columns["bits"], None
    if row >= 0:
        mask = self._pool.data[row].copy()
        self._pool.release(np.array([row]))
    count(self)
    self._note((CUT, source, target, (edge >> INDEX_BITS) & INDEX, outgoing, incoming,
                columns["kind"], *(columns[name] for name in SCALARS), mask))  # fmt: skip


def kind_of(self: Pattern, query: int, key: int) -> tuple[int, Array | None]:
    """Return kind and packed mask of an edge that is connected manually. Raises: CausalityViolation."""
    frame, base = self.frame, self.base
    block = frame.block
    i0, j0 = frame.q_start + query * block, key * block
    i1, j1 = i0 + block - 1, j0 + block - 1
    if query + 1 == self._rows:
        i1 = frame.q_start + frame.queries - 1
    if key + 1 == self._key_blocks:
        j1 = frame.keys - 1
    if base.causal and j0 > i1:
        raise CausalityViolation(query, key)
    whole = not base.causal or j1 <= i0
    if base.segments is None:
        w = base.window
        if w is None:
            return (FULL if whole else RULE), None
        if i0 - j1 < w and not (base.symmetric and j0 - i1 >= w):
            every = whole and i1 - j0 < w and not (base.symmetric and j1 - i0 >= w)
            return (FULL if every else RULE), None
        if whole:
            return FULL, None
    found = manual(base, frame, np.array([query]), np.array([key]))
    return int(found.kind[0]), found.bits[0] if len(found.bits) else None


def manual(base: Position, frame: Any, q: Array, k: Array) -> Blocks:
    """Return the blocks of edges connected manually: the base rule's pairs or, if there are none, all causal ones."""
    ruled = masks.of_rule(base, base, frame, Pairs(q, k))
    if len(ruled.q) == len(q):
        return ruled
    missing = ~np.isin(q * frame.columns + k, ruled.q * frame.columns + ruled.k)
    rest = masks.of_rule(Position(base.causal), base, frame, Pairs(q[missing], k[missing]))
    kind = np.empty(len(q), np.uint8)
    kind[~missing], kind[missing] = ruled.kind, rest.kind
    return Blocks(q, k, kind, rest.bits)


def count(self: Pattern) -> None:
    """Write the number of edges and of edge slots to the table."""
    words, edges = self._words, self._edge_table
    words[_EDGES], words[_EDGE_SLOTS] = edges.live, edges.size


def count_gates(self: Pattern) -> None:
    """Write the size that the vector of gates has at least: one more than the last slot that an edge refers to."""
    slots = self._columns["gate"][self.edges().index]
    self.gates = int(slots.max(initial=-1)) + 1


# -- many -------------------------------------------------------------------------------------------------------------
def connect_many(self: Pattern, query: Any, key: Any, plane: Any) -> EdgeArray:
    """Add edges; see `Pattern.connect_many`."""
    q, k, p = numbers(self, query, key, plane)
    if self.base.causal:
        future = self.frame.key_span(k)[0] > self.frame.query_span(q)[1]
        if future.any():
            row = int(np.argmax(future))
            raise CausalityViolation(int(q[row]), int(k[row]))
    source, target = self.key_nodes[p, k].astype(np.int64), self.query_nodes[p, q].astype(np.int64)
    found = self._index.find_many(source, target, self._source, self._target)
    _, first = np.unique(source << 32 | target, return_index=True)
    bad = np.ones(len(source), bool)
    bad[first] = found[first] >= 0
    if bad.any():
        row = int(np.argmax(bad))
        edge = EdgeId.from_int(int(self._edge_ids[found[row]])) if found[row] >= 0 else None
        raise EdgeExists(edge, int(q[row]), int(k[row]), int(p[row]))
    return insert(self, source, target, manual(self.base, self.frame, q, k))


def numbers(self: Pattern, query: Any, key: Any, plane: Any) -> tuple[Array, Array, Array]:
    """Return block numbers and planes as int64 arrays of one length. Raises: BlockRange, UsageError."""
    arrays: list[Array] = []
    limits = (("query", query, self.frame.rows), ("key", key, self.frame.columns), ("plane", plane, self.planes))
    for side, given, limit in limits:
        values = np.atleast_1d(np.asarray(given))
        if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
            got = f"{values.dtype} of shape {values.shape}"
            raise UsageError("block numbers are not integers", where=side, expected="1-d integers", got=got)
        values = values.astype(np.int64)
        bad = (values < 0) | (values >= limit)
        if bad.any():
            raise BlockRange(side, int(values[bad][0]), limit)
        arrays.append(values)
    try:
        q, k, p = np.broadcast_arrays(*arrays)
    except ValueError:
        got = ", ".join(str(len(each)) for each in arrays)
        raise UsageError("query, key and plane differ in length", expected="equal lengths, or 1", got=got) from None
    return q, k, p


def insert(self: Pattern, source: Array, target: Array, blocks: Blocks, **columns: Any) -> EdgeArray:
    """Add edges with these node slots and masks; the pairs have no edge yet. `columns` are arrays."""
    rows, own = stored(self, blocks)
    values = {"birth": np.full(len(source), self.steps, np.int32), **columns}
    nodes = (NodeArray(self._node_ids[each]) for each in (source, target))
    edges = self.graph.add_edges(*nodes, kind=blocks.kind, bits=rows, **values)
    slots = edges.index
    self._index.insert_many(slots, self._source, self._target)
    count(self)
    if self._open is not None and len(source):
        self._note({
            "op": np.full(len(source), ADD, np.uint8), "source": source, "target": target,
            "generation": edges.generation, "outgoing": self._out_at[slots], "incoming": self._in_at[slots],
            "kind": blocks.kind, **values, "new_mask": own, "bits": blocks.bits,
        })  # fmt: skip
    return edges


def cut_many(self: Pattern, which: Any) -> None:
    """Remove edges; see `Pattern.cut`."""
    edge_table = self._edge_table
    slots = edge_table.slots_of(selected(edge_table, which), distinct=True)
    if not len(slots):
        return
    source, target = self._source[slots].astype(np.int64), self._target[slots].astype(np.int64)
    self._index.erase_many(slots, self._source, self._target)
    removed = self.graph.remove_edges(EdgeArray(self._edge_ids[slots]))
    columns = removed.columns
    masked = columns["bits"] >= 0
    bits = self._pool.data[columns["bits"][masked]]
    self._pool.release(columns["bits"])
    count(self)
    if self._open is not None:
        own = np.where(masked, np.cumsum(masked) - 1, -1)
        self._note({
            "op": np.full(len(slots), CUT, np.uint8), "source": source, "target": target,
            "generation": removed.edges.generation, "outgoing": removed.out_positions,
            "incoming": removed.in_positions, "kind": columns["kind"], **{name: columns[name] for name in SCALARS},
            "new_mask": own, "bits": bits,
        })  # fmt: skip


def write(self: Pattern, which: Any, columns: Mapping[str, Any]) -> None:
    """Write columns of edges; see `PatternEdit.set`."""
    edge_table = self._edge_table
    slots = edge_table.slots_of(selected(edge_table, which), distinct=True)
    for name in columns:
        if name not in SCALARS:
            raise UsageError("this column of edges cannot be set", where=name, expected=sorted(SCALARS))
    rows = {name: edge_table.column(name).cast(values, len(slots)) for name, values in columns.items()}
    _check_values(self, rows)
    if not len(slots):
        return
    for name, values in rows.items():
        old = self._columns[name][slots]
        self._columns[name][slots] = values
        self._note({
            "op": np.full(len(slots), WRITE, np.uint8), "source": self._source[slots], "target": self._target[slots],
            "column": np.full(len(slots), list(SCALARS).index(name), np.uint8), "old": old, "new": values,
        })  # fmt: skip
    if "gate" in rows:
        count_gates(self)


def _check_values(self: Pattern, rows: Mapping[str, Array]) -> None:
    """Raise UsageError for a gate that no vector of gates has, or a score that is not finite."""
    if (gates := rows.get("gate")) is not None and len(gates):
        most = max(self.gates, self._edge_table.size) - 1
        if gates.min() < -1 or gates.max() > most:
            raise UsageError("the number of a gate is out of range", where="gate", expected=f"-1 to {most}",
                             got=int(gates.min() if gates.min() < -1 else gates.max()))  # fmt: skip
    if (scores := rows.get("score")) is not None and not np.isfinite(scores).all():
        raise UsageError("a score is not finite", where="score", expected="finite numbers",
                         got=float(scores[~np.isfinite(scores)][0]))  # fmt: skip


def put_masks(self: Pattern, slots: Array, kind: Array, bits: Array) -> None:
    """Give edges other kinds, and packed masks to those of kind MASKED, in their order."""
    old = self.held(slots)
    before = np.where(old.kind == MASKED, np.cumsum(old.kind == MASKED) - 1, -1)
    after = np.where(kind == MASKED, len(old.bits) + np.cumsum(kind == MASKED) - 1, -1)
    set_masks(self, slots, kind, bits)
    self._note({
        "op": np.full(len(slots), WRITE, np.uint8), "source": self._source[slots], "target": self._target[slots],
        "column": np.full(len(slots), MASK, np.uint8), "old": old.kind, "new": kind,
        "old_mask": before, "new_mask": after, "bits": np.concatenate([old.bits, bits]),
    })  # fmt: skip


def set_masks(self: Pattern, slots: Array, kind: Array, bits: Array) -> None:
    """Give edges other kinds and masks, without a note."""
    self._pool.release(self._columns["bits"][slots])
    rows, _ = stored(self, Blocks(slots, slots, kind, bits))
    self._columns["bits"][slots], self._columns["kind"][slots] = rows, kind


def stored(self: Pattern, blocks: Blocks) -> tuple[Array, Array]:
    """Store masks in the pool; return the row of each edge in the pool, and its row in `blocks.bits`, or -1."""
    masked = blocks.kind == MASKED
    rows = np.full(len(masked), -1, np.int32)
    rows[masked] = self._pool.store(blocks.bits)
    self.table[table.POOL] = self._pool.data.ctypes.data
    return rows, np.where(masked, np.cumsum(masked) - 1, -1)
