"""Loop-carried state at the end of a step: which states are updated in place, which are copied, and when.

All reads see the values from the start of the step. Instructions that write a state form one segment at the end, so a
failure before it changes no state. Only in-place updates whose new value is read in the same step happen earlier.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.graph import NodeId
from graphwright.ops import get
from graphwright.plan.planning.overlap import with_late_waits

if TYPE_CHECKING:
    from graphwright.plan.planning.plan_builder import PlanBuilder


class StateCommit:
    """Computes the final instruction order of a plan, in which most instructions that write states are at the end.

    Args:
        order: ids of the instructions that the plan needs, in execution order.
        outputs, watched: name of an output or of a watched node -> slot of its value.
        run: the functions of module `passes`, compiled or as Python.

    Attributes:
        order: ids of the instructions in the final order, including those that write states.
        outputs, watched: name -> slot; for the old value of a state that the step overwrites, the slot of a saved copy.
        start: index in `order` of the first instruction of the commit, the last span, which writes states.
        why: assign node -> the reason why its state is updated by a copy instead of in place.
        early: index in `order` of an instruction before the commit -> keys of the states that it updates.
        moved: buffer of a new state value -> buffer of the state, in whose memory the new value is computed.
    """

    def __init__(
        self, builder: PlanBuilder, order: np.ndarray, outputs: Mapping[str, int], watched: Mapping[str, int], run: Any
    ) -> None:
        self.order, self.outputs, self.watched = order, dict(outputs), dict(watched)
        self.why: dict[NodeId, str] = {}
        self.early: dict[int, tuple[str, ...]] = {}
        self.moved: dict[int, int] = {}
        self.start = len(order)
        self._builder, self._tables, self._run = builder, builder.tables, run
        self._writes = builder.writes()
        if self._writes:
            self._sink_updates()
        if self._tables.collective(self.order).any():
            self.order = with_late_waits(self.order, self.start, self._tables)
        if self._writes:
            self._save_old_values()
            self._write_states()

    def _base(self, slot: int) -> int:
        return self._tables.slots[slot].base

    def _returned(self) -> tuple[int, ...]:
        return (*self.outputs.values(), *self.watched.values())

    def _sink_updates(self) -> None:
        """Move the instructions that serve only to compute new state values to the end, keeping their order."""
        tables, holders = self._tables, self._tables.holders
        made, kept = (np.zeros(len(tables.buffers), np.bool_) for _ in range(2))
        made[[holders[new] for _, new in self._writes.values() if self._base(new) == new]] = True
        kept[[holders[s] for s in self._returned()]] = True
        sinks = self._run.sinking(self.order, *tables.reads.arrays(), *tables.outs.arrays(), made, kept)
        self.start = len(sinks) - int(np.count_nonzero(sinks))
        self.order = np.concatenate([self.order[~sinks], self.order[sinks]])

    def _save_old_values(self) -> None:
        """Copy the old value of each overwritten state that is returned, or becomes the new value of another state."""
        overwritten = {self._base(target) for target, new in self._writes.values() if target != new}
        copies: list[int] = []
        saved: dict[int, int] = {}

        def save(slot: int, node: NodeId, why: str) -> int:
            if self._base(slot) not in overwritten:
                return slot
            if slot not in saved:
                saved[slot], copy = self._tables.saved_copy(slot, node, why)
                copies.append(copy)
            return saved[slot]

        for named in (self.outputs, self.watched):
            for name, slot in named.items():
                named[name] = save(slot, self._builder.node_of(slot), "the old value outlives the step")
        for node, (target, new) in self._writes.items():
            if target != new:
                self._writes[node] = (target, save(new, node, "its memory is written in the same commit"))
        self.order = np.insert(self.order, self.start, copies).astype(np.int32, copy=False)
        self.start += len(copies)

    def _write_states(self) -> None:
        """Have each new state value computed in the state's memory if possible; else append a copy into the state."""
        tables, holders = self._tables, self._tables.holders
        made_at, read_at = (np.full(len(tables.buffers), -1, np.int64) for _ in range(2))
        self._run.touches(self.order, *tables.reads.arrays(), *tables.outs.arrays(), made_at, read_at)
        returned = {self._base(s) for s in self._returned()}
        copies: list[int] = []
        for node, (target, new) in self._writes.items():
            if target == new:
                continue
            buffer, state = holders[new], holders[target]
            made = int(made_at[buffer]) if self._base(new) == new else -1
            instr = tables.instrs[self.order[made]] if made >= 0 else None
            if instr is None:
                self.why[node] = "copied"
            elif buffer in self.moved:
                self.why[node] = "the new value is in another state's memory"
            elif new in returned:
                self.why[node] = "also an output"
            elif read_at[state] > made:
                self.why[node] = "the old value is read after the new one is made"
            elif (new, target) not in tables.overwritten(int(self.order[made])):
                self.why[node] = "the op cannot write over its operand"
            elif made < self.start and not get(instr.op).traits.update:
                self.why[node] = "others read the new value in this step"
            else:
                self.moved[buffer] = state
                if made < self.start:
                    self.early[made] = (*self.early.get(made, ()), tables.buffers[state][2])
                continue
            copies.append(tables.commit_copy(node, new, target))
        self.order = np.concatenate([self.order, np.array(copies, np.int32)])
