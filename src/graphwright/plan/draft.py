"""Draft: a private copy of what a plan is made of, by position in the order, read from the graph in bulk.

Rewrites change a draft and never the program. Invariant: a row's operands stand before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from graphwright.array import NDArray, Spec
from graphwright.graph import NodeId
from graphwright.program import Program, Value
from graphwright.program.kinds import STORED, WRITE


class Ref(NamedTuple):
    """One result of a row."""

    row: int
    port: int = 0


class Row:
    """One node: its op or kind, attributes, specs of its results (sizes known), and what it reads by port."""

    __slots__ = ("attrs", "node", "op", "operands", "specs")

    def __init__(
        self, node: NodeId, op: str, attrs: Mapping[str, Any], specs: tuple[Spec, ...], operands: list[Ref]
    ) -> None:
        self.node, self.op, self.attrs, self.specs, self.operands = node, op, attrs, specs, operands


class Firing(NamedTuple):
    """One use of a rewrite: the rule, the path of the node it was used on, and what stands for it now.

    Attributes:
        bound: for a rule that rounds otherwise, how far a result may lie from the exact rewrites' one.
    """

    rule: str
    node: str
    into: str
    bound: str = ""


class Draft:
    """Rows in order, and what of them is wanted.

    Attributes:
        rows: every node that an output, a watch or a write needs.
        outputs, watched: name -> result.
        pruned: nodes that nothing needs.
        same: result -> the earlier result that stands for it.
        log: the rewrites that were used.
        guards: constants whose values a rewrite relied on, with their versions.
    """

    def __init__(
        self, p: Program, dims: Mapping[str, int], outputs: Mapping[str, Value], watch: Mapping[str, Value]
    ) -> None:
        self.program = p
        self.same: dict[Ref, Ref] = {}
        self.log: list[Firing] = []
        self.guards: dict[str, tuple[NDArray, int]] = {}
        graph = p.graph
        flat = graph.csc()
        names = ("op", "attrs", "specs")
        ops, attrs, specs = (list(graph.nodes[name]) for name in names)
        sources, starts = flat.indices.tolist(), flat.indptr.tolist()
        src_ports, dst_ports = (np.asarray(graph.edges[n][flat.edges]).tolist() for n in ("src_port", "dst_port"))
        nodes = list(flat.nodes)
        dense = {node: i for i, node in enumerate(nodes)}
        roots = [dense[v.node] for v in (*outputs.values(), *watch.values())] + [dense[n] for n in p.writes()]
        needed = _reached(roots, sources, starts)
        key = p.order_labels.key
        order = sorted(range(len(nodes)), key=lambda i: key(nodes[i]))
        place = [-1] * len(nodes)
        self.rows: list[Row] = []
        self.pruned: list[NodeId] = []
        for i in order:
            if not needed[i]:
                self.pruned.append(nodes[i])
                continue
            place[i] = len(self.rows)
            edges = range(starts[i], starts[i + 1])
            if len(edges) > 1:
                edges = sorted(edges, key=dst_ports.__getitem__)
            bound = specs[i]
            if dims and any(s.symbolic for s in bound):
                bound = tuple(s.bind(dims) for s in bound)
            self.rows.append(
                Row(nodes[i], ops[i], attrs[i], bound, [Ref(place[sources[e]], src_ports[e]) for e in edges])
            )
        self.at = {row.node: i for i, row in enumerate(self.rows)}
        self.outputs = {name: Ref(self.at[v.node], v.port) for name, v in outputs.items()}
        self.watched = {name: Ref(self.at[v.node], v.port) for name, v in watch.items()}

    def spec(self, ref: Ref) -> Spec:
        """Spec of a result."""
        return self.rows[ref.row].specs[ref.port]

    def path(self, row: int) -> str:
        """Name of the node behind a row."""
        return self.program.path(self.rows[row].node)

    def find(self, ref: Ref) -> Ref:
        """The result that stands for this one now."""
        same = self.same
        while ref in same:
            ref = same[ref]
        return ref

    def replace(self, rule: str, row: int, by: Ref, bound: str = "") -> None:
        """Let another result stand for a row's only one, and note the rule."""
        self.same[Ref(row)] = by
        self.log.append(Firing(rule, self.path(row), self.path(by.row), bound))

    def needed(self) -> list[bool]:
        """Rows that are still wanted after rewriting."""
        roots = [self.find(r).row for r in (*self.outputs.values(), *self.watched.values())]
        roots += [i for i, row in enumerate(self.rows) if row.op == WRITE]
        flags = [False] * len(self.rows)
        for root in roots:
            flags[root] = True
        for i in range(len(self.rows) - 1, -1, -1):  # operands stand before their reader
            if flags[i]:
                for ref in self.rows[i].operands:
                    flags[self.find(ref).row] = True
        return flags

    def stored(self, row: int) -> bool:
        """True for a param, const or state."""
        return self.rows[row].op in STORED


def _reached(roots: Iterable[int], sources: list[int], starts: list[int]) -> list[bool]:
    seen = [False] * (len(starts) - 1)
    stack = list(roots)
    for root in stack:
        seen[root] = True
    while stack:
        i = stack.pop()
        for before in sources[starts[i] : starts[i + 1]]:
            if not seen[before]:
                seen[before] = True
                stack.append(before)
    return seen
