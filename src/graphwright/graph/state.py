"""Functions of a whole graph: hash, saved form, copy, snapshot, sparse matrices. They are methods of `Graph`.

The saved form has slots, generations, free lists and list positions, so that a loaded graph continues with the same
handles and undo records. It is plain JSON, or numpy arrays with `arrays=True`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from graphwright.graph.slots import DEAD, Array, Column, ColumnSpec, SlotTable, is_array, is_list

from ..errors import DTypeError, UsageError
from .buckets import Buckets
from .chain import canonical_json
from .errors import GraphFileError
from .handles import INDEX, INDEX_BITS, EdgeArray, Ids, NodeArray

if TYPE_CHECKING:
    from graphwright.graph.graph import Graph

# pyright: reportPrivateUsage=false
# The files of this folder share private attributes of a graph.

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of the nodes, edges and columns of a graph at one version, for readers on other threads."""

    version: int
    nodes: NodeArray
    edges: EdgeArray
    sources: NodeArray
    targets: NodeArray
    node_columns: dict[str, Array]
    edge_columns: dict[str, Array]


def snapshot(self: Graph) -> Snapshot:
    """Return a copy of all live nodes and edges with their columns, in slot order. Raises EditBusy."""
    with self._lock:
        nodes, edges = self._node_table, self._edge_table
        n, e = nodes.live_slots(), edges.live_slots()
        s, t = (NodeArray(nodes.ids[end.data[e]]) for end in (self._source, self._target))
        of_nodes = {name: column.take(n) for name, column in nodes.columns.items()}
        of_edges = {name: column.take(e) for name, column in edges.columns.items()}
        return Snapshot(self.version, NodeArray(nodes.ids[n]), EdgeArray(edges.ids[e]), s, t, of_nodes, of_edges)


class ListBuffers(NamedTuple):
    """The arrays of all out-lists or all in-lists; `graphwright.graph.buckets` describes them."""

    head: Array  # int32 per node slot: the first block of its list
    tail: Array
    degree: Array
    position: Array  # int32 per edge slot: its index in `items`
    items: Array  # int32 [blocks · block]: edge slots
    after: Array  # int32 per block: the next one of its list
    before: Array
    free: Array


class Buffers(NamedTuple):
    """The arrays of a graph, not copies: valid until `Graph.on_move` is called, and to be read only."""

    node_ids: Ids  # packed handle per slot, -1 for a free one
    edge_ids: Ids
    source: Array  # int32 per edge slot: the slot of its source
    target: Array
    outgoing: ListBuffers
    incoming: ListBuffers
    node_columns: dict[str, Array]
    edge_columns: dict[str, Array]


def buffers(self: Graph) -> Buffers:
    """Return the arrays that hold the graph, for compiled loops that walk its lists; nothing is copied."""
    nodes, edges = self._node_table, self._edge_table
    of_nodes, of_edges = ({name: c.data for name, c in table.columns.items()} for table in (nodes, edges))
    outgoing, incoming = (ListBuffers(*side.tables()) for side in (self._out, self._in))
    return Buffers(nodes.ids, edges.ids, self._source.data, self._target.data, outgoing, incoming, of_nodes, of_edges)


def structure_hash(self: Graph, positions: bool = False) -> str:
    """Return the sha256 of live handles, endpoints and columns, and with `positions` of adjacency-list positions.

    Generations of free slots, free lists and the version are left out, so an edit and its inverse give the same hash.
    Values of object columns, encoded if the column has `encode`, are hashed as JSON, or if they are not JSON by
    their repr. Raises: UsageError for a value with neither JSON nor a repr of its own.
    """
    with self._lock:
        digest = hashlib.sha256()
        e = self._edge_table.live_slots()
        for table in (self._node_table, self._edge_table):
            slots = table.live_slots()
            digest.update(f"{table.kind.__name__} {len(slots)}\n".encode())
            digest.update(table.ids[slots].tobytes())
            for name in sorted(table.columns):
                column = table.columns[name]
                digest.update(f"{name} {column.dtype.str}\n".encode())
                rows = column.take(slots)
                plain = column.dtype != object
                digest.update(rows.tobytes() if plain else "\n".join(_canonical(v, column) for v in rows).encode())
        for ends in (self._source, self._target):
            digest.update(self._node_table.ids[ends.data[e]].tobytes())
        if positions:
            digest.update(f"positions {self.block}\n".encode())
            for side in (self._out, self._in):
                digest.update(side.positions[e].tobytes())
        return digest.hexdigest()


def copy(self: Graph, kind: type[Graph] | None = None) -> Graph:
    """Return an independent copy that will issue the same future handles; object values in columns are shared.

    `kind` is the class of the copy, by default that of this graph.
    """
    with self._lock:
        nodes, edges = self._node_table, self._edge_table
        of_nodes, of_edges = ({name: c.spec for name, c in table.columns.items()} for table in (nodes, edges))
        twin = (kind or type(self))(
            of_nodes, of_edges, self.block, self.max_generation, self._counter is not None, self.timeout
        )
        twin._out.copy_from(self._out)
        twin._in.copy_from(self._in)
        twin._node_table.copy_from(nodes)
        twin._edge_table.copy_from(edges)
        twin.version, twin.describe = self.version, self.describe
        return twin


def memory(self: Graph) -> dict[str, float]:
    """Return bytes of memory, unused capacity included, as a dict: total, per_node, per_edge (with edge lists)."""
    nodes, edges = self._node_table.nbytes, self._edge_table.nbytes + self._out.nbytes + self._in.nbytes
    per_node, per_edge = nodes / max(self.node_count, 1), edges / max(self.edge_count, 1)
    return {"total": nodes + edges, "per_node": per_node, "per_edge": per_edge}


def to_dict(self: Graph, *, arrays: bool = False) -> dict[str, Any]:
    """Return the saved form: JSON values, or numpy arrays for the large parts with `arrays=True`.

    Values of object columns are saved as `ColumnSpec.encode` returns them, or unchanged if there is no `encode`.
    """
    with self._lock:
        nodes, edges = self._node_table, self._edge_table
        slots = edges.live_slots()
        data = {
            "schema": SCHEMA,
            "block": self.block,
            "max_generation": self.max_generation,
            "version": self.version,
            "nodes": _table_dict(nodes),
            "edges": _table_dict(edges)
            | {"source": self._source.data[slots].copy(), "target": self._target.data[slots].copy()},
            "out": _lists_dict(self._out, nodes, slots, self._source.data),
            "in": _lists_dict(self._in, nodes, slots, self._target.data),
        }
    return data if arrays else _plain(data)


def from_dict(
    cls: type[Graph], data: Mapping[str, Any], node_columns: Mapping[str, Any] | None = None,
    edge_columns: Mapping[str, Any] | None = None,
) -> Graph:  # fmt: skip
    """Return the graph that `to_dict` saved; columns declared here replace saved declarations, to supply `decode`.

    Raises: GraphFileError if the tables contradict each other; every size is checked before it is used.
    """
    try:
        if data["schema"] != SCHEMA:
            raise GraphFileError("the saved graph has an unknown schema", expected=SCHEMA, got=data["schema"])
        graph = cls({}, {}, int(data["block"]), int(data["max_generation"]))
        nodes, edges = graph._node_table, graph._edge_table
        _load_table(nodes, data["nodes"], node_columns or {})
        _load_table(edges, data["edges"], edge_columns or {})
        live = edges.live_slots()
        for column, name in ((graph._source, "source"), (graph._target, "target")):
            ends = _ints(data["edges"][name], name)
            _require(len(ends) == len(live) and _in_range(ends, nodes.size), f"wrong number or range of edge {name}s")
            _require(bool((nodes.ids[ends] != DEAD).all()), f"the {name} of an edge is a removed node")
            column.data[live] = ends
        _load_lists(graph._out, data["out"], nodes, live, graph._source.data)
        _load_lists(graph._in, data["in"], nodes, live, graph._target.data)
        graph.version = int(data["version"])
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        if isinstance(error, GraphFileError):
            raise
        raise GraphFileError(f"a field of the saved graph is missing or malformed: {error}") from error
    return graph


def _canonical(value: Any, column: Column) -> str:
    value = column.spec.encode(value) if column.spec.encode else value
    try:
        return canonical_json(value)
    except UsageError:
        if type(value).__repr__ is object.__repr__:
            what = f"cannot hash a {type(value).__name__}: it is not JSON and has no repr of its own"
            raise UsageError(what, where=column.name, fix="ColumnSpec(encode=...)") from None
        return f"{type(value).__qualname__} {value!r}"


def _table_dict(table: SlotTable) -> dict[str, Any]:
    used, live = slice(0, table.size), table.live_slots()
    generation = np.where(table.ids[used] == DEAD, 0, (table.ids[used] >> INDEX_BITS) & INDEX)
    columns: dict[str, Any] = {}
    for name, column in table.columns.items():
        rows, encode = column.take(live), column.spec.encode
        rows = [encode(v) if encode else v for v in rows] if column.dtype == object else rows
        default = encode(column.default) if encode and column.default is not None else column.default
        columns[name] = {"dtype": column.dtype.name, "default": default, "rows": rows}
    high, free = table.high[used].copy(), table.free_slots.copy()
    return {"generation": generation.astype(np.int32), "high": high, "free": free, "columns": columns}


def _lists_dict(side: Buckets, nodes: SlotTable, slots: Array, owner: Array) -> dict[str, Any]:
    """Return the saved form of all out-lists (or in-lists): edge slots and block numbers, joined in node order."""
    head, after = side.tables()[0], side.tables()[5]
    blocks: list[int] = []
    for block in head[: nodes.size][head[: nodes.size] >= 0].tolist():
        while block >= 0:
            blocks.append(block)
            block = int(after[block])
    rank = np.empty(side.state[0], np.int64)
    rank[blocks] = np.arange(len(blocks))
    positions = side.positions[slots].astype(np.int64)
    order = np.argsort(rank[positions // side.block] * side.block + positions % side.block)
    free = side.tables()[7][: side.state[1]].copy()
    return {"items": slots[order], "blocks": np.array(blocks, np.int64), "free": free}


def _load_table(table: SlotTable, data: Mapping[str, Any], declared: Mapping[str, Any]) -> None:
    generation, high, free = (_ints(data[name], name) for name in ("generation", "high", "free"))
    size, top = len(high), table.max_generation
    alive = generation > 0
    _require(len(generation) == size and size < INDEX, "`generation` and `high` differ in length, or are too long")
    _require(bool(((high >= 1) & (high <= top) & (generation >= 0)).all()), "a generation is out of range")
    _require(bool((generation <= np.minimum(high, top - 1)).all()), "a generation exceeds the `high` of its slot")
    listed = np.zeros(size, bool)
    _require(_in_range(free, size), "a free slot is out of range")
    listed[free] = True
    _require(len(free) == np.count_nonzero(listed), "a slot is listed as free twice")
    _require(bool((listed == (~alive & (high < top))).all()), "the free list does not hold the dead slots")
    table.reserve(size)
    slots = np.arange(size)
    table.ids[:size] = np.where(alive, table.kind_bit | generation << INDEX_BITS | slots, DEAD)
    table.high[:size] = high
    table.size, table.live = size, int(np.count_nonzero(alive))
    table.free_slots = free
    live = table.live_slots()
    saved = data["columns"]
    for name, column in saved.items():
        table.add_column(name, declared.get(name, (np.dtype(column["dtype"]), column["default"])))
        spec: ColumnSpec = table.columns[name].spec
        rows = column["rows"]
        if table.columns[name].dtype == object:
            _require(isinstance(rows, list), f"the rows of column {name} are not a list")
            rows = [spec.decode(v) for v in rows] if spec.decode else list(rows)
        elif is_list(rows):
            rows = np.array([float(v) if isinstance(v, str) else v for v in rows] or [], None if rows else np.int8)
        table.columns[name].put(live, table.columns[name].cast(rows, len(live)))
    for name in declared.keys() - saved.keys():
        table.add_column(name, declared[name])


def _load_lists(side: Buckets, data: Mapping[str, Any], nodes: SlotTable, live: Array, owner: Array) -> None:
    items, blocks, free = (_ints(data[name], name) for name in ("items", "blocks", "free"))
    size = side.block
    _require(len(items) == len(live) and np.array_equal(np.sort(items), live), "not every live edge is once in a list")
    degree = np.bincount(owner[live], minlength=nodes.size).astype(np.int64)
    lengths = -(-degree // size)
    _require(np.array_equal(owner[items], np.repeat(np.arange(nodes.size), degree)), "an edge is in a wrong list")
    used = len(blocks) + len(free)
    together = np.concatenate([blocks, free])
    _require(len(blocks) == lengths.sum() and _in_range(together, used), "wrong number or range of bucket blocks")
    _require(len(np.unique(together)) == used, "a bucket block is in two lists")
    side.load(degree, items, blocks, free)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {k: v if k == "default" else _plain(v) for k, v in fields.items()}
    if not is_array(value):
        return value
    rows = value.tolist()
    if value.dtype.kind == "f" and not np.isfinite(value).all():  # JSON has no NaN: such values are written as text
        rows = [v if np.isfinite(v) else str(v) for v in rows]
    return rows


def _ints(values: Any, name: str) -> Ids:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        got = f"{array.dtype} of shape {array.shape}"
        raise GraphFileError("a field of the saved graph is not a list of integers", where=name, got=got)
    return array.astype(np.int64)


def _in_range(values: Ids, end: int) -> bool:
    return not len(values) or bool(values.min() >= 0 and values.max() < end)


def _require(holds: bool | np.bool_, what: str) -> None:
    if not holds:
        raise GraphFileError(f"the saved tables contradict each other: {what}")


class Compressed(NamedTuple):
    """A graph in CSR form: `edges[indptr[i]:indptr[i + 1]]` leave (or enter) node i, `indices` are their other ends."""

    indptr: Array
    indices: Array
    edges: EdgeArray
    nodes: NodeArray


class Adjacency(NamedTuple):
    """A sparse matrix over `nodes` in CSR form: row i is `values[indptr[i]:indptr[i + 1]]` in columns `indices[...]`.

    `scipy.sparse.csr_matrix((values, indices, indptr))` accepts it directly.
    """

    indptr: Array
    indices: Array
    values: Array
    nodes: NodeArray


def adjacency(self: Graph, weights: str | None = None) -> Adjacency:
    """Return A[i, j] = number of edges from node i to node j, or the sum of their `weights`; float64. O(V + E log E).

    Raises: UsageError for an undeclared column, DTypeError for one that is not numeric.
    """
    with self._lock:
        rows = csr(self)
        return _matrix(rows, *_entries(self, rows, weights))


def normalized_adjacency(self: Graph, weights: str | None = None) -> Adjacency:
    """Return D^-1/2 (A + I) D^-1/2, D the row sums of A + I (Kipf and Welling 2017, eq. 2). O(V + E log E).

    Raises: as `adjacency`; UsageError naming the first node whose row sum is not positive.
    """
    with self._lock:
        rows = csr(self)
        near, far, values = _entries(self, rows, weights)
        loops = np.arange(len(rows.nodes))
        near, far = np.append(near, loops), np.append(far, loops)
        values = np.append(values, np.ones(len(loops)))
        sums = np.bincount(near, values, len(loops))
        if not (sums > 0).all():
            i = int(np.argmin(sums > 0))
            got = float(sums[i])
            raise UsageError("a row sum of A + I is not positive", where=repr(rows.nodes[i]), expected="> 0", got=got)
        return _matrix(rows, near, far, values / np.sqrt(sums[near] * sums[far]))


def from_coo(
    cls: type[Graph], rows: Any, columns: Any, nodes: int | None = None,
    edge_columns: Mapping[str, Any] | None = None, **values: Any,
) -> Graph:  # fmt: skip
    """Return a graph with an edge rows[k] -> columns[k] for each k, between nodes numbered in slot order.

    Args:
        rows, columns: the source and the target of each edge, as integers >= 0.
        nodes: number of nodes; by default the largest index plus one.
        edge_columns: as in `Graph`.
        values: column name -> one value per edge, or one for all.
    Raises: UsageError for indices out of range or of unequal count; the errors of `add_edges`.
    """
    ends = [np.atleast_1d(np.asarray(end)) for end in (rows, columns)]
    if any(end.ndim != 1 or (end.size and end.dtype.kind not in "iu") for end in ends):
        got = " and ".join(f"{end.dtype} of shape {end.shape}" for end in ends)
        raise UsageError("rows or columns is not a list of integers", expected="two 1-d integer arrays", got=got)
    least = max((int(end.max()) + 1 for end in ends if end.size), default=0)
    count = least if nodes is None else nodes
    if len(ends[0]) != len(ends[1]):
        raise UsageError("rows and columns differ in length", got=f"{len(ends[0])} and {len(ends[1])}")
    lowest = min((int(end.min()) for end in ends if end.size), default=0)
    if lowest < 0 or least > count:
        got = lowest if lowest < 0 else least - 1
        raise UsageError("node index out of range", expected=f"0 <= index < {count}", got=got)
    g = cls(edge_columns=edge_columns)
    made = g.add_nodes(count)
    g.add_edges(*(made.ids[end.astype(np.int64)] for end in ends), **values)
    return g


def _entries(self: Graph, rows: Compressed, weights: str | None) -> tuple[Array, Array, Array]:
    near = np.repeat(np.arange(len(rows.nodes)), np.diff(rows.indptr))
    if weights is None:
        return near, rows.indices, np.ones(len(near))
    column = self._edge_table.column(weights)
    if column.dtype.kind not in "iufb":
        raise DTypeError("the column of edge weights is not numeric", where=weights, got=column.dtype)
    return near, rows.indices, column.take(rows.edges.ids & INDEX).astype(np.float64)


def _matrix(rows: Compressed, near: Array, far: Array, values: Array) -> Adjacency:
    """Return the matrix with values[k] at [near[k], far[k]] for each k; duplicates are summed in order."""
    n = len(rows.nodes)
    positions, of = np.unique(near * n + far, return_inverse=True)
    indptr = np.zeros(n + 1, np.int64)
    np.cumsum(np.bincount(positions // max(n, 1), minlength=n), out=indptr[1:])
    return Adjacency(indptr, positions % max(n, 1), np.bincount(of, values, len(positions)), rows.nodes)


def csr(self: Graph) -> Compressed:
    """Return the out-edges of all nodes in CSR form, each row in edge slot order. O(V + E log E)."""
    return _compress(self, self._source.data, self._target.data)


def csc(self: Graph) -> Compressed:
    """Return the in-edges of all nodes in CSR form, each row in edge slot order. O(V + E log E)."""
    return _compress(self, self._target.data, self._source.data)


def _compress(self: Graph, near: Array, far: Array) -> Compressed:
    with self._lock:
        nodes, edges = self._node_table.live_slots(), self._edge_table.live_slots()
        dense = np.empty(self._node_table.size, np.int64)
        dense[nodes] = np.arange(len(nodes))
        rows, columns = dense[near[edges]], dense[far[edges]]
        order = np.argsort(rows, kind="stable")
        indptr = np.zeros(len(nodes) + 1, np.int64)
        np.cumsum(np.bincount(rows, minlength=len(nodes)), out=indptr[1:])
        edge_ids = EdgeArray(self._edge_table.ids[edges[order]])
        return Compressed(indptr, columns[order], edge_ids, NodeArray(self._node_table.ids[nodes]))
