"""A finding: one thing that is wrong with a network, the witness that shows it, and edits that mend it.

It is a `Mismatch`, as `program.validate()` gives them, that also says how bad it is and what can be done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from graphwright.graph import EdgeId, NodeId
from graphwright.program import Mismatch, Program
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
