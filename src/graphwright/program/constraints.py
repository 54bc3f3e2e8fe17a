"""Constraints of a program: conditions that go with it, and that every commit is held to if they are enforced.

What a constraint demands is written in a layer above; here it is anything that names what violates it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from graphwright import verbs
from graphwright.errors import UsageError
from graphwright.program.errors import ConstraintViolated

if TYPE_CHECKING:
    from graphwright.program.program import Program
    from graphwright.program.validate import Mismatch


class Constraint(Protocol):
    """A condition on a program."""

    def violations(self, p: Program) -> Sequence[Mismatch]:
        """Each way in which a program breaks it; none if it holds."""
        ...

    def to_json(self) -> dict[str, Any]:
        """What `graphwright.surgery` makes it again from. Raises: UsageError if it cannot be written down."""
        ...


class Constraints:
    """The constraints of one program, in the order in which they were added; part of it, not of its journal."""

    def __init__(self) -> None:
        self._held: dict[Constraint, bool] = {}

    def add(self, constraint: Constraint, enforce: bool = False) -> None:
        """Attach a constraint; with `enforce` an edit that leaves it violated is rolled back."""
        if not callable(getattr(constraint, "violations", None)):
            raise UsageError("not a constraint", got=repr(constraint)[:80], expected="one of graphwright.surgery")
        self._held[constraint] = enforce

    def remove(self, constraint: Constraint) -> None:
        """Take a constraint off. Raises: UsageError if it is not attached."""
        if constraint not in self._held:
            raise UsageError("the constraint is not attached", got=repr(constraint)[:80])
        del self._held[constraint]

    def enforced(self, constraint: Constraint) -> bool:
        """Whether commits are held to it."""
        return self._held.get(constraint, False)

    def violations(self, p: Program) -> list[Mismatch]:
        """What violates any of them."""
        return [v for constraint in self._held for v in constraint.violations(p)]

    def check(self, p: Program) -> None:
        """Raises: ConstraintViolated with all that violates an enforced one."""
        found = [v for constraint, enforce in self._held.items() if enforce for v in constraint.violations(p)]
        if found:
            raise ConstraintViolated(
                "the edit breaks what the program is held to:\n  " + "\n  ".join(map(str, found)),
                where=p.name,
                findings=tuple(found),
                fix="make an edit that keeps it, or program.constraints.remove(constraint)",
            )

    def copy(self) -> Constraints:
        """Those of a fork."""
        twin = Constraints()
        twin._held = dict(self._held)
        return twin

    def to_json(self) -> list[dict[str, Any]]:
        """All of them, for a saved program."""
        return [{"constraint": c.to_json(), "enforce": enforce} for c, enforce in self._held.items()]

    def load(self, forms: Sequence[Mapping[str, Any]]) -> None:
        """Attach what `to_json` wrote. Raises: UsageError for what is no constraint here."""
        for form in forms:
            self.add(verbs.verb("constraint")(form["constraint"]), bool(form["enforce"]))

    def __iter__(self) -> Iterator[Constraint]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        return f"Constraints({', '.join(map(repr, self._held))})"
