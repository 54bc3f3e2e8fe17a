"""Dependencies between instructions, and the regions that can be captured as device graphs.

Invariant: every order of the instructions that obeys the dependencies gives the same bits as the order of the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphwright.array import backend
from graphwright.ops import OPS
from graphwright.plan.planning.lowering import needs
from graphwright.plan.planning.passes import aligned
from graphwright.plan.table import ARENA, FOLDED, INPUT, TILE, Instr

if TYPE_CHECKING:
    from graphwright.plan.plan import Plan

DATA, STORAGE, STATE, RANKS = "data", "storage", "state", "ranks"


class Dependency(NamedTuple):
    """Instruction `after` depends on `before`.

    Attributes:
        kind: "data" (`after` reads a result of `before`), "storage" (`after` writes arena bytes that `before` uses),
            "state" (one writes a variable that the other reads or writes) or "ranks" (both talk to other ranks, which
            do so in the same order).
    """

    before: int
    after: int
    kind: str


def dependencies(plan: Plan) -> tuple[Dependency, ...]:
    """Return the dependencies of a plan in order of `after`, at most one per pair of instructions."""
    buffers, slots = plan.buffers, plan.slots
    arena = {b.index: (b.offset, b.offset + aligned(b.nbytes)) for b in buffers if b.kind in ARENA and b.offset >= 0}
    temporary = arena.keys() | {b.index for b in buffers if b.kind == TILE}
    number = {end: i for i, end in enumerate(sorted({end for span in arena.values() for end in span}))}
    owners = np.full(len(number), -1, np.int64)  # buffer that uses the bytes from one boundary to the next
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    waits: list[dict[int, str]] = [{} for _ in plan.instrs]
    together = -1  # the last instruction that talks to other ranks

    def assign(buffer: int) -> set[int]:
        """Record a buffer as the user of its arena bytes; return the buffers that used any of them until now."""
        start, stop = arena.pop(buffer)
        part = owners[number[start] : number[stop]]
        before = set(part.tolist()) - {-1}
        part[:] = buffer
        return before

    def last(buffer: int) -> list[int]:
        """Return the instructions that read a buffer since its last write; if there are no such, the last writer."""
        return readers.get(buffer) or ([writer[buffer]] if buffer in writer else [])

    for b in [b for b in arena if buffers[b].kind == INPUT]:
        assign(b)
    for i, (instr, row) in enumerate(zip(plan.instrs, waits, strict=True)):
        for b in {slots[s].buffer for s in instr.ins}:
            if b in writer:
                row.setdefault(writer[b], DATA if b in temporary else STATE)
            if buffers[b].kind != FOLDED:
                readers.setdefault(b, []).append(i)
        for b in {slots[s].buffer for s in (*instr.outs, *instr.work)}:
            for before in last(b):
                row.setdefault(before, STORAGE if b in temporary else STATE)
            if b in arena:  # its first write
                for before in {before for old in assign(b) for before in last(old)}:
                    row.setdefault(before, STORAGE)
            writer[b], readers[b] = i, []
        row.pop(i, None)
        if OPS[instr.op].traits.collective:
            if together >= 0:
                row.setdefault(together, RANKS)
            together = i
    return tuple(Dependency(before, i, kind) for i, row in enumerate(waits) for before, kind in row.items())


SHORTEST = 8
PRE, CAPTURED, GAP, POST, PLAIN = "pre", "capture", "gap", "post", "plain"


class Region(NamedTuple):
    """A span of instructions in execution order that is captured as one device graph, or not captured.

    Attributes:
        kind: "capture" (one graph), "pre", "gap" or "post" (before, between and after graphs), or "plain" if the plan
            has no graph.
        instrs: indices of the instructions, in an order that obeys all dependencies.
        why: per instruction the reason why it is in no graph, or "" if it is in one.
    """

    kind: str
    instrs: tuple[int, ...]
    why: tuple[str, ...]


def regions(plan: Plan) -> tuple[Region, ...]:
    """Split a plan into regions, each captured as one device graph or not at all; return them in execution order."""
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
    """Return the reason why an instruction cannot be captured in a device graph, or ""."""
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
    """Return an order of the instructions in which those that cannot be captured run first or last, if possible.

    Args:
        why: per instruction the reason why it cannot be captured in a device graph, or "".
        found: the dependencies of the plan, which the order obeys.
        commit: index of the first instruction of the commit, which writes states after all other instructions.
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
    open_commit = False  # an instruction of the commit that is neither early nor late
    for i in reversed(range(n)):
        waits = i < commit and open_commit
        if why[i] and i not in early and not waits and all(a in late for a in after[i]):
            late.add(i)
        elif i >= commit:
            open_commit = True
    middle = [i for i in range(n) if i not in early and i not in late]
    return [*sorted(early), *middle, *sorted(late)]


def runs(why: Sequence[str]) -> list[tuple[int, int]]:
    """Return (start, stop) of each run of instructions to capture as one graph.

    `why[i]` is the reason why instruction i cannot be captured, or "". Of the maximal runs without a reason, those of 8
    or more instructions are taken, and the longest in any case.
    """
    groups = [list(group) for inside, group in groupby(range(len(why)), lambda i: not why[i]) if inside]
    found = [(group[0], group[-1] + 1) for group in groups]
    longest = max(found, key=lambda run: run[1] - run[0], default=None)
    return [run for run in found if run == longest or run[1] - run[0] >= SHORTEST]
