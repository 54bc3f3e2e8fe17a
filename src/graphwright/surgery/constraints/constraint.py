"""A constraint: a condition on a program whose violations are findings, with repairs as their fixes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.program import Program
from graphwright.surgery.findings.finding import Finding, Fix, Severity

KINDS: dict[str, type[Constraint]] = {}


@dataclass(frozen=True)
class Constraint:
    """A condition on a program: frozen values that name nodes by path, axes by pattern, so that they can be saved."""

    name: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.name:
            KINDS[cls.name] = cls

    def violations(self, p: Program) -> list[Finding]:
        """Each way in which a program breaks it, with repairs; none if it holds."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Its name and fields."""
        return {"constraint": self.name, **{f.name: getattr(self, f.name) for f in fields(self)}}

    def broken(
        self,
        p: Program,
        what: str,
        *nodes: NodeId,
        where: str,
        severity: Severity = Severity.ERROR,
        fixes: tuple[Fix, ...] = (),
        **facts: Any,
    ) -> Finding:
        """A violation of it."""
        return Finding.of(p, self.name, severity, what, *nodes, where=where, fixes=fixes, **facts)

    def ends(self, p: Program, *paths: str) -> tuple[NodeId, ...] | None:
        """The nodes of paths; None if one is not there."""
        known = {p.path(n): n for n in p.nodes()}
        return tuple(known[path] for path in paths) if all(path in known for path in paths) else None

    def absent(self, p: Program, *paths: str) -> list[Finding]:
        """The violation that a node it speaks of is gone."""
        known = {p.path(n) for n in p.nodes()}
        gone = [path for path in paths if path not in known]
        return [self.broken(p, "a node that it speaks of is not there", where=", ".join(gone))]


def from_json(form: Mapping[str, Any]) -> Constraint:
    """The constraint that `to_json` wrote. Raises: UsageError for an unknown one, or fields that it does not have."""
    kind = KINDS.get(form.get("constraint", "")) if isinstance(form, Mapping) else None
    given = {k: v for k, v in form.items() if k != "constraint"} if kind is not None else {}
    if kind is None or given.keys() != {f.name for f in fields(kind)}:
        raise UsageError("no such constraint", got=repr(form)[:120], expected=", ".join(KINDS))
    return kind(**given)
