"""Carried state at the end of a step: which values are updated in place, which are copied, and when.

All reads see the values from the start of the step. What writes a state stands in one segment at the end, so that a
failure before it changes nothing; only an update that others read in the same step happens earlier, in place.
"""

from __future__ import annotations

from graphwright.graph import NodeId
from graphwright.ops import get
from graphwright.plan.lower import Rows
from graphwright.plan.table import Instr


class Commit:
    """Rows brought into their last order, with every state written.

    Attributes:
        start: first instruction of the commit segment.
        why: write node -> reason, for states whose new value is copied instead of updated in place.
        early: instruction -> keys of the states it updates before the commit segment.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.why: dict[NodeId, str] = {}
        self.early: dict[int, tuple[str, ...]] = {}
        self.start = len(rows.instrs)
        self._reads: tuple[Instr | None, dict[int, list[int]]] = (None, {})  # of the instruction looked at last
        if rows.writes:
            self._sink()
            self._save_old_values()
            self._write()

    def _sink(self) -> None:
        """Move what only makes new values of states behind everything else, keeping its order."""
        rows = self.rows
        made = {new for _, new in rows.writes.values()}
        kept = {rows.bases[s] for s in (*rows.outputs.values(), *rows.watched.values())}
        read: set[int] = set()  # bases that an instruction in front reads
        front: list[Instr] = []
        back: list[Instr] = []
        for instr in reversed(rows.instrs):
            sinks = any(s in made for s in instr.outs) and not any(s in read or s in kept for s in instr.outs)
            if not sinks:
                read.update(rows.bases[s] for s in instr.ins)
            (back if sinks else front).append(instr)
        self.start = len(front)
        rows.instrs[:] = [*reversed(front), *reversed(back)]

    def _save_old_values(self) -> None:
        """Copies of old values that outlive the step: the caller's, and those that become another state's new value."""
        rows = self.rows
        sources = {rows.bases[target]: rows.buffer_of[target] for target, new in rows.writes.values() if target != new}
        saved: dict[int, int] = {}
        instrs, rows.instrs = rows.instrs, []

        def save(slot: int, node: NodeId, why: str) -> int:
            if rows.bases[slot] not in sources:
                return slot
            if slot not in saved:
                saved[slot] = rows.fresh(rows.values[slot], rows.specs[slot])
                rows.emit("copy", (slot,), (saved[slot],), {}, node, why)
            return saved[slot]

        for named in (rows.outputs, rows.watched):
            for name, slot in named.items():
                value = rows.values[slot]
                assert value is not None
                named[name] = save(slot, value.node, "the old value outlives the step")
        for node, (target, new) in rows.writes.items():
            if target != new:
                rows.writes[node] = (target, save(new, node, "its memory is written in the same commit"))
        copies, rows.instrs = rows.instrs, instrs
        instrs[self.start : self.start] = copies
        self.start += len(copies)

    def _write(self) -> None:
        rows = self.rows
        last_read: dict[int, int] = {}
        producer: dict[int, int] = {}
        for i, instr in enumerate(rows.instrs):
            for s in instr.ins:
                last_read[rows.bases[s]] = i
            for s in instr.outs:
                producer[s] = i
        shown: dict[int, list[int]] = {}
        for s, base in enumerate(rows.bases):
            shown.setdefault(base, []).append(s)
        held = {rows.bases[s] for s in (*rows.outputs.values(), *rows.watched.values())}
        late: list[tuple[NodeId, int, int]] = []
        moved: set[int] = set()
        for node, (target, new) in rows.writes.items():
            if target == new:
                continue
            made = producer.get(new)
            if made is None:
                self.why[node] = "copied"
            elif new in moved:
                self.why[node] = "the new value lies in another state's memory"
            elif last_read.get(target, -1) > made or new in held:
                self.why[node] = (
                    "the old value is read after the new one is made" if new not in held else "also an output"
                )
            elif not self._over(rows.instrs[made], new, target):
                self.why[node] = "the op cannot write over its operand"
            elif made < self.start and not get(rows.instrs[made].op).traits.update:
                self.why[node] = "others read the new value in this step"
            else:
                self._move(shown[new], new, target, made)
                moved.add(new)
                continue
            late.append((node, new, target))
        for node, new, target in late:
            rows.emit("copy", (new,), (target,), {}, node, "commit")

    def _over(self, instr: Instr, new: int, target: int) -> bool:
        """True if the op may write this result over the state, which it reads as a whole and once."""
        rows, out = self.rows, instr.outs.index(new)
        if self._reads[0] is not instr:
            places: dict[int, list[int]] = {}
            for i, s in enumerate(instr.ins):
                places.setdefault(rows.bases[s], []).append(i)
            self._reads = (instr, places)
        readers = self._reads[1].get(target, [])
        return (
            len(readers) == 1
            and get(instr.op).overwrites(out, readers[0], len(instr.ins), len(instr.outs))
            and rows.layouts[instr.ins[readers[0]]] == rows.layouts[target]
        )

    def _move(self, slots: list[int], new: int, target: int, made: int) -> None:
        """Let the new value lie in the state's memory."""
        rows = self.rows
        old, state = rows.buffer_of[new], rows.buffer_of[target]
        for s in slots:
            rows.buffer_of[s] = state
        rows.buffers[old].kind = "moved"
        if made < self.start:
            self.early[made] = (*self.early.get(made, ()), rows.buffers[state].key)
