"""A plan within a budget of bytes: values that lie idle at the fullest instruction are dropped and computed again.

Greedy, by bytes freed per operation run again, one value at a time, until the arena fits. The bits stay.
Source for the rule: Kirisame et al. 2021, "Dynamic Tensor Rematerialization", section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Unpack

from graphwright.errors import ComputeError, Facts
from graphwright.ops import get
from graphwright.plan.draft import Draft, Firing, Ref, Row
from graphwright.plan.layout import aligned
from graphwright.plan.lower import Rows
from graphwright.plan.table import ARENA, TEMP
from graphwright.program.kinds import KINDS

_TRIED = 8
"""Candidates measured per round; the first one mostly does."""
_CHAIN = 32
"""Operations run again for one value, at most."""


class BudgetImpossible(ComputeError):
    """No choice of values to compute again that was found fits.

    Attributes:
        best: the smallest arena that was found, in bytes.
    """

    def __init__(self, what: str, *, best: int = 0, **facts: Unpack[Facts]) -> None:
        super().__init__(what, **facts)
        self.best = best


def within(draft: Draft, budget: int, tables: Callable[[Draft], tuple[Rows, Any, int]]) -> Draft:
    """The draft, with values computed again until its arena has at most `budget` bytes.

    Args:
        tables: lowers a draft and lays it out: rows, what else it made, and the arena's bytes.
    Raises: BudgetImpossible.
    """
    draft = _normal(draft)
    rows, _, arena = tables(_normal(draft))
    while arena > budget:
        now = _fullness(rows)
        for choice in _choices(draft, rows)[:_TRIED]:
            trial = choice.applied(draft)
            found, _, size = tables(_normal(trial))  # of a copy: lowering writes to the log
            if _fullness(found) < now:
                draft, rows, arena = trial, found, size
                break
        else:
            raise BudgetImpossible(
                "no values are left that could be computed again",
                best=arena,
                where=draft.program.name,
                expected=f"{budget:,} bytes",
                got=f"{arena:,} bytes at best",
                fix="a larger budget, or a smaller batch",
            )
    return draft


def _normal(draft: Draft) -> Draft:
    """A draft of its own whose operands are what stands for them."""
    made = copy(draft)
    made.rows = [Row(r.node, r.op, r.attrs, r.specs, [draft.find(o) for o in r.operands]) for r in draft.rows]
    made.outputs = {name: draft.find(ref) for name, ref in draft.outputs.items()}
    made.watched = {name: draft.find(ref) for name, ref in draft.watched.items()}
    made.same, made.log = {}, list(draft.log)
    return made


def _live(rows: Rows) -> list[int]:
    """Arena bytes that are live at each instruction."""
    steps = len(rows.instrs)
    change = [0] * (steps + 2)
    for b in rows.buffers:
        if b.kind in ARENA and b.last >= 0:
            change[max(b.first, 0)] += aligned(b.nbytes)
            change[min(b.last, steps) + 1] -= aligned(b.nbytes)
    live, line = 0, []
    for step in change[:steps]:
        live += step
        line.append(live)
    return line


def _fullness(rows: Rows) -> tuple[int, int]:
    """The most bytes that are live, and at how many instructions."""
    line = _live(rows)
    most = max(line, default=0)
    return most, line.count(most)


@dataclass(slots=True)
class _Choice:
    """One value to be computed again.

    Attributes:
        ref: the value.
        clones: rows to run again for it, in order.
        late: rows that read the clone.
        score: bytes freed per operation.
    """

    ref: Ref
    clones: list[int]
    late: list[int]
    score: float

    def applied(self, draft: Draft) -> Draft:
        """The draft with the clones in front of the first reader."""
        at, n = min(self.late), len(self.clones)

        def moved(ref: Ref) -> Ref:
            return ref if ref.row < at else Ref(ref.row + n, ref.port)

        twin = {row: at + k for k, row in enumerate(self.clones)}

        def again(ref: Ref) -> Ref:
            return Ref(twin[ref.row], ref.port) if ref.row in twin else moved(ref)

        made, late = copy(draft), {*self.late}
        rows = [Row(r.node, r.op, r.attrs, r.specs, list(r.operands)) for r in draft.rows]
        for i, row in enumerate(rows):
            row.operands = [again(ref) if i in late else moved(ref) for ref in row.operands]
        sources = [draft.rows[i] for i in self.clones]
        clones = [Row(r.node, r.op, r.attrs, r.specs, [again(ref) for ref in r.operands]) for r in sources]
        made.rows = [*rows[:at], *clones, *rows[at:]]
        made.outputs = {name: moved(ref) for name, ref in draft.outputs.items()}
        made.watched = {name: moved(ref) for name, ref in draft.watched.items()}
        path = draft.path(self.ref.row)
        made.log = [*draft.log, Firing("computed again", path, path)]
        return made


class _Uses:
    """Which instruction makes each value, which read it, and of which other value a view is."""

    def __init__(self, draft: Draft, rows: Rows) -> None:
        self.draft, self.rows = draft, rows
        slot_of = rows.at
        self.ref_of = {slot: ref for ref, slot in slot_of.items() if rows.bases[slot] == slot}
        self.made: dict[int, int] = {}
        self.readers: dict[int, list[int]] = {}
        for i, instr in enumerate(rows.instrs):
            for s in instr.outs:
                self.made[s] = i
            for base in {rows.bases[s] for s in instr.ins}:
                self.readers.setdefault(base, []).append(i)
        outs = {s: i for i, instr in enumerate(rows.instrs) for s in instr.outs}
        self.instr_of = {ref.row: outs[slot] for ref, slot in slot_of.items() if slot in outs}
        kept = (*rows.outputs.values(), *rows.watched.values(), *(new for _, new in rows.writes.values()))
        self.kept = {rows.bases[s] for s in kept}

    def base(self, ref: Ref) -> int:
        """The slot whose value a value shows."""
        return self.rows.bases[self.rows.at[ref]]

    def there(self, base: int, at: int) -> bool:
        """True if a value is in memory at an instruction anyway."""
        kind = self.rows.buffers[self.rows.buffer_of[base]].kind
        return base not in self.made or kind != TEMP or base in self.kept or max(self.readers.get(base, [-1])) >= at


def _choices(draft: Draft, rows: Rows) -> list[_Choice]:
    """Values that lie idle at the fullest instruction, the best first."""
    line, uses = _live(rows), _Uses(draft, rows)
    if not line:
        return []
    peak = line.index(max(line))
    found: list[_Choice] = []
    for base, made in uses.made.items():
        ref = uses.ref_of.get(base)
        readers = uses.readers.get(base, [])
        after = [i for i in readers if i > peak]
        if ref is None or made >= peak or not after or peak in readers or base in uses.kept:
            continue
        if get(draft.rows[ref.row].op).traits.update:
            continue
        choice = _choice(uses, ref, min(after), after)
        if choice is not None:
            found.append(choice)
    return sorted(found, key=lambda c: (-c.score, c.ref))


def _choice(uses: _Uses, ref: Ref, at: int, after: Sequence[int]) -> _Choice | None:
    """What it takes to have a value again at instruction `at`; None if too much."""
    draft, rows, wanted = uses.draft, uses.rows, {*after}
    base = uses.base(ref)
    late = [
        i
        for i, row in enumerate(draft.rows)
        if uses.instr_of.get(i) in wanted and any(r in rows.at and uses.base(r) == base for r in row.operands)
    ]
    if not late or len({uses.instr_of[i] for i in late}) < len(wanted):
        return None  # a reader that no row stands for: a copy that a layout needs
    clones, stack = {ref.row}, [ref.row]
    for i in late:  # views of the value, through which it is read
        stack += [r.row for r in draft.rows[i].operands if uses.base(r) == base and r.row != ref.row]
    clones.update(stack)
    flops = 0
    while stack:
        row = draft.rows[stack.pop()]
        if row.op in KINDS or get(row.op).traits.update or len(clones) > _CHAIN:
            return None
        ins, op = [draft.spec(o) for o in row.operands], get(row.op)
        flops += op.cost(ins, row.specs, row.attrs).flops
        for operand in row.operands:
            if operand.row not in clones and not (uses.there(uses.base(operand), at) and uses.base(operand) != base):
                clones.add(operand.row)
                stack.append(operand.row)
    freed = rows.buffers[rows.buffer_of[base]].nbytes
    return _Choice(ref, sorted(clones), late, freed / (flops + 1))
