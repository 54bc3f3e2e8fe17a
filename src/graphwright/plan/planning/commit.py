"""Carried state at the end of a step: which values are updated in place, which are copied, and when.

All reads see the values from the start of the step. What writes a state stands in one segment at the end, so that a
failure before it changes nothing; only an update that others read in the same step happens earlier, in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.ops import get

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.plan.planning.plan_builder import PlanBuilder
    from graphwright.plan.table import Instr


class StateCommit:
    """The order of instructions with every state written.

    Args:
        order: instructions that are needed.
        outputs, watched: name -> slot.
        run: the native loops.

    Attributes:
        order: of instructions, commits included.
        outputs, watched: name -> slot; copies of old values where the state is written.
        start: first instruction of the commit segment.
        why: write node -> reason, for states whose new value is copied instead of updated in place.
        early: time -> keys of the states that are updated before the commit segment.
        moved: buffer -> the state's buffer that it lies in.
    """

    def __init__(
        self, ledger: PlanBuilder, order: np.ndarray, outputs: Mapping[str, int], watched: Mapping[str, int], run: Any
    ) -> None:
        self.ledger, self.order, self.run = ledger, order, run
        self.outputs, self.watched = dict(outputs), dict(watched)
        self.why: dict[NodeId, str] = {}
        self.early: dict[int, tuple[str, ...]] = {}
        self.moved: dict[int, int] = {}
        self.start = len(order)
        self._reads: tuple[Instr | None, dict[int, list[int]]] = (None, {})  # of the instruction looked at last
        self._writes = ledger.writes()
        if self._writes:
            self._sink()
            self._save_old_values()
            self._write()

    def _base(self, slot: int) -> int:
        return self.ledger.slots[slot].base

    def _buffer(self, slot: int) -> int:
        return self.ledger.slots[slot].buffer

    def _sink(self) -> None:
        """Move what only makes new values of states behind everything else, keeping its order."""
        ledger = self.ledger
        made, kept = (np.zeros(len(ledger.buffers), np.bool_) for _ in range(2))
        made[[self._buffer(new) for _, new in self._writes.values() if self._base(new) == new]] = True
        kept[[self._buffer(s) for s in (*self.outputs.values(), *self.watched.values())]] = True
        sinks = self.run.sinking(self.order, *ledger.reads.arrays(), *ledger.outs.arrays(), made, kept)
        self.start = len(sinks) - int(np.count_nonzero(sinks))
        self.order = np.concatenate([self.order[~sinks], self.order[sinks]])

    def _save_old_values(self) -> None:
        """Copies of old values that outlive the step: the caller's, and those that become another state's new value."""
        sources = {self._base(target) for target, new in self._writes.values() if target != new}
        copies: list[int] = []
        saved: dict[int, int] = {}

        def save(slot: int, node: NodeId, why: str) -> int:
            if self._base(slot) not in sources:
                return slot
            if slot not in saved:
                saved[slot], copy = self.ledger.saved(slot, node, why)
                copies.append(copy)
            return saved[slot]

        for named in (self.outputs, self.watched):
            for name, slot in named.items():
                named[name] = save(slot, self.ledger.node_of(slot), "the old value outlives the step")
        for node, (target, new) in self._writes.items():
            if target != new:
                self._writes[node] = (target, save(new, node, "its memory is written in the same commit"))
        self.order = np.insert(self.order, self.start, copies).astype(np.int32, copy=False)
        self.start += len(copies)

    def _write(self) -> None:
        ledger = self.ledger
        made_at, read_at = (np.full(len(ledger.buffers), -1, np.int64) for _ in range(2))
        self.run.touches(self.order, *ledger.reads.arrays(), *ledger.outs.arrays(), made_at, read_at)
        held = {self._base(s) for s in (*self.outputs.values(), *self.watched.values())}
        late: list[tuple[NodeId, int, int]] = []
        for node, (target, new) in self._writes.items():
            if target == new:
                continue
            buffer = self._buffer(new)
            made = int(made_at[buffer]) if self._base(new) == new else -1
            if made < 0:
                self.why[node] = "copied"
            elif buffer in self.moved:
                self.why[node] = "the new value lies in another state's memory"
            elif read_at[self._buffer(target)] > made or new in held:
                self.why[node] = (
                    "the old value is read after the new one is made" if new not in held else "also an output"
                )
            elif not self._over(ledger.instrs[self.order[made]], new, target):
                self.why[node] = "the op cannot write over its operand"
            elif made < self.start and not get(ledger.instrs[self.order[made]].op).traits.update:
                self.why[node] = "others read the new value in this step"
            else:
                self.moved[buffer] = state = self._buffer(target)
                if made < self.start:
                    self.early[made] = (*self.early.get(made, ()), ledger.buffers[state][2])
                continue
            late.append((node, new, target))
        copies = [ledger.committed(node, new, target) for node, new, target in late]
        self.order = np.concatenate([self.order, np.array(copies, np.int32)])

    def _over(self, instr: Instr, new: int, target: int) -> bool:
        """True if the op may write this result over the state, which it reads as a whole and once."""
        slots, out = self.ledger.slots, instr.outs.index(new)
        if self._reads[0] is not instr:
            places: dict[int, list[int]] = {}
            for i, s in enumerate(instr.ins):
                places.setdefault(slots[s].base, []).append(i)
            self._reads = (instr, places)
        readers = self._reads[1].get(target, [])
        return (
            len(readers) == 1
            and get(instr.op).overwrites(out, readers[0], len(instr.ins), len(instr.outs))
            and slots[instr.ins[readers[0]]].layout == slots[target].layout
        )
