"""A finding: one thing that is wrong with a network, the witness that shows it, and edits that mend it.

It is a `Mismatch`, as `program.validate()` gives them, that also says how bad it is and what can be done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import prod
from typing import TYPE_CHECKING, Any

from graphwright.program import Mismatch, Value
from graphwright.program.editing.replace import redirect
from graphwright.surgery.findings.wiring import Wiring

if TYPE_CHECKING:
    from graphwright.graph import EdgeId, NodeId
    from graphwright.program import AxisGroup, Program
    from graphwright.program.editing.transaction import Transaction


class Severity(IntEnum):
    """How bad it is: worth knowing, suspicious, wrong, or such that nothing runs."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    CRITICAL = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Fix:
    """A list of edits that mends one finding.

    Attributes:
        what: what it does, as the journal says it.
        apply: makes the edits in an open transaction.
        edges, ops: how many it adds or moves.
        parameters: how many numbers it adds.
        keeps_function: what ran before gives the same results; a repair of what did not run keeps it too, if there is
            only one.
    """

    what: str
    apply: Callable[[Transaction], object]
    edges: int = 0
    ops: int = 0
    parameters: int = 0
    keeps_function: bool = False

    @property
    def cost(self) -> float:
        """1 per edge, 2 per op, 1 per million numbers, and 10 where the function changes."""
        return self.edges + 2 * self.ops + self.parameters / 1e6 + (0 if self.keeps_function else 10)

    def to_json(self) -> dict[str, Any]:
        """What, cost and whether the function stays."""
        return {"what": self.what, "cost": round(self.cost, 6), "keeps_function": self.keeps_function}


@dataclass(frozen=True, slots=True)
class Finding(Mismatch):
    """One thing that is wrong.

    Attributes:
        kind: name of the rule that found it.
        where: path of what it is about, or a checkpoint key.
        what: one sentence.
        axis, expected, got: as in a mismatch.
        severity: how bad it is.
        nodes, edges: handles of the elements.
        paths: of the nodes, then of the edges, as they were called when it was found.
        witness: what shows it: paths, keys, places, numbers.
        fixes: edits that mend it, the cheapest first.
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
        **facts: Any,
    ) -> Finding:
        """A finding about some elements of a program; `where` is the first one unless given."""
        paths = (*map(p.path, nodes), *map(p.path, edges))
        return Finding(
            kind=kind,
            where=where or paths[0],
            what=what,
            severity=severity,
            nodes=nodes,
            edges=edges,
            paths=paths,
            witness=dict(witness or {}),
            fixes=tuple(sorted(fixes, key=lambda f: f.cost)),
            **facts,
        )

    @property
    def identity(self) -> tuple[str, str]:
        """Kind and place: two findings that agree in it are the same one."""
        return self.kind, self.where

    def cheapest(self, only: str | None = None) -> Fix | None:
        """The cheapest fix; with `only="keeps_function"` the cheapest that changes no result. None if there is none."""
        return next((f for f in self.fixes if only is None or f.keeps_function), None)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values, always with the same keys."""
        return {
            "kind": self.kind,
            "severity": str(self.severity),
            "where": self.where,
            "what": self.what,
            "axis": self.axis,
            "expected": self.expected,
            "got": self.got,
            "paths": list(self.paths),
            "witness": dict(self.witness),
            "fixes": [f.to_json() for f in self.fixes],
        }


@dataclass(frozen=True, slots=True)
class Limits:
    """From where on something is a finding.

    Attributes:
        siblings: share of alike blocks that have a residual path, from which on one without it stands out.
        head_ratio: a head's norm above this times the median of its layer, or below its inverse, is unbalanced.
        dead_head: share of the median below which a head is dead.
        rank: effective rank as a share of the smaller side of a matrix, below which it is degenerate.
        gradient: share of the median gradient norm of its kind below which a param hardly learns.
        rows: of the probe that must leave a unit inactive before it counts as such.
        width: a dominator narrower than this share of both neighbours is a bottleneck.
        declared: path patterns of bottlenecks that are meant.
        redundant: largest change of an output, as a share of its largest entry, that an edge may make and be redundant.
        gain: largest ratio of gradients along the trunk, and of the gain of a chain without norms.
        stable_rank: of the representations of tokens, below which they have collapsed.
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
    """Remove those of some nodes that are still there."""
    e.remove([n for n in nodes if n in e.program.graph])


def sweep(e: Transaction, *ends: NodeId) -> None:
    """Remove those of some nodes that nothing reads, with all that only they use."""
    w = Wiring(e.program)
    dead = [w.at[n] for n in ends if n in w.at and w.unread(w.at[n])]
    remove(e, [w.nodes[i] for i in w.cone(dead)])


def rewired(p: Program, edge: EdgeId, source: Value, *, keeps: bool) -> Fix:
    """Let an edge read another value; what only the old one needed goes."""
    before = p.graph.source(edge)

    def apply(e: Transaction) -> None:
        e.rewire(edge, source)
        sweep(e, before)

    return Fix(f"rewire {p.path(edge)} to {p.path(source)}", apply, edges=1, keeps_function=keeps)


def bypassed(p: Program, node: NodeId, *, keeps: bool) -> Fix:
    """Let what reads a one-operand node read its operand, and remove it."""

    def apply(e: Transaction) -> None:
        (operand,) = e.program.operands(node)
        redirect(e, {Value(node): operand})
        sweep(e, node)

    return Fix(f"take {p.path(node)} ({p.op(node)}) out", apply, edges=1, keeps_function=keeps)


def removed(p: Program, nodes: Sequence[NodeId], *, keeps: bool) -> Fix:
    """Remove nodes."""
    more = f" and {len(nodes) - 1} nodes that only it uses" if len(nodes) > 1 else ""
    return Fix(f"remove {p.path(nodes[0])}{more}", lambda e: remove(e, nodes), edges=1, keeps_function=keeps)


def grown(group: AxisGroup, size: int) -> tuple[Fix, ...]:
    """Grow an axis by units that change nothing; none if it can't be grown."""
    if group.frozen or len(group.atoms) != 1:
        return ()
    more = size - group.size
    held = sum(prod(group.axes.program.weights.array(m.key).shape) for m in group.members if m.key is not None)
    what = f"grow {group.name} by {more}"
    return (Fix(what, lambda e: e.grow(group.name, more), parameters=held * more // group.size, keeps_function=True),)
