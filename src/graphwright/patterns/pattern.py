"""Block-sparse attention patterns: which query block attends to which key block, as a graph that can be edited.

A pattern is a graph with a node per query block and per key block of each plane, and an edge from a key block to each
query block that sees it. Kernels read the graph's own arrays, by their addresses in `pattern.table`; nothing is
converted.
Invariants: two blocks have at most one edge; the table, both adjacency lists and the pair index agree after every edit;
an edit that raises leaves the pattern unchanged.
"""

# pyright: reportPrivateUsage=false
# The files of this folder share private attributes of a pattern.
from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from graphwright.graph import EdgeArray, EdgeId, Graph, Mask, NodeArray, NotUndoable, RemovedEdges
from graphwright.graph.handles import INDEX, INDEX_BITS
from graphwright.graph.views import TableView, selected

from ..errors import UsageError
from . import changes, masks, pair_index, table
from .changes import ADD, CUT, MASK, SCALARS, WRITE, PatternChange
from .errors import BlockRange, CausalityViolation, EdgeExists, PatternShape
from .lock import RunLock
from .masks import Blocks
from .pair_index import PairIndex
from .rules import Frame, Position, Rule, Segments
from .table import FULL, MASKED, RULE

Array = npt.NDArray[Any]
BUCKET = 16
EDGE_COLUMNS: dict[str, Any] = {
    "kind": np.uint8, "gate": (np.int32, -1), "score": np.float32, "birth": np.int32, "pinned": np.uint8,
    "bits": (np.int32, -1),
}  # fmt: skip


class Owner(Protocol):
    """What journals the transactions of a pattern in its place, such as a program."""

    def holding(self) -> AbstractContextManager[None]:
        """Return a context that an edit enters before it locks the pattern. Raises: UsageError if it is refused."""
        ...

    def __call__(self, change: PatternChange, why: str, author: str | None) -> None:
        """Journal a change that was applied already. If it raises an error, the pattern reverts the change."""
        ...


@dataclass(slots=True)
class Entry:
    """One transaction in the history of a pattern."""

    why: str
    author: str | None
    _parts: list[Any] | None
    _change: PatternChange | None
    _block: int

    @property
    def change(self) -> PatternChange:
        """The change; built from the noted rows when it is first asked for."""
        if self._change is None:
            assert self._parts is not None
            self._change, self._parts = changes.build(self._parts, self._block), None
        return self._change


class Pattern:
    """Which query block attends to which key block.

    Args:
        tokens: numbers of (queries, keys), or one number for both.
        block: tokens per block; the last block may be shorter.
        planes: number of independent patterns: 1, one per key/value head, or one per query head.
        causal: no query sees a later key.
        q_start: position of the first query; by default the last query is at the last key.
        window: the base rule has `i - j < window`.
        symmetric: the base rule has also `j - i < window`.
        segments: document ids of the keys, or (ids of the queries, ids of the keys): the base rule keeps to a document.
        name: name in errors and reports.
        timeout: seconds an edit waits for the runs that read the pattern.
        debug_counters: count the array elements that edits read or write, in `graph.cells_touched`; slow.
    Raises: ValueError (UsageError) for sizes < 1 and segments of a wrong length.

    A new pattern has no edges; `connect` adds them, or one of the generators makes a pattern with edges. The base rule
    tells what an edge of kind RULE allows, and what `connect` allows: the base rule's pairs of the block or, if it has
    none there, all pairs that `causal` permits.
    """

    def __init__(
        self, tokens: int | tuple[int, int], block: int = 64, planes: int = 1, causal: bool = True,
        q_start: int | None = None, window: int | None = None, symmetric: bool = False, segments: Any = None, *,
        name: str = "", timeout: float = 5.0, debug_counters: bool = False,
    ) -> None:  # fmt: skip
        queries, keys = (tokens, tokens) if isinstance(tokens, int | np.integer) else tokens
        for label, value in (("queries", queries), ("keys", keys), ("block", block), ("planes", planes)):
            if value < 1:
                raise UsageError("a size of the pattern is out of range", where=label, expected=">= 1", got=value)
        if window is not None and window < 1:
            raise UsageError("the window is out of range", expected="window >= 1, or None", got=window)
        start = keys - queries if q_start is None else q_start
        if start < 0:
            raise UsageError("the first query has a negative position", expected="q_start >= 0", got=start,
                             fix="q_start=0")  # fmt: skip
        self.frame = Frame(int(queries), int(keys), int(block), int(start))
        self.planes, self.name = int(planes), name
        self.base = Position(bool(causal), window, bool(symmetric), as_segments(segments, self.frame))
        self.rule: Rule | None = None
        self.owner: Owner | None = None
        self.version = 0
        self.steps = 0
        """Number of steps that the pattern has taken; `birth` of an edge is their number when it was connected."""
        self.graph = Graph({"index": np.int32}, EDGE_COLUMNS, BUCKET, debug_counters=debug_counters)
        self.lookups: list[int] | None = [0] if debug_counters else None
        self._index = PairIndex(self.lookups)
        self._lock = RunLock(timeout)
        self._open: list[Any] | None = None
        self._done: list[Entry] = []
        self._undone: list[Entry] = []
        self._pool = np.empty((0, block, masks.words(block)), np.uint64)
        self._pool_free: list[int] = []
        self.gates = 0
        self.table = np.zeros(table.WORDS, np.int64)
        self._words = memoryview(self.table)
        self._add_nodes()
        self.graph.on_move.append(self._refresh)
        self._refresh()

    def _add_nodes(self) -> None:
        rows, columns = self.frame.rows, self.frame.columns
        numbers = np.concatenate([np.arange(rows), np.arange(columns)])
        nodes = self.graph.add_nodes((rows + columns) * self.planes, index=np.tile(numbers, self.planes))
        slots = nodes.index.reshape(self.planes, rows + columns).astype(np.int32)
        self.query_nodes = np.ascontiguousarray(slots[:, :rows])
        self.key_nodes = np.ascontiguousarray(slots[:, rows:])

    # -- geometry ----------------------------------------------------------------------------------------------------
    @property
    def tokens(self) -> tuple[int, int]:
        """Numbers of queries and keys."""
        return self.frame.queries, self.frame.keys

    @property
    def block(self) -> int:
        """Tokens per block."""
        return self.frame.block

    @property
    def q_start(self) -> int:
        """Position of the first query."""
        return self.frame.q_start

    @property
    def causal(self) -> bool:
        """Whether no query sees a later key."""
        return self.base.causal

    @property
    def blocks(self) -> tuple[int, int]:
        """Numbers of query blocks and key blocks."""
        return self.frame.rows, self.frame.columns

    @property
    def edge_count(self) -> int:
        """Number of edges."""
        return self.graph.edge_count

    def __len__(self) -> int:
        return self.graph.edge_count

    # -- the table ---------------------------------------------------------------------------------------------------
    def _refresh(self) -> None:
        """Write all words of the table again, after arrays moved."""
        arrays = self.graph.buffers()
        self._source, self._target = arrays.source, arrays.target
        self._source_cells, self._target_cells = memoryview(arrays.source), memoryview(arrays.target)
        self._query_cells, self._key_cells = memoryview(self.query_nodes), memoryview(self.key_nodes)
        self._node_ids, self._edge_ids = arrays.node_ids, arrays.edge_ids
        self._columns = arrays.edge_columns
        self._out_at, self._in_at = arrays.outgoing.position, arrays.incoming.position
        self._out_cells, self._in_cells = memoryview(self._out_at), memoryview(self._in_at)
        self._index_column = arrays.node_columns["index"]
        t, frame, base = self.table, self.frame, self.base
        t[table.MAGIC] = table.SIGNATURE
        t[table.ROWS], t[table.COLS] = _address(self.query_nodes), _address(self.key_nodes)
        inward, outward = arrays.incoming, arrays.outgoing
        t[table.IN_HEAD : table.IN_ITEMS + 1] = [
            _address(each) for each in (inward.head, inward.degree, inward.after, inward.items)
        ]
        t[table.OUT_HEAD : table.OUT_ITEMS + 1] = [
            _address(each) for each in (outward.head, outward.degree, outward.after, outward.items)
        ]
        t[table.SRC], t[table.DST] = _address(arrays.source), _address(arrays.target)
        t[table.INDEX] = _address(self._index_column)
        t[table.KIND], t[table.GATE], t[table.BITS] = (_address(self._columns[c]) for c in ("kind", "gate", "bits"))
        t[table.POOL] = _address(self._pool)
        t[table.BLOCK : table.TK + 1] = frame.block, frame.rows, frame.columns, self.planes, frame.queries, frame.keys
        t[table.QSTART : table.SYMMETRIC + 1] = frame.q_start, base.causal, base.window or 0, base.symmetric
        segments = base.segments
        t[table.SEG_Q], t[table.SEG_K] = (0, 0) if segments is None else (_address(segments.q), _address(segments.k))
        t[table.EDGES], t[table.EDGE_SLOTS] = self.graph.edge_count, self.graph.edge_slots
        t[table.BUCKET], t[table.GATES] = BUCKET, self.gates
        t[table.ROW_STRIDE], t[table.COL_STRIDE] = self.query_nodes.shape[1], self.key_nodes.shape[1]

    def _count(self) -> None:
        """Write the number of edges to the table."""
        words = self._words
        words[table.EDGES], words[table.EDGE_SLOTS] = self.graph.edge_count, self.graph.edge_slots

    def reading(self) -> AbstractContextManager[None]:
        """Return a context for a run: edits wait until it ends, runs of several threads may overlap.

        Raises: EditBusy if another thread is editing, after `timeout` seconds.
        """
        return self._lock.reading()

    def writing(self) -> RunLock:
        """Return a context that keeps runs and other edits away; writes of columns of `edges` take it."""
        return self._lock

    @property
    def timeout(self) -> float:
        """Seconds that an edit waits for runs, and a run for an edit."""
        return self._lock.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._lock.timeout = seconds

    # -- single edits ------------------------------------------------------------------------------------------------
    def has(self, query: int, key: int, plane: int = 0) -> bool:
        """Return whether a query block sees a key block. O(1). Raises BlockRange."""
        return self._find(query, key, plane) >= 0

    def edge_between(self, query: int, key: int, plane: int = 0) -> EdgeId | None:
        """Return the edge of a query block and a key block, or None. O(1). Raises BlockRange."""
        slot = self._find(query, key, plane)
        return None if slot < 0 else EdgeId.from_int(int(self._edge_ids[slot]))

    def _find(self, query: int, key: int, plane: int) -> int:
        source, target = self._ends(query, key, plane)
        return pair_index.find(self._index.cells, source, target, self._source_cells, self._target_cells)

    def _ends(self, query: int, key: int, plane: int) -> tuple[int, int]:
        """Return the node slots of a key block and a query block. Raises BlockRange."""
        frame = self.frame
        if not 0 <= query < frame.rows:
            raise BlockRange("query", query, frame.rows)
        if not 0 <= key < frame.columns:
            raise BlockRange("key", key, frame.columns)
        if not 0 <= plane < self.planes:
            raise BlockRange("plane", plane, self.planes)
        return self._key_cells[plane, key], self._query_cells[plane, query]

    def connect(self, query: int, key: int, plane: int = 0) -> EdgeId:
        """Let a query block see a key block; return the new edge. O(1).

        Raises: BlockRange, EdgeExists, CausalityViolation, EditBusy; then nothing changes.
        """
        with self._transaction("connect", None):
            return self._connect(query, key, plane)

    def _connect(self, query: int, key: int, plane: int) -> EdgeId:
        source, target = self._ends(query, key, plane)
        slot = pair_index.find(self._index.cells, source, target, self._source_cells, self._target_cells)
        if slot >= 0:
            raise EdgeExists(EdgeId.from_int(int(self._edge_ids[slot])), query, key, plane)
        kind, mask = self._kind(query, key)
        ids = self._node_ids
        edge = self.graph.add_edge(
            cast("Any", int(ids[source])), cast("Any", int(ids[target])), kind=kind, birth=self.steps
        )
        slot = edge & INDEX
        if mask is not None:
            self._columns["bits"][slot] = self._store(mask[None])[0]
        self._index.reserve(self._index.count + 1, self._source, self._target)
        pair_index.insert(self._index.cells, slot, self._source_cells, self._target_cells)
        self._index.count += 1
        self._count()
        self._note((ADD, source, target, (edge >> INDEX_BITS) & INDEX, self._out_cells[slot], self._in_cells[slot],
                    kind, -1, 0.0, self.steps, 0, mask))  # fmt: skip
        return edge

    def _kind(self, query: int, key: int) -> tuple[int, Array | None]:
        """Return kind and packed mask of an edge that is connected manually. Raises CausalityViolation."""
        frame, base = self.frame, self.base
        block = frame.block
        i0, j0 = frame.q_start + query * block, key * block
        i1 = frame.q_start + min((query + 1) * block, frame.queries) - 1
        j1 = min((key + 1) * block, frame.keys) - 1
        if base.causal and j0 > i1:
            raise CausalityViolation(query, key)
        whole = not base.causal or j1 <= i0
        if base.segments is None:
            w = base.window
            if w is None:
                return (FULL if whole else RULE), None
            some = i0 - j1 < w and not (base.symmetric and j0 - i1 >= w)
            if some:
                every = whole and i1 - j0 < w and not (base.symmetric and j1 - i0 >= w)
                return (FULL if every else RULE), None
            if whole:
                return FULL, None
        found = self._manual(np.array([query]), np.array([key]))
        return int(found.kind[0]), found.bits[0] if len(found.bits) else None

    def _manual(self, q: Array, k: Array) -> Blocks:
        """Return the blocks of edges connected manually: the base rule's pairs or, if none, all causal ones."""
        frame, base = self.frame, self.base
        pairs = masks.Pairs(q, k)
        ruled = masks.of_rule(base, base, frame, pairs)
        if len(ruled.q) == len(q):
            return ruled
        missing = ~np.isin(q * frame.columns + k, ruled.q * frame.columns + ruled.k)
        rest = masks.of_rule(Position(base.causal), base, frame, masks.Pairs(q[missing], k[missing]))
        kind = np.empty(len(q), np.uint8)
        kind[~missing], kind[missing] = ruled.kind, rest.kind
        return Blocks(q, k, kind, rest.bits)

    def cut(self, edges: EdgeId | EdgeArray | Mask | Iterable[int] | Array) -> None:
        """Remove an edge, or all edges of a mask, of an array of handles or of a sequence. O(1) per edge.

        Raises: StaleHandle, UsageError for an edge that is given twice, EditBusy; then nothing changes.
        """
        with self._transaction("cut", None):
            self._cut(edges)

    def _cut(self, edges: Any) -> None:
        if isinstance(edges, int) and not isinstance(edges, bool):
            self._cut_one(cast("EdgeId", edges))
        else:
            self._cut_many(selected(self.graph.edges._table, edges))

    def _cut_one(self, edge: EdgeId) -> None:
        self.graph.source(edge)  # raises StaleHandle
        slot = edge & INDEX
        pair_index.erase(self._index.cells, slot, self._source_cells, self._target_cells)
        self._index.count -= 1
        source, target = self._source_cells[slot], self._target_cells[slot]
        removed = self.graph.remove_edge(edge)
        columns, mask = removed.columns, None
        if columns["kind"] == MASKED:
            mask = self._pool[columns["bits"]].copy()
            self._pool_free.append(columns["bits"])
        self._count()
        self._note((CUT, source, target, (edge >> INDEX_BITS) & INDEX, removed.out_position, removed.in_position,
                    columns["kind"], *(columns[name] for name in SCALARS), mask))  # fmt: skip

    # -- many --------------------------------------------------------------------------------------------------------
    def connect_many(self, query: Any, key: Any, plane: Any = 0) -> EdgeArray:
        """Connect pairs of blocks, as a loop of `connect` would, down to the order of all lists; return the edges.

        Args:
            query, key, plane: block numbers, as integers or 1-d arrays that broadcast.
        Raises: BlockRange, EdgeExists, CausalityViolation with the first bad pair, EditBusy; then nothing changes.
        """
        with self._transaction("connect", None):
            return self._connect_many(query, key, plane)

    def _connect_many(self, query: Any, key: Any, plane: Any) -> EdgeArray:
        q, k, p = self._numbers(query, key, plane)
        if self.base.causal:
            future = self.frame.key_span(k)[0] > self.frame.query_span(q)[1]
            if future.any():
                row = int(np.argmax(future))
                raise CausalityViolation(int(q[row]), int(k[row]))
        source, target = self.key_nodes[p, k].astype(np.int64), self.query_nodes[p, q].astype(np.int64)
        self._check_absent(q, k, p, source, target)
        return self._insert(source, target, self._manual(q, k))

    def _numbers(self, query: Any, key: Any, plane: Any) -> tuple[Array, Array, Array]:
        arrays: list[Array] = []
        for side, given, count in (
            ("query", query, self.frame.rows), ("key", key, self.frame.columns), ("plane", plane, self.planes),
        ):  # fmt: skip
            values = np.atleast_1d(np.asarray(given))
            if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
                got = f"{values.dtype} of shape {values.shape}"
                raise UsageError("block numbers are not integers", where=side, expected="1-d integers", got=got)
            values = values.astype(np.int64)
            bad = (values < 0) | (values >= count)
            if bad.any():
                raise BlockRange(side, int(values[bad][0]), count)
            arrays.append(values)
        try:
            q, k, p = np.broadcast_arrays(*arrays)
        except ValueError:
            got = ", ".join(str(len(each)) for each in arrays)
            raise UsageError("query, key and plane differ in length", expected="equal lengths, or 1", got=got) from None
        return q, k, p

    def _check_absent(self, q: Array, k: Array, p: Array, source: Array, target: Array) -> None:
        found = self._index.find_many(source, target, self._source, self._target)
        keys = source << 32 | target
        _, first = np.unique(keys, return_index=True)
        again = np.ones(len(keys), bool)
        again[first] = False
        bad = (found >= 0) | again
        if bad.any():
            row = int(np.argmax(bad))
            edge = EdgeId.from_int(int(self._edge_ids[found[row]])) if found[row] >= 0 else None
            raise EdgeExists(edge, int(q[row]), int(k[row]), int(p[row]))

    def _insert(self, source: Array, target: Array, blocks: Blocks, **columns: Array) -> EdgeArray:
        """Add edges with these ends and masks; the pairs are known to be absent."""
        rows = self._store(blocks.bits)
        bits = np.full(len(source), -1, np.int32)
        bits[blocks.kind == MASKED] = rows
        values = {"birth": np.full(len(source), self.steps, np.int32), **columns}
        ends = (NodeArray(self._node_ids[each]) for each in (source, target))
        edges = self.graph.add_edges(*ends, kind=blocks.kind, bits=bits, **values)
        slots = edges.index
        self._index.insert_many(slots, self._source, self._target)
        self._count()
        own = np.full(len(source), -1, np.int32)
        own[bits >= 0] = np.arange(len(rows))
        self._note({
            "op": np.full(len(source), ADD, np.uint8), "source": source, "target": target,
            "generation": edges.generation, "outgoing": self._out_at[slots], "incoming": self._in_at[slots],
            "kind": blocks.kind, **values, "new_mask": own, "bits": blocks.bits,
        })  # fmt: skip
        return edges

    def _cut_many(self, ids: Array) -> None:
        table_of = self.graph.edges._table
        slots = table_of.slots_of(ids, distinct=True)
        self._index.erase_many(slots, self._source, self._target)
        source, target = self._source[slots].astype(np.int64), self._target[slots].astype(np.int64)
        removed = self.graph.remove_edges(EdgeArray(ids))
        columns = removed.columns
        masked = columns["kind"] == MASKED
        rows = columns["bits"][masked]
        bits = self._pool[rows]
        self._pool_free.extend(rows.tolist())
        self._count()
        own = np.full(len(slots), -1, np.int32)
        own[masked] = np.arange(len(rows))
        self._note({
            "op": np.full(len(slots), CUT, np.uint8), "source": source, "target": target,
            "generation": removed.edges.generation, "outgoing": removed.out_positions, "incoming": removed.in_positions,
            "kind": columns["kind"], **{name: columns[name] for name in SCALARS}, "new_mask": own, "bits": bits,
        })  # fmt: skip

    def _set(self, edges: Any, columns: dict[str, Any]) -> None:
        table_of = self.graph.edges._table
        ids = selected(table_of, edges)
        slots = table_of.slots_of(ids, distinct=True)
        for name in columns:
            if name not in SCALARS:
                raise UsageError("this column cannot be set", where=name, expected=sorted(SCALARS))
        rows = {name: table_of.column(name).cast(values, len(slots)) for name, values in columns.items()}
        for name, values in rows.items():
            old = self._columns[name][slots]
            self._columns[name][slots] = values
            self._note({
                "op": np.full(len(slots), WRITE, np.uint8),
                "source": self._source[slots], "target": self._target[slots],
                "column": np.full(len(slots), list(SCALARS).index(name), np.uint8), "old": old, "new": values,
            })  # fmt: skip

    # -- masks in the pool -------------------------------------------------------------------------------------------
    def _store(self, bits: Array) -> Array:
        """Copy packed masks into the pool; return their rows."""
        count = len(bits)
        if not count:
            return np.empty(0, np.int32)
        reused = min(count, len(self._pool_free))
        rows = [self._pool_free.pop() for _ in range(reused)]
        fresh = count - reused
        used = self._pool_used
        if used + fresh > len(self._pool):
            pool = np.zeros((max(used + fresh, len(self._pool) * 3 // 2), *self._pool.shape[1:]), np.uint64)
            pool[:used] = self._pool[:used]
            self._pool = pool
            self.table[table.POOL] = _address(pool)
        self._pool_used = used + fresh
        at = np.array([*rows, *range(used, used + fresh)], np.int32)
        self._pool[at] = bits
        return at

    _pool_used = 0

    # -- transactions ------------------------------------------------------------------------------------------------
    def edit(self, why: str, author: str | None = None) -> AbstractContextManager[PatternEdit]:
        """Return a context whose edits are one entry of the journal; if the block raises, none of them is kept.

        Raises: EditBusy if a run reads the pattern for longer than `timeout`; UsageError inside another edit.
        """
        return self._editing(why, author)

    @contextmanager
    def _editing(self, why: str, author: str | None) -> Generator[PatternEdit]:
        with self._transaction(why, author, nested=False):
            yield PatternEdit(self)

    def _transaction(self, why: str, author: str | None, nested: bool = True) -> AbstractContextManager[None]:
        """Return a context that notes edits in one entry; a transaction inside another one is a part of it."""
        inner = self._noting(why, author, nested)
        return inner if self.owner is None else self._owned(self.owner, inner)

    @contextmanager
    def _owned(self, owner: Owner, inner: AbstractContextManager[None]) -> Generator[None]:
        with owner.holding(), inner:  # a run holds the program before it holds the pattern, so an edit does too
            yield

    @contextmanager
    def _noting(self, why: str, author: str | None, nested: bool) -> Generator[None]:
        if not self._lock.acquire(False):
            self._lock.wait()
        elif self._lock.readers:
            self._lock.release()
            self._lock.wait()
        try:
            if self._open is not None:
                if not nested:
                    raise UsageError("an edit of this pattern is open already", where=self.name or None, got=why,
                                     fix="use the open edit, or end it first")  # fmt: skip
                yield
                return
            self._open = parts = []
            try:
                yield
            except BaseException:
                self._open = None
                if parts:
                    self._perform(changes.build(parts, self.block).invert())
                raise
            self._open = None
            if parts:
                self._commit(Entry(why, author, parts, None, self.block))
        finally:
            self._lock.release()

    def _note(self, part: Any) -> None:
        if self._open is not None:
            self._open.append(part)

    def _commit(self, entry: Entry) -> None:
        self.version += 1
        if self.owner is None:
            self._done.append(entry)
            self._undone.clear()
            return
        try:
            self.owner(entry.change, entry.why, entry.author)
        except BaseException:
            self._perform(entry.change.invert())
            raise

    @property
    def journal(self) -> tuple[Entry, ...]:
        """The transactions so far, without those undone; a program that owns the pattern has them in its journal."""
        return tuple(self._done)

    def undo(self) -> None:
        """Undo the last transaction, restoring handles, columns and the order of all lists.

        Raises: NotUndoable if no edit is left; UsageError if a program owns the pattern.
        """
        self._step(self._done, self._undone, back=True)

    def redo(self) -> None:
        """Redo the transaction that was undone last. Raises: as `undo`."""
        self._step(self._undone, self._done, back=False)

    def _step(self, source: list[Entry], into: list[Entry], back: bool) -> None:
        verb = "undo" if back else "redo"
        if self.owner is not None:
            raise UsageError("a program owns this pattern and its history", where=self.name or None,
                             fix=f"program.{verb}()")  # fmt: skip
        with self._lock:
            if not source:
                raise NotUndoable(f"there is no edit to {verb}", where=self.name or None)
            entry = source[-1]
            self._perform(entry.change.invert() if back else entry.change)
            into.append(source.pop())
            self.version += 1

    def apply(self, change: PatternChange) -> None:
        """Apply a change without recording it; `PatternChange.apply` calls this. Raises: as there."""
        with self._lock:
            self._perform(change)
            self.version += 1

    def _perform(self, change: PatternChange) -> None:
        op = change.rows["op"]
        borders = np.flatnonzero(np.diff(op)) + 1
        starts = [0, *borders.tolist()]
        for start, end in zip(starts, [*borders.tolist(), len(op)], strict=True):
            if start == end:
                continue
            rows = {name: array[start:end] for name, array in change.rows.items()}
            {ADD: self._add_rows, CUT: self._cut_rows, WRITE: self._write_rows}[int(op[start])](rows, change.bits)

    def _add_rows(self, rows: dict[str, Array], bits: Array) -> None:
        source, target = rows["source"].astype(np.int64), rows["target"].astype(np.int64)
        at = 0
        while at < len(source):
            ahead = self.graph.next_edges(len(source) - at)
            fresh = rows["generation"][at:] >= ahead.generation
            change = np.flatnonzero(fresh != fresh[0])
            end = at + (int(change[0]) if len(change) else len(fresh))
            part = slice(at, end)
            columns = {name: rows[name][part] for name in SCALARS}
            blocks = Blocks(
                source, target, rows["kind"][part], bits[rows["new_mask"][part][rows["new_mask"][part] >= 0]]
            )
            if fresh[0]:
                self._insert(source[part], target[part], blocks, **columns)
            else:
                handles = ahead.ids[: end - at] & INDEX | rows["generation"][part].astype(np.int64) << INDEX_BITS
                self._restore(handles | EdgeId.kind_bit, source[part], target[part], blocks, columns,
                              rows["outgoing"][part], rows["incoming"][part])  # fmt: skip
            at = end

    def _restore(
        self, handles: Array, source: Array, target: Array, blocks: Blocks, columns: dict[str, Array],
        outgoing: Array, incoming: Array,
    ) -> None:  # fmt: skip
        stored = np.full(len(source), -1, np.int32)
        stored[blocks.kind == MASKED] = self._store(blocks.bits)
        values = {**columns, "kind": blocks.kind, "bits": stored}
        back = slice(None, None, -1)
        self.graph.restore_edges(RemovedEdges(
            EdgeArray(handles[back]), NodeArray(self._node_ids[source[back]]), NodeArray(self._node_ids[target[back]]),
            {name: value[back] for name, value in values.items()}, outgoing[back], incoming[back],
        ))  # fmt: skip
        self._index.insert_many(handles & INDEX, self._source, self._target)
        self._count()

    def _cut_rows(self, rows: dict[str, Array], bits: Array) -> None:
        self._cut_many(self._edge_ids[self._slots(rows)])

    def _slots(self, rows: dict[str, Array]) -> Array:
        slots = self._index.find_many(rows["source"], rows["target"], self._source, self._target)
        if len(slots) and slots.min() < 0:
            row = int(np.argmin(slots))
            q, k = (int(self._index_column[rows[end][row]]) for end in ("target", "source"))
            raise NotUndoable("the change refers to an edge that does not exist", where=f"query {q}, key {k}",
                              fix="undo later edits first")  # fmt: skip
        return slots

    def _write_rows(self, rows: dict[str, Array], bits: Array) -> None:
        slots = self._slots(rows)
        for number, name in enumerate(SCALARS):
            here = rows["column"] == number
            self._columns[name][slots[here]] = rows["new"][here].astype(SCALARS[name])
        here = rows["column"] == MASK
        if here.any():
            kinds = rows["new"][here].astype(np.uint8)
            self._put_masks(slots[here], kinds, bits[rows["new_mask"][here][kinds == MASKED]])

    def _put_masks(self, slots: Array, kinds: Array, bits: Array) -> None:
        """Give edges other kinds, and packed masks to those of kind MASKED."""
        old = self._columns["bits"][slots]
        self._pool_free.extend(old[old >= 0].tolist())
        rows = np.full(len(slots), -1, np.int32)
        rows[kinds == MASKED] = self._store(bits)
        self._columns["bits"][slots], self._columns["kind"][slots] = rows, kinds

    # -- views -------------------------------------------------------------------------------------------------------
    @property
    def edges(self) -> TableView[EdgeArray]:
        """The edges as a table: `edges()` returns handles, `edges["score"]` a column, `edges["score"] < t` a mask."""
        return TableView(cast("Any", self), self.graph.edges._table, EdgeArray)

    def pairs(self) -> npt.NDArray[np.int32]:
        """Return (plane, query block, key block) of each edge, int32 [edges, 3], in the order of `edges()`."""
        slots = self.edges().index
        per_plane = self._plane_of()
        found = np.empty((len(slots), 3), np.int32)
        target, source = self._target[slots], self._source[slots]
        found[:, 0] = per_plane[target]
        found[:, 1], found[:, 2] = self._index_column[target], self._index_column[source]
        return found

    def _plane_of(self) -> Array:
        planes = np.zeros(len(self._index_column), np.int32)
        for plane in range(self.planes):
            planes[self.query_nodes[plane, : self.frame.rows]] = plane
            planes[self.key_nodes[plane, : self.frame.columns]] = plane
        return planes

    def ends(self, edge: EdgeId) -> tuple[int, int, int]:
        """Return (plane, query block, key block) of an edge. Raises StaleHandle."""
        key, query = self.graph.endpoints(edge)
        q, k = int(self._index_column[query.index]), int(self._index_column[key.index])
        plane = int(np.flatnonzero(self.query_nodes[:, q] == query.index)[0])
        return plane, q, k

    def held(self, slots: Array) -> Blocks:
        """Return block numbers, kinds and masks of edges, given by their slots."""
        kind, rows = self._columns["kind"][slots], self._columns["bits"][slots]
        q, k = self._index_column[self._target[slots]], self._index_column[self._source[slots]]
        return Blocks(q.astype(np.int64), k.astype(np.int64), kind, self._pool[rows[kind == MASKED]])

    def to_dense(self) -> npt.NDArray[np.bool_]:
        """Return the mask of all tokens, bool [planes, queries, keys]."""
        frame, block = self.frame, self.block
        padded = np.zeros((self.planes, frame.rows, block, frame.columns, block), bool)
        slots = self.edges().index
        planes = self._plane_of()[self._target[slots]]
        blocks = self.held(slots)
        for part in masks.chunks(len(slots), block):
            rows = np.arange(len(slots))[part]
            piece = blocks.take(rows)
            padded[planes[rows], piece.q, :, piece.k] = masks.tokens(piece, self.base, frame)
        flat = padded.reshape(self.planes, frame.rows * block, frame.columns * block)
        return flat[:, : frame.queries, : frame.keys].copy()

    def empty_rows(self) -> npt.NDArray[np.int64]:
        """Return (plane, query block) of the query blocks without an edge, int64 [n, 2]."""
        degree = self.graph.buffers().incoming.degree[self.query_nodes[:, : self.frame.rows]]
        return np.argwhere(degree == 0)

    def hash(self, positions: bool = False) -> str:
        """Return the sha256 of shape, base rule and edges: their blocks, masks, gates and pins, not their scores.

        Patterns with equal edges have equal hashes, whatever their history. With `positions`, handles and the order of
        all lists count too.
        """
        with self._lock:
            digest = hashlib.sha256()
            base, frame = self.base, self.frame
            facts = (frame.queries, frame.keys, frame.block, frame.q_start, self.planes,
                     base.causal, base.window, base.symmetric)  # fmt: skip
            digest.update(repr(facts).encode())
            if base.segments is not None:
                for ids in (base.segments.q, base.segments.k):
                    digest.update(ids.tobytes())
            slots = self.edges().index
            pairs = self.pairs()
            if not positions:
                order = np.lexsort((pairs[:, 2], pairs[:, 1], pairs[:, 0]))
                slots, pairs = slots[order], pairs[order]
            digest.update(pairs.tobytes())
            for name in ("kind", "gate", "pinned"):
                digest.update(self._columns[name][slots].tobytes())
            digest.update(np.ascontiguousarray(self.held(slots).bits).tobytes())
            if positions:
                digest.update(self._edge_ids[slots].tobytes())
                for at in (self._out_at, self._in_at):
                    digest.update(at[slots].tobytes())
            return digest.hexdigest()

    def __repr__(self) -> str:
        queries, keys = self.tokens
        name = f"{self.name!r}, " if self.name else ""
        return f"Pattern({name}{queries} x {keys} tokens, block {self.block}, {self.planes} planes, {len(self)} edges)"


class PatternEdit:
    """The verbs of an open transaction; `Pattern.edit` gives it."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern

    def connect(self, query: int, key: int, plane: int = 0) -> EdgeId:
        """Let a query block see a key block; see `Pattern.connect`."""
        return self.pattern.connect(query, key, plane)

    def connect_many(self, query: Any, key: Any, plane: Any = 0) -> EdgeArray:
        """Connect pairs of blocks; see `Pattern.connect_many`."""
        return self.pattern.connect_many(query, key, plane)

    def cut(self, edges: EdgeId | EdgeArray | Mask | Iterable[int] | Array) -> None:
        """Remove edges; see `Pattern.cut`."""
        self.pattern.cut(edges)

    def set(self, edges: EdgeId | EdgeArray | Mask | Iterable[int] | Array, **columns: Any) -> None:
        """Write columns of edges: gate, score, birth, pinned; one value for all, or one per edge.

        Raises: StaleHandle, UsageError for another column, DTypeError for a value that it cannot hold.
        """
        self.pattern._set(edges, columns)


def of_rule(pattern: Pattern, rule: Rule) -> Pattern:
    """Add the edges of a rule to an empty pattern, in every plane, and make it the pattern's generator."""
    frame = pattern.frame
    pairs = masks.candidates(rule, frame, np.arange(frame.rows))
    blocks = masks.of_rule(rule, pattern.base, frame, pairs)
    for plane in range(pattern.planes):
        source = pattern.key_nodes[plane, blocks.k].astype(np.int64)
        target = pattern.query_nodes[plane, blocks.q].astype(np.int64)
        pattern._insert(source, target, blocks)
    pattern.rule = rule
    return pattern


def as_segments(given: Any, frame: Frame) -> Segments | None:
    """Return segments from the ids of all keys, or from (ids of queries, ids of keys). Raises UsageError."""
    if given is None or isinstance(given, Segments):
        return given
    if isinstance(given, tuple):
        q, k = (np.asarray(each) for each in given)
    else:
        k = np.asarray(given)
        q = k[frame.q_start : frame.q_start + frame.queries]
    for side, ids, count in (("queries", q, frame.queries), ("keys", k, frame.keys)):
        if ids.shape != (count,) or ids.dtype.kind not in "iu":
            got = f"{ids.dtype} of shape {ids.shape}"
            raise PatternShape(f"segments of the {side} do not fit", expected=f"integers of shape ({count},)", got=got,
                               fix=None)  # fmt: skip
    return Segments(np.ascontiguousarray(q, np.int32), np.ascontiguousarray(k, np.int32))


def _address(array: Array) -> int:
    return array.ctypes.data
