"""Where values lie in a plan on another device: what only the host asks for stays there, the rest is placed once.

A kernel may need a number on the host to be launched (a learning rate), and a generator's key belongs to the host, as
eager code reads it too. Reading such a value back from the device would stop the queue in every step, so it stays on
the host and is sent where the device needs it. Dtypes and storage formats stay as they are.
"""

from __future__ import annotations

from graphwright.array import Device, backend
from graphwright.autograd import HostVariable
from graphwright.plan.lower import Rows
from graphwright.plan.table import CONST, HOST, INPUT, PARAM, STATE, TEMP, Instr

_SOURCES = frozenset({INPUT, PARAM, CONST, STATE})


def host_reads(rows: Rows, instr: Instr, device: Device) -> tuple[int, ...]:
    """Places of the operands whose values the host must know to launch an instruction."""
    outs, ins = ([rows.specs[s] for s in slots] for slots in (instr.outs, instr.ins))
    return backend(device).needs(instr.op, outs, ins, instr.attrs).reads


def keep_on_host(rows: Rows, device: Device) -> None:
    """Mark the buffers that lie on the host, and put in copies of what the device reads of them."""
    kept = _kept(rows)
    _compute_there(rows, kept)
    written = {rows.bases[target] for target, _ in rows.writes.values()}
    for instr in rows.instrs:
        for i in host_reads(rows, instr, device):
            base = rows.bases[instr.ins[i]]
            if rows.buffers[rows.buffer_of[base]].kind in _SOURCES and base not in written:
                kept.add(base)
    for base in kept:
        buffer = rows.buffers[rows.buffer_of[base]]
        buffer.on_host = True
        if buffer.kind in (INPUT, TEMP):
            buffer.kind = HOST
    _send(rows, kept, device)


def _kept(rows: Rows) -> set[int]:
    """Slots of states that the host shares with others."""
    weights = rows.draft.program.weights
    found = {s for s, b in enumerate(rows.buffer_of) if rows.bases[s] == s and rows.buffers[b].kind == STATE}
    return {s for s in found if isinstance(weights[rows.buffers[rows.buffer_of[s]].key], HostVariable)}


def _compute_there(rows: Rows, kept: set[int]) -> None:
    """What is made of values on the host alone, and carried by it, is computed there: the next key of a generator."""
    carried = {rows.bases[new] for target, new in rows.writes.values() if rows.bases[target] in kept}
    for instr in rows.instrs:
        bases = {rows.bases[s] for s in instr.ins}
        outs = {*instr.outs}
        constants = {b for b in bases if rows.buffers[rows.buffer_of[b]].kind in (CONST, INPUT)}
        if bases & kept and bases <= kept | constants and outs <= carried:
            kept |= constants | outs
            for s in instr.work:
                rows.buffers[rows.buffer_of[s]].kind = HOST


def _send(rows: Rows, kept: set[int], device: Device) -> None:
    """In front of the first instruction on the device that reads a value of the host, a copy of it; one per value."""
    twins: dict[int, int] = {}
    made: list[Instr] = []

    def sent(slot: int) -> int:
        base = rows.bases[slot]
        if base not in kept:
            return slot
        if base not in twins:
            twins[base] = rows.fresh(None, rows.specs[base])
            value = rows.values[base]
            assert value is not None
            made.append(Instr("copy", (base,), (twins[base],), (), {}, value.node, "the device reads it too"))
        if slot not in twins:
            buffer = rows.buffer_of[twins[base]]
            twins[slot] = rows.slot(None, buffer, rows.specs[slot], rows.layouts[slot], twins[base])
        return twins[slot]

    for instr in rows.instrs:
        if not {*instr.outs} & kept:
            places = host_reads(rows, instr, device)
            instr = instr._replace(ins=tuple(s if k in places else sent(s) for k, s in enumerate(instr.ins)))
        made.append(instr)
    rows.writes = {n: (to, new if rows.bases[to] in kept else sent(new)) for n, (to, new) in rows.writes.items()}
    rows.instrs[:] = made
