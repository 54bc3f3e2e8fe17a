"""A constraint: a condition on a program whose violations are findings, with repairs as their fixes."""

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


Rule = Callable[[Program], "Iterable[Finding | str]"]
_rules: dict[str, Rule] = {}


def constraint(name: str) -> Callable[[Rule], Rule]:
    """Register the function below under a name, for `Custom(name)`; it gives findings, or sentences, of what is wrong.

    Raises: UsageError for a name that another function has.
    """

    def enter(rule: Rule) -> Rule:
        if _rules.setdefault(name, rule) is not rule:
            raise UsageError("another function has this name", where=name)
        return rule

    return enter


@dataclass(frozen=True)
class Custom(Constraint):
    """The condition of a function: of a registered one by its name, or of any, which then cannot be saved."""

    rule: str | Rule
    name: ClassVar[str] = "custom"

    def __post_init__(self) -> None:
        if isinstance(self.rule, str) and self.rule not in _rules:
            raise UsageError(
                "no function is registered under this name",
                got=self.rule,
                expected=", ".join(_rules),
                fix='import the module that has @graphwright.surgery.constraint("name") first',
            )

    def violations(self, p: Program) -> list[Finding]:
        """What the function finds."""
        rule = _rules[self.rule] if isinstance(self.rule, str) else self.rule
        label = self.rule if isinstance(self.rule, str) else getattr(rule, "__name__", "custom")
        found = []
        for at, each in enumerate(rule(p)):
            found.append(each if isinstance(each, Finding) else self.broken(p, each, where=f"{label} {at}"))
        return found

    def to_json(self) -> dict[str, Any]:
        """Its name. Raises: UsageError for a function that is not registered."""
        if not isinstance(self.rule, str):
            raise UsageError(
                "a constraint is a function without a name, and could not be found again",
                got=getattr(self.rule, "__qualname__", repr(self.rule)),
                fix='register it: @graphwright.surgery.constraint("name"), and use Custom("name")',
            )
        return super().to_json()
