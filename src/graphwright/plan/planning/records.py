"""Node records: the state of planning for one node each, kept from plan to plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphwright.array import Spec
from graphwright.graph import NodeId
from graphwright.program import Program, Value

if TYPE_CHECKING:
    from graphwright.plan.planning.lowering import Signature


class RewriteRecord(NamedTuple):
    """One application of a rewrite rule: the node it replaced, the node that replaces it, and an error bound."""

    rule: str
    node: NodeId
    into: NodeId | None
    bound: str = ""


@dataclass(slots=True, eq=False)
class NodeRecord:
    """What planning found for one node.

    Attributes:
        node, path, op, attrs, specs: of the node; sizes are known once it is planned.
        sources: its operands in the program.
        reads: slots it reads, after rewrites.
        results: slots of its results; those of another record where that one replaces it.
        own: slots made for it, including the scratch of its instruction.
        instr: its instruction, or -1.
        copies: keys of the operand copies it needs.
        rewrites: rewrites applied to it.
        cse_key: what it shares with records that compute the same value.
        signature: what it shares with records of equal op, attributes, specs and operand layouts.
    """

    node: NodeId
    path: str
    op: str
    attrs: Mapping[str, Any]
    specs: tuple[Spec, ...]
    sources: Sequence[Value]
    reads: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    own: tuple[int, ...] = ()
    instr: int = -1
    copies: tuple[Any, ...] = ()
    rewrites: tuple[RewriteRecord, ...] = ()
    cse_key: Any = None
    signature: Signature = None  # pyright: ignore[reportAssignmentType]  # set for every op


@dataclass(slots=True, eq=False)
class SharedCopy:
    """A row-major copy of the slot `source` in the slot `target`; `wanted` maps its readers to (rank, reason)."""

    source: int
    target: int
    instr: int = -1
    wanted: dict[NodeId, tuple[int, str]] = field(default_factory=dict)


class SourceTable(NamedTuple):
    """Inputs, params, consts and states in order: slots, their buffers, and keys of weights (None for an input)."""

    slots: list[int]
    holders: np.ndarray
    keys: list[str | None]


class CseTable:
    """Nodes by the value they compute, for common-subexpression elimination.

    Args:
        order: sort key of a node.
        revisit: called with a node whose representative may have changed.
    """

    def __init__(self, order: Callable[[NodeId], Any], revisit: Callable[[NodeId], None]) -> None:
        self._order, self._revisit = order, revisit
        self._members: dict[Any, dict[NodeId, None]] = {}
        self._first: dict[Any, NodeId] = {}

    def enter(self, node: NodeId, key: Any) -> NodeId:
        """Add a node; returns the first node that computes the same value, which may be itself."""
        members, known = self._members.setdefault(key, {}), self._first.get(key)
        members[node] = None
        candidates = members if known is None or known == node else (known, node)  # the first one left, or moved
        first = min(candidates, key=self._order)
        if first != known:
            self._first[key] = first
            self._revisit_others(node, key)
        return first

    def leave(self, node: NodeId, key: Any) -> None:
        """Remove a node that was deleted or computes another value."""
        members = self._members[key]
        del members[node]
        if self._first.get(key) == node:
            del self._first[key]
            self._revisit_others(node, key)
        if not members:
            del self._members[key]

    def changed(self, node: NodeId, key: Any) -> None:
        """Note that a node moved, or that its results are in other slots."""
        if self._first.get(key) == node:
            self._revisit_others(node, key)

    def _revisit_others(self, node: NodeId, key: Any) -> None:
        for other in self._members[key]:
            if other != node:
                self._revisit(other)


class AllRecords(NamedTuple):
    """Fresh records of all nodes, in order; the results of all nodes are numbered in that order.

    Attributes:
        records: one per node.
        begins: per record the number of its first result, then the number of results.
        reads: numbers of the results that records read, by record and port.
        stops: per record the end of its part of `reads`.
    """

    records: list[NodeRecord]
    begins: list[int]
    reads: list[int]
    stops: list[int]


def all_records(p: Program) -> AllRecords:
    """Make a record for every node of a program."""
    graph = p.graph
    flat = graph.csc()
    nodes = list(flat.nodes)
    order = np.array(sorted(range(len(nodes)), key=list(map(p.order_labels.key, nodes)).__getitem__), np.int64)
    position = np.empty(len(nodes), np.int64)
    position[order] = np.arange(len(nodes))
    names, ops, attrs, specs = (np.asarray(graph.nodes[c])[order].tolist() for c in ("name", "op", "attrs", "specs"))
    nodes = [nodes[i] for i in order.tolist()]
    results = np.fromiter(map(len, specs), np.int64, len(nodes))
    begins = np.concatenate([[0], np.cumsum(results)])

    targets = position[np.repeat(np.arange(len(nodes)), np.diff(flat.indptr))]
    by_port = np.lexsort((np.asarray(graph.edges["dst_port"][flat.edges]), targets))
    ports = np.asarray(graph.edges["src_port"][flat.edges])[by_port]
    reads = (begins[position[flat.indices[by_port]]] + ports).tolist()
    stops = np.cumsum(np.bincount(targets, minlength=len(nodes))).tolist()

    owners = np.repeat(np.arange(len(nodes)), results)
    numbers = np.arange(len(owners)) - begins[owners]
    values = list(map(Value, map(nodes.__getitem__, owners.tolist()), numbers.tolist()))
    sources = tuple(map(values.__getitem__, reads))
    read = [sources[a:b] for a, b in zip([0, *stops], stops, strict=False)]
    return AllRecords(list(map(NodeRecord, nodes, names, ops, attrs, specs, read)), begins.tolist(), reads, stops)
