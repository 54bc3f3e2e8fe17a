"""A condition of your own, as a registered function, so that it is still there after a save."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from graphwright.errors import UsageError
from graphwright.program import Program
from graphwright.surgery.constraints.constraint import Constraint
from graphwright.surgery.findings.finding import Finding

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
