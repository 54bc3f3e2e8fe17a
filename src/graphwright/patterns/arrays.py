"""The saved form of a pattern: named arrays, all of which are checked before a pattern is made of them.

Lists are saved as edges in order; the chains of blocks are rebuilt from them. Methods of `Pattern`.
"""

# pyright: reportPrivateUsage=false
# The files of this folder share private attributes of a pattern.
from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphwright.graph import Graph, GraphFileError, canonical_json

from ..errors import GraphwrightError
from . import masks, rules
from .errors import PatternFileError
from .masks import Blocks
from .rules import Frame, Segments
from .table import FULL, MASKED

if TYPE_CHECKING:
    from .pattern import Pattern

Array = npt.NDArray[Any]
SCHEMA = 1
TABLES = {
    "nodes": ("generation", "high", "free"),
    "edges": ("generation", "high", "free", "source", "target"),
    "out": ("items", "blocks", "free"),
    "in": ("items", "blocks", "free"),
}
COLUMNS = {"nodes": ("number",), "edges": ("kind", "gate", "score", "birth", "pinned")}


def to_arrays(self: Pattern) -> dict[str, Array]:
    """Return the saved form: arrays by name; numbers and the generator are JSON text, as uint8, under "facts"."""
    with self.reading():
        data = self.graph.to_dict(arrays=True)
        found: dict[str, Array] = {}
        for part, names in TABLES.items():
            found |= {f"{part}.{name}": np.asarray(data[part][name], np.int32) for name in names}
        for part, names in COLUMNS.items():
            found |= {f"{part}.{name}": data[part]["columns"][name]["rows"] for name in names}
        slots = self.edges().index
        found["bits"] = self.held(slots).bits
        found["query_nodes"] = self.query_nodes[:, : self.frame.rows].copy()
        found["key_nodes"] = self.key_nodes[:, : self.frame.columns].copy()
        segments: list[Segments] = []
        base = rules.to_json(self.base, segments)
        facts = {
            "schema": SCHEMA, "tokens": list(self.tokens), "block": self.block, "planes": self.planes,
            "q_start": self.q_start, "base": base, "name": self.name, "version": self.version, "steps": self.steps,
            "gates": self.gates, "rule": None if self.rule is None else rules.to_json(self.rule, segments),
        }  # fmt: skip
        for number, each in enumerate(segments):
            found[f"segments.{number}.q"], found[f"segments.{number}.k"] = each.q, each.k
        found["facts"] = np.frombuffer(canonical_json(facts).encode(), np.uint8)
        return found


def from_arrays(cls: type[Pattern], data: Mapping[str, Any]) -> Pattern:
    """Return the pattern that `to_arrays` saved, with equal handles and lists.

    Raises: PatternFileError if an array is missing or malformed, or if arrays contradict each other.
    """
    try:
        return _loaded(cls, {name: np.asarray(array) for name, array in data.items()})
    except PatternFileError:
        raise
    except GraphFileError as error:
        raise PatternFileError(error.what, where=error.where, expected=error.expected, got=error.got) from error
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError, GraphwrightError) as error:
        raise PatternFileError(f"an array of the saved pattern is missing or malformed: {error}") from error


def _loaded(cls: type[Pattern], data: Mapping[str, Array]) -> Pattern:
    facts = json.loads(np.ascontiguousarray(data["facts"], np.uint8).tobytes())
    if facts["schema"] != SCHEMA:
        raise PatternFileError("the saved pattern has an unknown schema", expected=SCHEMA, got=facts["schema"])
    queries, keys = (int(each) for each in facts["tokens"])
    frame, planes = Frame(queries, keys, max(int(facts["block"]), 1), int(facts["q_start"])), int(facts["planes"])
    nodes = data["query_nodes"].size + data["key_nodes"].size
    if planes * (frame.rows + frame.columns) != nodes:  # before anything of that size is allocated
        expected, got = f"{planes} planes of {frame.rows} + {frame.columns} blocks", f"{nodes} nodes"
        raise PatternFileError("the nodes do not fit the shape of the pattern", expected=expected, got=got)
    segments: list[Segments] = []
    while (name := f"segments.{len(segments)}") + ".q" in data:
        sides = (("queries", "q", queries), ("keys", "k", keys))
        segments.append(Segments(*(rules.document_ids(side, data[f"{name}.{end}"], n) for side, end, n in sides)))
    base = rules.from_json(facts["base"], segments)
    if not isinstance(base, rules.Position):
        raise PatternFileError("the base rule is not one by position", got=base.kind)
    self = cls((queries, keys), int(facts["block"]), planes, base.causal, frame.q_start,
               base.window, base.symmetric, base.segments, name=str(facts["name"]))  # fmt: skip
    self.version, self.steps, self.gates = (int(facts[name]) for name in ("version", "steps", "gates"))
    self.rule = None if facts["rule"] is None else rules.from_json(facts["rule"], segments)
    graph = _graph(data)
    self.query_nodes, self.key_nodes = _nodes(self, graph, data)
    self._bind(graph)
    _check_edges(self, data["bits"])
    return self


def _graph(data: Mapping[str, Array]) -> Graph:
    saved: dict[str, Any] = {part: {name: data[f"{part}.{name}"] for name in names} for part, names in TABLES.items()}
    declared = Graph({"number": np.int32}, _columns())
    for part, table in (("nodes", declared.nodes), ("edges", declared.edges)):
        saved[part]["columns"] = {
            name: {"dtype": table[name].dtype.name, "default": 0, "rows": data[f"{part}.{name}"]}
            for name in COLUMNS[part]
        }
    facts = {"schema": 1, "block": declared.block, "max_generation": declared.max_generation, "version": 0}
    return Graph.from_dict(saved | facts, {"number": np.int32}, _columns())


def _columns() -> dict[str, Any]:
    from .pattern import EDGE_COLUMNS

    return EDGE_COLUMNS


def _nodes(self: Pattern, graph: Graph, data: Mapping[str, Array]) -> tuple[Array, Array]:
    """Return the node slots of query blocks and key blocks, each node of the graph once, with its number."""
    rows, columns = self.blocks
    found: list[Array] = []
    held = graph.buffers()
    for name, count in (("query_nodes", rows), ("key_nodes", columns)):
        slots = data[name]
        _require(slots.shape == (self.planes, count) and slots.dtype.kind in "iu", f"{name} has a wrong shape or dtype")
        _require(bool(((slots >= 0) & (slots < len(held.node_ids))).all()), f"a slot in {name} is out of range")
        numbers = held.node_columns["number"][slots]
        _require(bool((numbers == np.arange(count)).all()), f"nodes in {name} have other block numbers")
        found.append(np.ascontiguousarray(slots, np.int32))
    together = np.sort(np.concatenate([each.ravel() for each in found]))
    _require(np.array_equal(together, graph.nodes().index), "not every node is one block")
    return found[0], found[1]


def _check_edges(self: Pattern, bits: Array) -> None:
    """Check ends, pairs, kinds and masks of all edges, and fill the pair index and the pool."""
    slots = self.edges().index
    source, target = self._source[slots], self._target[slots]
    side = np.full(len(self._node_ids), -1, np.int64)
    for plane in range(self.planes):
        side[self.query_nodes[plane]] = 2 * plane + 1
        side[self.key_nodes[plane]] = 2 * plane
    _require(bool((side[source] % 2 == 0).all()), "an edge does not come from a key block")
    _require(bool((side[target] == side[source] + 1).all()), "an edge does not enter a query block of its plane")
    _require(self._index.insert_many(slots, self._source, self._target) == len(slots), "two edges have the same blocks")
    kind, gate = self._columns["kind"][slots], self._columns["gate"][slots]
    _require(bool((kind <= MASKED).all()), "an edge has an unknown kind")
    _require(bool(((gate >= -1) & (gate < max(self.gates, 0))).all()), "an edge has a gate that does not exist")
    q, k = self._numbers[target].astype(np.int64), self._numbers[source].astype(np.int64)
    masked = kind == MASKED
    shape = (int(masked.sum()), *self._pool.data.shape[1:])
    _require(bits.shape == shape and bits.dtype == np.uint64, "the masks have a wrong shape or dtype")
    if self.causal:
        late = self.frame.key_span(k)[1] > self.frame.query_span(q)[0]
        future = (late & (kind == FULL)).any() or _sees_future(self, Blocks(q[masked], k[masked], kind[masked], bits))
        _require(not future, "an edge allows keys that come after their queries")
    self._columns["bits"][slots] = -1
    self._columns["bits"][slots[masked]] = self._pool.store(bits)
    self._refresh()


def _sees_future(self: Pattern, blocks: Blocks) -> bool:
    """Return whether the mask of any edge has a pair of tokens whose key comes after the query."""
    for part in masks.chunks(len(blocks.q), self.block):
        own = blocks.take(np.arange(len(blocks.q))[part])
        i, j, exist = self.frame.positions(own.q, own.k)
        if (masks.tokens(own, self.base, self.frame) & exist & (j > i)).any():
            return True
    return False


def _require(holds: bool | np.bool_, what: str) -> None:
    if not holds:
        raise PatternFileError(f"the saved arrays contradict each other: {what}")
