"""A finding: one defect of a network, a witness that shows it, and edits that fix it.

It extends `Mismatch`, the result of `program.validate()`, by a severity and fixes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import prod
from typing import TYPE_CHECKING, Any

from graphwright.program import Mismatch, Value
from graphwright.program.editing.replace import redirect
from graphwright.report import plain
from graphwright.surgery.findings.wiring import Wiring

if TYPE_CHECKING:
    from graphwright.graph import EdgeId, NodeId
    from graphwright.program import AxisGroup, Program
    from graphwright.program.editing.transaction import Transaction


class Severity(IntEnum):
    """Severity: worth knowing, suspicious, wrong, or so that nothing runs."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    CRITICAL = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Fix:
    """Edits that fix one finding.

    Attributes:
        what: description, for the journal.
        apply: makes the edits in an open transaction.
        edges, ops: number of edges and ops that it adds or moves.
        parameters: number of parameters that it adds.
        keeps_function: results of the program stay the same; also True for the only repair of a part that did not run.
    """

    what: str
    apply: Callable[[Transaction], object]
    edges: int = 0
    ops: int = 0
    parameters: int = 0
    keeps_function: bool = False

    @property
    def cost(self) -> float:
        """1 per edge, 2 per op, 1 per million parameters, and 10 if the function changes."""
        return self.edges + 2 * self.ops + self.parameters / 1e6 + (0 if self.keeps_function else 10)

    def to_json(self) -> dict[str, Any]:
        """Description, cost and whether the function stays the same."""
        return {"what": self.what, "cost": round(self.cost, 6), "keeps_function": self.keeps_function}


@dataclass(frozen=True, slots=True)
class Finding(Mismatch):
    """One defect.

    Attributes:
        kind: name of the rule that found it.
        where: path of the affected node, or a checkpoint key.
        what: one sentence.
        axis, expected, got: as in `Mismatch`.
        severity: see `Severity`.
        nodes, edges: handles of the elements.
        paths: of the nodes, then of the edges, at the time of the diagnosis.
        witness: evidence: paths, keys, indices, numbers.
        fixes: by ascending cost.
    """

    severity: Severity = Severity.WARNING
    nodes: tuple[NodeId, ...] = ()
    edges: tuple[EdgeId, ...] = ()
    paths: tuple[str, ...] = ()
    witness: Mapping[str, Any] = field(default_factory=dict)
    fixes: tuple[Fix, ...] = ()

    @staticmethod
    def of(
        p: Program,
        kind: str,
        severity: Severity,
        what: str,
        *nodes: NodeId,
        edges: tuple[EdgeId, ...] = (),
        where: str | None = None,
        fixes: tuple[Fix, ...] = (),
        witness: Mapping[str, Any] | None = None,
        axis: int | None = None,
        expected: str | None = None,
        got: str | None = None,
    ) -> Finding:
        """A finding about some elements of a program; `where` defaults to the first one."""
        paths = (*map(p.path, nodes), *map(p.path, edges))
        return Finding(kind, where or paths[0], what, axis, expected, got, severity, nodes, edges, paths,
                       dict(witness or {}), tuple(sorted(fixes, key=lambda f: f.cost)))  # fmt: skip

    @property
    def identity(self) -> tuple[str, str]:
        """Kind and location: findings with the same identity are the same finding."""
        return self.kind, self.where

    def cheapest(self, only: str | None = None) -> Fix | None:
        """The cheapest fix, or None; with `only="keeps_function"` the cheapest that changes no result."""
        return next((f for f in self.fixes if only is None or f.keeps_function), None)

    def to_json(self) -> dict[str, Any]:
        """Plain values, always with the same keys."""
        names = ("kind", "where", "what", "axis", "expected", "got", "paths", "witness")
        return {n: plain(getattr(self, n)) for n in names} | {
            "severity": str(self.severity), "fixes": [f.to_json() for f in self.fixes],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """Thresholds of the rules.

    Attributes:
        siblings: share of equal blocks with a residual path above which a block without one is reported.
        head_ratio: largest ratio of a head's norm to the median of its layer; its inverse is the smallest.
        dead_head: share of the median below which a head counts as dead.
        rank: smallest effective rank of a matrix, as a share of its smaller side.
        gradient: smallest gradient norm of a param, as a share of the median of its kind.
        rows: smallest number of probe rows for reporting inactive units.
        width: a dominator narrower than this share of both neighbours is a bottleneck.
        declared: path patterns of intended bottlenecks.
        redundant: an edge is redundant if its removal changes outputs by less than this share of their largest entry.
        gain: largest ratio of gradients along the trunk, and largest gain of a chain without norms.
        stable_rank: smallest stable rank of the representations of tokens.
    """

    siblings: float = 0.5
    head_ratio: float = 8.0
    dead_head: float = 1e-3
    rank: float = 0.05
    gradient: float = 1e-6
    rows: int = 32
    width: float = 0.25
    declared: tuple[str, ...] = ()
    redundant: float = 1e-6
    gain: float = 1e4
    stable_rank: float = 1.5


def remove(e: Transaction, nodes: Iterable[NodeId]) -> None:
    """Remove the nodes that still exist."""
    e.remove([n for n in nodes if n in e.program.graph])


def remove_unread_cone(e: Transaction, *ends: NodeId) -> None:
    """Remove those of some nodes that nothing reads, and everything that only they use."""
    w = Wiring(e.program)
    dead = [w.at[n] for n in ends if n in w.at and w.unread(w.at[n])]
    remove(e, [w.nodes[i] for i in w.cone(dead)])


def rewired(p: Program, edge: EdgeId, source: Value, *, keeps: bool) -> Fix:
    """A fix that lets an edge read another value, and removes nodes that only the old value needed."""
    before = p.graph.source(edge)

    def apply(e: Transaction) -> None:
        e.rewire(edge, source)
        remove_unread_cone(e, before)

    return Fix(f"rewire {p.path(edge)} to {p.path(source)}", apply, edges=1, keeps_function=keeps)


def bypassed(p: Program, node: NodeId, *, keeps: bool) -> Fix:
    """A fix that removes a one-operand node, and lets its readers read its operand."""

    def apply(e: Transaction) -> None:
        (operand,) = e.program.operands(node)
        redirect(e, {Value(node): operand})
        remove_unread_cone(e, node)

    return Fix(f"bypass {p.path(node)} ({p.op(node)})", apply, edges=1, keeps_function=keeps)


def removed(p: Program, nodes: Sequence[NodeId], *, keeps: bool) -> Fix:
    """A fix that removes nodes."""
    more = f" and {len(nodes) - 1} nodes that only it uses" if len(nodes) > 1 else ""
    return Fix(f"remove {p.path(nodes[0])}{more}", lambda e: remove(e, nodes), edges=1, keeps_function=keeps)


def grown(group: AxisGroup, size: int) -> tuple[Fix, ...]:
    """A fix that grows an axis by units that change nothing; none if the axis cannot grow."""
    if group.frozen or len(group.atoms) != 1:
        return ()
    more = size - group.size
    held = sum(prod(group.axes.program.weights.array(m.key).shape) for m in group.members if m.key is not None)
    what = f"grow {group.name} by {more}"
    return (Fix(what, lambda e: e.grow(group.name, more), parameters=held * more // group.size, keeps_function=True),)
