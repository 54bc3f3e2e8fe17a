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

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any, Protocol, cast, runtime_checkable
from weakref import ReferenceType

import numpy as np
import numpy.typing as npt

from graphwright.graph import EdgeArray, EdgeId, Graph, Mask
from graphwright.graph.slots import cells_of
from graphwright.graph.views import TableView

from ..arguments import checked
from ..errors import UsageError
from ..settings import NotNegative
from ..signatures import late
from . import algebra, arrays, content, convert, edits, growth, replay, table
from .changes import PatternChange
from .history import Entry, History, Owner
from .lock import OwnedLock, RunLock
from .pair_index import PairIndex
from .pool import MaskPool
from .rules import Frame, Position, Rule, Segments, document_ids

Array = npt.NDArray[Any]
BUCKET = 16
EDGE_COLUMNS: dict[str, Any] = {
    "kind": np.uint8, "gate": (np.int32, -1), "score": np.float32, "birth": np.int32, "pinned": np.uint8,
    "bits": (np.int32, -1),
}  # fmt: skip


class Watcher(Protocol):
    """What follows the changes of a pattern, under the pattern's lock."""

    def changed(self, change: PatternChange) -> None:
        """Note a change that was made; `pattern.version` counts it already."""


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
        debug_counters: count the array elements that edits read or write, in `graph.cells_touched` and `lookups`; slow.
    Raises: ValueError (UsageError) for sizes < 1 and segments of a wrong length.

    A new pattern has no edges; `connect` adds them, or one of the generators makes a pattern with edges. The base rule
    tells what an edge of kind RULE allows, and what `connect` allows: the base rule's pairs of the block or, if it has
    none there, all pairs that `causal` permits.
    """

    @checked
    def __init__(
        self, tokens: int | tuple[int, int], block: int = 64, planes: int = 1, causal: bool = True,
        q_start: int | None = None, window: int | None = None, symmetric: bool = False, segments: Any = None, *,
        name: str = "", timeout: NotNegative = 5.0, debug_counters: bool = False,
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
        self.base = Position(bool(causal), window, bool(symmetric), as_segments(segments, self.frame))
        self.planes, self.name = int(planes), name
        self.rule: Rule | None = None
        self.version, self._gates = 0, 0
        self.steps = 0
        """Number of steps that the pattern has taken; `birth` of an edge is their number when it was connected."""
        self.cooling: dict[tuple[int, int, int], int] = {}
        """Pairs (plane, query block, key block) that a step cut lately -> number of the step."""
        self.lookups: list[int] | None = [0] if debug_counters else None
        self.table: npt.NDArray[np.int64] = np.zeros(table.WORDS, np.int64)
        self._words = cells_of(self.table)
        self._history = History()
        self.watchers: list[ReferenceType[Watcher]] = []
        """What follows each change after it was made, such as copies on devices."""
        self._open: list[Any] | None = None
        self._lock = RunLock(timeout)
        self._guard: RunLock | OwnedLock = self._lock
        self._index = PairIndex(self.lookups)
        self._pool = MaskPool(block)
        self.query_nodes: npt.NDArray[np.int32] = np.empty((self.planes, 0), np.int32)
        self.key_nodes: npt.NDArray[np.int32] = np.empty((self.planes, 0), np.int32)
        self._bind(Graph({"number": np.int32}, EDGE_COLUMNS, BUCKET, debug_counters=debug_counters))
        growth.add_nodes(self)

    def _bind(self, graph: Graph) -> None:
        """Use a graph, which is not shared with others."""
        self.graph = graph
        self._edge_table = graph.edges._table
        graph.on_move.append(self._refresh)
        self._refresh()

    # -- shape -------------------------------------------------------------------------------------------------------
    @property
    def tokens(self) -> tuple[int, int]:
        """Numbers of queries and keys."""
        return self.frame.queries, self.frame.keys

    @property
    def block(self) -> int:
        """Tokens per block."""
        return self.frame.block

    @property
    def blocks(self) -> tuple[int, int]:
        """Numbers of query blocks and key blocks."""
        return self.frame.rows, self.frame.columns

    @property
    def q_start(self) -> int:
        """Position of the first query."""
        return self.frame.q_start

    @property
    def causal(self) -> bool:
        """Whether no query sees a later key."""
        return self.base.causal

    @property
    def edge_count(self) -> int:
        """Number of edges."""
        return self.graph.edge_count

    def __len__(self) -> int:
        return self.graph.edge_count

    def __bool__(self) -> bool:
        return True

    # -- the table ---------------------------------------------------------------------------------------------------
    def _refresh(self) -> None:
        """Write all words of the table again, after arrays moved or the shape changed."""
        held = self.graph.buffers()
        self._source, self._target, self._columns = held.source, held.target, held.edge_columns
        self._node_ids, self._edge_ids = held.node_ids, held.edge_ids
        self._out_at, self._in_at = held.outgoing.position, held.incoming.position
        self._numbers = held.node_columns["number"]
        self._source_cells, self._target_cells = cells_of(held.source), cells_of(held.target)
        self._query_cells, self._key_cells = cells_of(self.query_nodes), cells_of(self.key_nodes)
        self._node_cells, self._edge_cells = cells_of(held.node_ids), cells_of(held.edge_ids)
        self._out_cells, self._in_cells = cells_of(self._out_at), cells_of(self._in_at)
        self._rows, self._key_blocks = self.blocks
        t, frame, base = self.table, self.frame, self.base
        lists = [each for side in (held.incoming, held.outgoing)
                 for each in (side.head, side.degree, side.after, side.items)]  # fmt: skip
        columns = [self._columns[name] for name in ("kind", "gate", "bits")]
        addressed = [self.query_nodes, self.key_nodes, *lists, held.source, held.target, self._numbers, *columns,
                     self._pool.data]  # fmt: skip
        t[table.MAGIC] = table.SIGNATURE
        t[table.ROWS : table.POOL + 1] = [address(each) for each in addressed]
        t[table.BLOCK : table.TK + 1] = frame.block, frame.rows, frame.columns, self.planes, frame.queries, frame.keys
        t[table.QSTART : table.SYMMETRIC + 1] = frame.q_start, base.causal, base.window or 0, base.symmetric
        segments = base.segments
        t[table.SEG_Q], t[table.SEG_K] = (0, 0) if segments is None else (address(segments.q), address(segments.k))
        t[table.BUCKET], t[table.GATES] = BUCKET, self._gates
        t[table.ROW_STRIDE], t[table.COL_STRIDE] = self.query_nodes.shape[1], self.key_nodes.shape[1]
        edits.count(self)

    @property
    def gates(self) -> int:
        """Size of the vector of gates that the column `gate` of edges refers to."""
        return self._gates

    @gates.setter
    def gates(self, count: int) -> None:
        self._gates = self._words[table.GATES] = count

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

    # -- queries -----------------------------------------------------------------------------------------------------
    def has(self, query: int, key: int, plane: int = 0) -> bool:
        """Return whether a query block sees a key block. O(1). Raises: BlockRange."""
        return edits.find(self, query, key, plane) >= 0

    def edge_between(self, query: int, key: int, plane: int = 0) -> EdgeId | None:
        """Return the edge of a query block and a key block, or None. O(1). Raises: BlockRange."""
        slot = edits.find(self, query, key, plane)
        return None if slot < 0 else EdgeId.from_int(self._edge_cells[slot])

    def slots_of(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the edge slots of pairs (node slot of a key block, of a query block); -1 where there is no edge."""
        return self._index.find_many(sources, targets, self._source, self._target)

    @property
    def masks(self) -> npt.NDArray[np.uint64]:
        """The masks of edges of kind MASKED, [rows, block, words]; the column `bits` has the row of each edge."""
        return self._pool.data

    @property
    def edges(self) -> TableView[EdgeArray]:
        """The edges as a table: `edges()` returns handles, `edges["score"]` a column, `edges["score"] < t` a mask."""
        return TableView(cast("Any", self), self._edge_table, EdgeArray)

    # -- edits -------------------------------------------------------------------------------------------------------
    def connect(self, query: int, key: int, plane: int = 0) -> EdgeId:
        """Let a query block see a key block; return the new edge. O(1).

        Raises: BlockRange, EdgeExists, CausalityViolation, EditBusy; then nothing changes.
        """
        with self._guard:
            if self._open is not None:
                return edits.connect(self, query, key, plane)
            with _Transaction(self, "connect"):
                return edits.connect(self, query, key, plane)

    def connect_many(self, query: Any, key: Any, plane: Any = 0) -> EdgeArray:
        """Connect pairs of blocks, as a loop of `connect` would, down to the order of all lists; return the edges.

        Args:
            query, key, plane: block numbers, as integers or 1-d arrays that broadcast.
        Raises: BlockRange, EdgeExists, CausalityViolation with the first bad pair, EditBusy; then nothing changes.
        """
        with self._transaction("connect"):
            return edits.connect_many(self, query, key, plane)

    def cut(self, edges: EdgeId | EdgeArray | Mask | Iterable[int] | Array) -> None:
        """Remove an edge, or all edges of a mask, of an array of handles or of a sequence. O(1) per edge.

        Raises: StaleHandle, UsageError for an edge that is given twice, EditBusy; then nothing changes.
        """
        if not isinstance(edges, int):
            with self._transaction("cut"):
                edits.cut_many(self, edges)
            return
        with self._guard:
            if self._open is not None:
                edits.cut(self, cast("EdgeId", edges))
                return
            with _Transaction(self, "cut"):
                edits.cut(self, cast("EdgeId", edges))

    def edit(self, why: str, author: str | None = None) -> AbstractContextManager[PatternEdit]:
        """Return a context whose edits are one entry of the journal; if the block raises, all of them are undone.

        Raises: EditBusy if a run reads the pattern for longer than `timeout`; UsageError inside another edit.
        """
        return self._edit(why, author, nested=False)

    def transaction(self, why: str, author: str | None = None) -> AbstractContextManager[PatternEdit]:
        """Return a context like `edit`, whose edits belong to the open edit if there is one."""
        return self._edit(why, author, nested=True)

    @contextmanager
    def _edit(self, why: str, author: str | None, nested: bool) -> Generator[PatternEdit]:
        with self._transaction(why, author, nested):
            yield PatternEdit(self)

    @contextmanager
    def _transaction(self, why: str, author: str | None = None, nested: bool = True) -> Generator[None]:
        """Note edits in one entry; a transaction inside another one is a part of it."""
        with self._guard:
            if self._open is not None:
                if not nested:
                    raise UsageError("an edit of this pattern is open already", where=self.name or None, got=why,
                                     fix="use the open edit, or end it first")  # fmt: skip
                yield
                return
            with _Transaction(self, why, author):
                yield

    def _tell(self, change: PatternChange) -> None:
        self.watchers = [each for each in self.watchers if each() is not None]
        for each in self.watchers:
            if (watcher := each()) is not None:
                watcher.changed(change)

    def _note(self, part: Any) -> None:
        if self._open is not None:
            self._open.append(part)

    # -- history -----------------------------------------------------------------------------------------------------
    @property
    def owner(self) -> Owner | None:
        """What journals the transactions in place of the pattern, such as a program; it owns undo."""
        return self._history.owner

    @owner.setter
    def owner(self, owner: Owner | None) -> None:
        self._history.owner = owner
        self._guard = self._lock if owner is None else OwnedLock(owner.holding, self._lock)

    @property
    def journal(self) -> tuple[Entry, ...]:
        """The transactions so far, without those undone; empty if an owner journals them."""
        return tuple(self._history.done)

    def blame(self, query: int, key: int, plane: int = 0) -> list[Any]:
        """Return the journal entries that connected, cut or changed the edge of two blocks, even if it was cut.

        They are entries of `journal` or, if a program owns the pattern, of the program's journal, oldest first.

        Raises: BlockRange.
        """
        source, target = edits.ends(self, query, key, plane)
        found: list[Any] = []
        for entry, change in self._history.changes():
            hit = ((change.rows["source"] == source) & (change.rows["target"] == target)).any()
            if hit and not (found and found[-1] is entry):  # an entry may have several changes
                found.append(entry)
        return found

    def undo(self) -> None:
        """Undo the last transaction, restoring handles, columns and the order of all lists.

        Raises: NotUndoable if no edit is left; UsageError if a program owns the pattern.
        """
        with self._lock:
            change = self._history.last(self.name).change.invert()
            replay.perform(self, change)
            self._history.undone()
            self.version += 1
            self._tell(change)

    def redo(self) -> None:
        """Redo the transaction that was undone last. Raises: as `undo`."""
        with self._lock:
            change = self._history.next(self.name).change
            replay.perform(self, change)
            self._history.redone()
            self.version += 1
            self._tell(change)

    def apply(self, change: PatternChange | Applies) -> Any:
        """Apply a change without recording it, or connect proposed edges in one entry of the journal and return them.

        Raises: NotUndoable if a change does not fit the pattern, because later edits were not undone first; EdgeExists
        if a proposed edge was connected meanwhile. Then the pattern is unchanged.
        """
        if not isinstance(change, PatternChange):
            if not isinstance(change, Applies):
                raise UsageError("not a change of a pattern", expected="a change, or what propose returned", got=change)
            return change.apply(self)
        with self._lock:
            replay.perform(self, change)
            self.version += 1
            self._tell(change)

    # -- methods of a layer above ------------------------------------------------------------------------------------
    @late
    def prune(self):
        """Cut the edges that carry the least attention; see `graphwright.attention.prune`."""
        return _attention("prune")

    @late
    def step(self):
        """Cut the lightest edges and add the most useful absent ones; see `graphwright.attention.step`."""
        return _attention("step")

    @late
    def gate(self):
        """Put trained gates on edges, in the program that owns the pattern; see `graphwright.attention.gate`."""
        return _attention("gate")

    @late
    def reach(self):
        """Return which tokens influence which through layers of this pattern; see `graphwright.attention.reach`."""
        return _attention("reach")

    @late
    def propose(self):
        """Rank absent edges by how much they would lower the loss; see `graphwright.attention.propose`."""
        return _attention("propose")

    # -- other files of this folder ----------------------------------------------------------------------------------
    pairs = content.pairs
    ends = content.ends
    held = content.held
    to_dense = content.to_dense
    empty_rows = content.empty_rows
    hash = content.content_hash
    summary = content.summary
    diff = content.diff
    copy = content.copy
    extend = growth.extend
    compact = growth.compact
    __or__ = algebra.union
    __and__ = algebra.intersection
    __sub__ = algebra.difference
    to_arrays = arrays.to_arrays
    from_arrays = classmethod(arrays.from_arrays)
    from_dense = classmethod(convert.from_dense)
    from_mask_fn = classmethod(convert.from_mask_fn)
    from_flex = classmethod(convert.from_flex)
    to_flex = convert.to_flex

    def __repr__(self) -> str:
        queries, keys = self.tokens
        name = f"{self.name!r}, " if self.name else ""
        planes = "" if self.planes == 1 else f", {self.planes} planes"
        return f"Pattern({name}{queries} x {keys} tokens, block {self.block}{planes}, {len(self)} edges)"


def _attention(name: str) -> Any:
    """Return a function of the layer that runs patterns, by name, so that no import circle arises."""
    return getattr(import_module("graphwright.attention"), name)


@runtime_checkable
class Applies(Protocol):
    """Edits that are proposed, such as those of `propose`."""

    def apply(self, pattern: Pattern) -> Any:
        """Make the edits."""
        ...


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

        Raises: StaleHandle; UsageError for another column, a gate's number out of range, or a score that is not finite;
        DTypeError for a value that the column cannot hold.
        """
        edits.write(self.pattern, edges, columns)

    def prune(self, mass: float | None = None, relative: Any = "none", **options: Any) -> Any:
        """Cut the edges that carry the least attention; see `Pattern.prune`."""
        return self.pattern.prune(mass, relative, **options)


class _Transaction:
    """One transaction: what is edited inside becomes an entry of the history, or is undone if the block raises.

    A class, since a generator takes a quarter of the time of a single edit.
    """

    __slots__ = ("author", "parts", "pattern", "why")

    def __init__(self, pattern: Pattern, why: str, author: str | None = None) -> None:
        self.pattern, self.why, self.author = pattern, why, author

    def __enter__(self) -> None:
        self.pattern._open = self.parts = []

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        pattern = self.pattern
        pattern._open = None
        if not self.parts:
            return
        entry = Entry(self.why, self.author, self.parts, pattern.block)
        if kind is not None:
            replay.perform(pattern, entry.change.invert())
            return
        try:
            pattern._history.commit(entry)
        except BaseException:
            replay.perform(pattern, entry.change.invert())
            raise
        pattern.version += 1
        if pattern.watchers:
            pattern._tell(entry.change)


def as_segments(given: Any, frame: Frame) -> Segments | None:
    """Return segments from the ids of all keys, or from (ids of queries, ids of keys). Raises: PatternShape."""
    if given is None or isinstance(given, Segments):
        return given
    if isinstance(given, tuple):
        q, k = (np.asarray(each) for each in given)
    else:
        k = document_ids("keys", given, frame.keys)
        q = k[frame.q_start : frame.q_start + frame.queries]
    return Segments(document_ids("queries", q, frame.queries), document_ids("keys", k, frame.keys))


def address(array: Array) -> int:
    """Return the address of an array's memory."""
    return array.__array_interface__["data"][0]
