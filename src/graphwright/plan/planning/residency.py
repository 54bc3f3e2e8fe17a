"""Placement of a plan's buffers in host or device memory: values that the host reads are kept in host memory.

A kernel launch may need a number on the host (a learning rate), and the key of a random generator is kept on the host,
because eager code reads it too. Reading such a value back from the device would stall its queue in every step, so the
value is kept on the host, and copied to the device for instructions that need it there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphwright.array import backend
from graphwright.autograd import HostVariable
from graphwright.plan.planning.lowering import needs
from graphwright.plan.table import CONST, INPUT, PARAM, STATE, Instr

if TYPE_CHECKING:
    from graphwright.plan.planning.plan_builder import PlanBuilder

_SOURCES = frozenset({INPUT, PARAM, CONST, STATE})


class HomeChanged(Exception):  # no error: the plan is made in full
    """A buffer of the previous plan would have to move between host and device, so the program is planned in full."""


class HostPlacement:
    """Decides which slots of a plan for a device are kept in host memory; `order`: ids of the plan's instructions."""

    def __init__(self, builder: PlanBuilder, order: np.ndarray) -> None:
        self.builder, self.tables = builder, builder.tables
        self.instrs = [(q, self.tables.instrs[q]) for q in order.tolist()]
        self.on_host = self._host_states()
        self.scratch: set[int] = set()

    def apply(self, known: int) -> np.ndarray:
        """Move buffers to host memory, and insert copies to the device for instructions that read them there.

        Args:
            known: number of buffers of the previous plan; these buffers cannot move.
        Returns: the execution order with the copies, in which instructions on the device read the copies.
        Raises: HomeChanged if one of the `known` buffers would have to move; nothing is changed.
        """
        tables, slots = self.tables, self.tables.slots
        self._compute_on_host()
        written = {slots[target].base for target, _ in self.builder.writes().values()}
        for _, instr in self.instrs:
            for i in self._host_reads(instr):
                base = slots[instr.ins[i]].base
                if self._kind(base) in _SOURCES and base not in written:
                    self.on_host.add(base)
        host = {slots[s].buffer for s in self.on_host | self.scratch}
        used = {slots[s].buffer for _, i in self.instrs for s in (*i.ins, *i.outs, *i.work)}
        if any((b in host) != (b in tables.on_host) for b in used | host if b < known):
            raise HomeChanged
        for buffer in host:
            tables.move_to_host(buffer)
        return self._insert_copies()

    def _kind(self, slot: int) -> str:
        return self.tables.buffers[self.tables.holders[slot]][0]

    def _host_reads(self, instr: Instr) -> tuple[int, ...]:
        """Return the indices of the operands whose values the host needs to launch an instruction."""
        return needs(instr, backend(self.builder.device), lambda s: self.tables.slots[s].spec).reads

    def _host_states(self) -> set[int]:
        """Return the slots of states that are host variables, which eager code reads too."""
        weights, known = self.builder.program.weights, self.builder.sources()
        states = [(s, key) for s, key in zip(known.slots, known.keys, strict=True) if self._kind(s) == STATE]
        return {s for s, key in states if key is not None and isinstance(weights[key], HostVariable)}

    def _compute_on_host(self) -> None:
        """Keep the new value of a host state on the host if it is computed from host values, constants and inputs."""
        slots, writes = self.tables.slots, self.builder.writes().values()
        new_states = {slots[new].base for target, new in writes if slots[target].base in self.on_host}
        for _, instr in self.instrs:
            bases, outs = {slots[s].base for s in instr.ins}, {*instr.outs}
            constants = {b for b in bases if self._kind(b) in (CONST, INPUT)}
            if bases & self.on_host and bases <= self.on_host | constants and outs <= new_states:
                self.on_host |= constants | outs
                self.scratch.update(instr.work)

    def _insert_copies(self) -> np.ndarray:
        """Return the execution order with a copy of each host value before its first reader on the device."""
        tables, slots = self.tables, self.tables.slots
        copies: dict[int, int] = {}
        order: list[int] = []

        def sent(slot: int) -> int:
            base = slots[slot].base
            if base not in self.on_host:
                return slot
            if base not in copies:
                copies[base], copy = tables.saved_copy(base, self.builder.node_of(base), "the device reads it too")
                order.append(copy)
            return copies[base] if slot == base else tables.same_view_of(slot, copies[base])

        for q, instr in self.instrs:
            if not {*instr.outs} & self.on_host:
                host_reads = self._host_reads(instr)
                ins = tuple(s if k in host_reads else sent(s) for k, s in enumerate(instr.ins))
                if ins != instr.ins:
                    q = tables.with_operands(q, ins)
            order.append(q)
        for node, (to, new) in self.builder.writes().items():
            if slots[to].base not in self.on_host:
                self.builder.sent[node] = sent(new)
        return np.array(order, np.int32)
