"""`solve`: make repairs until all constraints hold, none of which may break something else; all of them, or none.

Repairs are tried on forks, in a fixed order. Only a sequence that satisfies everything is made on the program, as one
edit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graphwright.errors import GraphwrightError, UsageError
from graphwright.surgery.diagnose import diagnose
from graphwright.surgery.findings.finding import Finding, Fix, Severity
from graphwright.surgery.findings.kinds import kinds

if TYPE_CHECKING:
    from graphwright.program import Entry, Program
    from graphwright.program.constraints import Constraint

TOOL = "graphwright solve"


@dataclass(frozen=True, slots=True)
class Unsatisfied:
    """A violation that is left, and why each of its repairs was not made."""

    violation: Finding
    tried: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{self.violation.kind}: {self.violation}"]
        return "\n".join(lines + [f"  {what}: {why}" for what, why in self.tried or (("no repair is known", ""),)])


@dataclass(frozen=True, slots=True)
class Solution:
    """What solving came to.

    Attributes:
        satisfied: whether all constraints hold now.
        made: the repairs, in order; none if not all could be satisfied.
        unsatisfied: what was left, with what was tried.
        entry: of the journal; None if nothing was made.
    """

    satisfied: bool
    made: tuple[str, ...] = ()
    unsatisfied: tuple[Unsatisfied, ...] = ()
    entry: Entry | None = field(default=None, repr=False)

    def __bool__(self) -> bool:
        return self.satisfied

    def __str__(self) -> str:
        if self.satisfied:
            return "satisfied" + "".join(f"\n  {what}" for what in self.made)
        return "unsatisfied, nothing changed\n" + "\n".join(map(str, self.unsatisfied))

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        left = [{"violation": u.violation.to_json(), "tried": [list(t) for t in u.tried]} for u in self.unsatisfied]
        return {"satisfied": self.satisfied, "made": list(self.made), "unsatisfied": left}


def solve(program: Program, constraints: Sequence[Constraint] | None = None, max_edits: int = 64) -> Solution:
    """Satisfy constraints by repairs that create no finding and no violation that was not there; deterministic.

    Args:
        program: changed by one edit if all can be satisfied, else bit for bit as it was.
        constraints: by default those attached to it.
        max_edits: repairs at most.
    Raises: UsageError while an edit is open.
    """
    wanted = list(program.constraints if constraints is None else constraints)
    if program.history.open is not None:
        raise UsageError("an edit is open", where=program.name, fix="leave the with-block first")
    trial, made = program.fork(), list[Fix]()
    for constraint in list(trial.constraints):
        trial.constraints.remove(constraint)  # what is wrong on the way may be mended by the next repair
    known = _structural(trial)
    left = _violations(trial, wanted)
    tried: dict[tuple[str, str], dict[str, str]] = {}
    while left and len(made) < max_edits:
        step = _step(trial, wanted, left, known, tried)
        if step is None:
            break
        trial, left, fix = step
        made.append(fix)
    if left:
        rest = [Unsatisfied(v, tuple(tried.get(v.identity, {}).items())) for v in left]
        return Solution(False, unsatisfied=tuple(rest))
    if not made:
        return Solution(True)
    with program.edit(f"solve {len(wanted)} constraints", tool=TOOL, check=program.valid) as e:
        for fix in made:
            fix.apply(e)
    return Solution(True, tuple(fix.what for fix in made), (), program.journal[-1])


def _step(
    trial: Program,
    wanted: Sequence[Constraint],
    left: list[Finding],
    known: set[tuple[str, str]],
    tried: dict[tuple[str, str], dict[str, str]],
) -> tuple[Program, list[Finding], Fix] | None:
    """The first repair, by cost, kind and place, that leaves less and adds nothing."""
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
        after = _violations(twin, wanted)
        fresh = ({v.identity for v in after} | _structural(twin)) - allowed
        if fresh:
            kind, where = sorted(fresh)[0]
            why[fix.what] = f"it would make a new finding: {kind} at {where}"
        elif _weight(after) < _weight(left):
            return twin, after, fix
        else:
            why[fix.what] = "it leaves as much"
    return None


def _violations(p: Program, wanted: Sequence[Constraint]) -> list[Finding]:
    return [v if isinstance(v, Finding) else Finding(v.kind, v.where, v.what) for c in wanted for v in c.violations(p)]


def _structural(p: Program) -> set[tuple[str, str]]:
    names = [kind.name for kind in kinds().values() if kind.reads == "structure"]
    return {f.identity for f in diagnose(p, kinds=names)}


def _weight(left: Sequence[Finding]) -> tuple[int, ...]:
    """How much is left, the worst first; lexicographic."""
    count = Counter(v.severity for v in left)
    return tuple(count[s] for s in sorted(Severity, reverse=True))
