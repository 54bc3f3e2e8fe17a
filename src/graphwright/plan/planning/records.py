"""A row of the ledger: what planning knows of one node; and what rows share or hand to native code."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphwright.program import Value

if TYPE_CHECKING:
    from graphwright.array import Spec
    from graphwright.graph import NodeId
    from graphwright.program import Program


class RewriteRecord(NamedTuple):
    """One use of a rewrite: the rule, the node it was used on, the node that stands for it, and an error bound."""

    rule: str
    node: NodeId
    into: NodeId | None
    bound: str = ""


class NodeRecord:
    """One node.

    Attributes:
        node, path, op, attrs, specs: of the node; sizes are known.
        sources: what it reads in the program.
        reads: slots it reads, rewrites done.
        results: slots of its results; those of another row where that one stands for it.
        own: slots that were made for it, the scratch of its instruction included.
        instr: its instruction, or -1.
        copies: copies that it wants to be made for it.
        uses: rewrites that were used on it.
        alike: what it shares with rows of the same op, attributes, specs and layouts; see `Alike`.
        group: what it shares with rows that do the same.
    """

    __slots__ = (
        "alike",
        "attrs",
        "copies",
        "group",
        "instr",
        "node",
        "op",
        "own",
        "path",
        "reads",
        "results",
        "sources",
        "specs",
        "uses",
    )

    def __init__(
        self,
        node: NodeId,
        path: str,
        op: str,
        attrs: Mapping[str, Any],
        specs: tuple[Spec, ...],
        sources: Sequence[Value],
    ) -> None:
        self.node, self.path, self.op, self.attrs, self.specs, self.sources = node, path, op, attrs, specs, sources
        self.reads: tuple[int, ...] = ()
        self.results: tuple[int, ...] = ()
        self.own: tuple[int, ...] = ()
        self.instr = -1
        self.copies: tuple[Any, ...] = ()
        self.uses: tuple[RewriteRecord, ...] = ()
        self.group: Any = None
        self.alike: Any = None


class IndexLists:
    """Lists of numbers, one per instruction, as arrays that native code walks.

    Args:
        rows: what has one list each; it grows at its end.
        of: the list of one of them.
        names: what the numbers of a list stand for, if not for themselves.
    """

    def __init__(
        self, rows: Sequence[Any], of: Callable[[Any], Sequence[int]], names: array[int] | None = None
    ) -> None:
        self._rows, self._of, self._names = rows, of, names
        self._at, self._data = array("I", [0]), array("I")

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Where lists begin, and what is in them; to be dropped before more is asked for."""
        new = list(map(self._of, self._rows[len(self._at) - 1 :]))
        if new:
            flat = chain.from_iterable(new)
            self._data.extend(flat if self._names is None else map(self._names.__getitem__, flat))
            self._at.extend(list(accumulate(map(len, new), initial=self._at[-1]))[1:])
        data = np.frombuffer(self._data, np.uint32) if self._data else np.zeros(0, np.uint32)
        return np.frombuffer(self._at, np.uint32), data


class SharedCopy:
    """A copy that lies row by row: of which slot, in which, its instruction, and the rows that want it, and why."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target, self.instr = source, target, -1
        self.wanted: dict[NodeId, tuple[int, str]] = {}


class SourceTable(NamedTuple):
    """Inputs, params, consts and states in order: slots, their buffers, and keys of weights (None for an input)."""

    slots: list[int]
    holders: np.ndarray
    keys: list[str | None]


class Listed(NamedTuple):
    """Rows in order; results of all of them are numbered in that order.

    Attributes:
        rows: one per node.
        begins: of each row, the number of its first result; then how many there are.
        reads: numbers of the results that rows read, by row and port.
        stops: of each row, where its reads end.
    """

    rows: list[NodeRecord]
    begins: list[int]
    reads: list[int]
    stops: list[int]


def listed(p: Program) -> Listed:
    """All nodes of a program."""
    graph = p.graph
    flat = graph.csc()
    nodes = list(flat.nodes)
    order = np.array(sorted(range(len(nodes)), key=list(map(p.order_labels.key, nodes)).__getitem__), np.int64)
    place = np.empty(len(nodes), np.int64)
    place[order] = np.arange(len(nodes))
    names, ops, attrs, specs = (np.asarray(graph.nodes[c])[order].tolist() for c in ("name", "op", "attrs", "specs"))
    nodes = [nodes[i] for i in order.tolist()]
    results = np.fromiter(map(len, specs), np.int64, len(nodes))
    begins = np.concatenate([[0], np.cumsum(results)])

    targets = place[np.repeat(np.arange(len(nodes)), np.diff(flat.indptr))]
    by_port = np.lexsort((np.asarray(graph.edges["dst_port"][flat.edges]), targets))
    ports = np.asarray(graph.edges["src_port"][flat.edges])[by_port]
    reads = (begins[place[flat.indices[by_port]]] + ports).tolist()
    stops = np.cumsum(np.bincount(targets, minlength=len(nodes))).tolist()

    owners = np.repeat(np.arange(len(nodes)), results)
    values = list(
        map(Value, map(nodes.__getitem__, owners.tolist()), (np.arange(len(owners)) - begins[owners]).tolist())
    )
    sources = tuple(map(values.__getitem__, reads))
    read = [sources[a:b] for a, b in zip([0, *stops], stops, strict=False)]
    return Listed(list(map(NodeRecord, nodes, names, ops, attrs, specs, read)), begins.tolist(), reads, stops)
