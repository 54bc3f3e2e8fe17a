"""Which instructions must wait for which others, whatever runs them: data, storage and state edges.

Invariant: every order of the instructions that obeys the edges gives the bits of the order of the plan.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from graphwright.array import backend
from graphwright.ops import expansion, get
from graphwright.plan.planning.buffer_layout import aligned
from graphwright.plan.table import ARENA, FOLDED, INPUT, TILE

if TYPE_CHECKING:
    from graphwright.plan.plan import Plan
    from graphwright.plan.table import Instr

DATA, STORAGE, STATE = "data", "storage", "state"


class Dependency(NamedTuple):
    """Instruction `after` waits for `before`.

    Attributes:
        kind: "data" (it reads what that one wrote), "storage" (it writes arena bytes that that one still uses) or
            "state" (it reads or writes a variable that that one writes or reads).
    """

    before: int
    after: int
    kind: str


def edges(plan: Plan) -> tuple[Dependency, ...]:
    """The edges of a plan, by `after`; of two kinds between the same two instructions, the first found."""
    found = _Hazards(plan)
    for i in range(len(plan.instrs)):
        found.add(i)
    return tuple(Dependency(before, i, kind) for i, row in enumerate(found.waits) for before, kind in row.items())


class _Hazards:
    """The state of the walk: who wrote each buffer last, who read it since, and whose bytes are whose."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.waits: list[dict[int, str]] = [{} for _ in plan.instrs]
        self._writer: dict[int, int] = {}
        self._readers: dict[int, list[int]] = {}
        self._arena = _Tenants()
        self._settled = {b.index for b in plan.buffers if b.kind == INPUT and b.offset >= 0}
        for b in self._settled:
            self._arena.settle(plan.buffers[b].offset, aligned(plan.buffers[b].nbytes), b)

    def add(self, i: int) -> None:
        """Take the next instruction."""
        instr, slots = self.plan.instrs[i], self.plan.slots
        for b in {slots[s].buffer for s in instr.ins}:
            if b in self._writer:
                self._wait(i, self._writer[b], DATA if self._is_temporary(b) else STATE)
            if self.plan.buffers[b].kind != FOLDED:
                self._readers.setdefault(b, []).append(i)
        for b in {slots[s].buffer for s in (*instr.outs, *instr.work)}:
            for before in self._last(b):
                self._wait(i, before, STORAGE if self._is_temporary(b) else STATE)
            if self._in_arena(b) and b not in self._settled:
                self._settled.add(b)
                row = self.plan.buffers[b]
                for old in self._arena.settle(row.offset, aligned(row.nbytes), b):
                    for before in self._last(old):
                        self._wait(i, before, STORAGE)
            self._writer[b], self._readers[b] = i, []

    def _last(self, buffer: int) -> list[int]:
        """Who used a buffer last: its readers since the last write, or else the writer."""
        readers = self._readers.get(buffer)
        return readers or ([self._writer[buffer]] if buffer in self._writer else [])

    def _wait(self, i: int, before: int, kind: str) -> None:
        if before != i:
            self.waits[i].setdefault(before, kind)

    def _is_temporary(self, buffer: int) -> bool:
        return self._in_arena(buffer) or self.plan.buffers[buffer].kind == TILE

    def _in_arena(self, buffer: int) -> bool:
        return self.plan.buffers[buffer].kind in ARENA


class _Tenants:
    """Disjoint stretches of the arena, each with the buffer that was put there last."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._rows: list[tuple[int, int]] = []  # (end, buffer)

    def settle(self, start: int, size: int, buffer: int) -> set[int]:
        """Give a stretch to a buffer; returns whose bytes it takes."""
        end = start + size
        if not size:
            return set()
        low = max(bisect_right(self._starts, start) - 1, 0)
        high = bisect_left(self._starts, end)
        old: set[int] = set()
        kept: list[tuple[int, int, int]] = [(start, end, buffer)]
        for s, (e, b) in zip(self._starts[low:high], self._rows[low:high], strict=True):
            if e > start:
                old.add(b)
            if s < start:
                kept.append((s, min(e, start), b))
            if e > end:
                kept.append((end, e, b))
        kept.sort()
        self._starts[low:high] = [s for s, _, _ in kept]
        self._rows[low:high] = [(e, b) for _, e, b in kept]
        return old


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
    needs = expansion.needs(
        get(instr.op),
        kernels,
        [s.spec for s in slots[len(instr.ins) :]],
        [s.spec for s in slots[: len(instr.ins)]],
        instr.attrs,
    )
    if needs.why:
        return needs.why
    if needs.reads:
        return f"the host reads operand {needs.reads[0]}"
    on_host = [k for k, s in enumerate(slots) if plan.buffers[s.buffer].on_host]
    if on_host:
        return f"operand {on_host[0]} lies on the host" if on_host[0] < len(instr.ins) else "it runs on the host"
    return ""


def hoisted(why: Sequence[str], found: Sequence[Dependency], commit: int) -> list[int]:
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
