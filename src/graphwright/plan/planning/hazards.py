"""Which instructions must wait for which others, whatever runs them: data, storage and state edges.

Invariant: every order of the instructions that obeys the edges gives the bits of the order of the plan.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from graphwright.plan.plan import Plan
from graphwright.plan.planning.layout import aligned
from graphwright.plan.table import ARENA, FOLDED, INPUT, TILE

DATA, STORAGE, STATE = "data", "storage", "state"


class Edge(NamedTuple):
    """Instruction `after` waits for `before`.

    Attributes:
        kind: "data" (it reads what that one wrote), "storage" (it writes arena bytes that that one still uses) or
            "state" (it reads or writes a variable that that one writes or reads).
    """

    before: int
    after: int
    kind: str


def edges(plan: Plan) -> tuple[Edge, ...]:
    """The edges of a plan, by `after`; of two kinds between the same two instructions, the first found."""
    found = _Hazards(plan)
    for i in range(len(plan.instrs)):
        found.add(i)
    return tuple(Edge(before, i, kind) for i, row in enumerate(found.waits) for before, kind in row.items())


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
