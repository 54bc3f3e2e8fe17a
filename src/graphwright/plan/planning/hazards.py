"""Dependencies between instructions, and the regions that graphs of a device can hold.

Invariant: every order of the instructions that obeys the dependencies gives the bits of the order of the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphwright.array import backend
from graphwright.plan.planning.lowering import needs
from graphwright.plan.planning.passes import aligned
from graphwright.plan.table import ARENA, FOLDED, INPUT, TILE, Instr

if TYPE_CHECKING:
    from graphwright.plan.plan import Plan

DATA, STORAGE, STATE = "data", "storage", "state"


class Dependency(NamedTuple):
    """Instruction `after` depends on `before`.

    Attributes:
        kind: "data" (`after` reads a result of `before`), "storage" (`after` writes arena bytes that `before` uses) or
            "state" (one writes a variable that the other reads or writes).
    """

    before: int
    after: int
    kind: str


def dependencies(plan: Plan) -> tuple[Dependency, ...]:
    """The dependencies of a plan, by `after`, one per pair of instructions."""
    found = _Hazards(plan)
    for i in range(len(plan.instrs)):
        found.add(i)
    return tuple(Dependency(before, i, kind) for i, row in enumerate(found.waits) for before, kind in row.items())


class _Hazards:
    """The state of a walk in order: the last writer and readers of each buffer, and the buffer of each arena span."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.waits: list[dict[int, str]] = [{} for _ in plan.instrs]
        self._writer: dict[int, int] = {}
        self._readers: dict[int, list[int]] = {}
        placed = [b for b in plan.buffers if b.kind in ARENA and b.offset >= 0]
        ends = sorted({end for b in placed for end in (b.offset, b.offset + aligned(b.nbytes))})
        self._number = {end: i for i, end in enumerate(ends)}
        self._owners = np.full(len(ends), -1, np.int64)  # of the span from an end to the next one
        self._assigned = {b.index for b in placed if b.kind == INPUT}
        for b in self._assigned:
            self._assign(b)

    def add(self, i: int) -> None:
        """Visit the next instruction."""
        instr, slots = self.plan.instrs[i], self.plan.slots
        for b in {slots[s].buffer for s in instr.ins}:
            if b in self._writer:
                self._depend(i, self._writer[b], DATA if self._is_temporary(b) else STATE)
            if self.plan.buffers[b].kind != FOLDED:
                self._readers.setdefault(b, []).append(i)
        for b in {slots[s].buffer for s in (*instr.outs, *instr.work)}:
            for before in self._last(b):
                self._depend(i, before, STORAGE if self._is_temporary(b) else STATE)
            if self._in_arena(b) and b not in self._assigned:
                self._assigned.add(b)
                for before in {before for old in self._assign(b) for before in self._last(old)}:
                    self._depend(i, before, STORAGE)
            self._writer[b], self._readers[b] = i, []

    def _assign(self, buffer: int) -> set[int]:
        """Give a buffer its bytes of the arena; returns the buffers that they had before."""
        row = self.plan.buffers[buffer]
        owners = self._owners[self._number[row.offset] : self._number[row.offset + aligned(row.nbytes)]]
        old = set(owners.tolist()) - {-1}
        owners[:] = buffer
        return old

    def _last(self, buffer: int) -> list[int]:
        """The readers of a buffer since its last write, or else the writer."""
        readers = self._readers.get(buffer)
        return readers or ([self._writer[buffer]] if buffer in self._writer else [])

    def _depend(self, i: int, before: int, kind: str) -> None:
        if before != i:
            self.waits[i].setdefault(before, kind)

    def _is_temporary(self, buffer: int) -> bool:
        return self._in_arena(buffer) or self.plan.buffers[buffer].kind == TILE

    def _in_arena(self, buffer: int) -> bool:
        return self.plan.buffers[buffer].kind in ARENA


SHORTEST = 8
PRE, CAPTURED, GAP, POST, PLAIN = "pre", "capture", "gap", "post", "plain"


class Region(NamedTuple):
    """Instructions that run one after another.

    Attributes:
        kind: "capture" (one graph), "pre", "gap" or "post" (before, between and after graphs), or "plain" if there is
            no graph at all.
        instrs: in the order in which they run, which obeys all dependencies.
        why: per instruction the reason it is in no graph; "" for those inside.
    """

    kind: str
    instrs: tuple[int, ...]
    why: tuple[str, ...]


def regions(plan: Plan) -> tuple[Region, ...]:
    """The regions of a plan, in the order in which they run."""
    why = [reason(plan, instr) for instr in plan.instrs]
    order = hoisted(why, dependencies(plan), plan.commit_start)
    why = [why[i] for i in order]
    found = runs(why)
    if not found:
        return (Region(PLAIN, tuple(order), tuple(why)),) if order else ()
    made: list[Region] = []
    at = 0
    for start, stop in [*found, (len(order), len(order))]:
        if at < start:
            kind = PRE if at == 0 else POST if start == len(order) else GAP
            left = [w or f"a run of fewer than {SHORTEST}" for w in why[at:start]]
            made.append(Region(kind, tuple(order[at:start]), tuple(left)))
        if start < stop:
            made.append(Region(CAPTURED, tuple(order[start:stop]), ("",) * (stop - start)))
        at = stop
    return tuple(made)


def reason(plan: Plan, instr: Instr) -> str:
    """The reason an instruction cannot be in a graph, or ""."""
    device = plan.options.device
    kernels = backend(device)
    if kernels.driver is None:
        return f"no graphs on {device}"
    asked = needs(instr, kernels, lambda s: plan.slots[s].spec)
    if asked.why:
        return asked.why
    if asked.reads:
        return f"the host reads operand {asked.reads[0]}"
    for k, s in enumerate((*instr.ins, *instr.outs)):
        if plan.buffers[plan.slots[s].buffer].on_host:
            return f"operand {k} is on the host" if k < len(instr.ins) else "it runs on the host"
    return ""


def hoisted(why: Sequence[str], found: Sequence[Dependency], commit: int) -> list[int]:
    """Reorder instructions so that non-capturable ones run before or after all others, where dependencies allow.

    Args:
        why: per instruction, "" if a graph may hold it.
        found: the dependencies of the plan.
        commit: the first instruction of the commit, which depends on all before it.
    """
    n = len(why)
    before, after = ([[] for _ in range(n)] for _ in range(2))
    for e in found:
        before[e.after].append(e.before)
        after[e.before].append(e.after)
    early: set[int] = set()
    for i in range(n):
        if why[i] and i < commit and all(b in early for b in before[i]):
            early.add(i)
    late: set[int] = set()
    open_commit = False  # an instruction of the commit that stays in the middle
    for i in reversed(range(n)):
        waits = i < commit and open_commit
        if why[i] and i not in early and not waits and all(a in late for a in after[i]):
            late.add(i)
        elif i >= commit:
            open_commit = True
    middle = [i for i in range(n) if i not in early and i not in late]
    return [*sorted(early), *middle, *sorted(late)]


def runs(why: Sequence[str]) -> list[tuple[int, int]]:
    """Capturable runs (start, stop) that become graphs: the longest (first on ties), and others of at least 8."""
    groups = [list(group) for inside, group in groupby(range(len(why)), lambda i: not why[i]) if inside]
    found = [(group[0], group[-1] + 1) for group in groups]
    longest = max(found, key=lambda run: run[1] - run[0], default=None)
    return [run for run in found if run == longest or run[1] - run[0] >= SHORTEST]
