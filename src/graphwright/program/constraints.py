"""Constraints of a program: conditions that are saved with it; every commit checks the enforced ones.

This module accepts any object with a method `violations(program)`; `KINDS` lists the classes that a file can name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

from graphwright.errors import UsageError
from graphwright.program.errors import ConstraintViolated

if TYPE_CHECKING:
    from graphwright.program.program import Program
    from graphwright.program.validate import Mismatch
    from graphwright.surgery.constraints import Constraint

KINDS: dict[str, type[Constraint]] = {}
"""Name -> class of each kind of constraint; a kind is registered when its module is imported."""


class Constraints:
    """The constraints of one program, in the order in which they were added; the journal does not record them."""

    def __init__(self) -> None:
        self._held: dict[Constraint, bool] = {}

    def add(self, constraint: Constraint, enforce: bool = False) -> None:
        """Attach a constraint; with `enforce`, an edit that violates it is rolled back."""
        if not callable(getattr(constraint, "violations", None)):
            expected = "a constraint from graphwright.surgery"
            raise UsageError("the argument is not a constraint", got=repr(constraint)[:80], expected=expected)
        self._held[constraint] = enforce

    def remove(self, constraint: Constraint) -> None:
        """Detach a constraint. Raises: UsageError if it is not attached."""
        if constraint not in self._held:
            raise UsageError("the constraint is not attached to this program", got=repr(constraint)[:80])
        del self._held[constraint]

    def enforced(self, constraint: Constraint) -> bool:
        """Return True if every commit checks the constraint."""
        return self._held.get(constraint, False)

    def violations(self, p: Program) -> list[Mismatch]:
        """Return the violations of all constraints."""
        return [v for constraint in self._held for v in constraint.violations(p)]

    def check(self, p: Program) -> None:
        """Raise ConstraintViolated with all violations of enforced constraints, if any."""
        found = tuple(v for constraint, enforce in self._held.items() if enforce for v in constraint.violations(p))
        if found:
            what = "\n  ".join(["the edit violates constraints of the program:", *map(str, found)])
            fix = "change the edit, or program.constraints.remove(constraint)"
            raise ConstraintViolated(what, where=p.name, findings=found, fix=fix)

    def copy(self) -> Constraints:
        """Return a copy of the constraints, for a fork."""
        twin = Constraints()
        twin._held = dict(self._held)
        return twin

    def to_json(self) -> list[dict[str, Any]]:
        """Return all constraints as JSON values, to store in a saved program."""
        return [{"constraint": c.to_json(), "enforce": enforce} for c, enforce in self._held.items()]

    def __iter__(self) -> Iterator[Constraint]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        return f"Constraints({', '.join(map(repr, self._held))})"


def constraint_from_json(form: Mapping[str, Any]) -> Constraint:
    """Restore a constraint from the dict of its `to_json`. Raises: UsageError for an unknown kind or wrong fields."""
    import_module("graphwright.surgery.constraints")  # registers the kinds of this package
    kind = KINDS.get(form.get("constraint", "")) if isinstance(form, Mapping) else None
    if kind is None:
        raise UsageError("unknown constraint", got=repr(form)[:120], expected=", ".join(KINDS))
    given, known = {k: v for k, v in form.items() if k != "constraint"}, {f.name for f in fields(kind)}
    if given.keys() != known:
        raise UsageError("the constraint has missing or unknown fields", where=kind.name,
                         expected=", ".join(sorted(known)), got=", ".join(map(str, given)))  # fmt: skip
    return kind(**given)
