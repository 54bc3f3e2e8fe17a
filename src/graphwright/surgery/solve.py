"""Constraint solver: repairs are tried on forks, in a fixed order.

A sequence of repairs is applied to the program, as one edit, only if it satisfies all constraints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from graphwright.arguments import checked
from graphwright.errors import GraphwrightError, UsageError
from graphwright.program import Entry, Program
from graphwright.report import Report
from graphwright.surgery.constraints import Constraint
from graphwright.surgery.findings.diagnose import diagnose, rules
from graphwright.surgery.findings.finding import Finding, Fix, Severity

TOOL = "graphwright solve"


@dataclass(frozen=True, slots=True, repr=False)
class Unsatisfied(Report):
    """A remaining violation, and pairs (repair, reason for which it was rejected)."""

    violation: Finding
    tried: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{self.violation.kind}: {self.violation}"]
        return "\n".join(lines + [f"  {what}: {why}" for what, why in self.tried or (("no repair exists", ""),)])


@dataclass(frozen=True, slots=True, repr=False)
class ConstraintSolution(Report):
    """The result of `solve`.

    Attributes:
        satisfied: whether all constraints hold.
        made: descriptions of the applied repairs, in order; empty unless all constraints hold.
        unsatisfied: remaining violations, with the rejected repairs.
        entry: the journal entry of the repairs; None if there was no edit.
    """

    satisfied: bool
    made: tuple[str, ...] = ()
    unsatisfied: tuple[Unsatisfied, ...] = ()
    entry: Entry | None = None
    HIDDEN: ClassVar = ("entry",)

    def __bool__(self) -> bool:
        return self.satisfied

    def _text(self) -> str:
        if self.satisfied:
            return "satisfied" + "".join(f"\n  {what}" for what in self.made)
        return "unsatisfied, nothing changed\n" + "\n".join(map(str, self.unsatisfied))


@checked
def solve(program: Program, constraints: Sequence[Constraint] | None = None, max_edits: int = 64) -> ConstraintSolution:
    """Apply repairs until all constraints hold. Repairs that cause new findings or violations are rejected.

    Args:
        program: changed by one edit if all constraints can be satisfied, otherwise unchanged bit for bit.
        constraints: by default those attached to the program.
        max_edits: largest number of repairs.
    Raises: UsageError while an edit is open.
    """
    wanted = list(program.constraints if constraints is None else constraints)
    if program.history.open is not None:
        raise UsageError("the program has an open edit", where=program.name, fix="leave its with-block first")
    trial, made = program.fork(), list[Fix]()
    for constraint in list(trial.constraints):
        trial.constraints.remove(constraint)  # an intermediate violation may be repaired by a later step
    known = _structural(trial)
    left = _broken_by(trial, wanted)
    tried: dict[tuple[str, str], dict[str, str]] = {}
    while left and len(made) < max_edits:
        step = _step(trial, wanted, left, known, tried)
        if step is None:
            break
        trial, left, fix = step
        made.append(fix)
    if left:
        rest = [Unsatisfied(v, tuple(tried.get(v.identity, {}).items())) for v in left]
        return ConstraintSolution(False, unsatisfied=tuple(rest))
    if not made:
        return ConstraintSolution(True)
    with program.edit(f"solve {len(wanted)} constraints", tool=TOOL, check=program.valid) as e:
        for fix in made:
            fix.apply(e)
    return ConstraintSolution(True, tuple(fix.what for fix in made), (), program.journal[-1])


def _step(
    trial: Program, wanted: Sequence[Constraint], left: list[Finding], known: set[tuple[str, str]],
    tried: dict[tuple[str, str], dict[str, str]],
) -> tuple[Program, list[Finding], Fix] | None:  # fmt: skip
    """Find the first repair, by cost, kind and location, that leaves fewer violations and causes no new finding.

    `known` are (kind, location) of findings from before; `tried` collects the rejected repairs of each finding.
    Returns: the repaired fork, its violations and the repair; None if there is no such repair.
    """
    repairs = [(v, fix) for v in left for fix in v.fixes]
    repairs.sort(key=lambda pair: (pair[1].cost, pair[0].kind, pair[0].where, pair[1].what))
    allowed = known | {v.identity for v in left}
    for violation, fix in repairs:
        why = tried.setdefault(violation.identity, {})
        twin = trial.fork()
        try:
            with twin.edit(fix.what, keep_undo=False, check=twin.valid) as e:
                fix.apply(e)
        except GraphwrightError as error:
            why[fix.what] = f"{type(error).__name__}: {error.what}"
            continue
        after = _broken_by(twin, wanted)
        fresh = ({v.identity for v in after} | _structural(twin)) - allowed
        if fresh:
            kind, where = sorted(fresh)[0]
            why[fix.what] = f"it would cause a new finding: {kind} at {where}"
        elif _weight(after) < _weight(left):
            return twin, after, fix
        else:
            why[fix.what] = "it does not reduce the violations"
    return None


def _broken_by(p: Program, wanted: Sequence[Constraint]) -> list[Finding]:
    return [v if isinstance(v, Finding) else Finding(v.kind, v.where, v.what) for c in wanted for v in c.violations(p)]


def _structural(p: Program) -> set[tuple[str, str]]:
    names = [rule.name for rule in rules().values() if rule.reads == "structure"]
    return {f.identity for f in diagnose(p, kinds=names)}


def _weight(left: Sequence[Finding]) -> tuple[int, ...]:
    """Return the number of violations per severity, highest severity first, for lexicographic comparison."""
    count = Counter(v.severity for v in left)
    return tuple(count[s] for s in sorted(Severity, reverse=True))
