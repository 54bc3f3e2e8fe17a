"""Constraints: conditions on a program whose violations are findings, with repairs as fixes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from graphwright.errors import UsageError
from graphwright.program import Program
from graphwright.surgery.findings.finding import Finding, Severity

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.surgery.findings.finding import Fix

CONSTRAINTS: dict[str, type[Constraint]] = {}


@dataclass(frozen=True)
class Constraint:
    """A condition on a program, as frozen values: node paths and axis patterns, so that it can be saved."""

    name: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.name:
            CONSTRAINTS[cls.name] = cls

    def violations(self, p: Program) -> list[Finding]:
        """Violations by a program, with repairs; empty if the constraint holds."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Name and fields."""
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
        """A violation of this constraint."""
        return Finding.of(p, self.name, severity, what, *nodes, where=where, fixes=fixes, **facts)

    def ends(self, p: Program, *paths: str) -> tuple[NodeId, ...] | None:
        """The nodes of paths; None if one does not exist."""
        known = {p.path(n): n for n in p.nodes()}
        return tuple(known[path] for path in paths) if all(path in known for path in paths) else None

    def absent(self, p: Program, *paths: str) -> list[Finding]:
        """The violation that a named node does not exist."""
        known = {p.path(n) for n in p.nodes()}
        missing = [path for path in paths if path not in known]
        return [self.broken(p, "a node of the constraint does not exist", where=", ".join(missing))]


def from_json(form: Mapping[str, Any]) -> Constraint:
    """The constraint that `to_json` wrote. Raises: UsageError for an unknown name, or wrong fields."""
    kind = CONSTRAINTS.get(form.get("constraint", "")) if isinstance(form, Mapping) else None
    given = {k: v for k, v in form.items() if k != "constraint"} if kind is not None else {}
    if kind is None or given.keys() != {f.name for f in fields(kind)}:
        raise UsageError("unknown constraint", got=repr(form)[:120], expected=", ".join(CONSTRAINTS))
    return kind(**given)


Condition = Callable[[Program], "Iterable[Finding | str]"]
_conditions: dict[str, Condition] = {}


def constraint(name: str) -> Callable[[Condition], Condition]:
    """Register the decorated function for `Custom(name)`; it returns findings, or sentences that describe violations.

    Raises: UsageError for a name that another function has.
    """

    def enter(rule: Condition) -> Condition:
        if _conditions.setdefault(name, rule) is not rule:
            raise UsageError("another function is registered under this name", where=name)
        return rule

    return enter


@dataclass(frozen=True)
class Custom(Constraint):
    """A condition given by a function: a registered one by name, or any callable, which cannot be saved."""

    rule: str | Condition
    name: ClassVar[str] = "custom"

    def __post_init__(self) -> None:
        if isinstance(self.rule, str) and self.rule not in _conditions:
            raise UsageError(
                "no function is registered under this name",
                got=self.rule,
                expected=", ".join(_conditions),
                fix='import the module that has @graphwright.surgery.constraint("name") first',
            )

    def violations(self, p: Program) -> list[Finding]:
        """Violations that the function returns."""
        rule = _conditions[self.rule] if isinstance(self.rule, str) else self.rule
        label = self.rule if isinstance(self.rule, str) else getattr(rule, "__name__", "custom")
        found = []
        for at, each in enumerate(rule(p)):
            found.append(each if isinstance(each, Finding) else self.broken(p, each, where=f"{label} {at}"))
        return found

    def to_json(self) -> dict[str, Any]:
        """The registered name. Raises: UsageError for a function that is not registered."""
        if not isinstance(self.rule, str):
            raise UsageError(
                "the constraint is an unregistered function, which cannot be saved",
                got=getattr(self.rule, "__qualname__", repr(self.rule)),
                fix='register it: @graphwright.surgery.constraint("name"), and use Custom("name")',
            )
        return super().to_json()
