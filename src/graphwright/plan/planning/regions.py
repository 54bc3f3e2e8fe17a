"""Which instructions a graph of the device may hold: the longest run of them always, other runs from 8 on.

What cannot be held moves in front of all regions, or behind them, where its dependencies allow it. Decided by what
kernels ask of the host (`Needs`) and by where operands lie, never by the name of an op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graphwright.array import backend
from graphwright.plan.plan import Plan
from graphwright.plan.planning.hazards import Edge, edges
from graphwright.plan.table import Instr

SHORTEST = 8
PRE, CAPTURED, GAP, POST, PLAIN = "pre", "capture", "gap", "post", "plain"


class Region(NamedTuple):
    """Instructions that run one after another.

    Attributes:
        kind: "capture" (one graph), "pre", "gap" or "post" (in front of, between and behind graphs), or "plain" where
            there is no graph at all.
        instrs: in the order in which they run, which obeys all edges of the plan.
        why: per instruction what keeps it out of a graph; nothing for those inside.
    """

    kind: str
    instrs: tuple[int, ...]
    why: tuple[str, ...]


def regions(plan: Plan) -> tuple[Region, ...]:
    """The regions of a plan, in the order in which they run."""
    why = [reason(plan, instr) for instr in plan.instrs]
    order = hoisted(why, edges(plan), plan.commit_start)
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
    """What keeps an instruction out of a graph, or nothing."""
    device = plan.options.device
    kernels = backend(device)
    if kernels.driver is None:
        return f"no graphs on {device}"
    slots = [plan.slots[s] for s in (*instr.ins, *instr.outs)]
    needs = kernels.needs(
        instr.op, [s.spec for s in slots[len(instr.ins) :]], [s.spec for s in slots[: len(instr.ins)]], instr.attrs
    )
    if needs.why:
        return needs.why
    if needs.reads:
        return f"the host reads operand {needs.reads[0]}"
    on_host = [k for k, s in enumerate(slots) if plan.buffers[s.buffer].on_host]
    if on_host:
        return f"operand {on_host[0]} lies on the host" if on_host[0] < len(instr.ins) else "it runs on the host"
    return ""


def hoisted(why: Sequence[str], found: Sequence[Edge], commit: int) -> list[int]:
    """An order in which as much as can be of what graphs do not hold stands in front of the rest, or behind it.

    Args:
        why: per instruction, nothing if a graph may hold it.
        found: the edges of the plan.
        commit: the first instruction of the commit, which waits for all in front of it.
    """
    n = len(why)
    before: list[list[int]] = [[] for _ in range(n)]
    after: list[list[int]] = [[] for _ in range(n)]
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
    """Runs without a reason that become graphs, as (start, stop): the longest (first on ties), others from 8 on."""
    found: list[tuple[int, int]] = []
    start = 0
    for i in range(len(why) + 1):
        if i == len(why) or why[i]:
            if start < i:
                found.append((start, i))
            start = i + 1
    longest = max(found, key=lambda run: run[1] - run[0], default=None)
    return [run for run in found if run == longest or run[1] - run[0] >= SHORTEST]
