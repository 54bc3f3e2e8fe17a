"""Constraints on paths between two nodes: an identity path, any path, or no path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from graphwright.graph.analysis import reachable
from graphwright.ops import traits
from graphwright.program import Value
from graphwright.program.axes.solve_axes import origin
from graphwright.program.editing.replace import redirect
from graphwright.program.kinds import PARAM
from graphwright.surgery.constraints.constraint import Constraint
from graphwright.surgery.findings.finding import Fix, Severity, remove_unread_cone
from graphwright.surgery.findings.residuals import carried, gated

if TYPE_CHECKING:
    from graphwright.graph import EdgeId, NodeId
    from graphwright.program import Program
    from graphwright.program.editing.transaction import Transaction
    from graphwright.surgery.findings.finding import Finding


@dataclass(frozen=True)
class _Pair(Constraint):
    """A condition on two nodes."""

    a: str
    b: str

    @property
    def where(self) -> str:
        return f"{self.a} -> {self.b}"

    def violations(self, p: Program) -> list[Finding]:
        """Violations of this pair; a missing node is a violation."""
        ends = self.ends(p, self.a, self.b)
        return self.absent(p, self.a, self.b) if ends is None else self.between(p, *ends)

    def between(self, p: Program, source: NodeId, target: NodeId) -> list[Finding]:
        raise NotImplementedError


@dataclass(frozen=True)
class ResidualPath(_Pair):
    """Node `a` reaches a sum at node `b` by identity edges (or a projection, if widths differ).

    If `b` is no sum, the sum is a junction that reads `b`.
    """

    name: ClassVar[str] = "residual"

    def between(self, p: Program, source: NodeId, target: NodeId) -> list[Finding]:
        """One violation if there is no such path; residual paths elsewhere do not count."""
        sums = [target] if p.is_junction(target) else [n for n in p.consumers(target) if p.is_junction(n)]
        if any(carried(p, source, s) or _projected(p, source, s) for s in sums):
            return []
        what = f"there is no identity path from {self.a} into {self.b}"
        return [self.broken(p, what, target, source, where=self.where, severity=Severity.WARNING,
                            fixes=bridge(p, source, target))]  # fmt: skip


@dataclass(frozen=True)
class Reachable(_Pair):
    """A path exists from node `a` to node `b`."""

    name: ClassVar[str] = "reachable"

    def between(self, p: Program, source: NodeId, target: NodeId) -> list[Finding]:
        """One violation if there is no path; repaired by an edge that changes nothing until it is trained."""
        if target in reachable(p.graph, source):
            return []
        return [self.broken(p, f"there is no path from {self.a} to {self.b}", source, target, where=self.where,
                            fixes=bridge(p, source, target))]  # fmt: skip


@dataclass(frozen=True)
class NoPath(_Pair):
    """No path exists from node `a` to node `b`; it holds if one of them does not exist."""

    name: ClassVar[str] = "no_path"

    def absent(self, p: Program, *paths: str) -> list[Finding]:
        """No violation."""
        return []

    def between(self, p: Program, source: NodeId, target: NodeId) -> list[Finding]:
        """One violation if there is a path; repaired by cutting edges into sums."""
        if target not in reachable(p.graph, source):
            return []
        edges = _cut_set(p, source, target)
        fixes = () if edges is None else (Fix(f"cut {', '.join(map(p.path, edges))}", lambda e: _cut(e, edges),
                                              edges=len(edges)),)  # fmt: skip
        return [self.broken(p, f"there is a path from {self.a} to {self.b}", source, target, where=self.where,
                            fixes=fixes)]  # fmt: skip


def bridge(p: Program, source: NodeId, target: NodeId) -> tuple[Fix, ...]:
    """A fix that adds an edge into a node, or into a new sum after it, which is zero until it is trained."""
    if source in reachable(p.graph, target):
        return ()
    have, want = p.specs(source)[0], p.specs(target)[0]
    fits = have == want
    wider = (
        have.dtype == want.dtype
        and have.dtype.is_float
        and len(have.shape) == len(want.shape) > 0
        and have.shape[:-1] == want.shape[:-1]
        and isinstance(have.shape[-1], int)
        and isinstance(want.shape[-1], int)
    )
    if not fits and not wider:
        return ()

    def apply(e: Transaction) -> None:
        junction = target if e.program.is_junction(target) else _sum_after(e, target)
        if fits:
            gated(e, Value(source), junction)
            return
        weight = np.zeros((int(want.shape[-1]), int(have.shape[-1])), np.float32)
        matrix = e.param(base := e.program.free_name(f"{e.program.path(junction)}.bridge.weight"), weight)
        if want.dtype.name != "float32":
            matrix = e.add("cast", matrix, dtype=want.dtype, name=f"{base}.cast")
        e.connect(e.add("linear", source, matrix, name=base.removesuffix(".weight")), junction)

    how = "through a gate at 0" if fits else "through a matrix of zeros"
    size = 1 if fits else int(want.shape[-1]) * int(have.shape[-1])
    ops = 1 if p.is_junction(target) else 2
    return (Fix(f"connect {p.path(source)} -> {p.path(target)} {how}", apply, 1, ops, size, keeps_function=True),)


def _sum_after(e: Transaction, node: NodeId) -> NodeId:
    """A junction that all readers of a node read instead of the node."""
    junction = e.add("junction", node, name=e.program.free_name(f"{e.program.path(node)}.sum"))
    redirect(e, {Value(node): Value(junction)})
    return junction


def _projected(p: Program, source: NodeId, junction: NodeId) -> bool:
    """Whether a linear map of the source with a param enters a sum."""
    if p.specs(source)[0] == p.spec(junction):
        return False
    for node in p.consumers(source):
        if traits(p.op(node)).contracts == "out_in" and p.operands(node)[0].node == source:
            weight = origin(p, p.operands(node)[1])
            if weight is not None and p.op(weight) == PARAM and carried(p, node, junction):
                return True
    return False


def _cut_set(p: Program, source: NodeId, target: NodeId) -> list[EdgeId] | None:
    """Edges into sums that cut all paths: the last one of each remaining path; None if a path has no such edge."""
    gone: set[EdgeId] = set()
    while True:
        came: dict[NodeId, EdgeId | None] = {source: None}
        queue = [source]
        for node in queue:
            for edge in p.out_edges(node):
                after = p.graph.target(edge)
                if edge not in gone and after not in came:
                    came[after] = edge
                    queue.append(after)
        if target not in came:
            return sorted(gone)
        node, found = target, None
        while (edge := came[node]) is not None:
            if p.is_junction(p.graph.target(edge)):
                found = edge
                break
            node = p.graph.source(edge)
        if found is None:
            return None
        gone.add(found)


def _cut(e: Transaction, edges: list[EdgeId]) -> None:
    sources = [e.program.graph.source(edge) for edge in edges]
    for edge in edges:
        e.cut(edge)
    remove_unread_cone(e, *sources)
