"""First and last use of every buffer, and results put over dying operands where the op allows it."""

from __future__ import annotations

from graphwright.ops import OPS
from graphwright.plan.lower import Rows
from graphwright.plan.table import INPUT, TEMP


def lifetimes(rows: Rows) -> None:
    """Fill `first` and `last` of the buffers. A result that nobody reads dies at once; outputs and watches never do."""
    buffers, buffer_of = rows.buffers, rows.buffer_of
    for i, instr in enumerate(rows.instrs):
        for s in instr.outs + instr.work:
            b = buffers[buffer_of[s]]
            b.first = b.last = i  # written by one instruction
        for s in instr.ins:
            buffers[buffer_of[s]].last = i
    for slots in (rows.outputs, rows.watched):
        for s in slots.values():
            buffers[buffer_of[s]].last = len(rows.instrs)
    for b in buffers:
        if b.kind == INPUT:  # fed before the first instruction
            b.first = 0


def in_place(rows: Rows) -> None:
    """Let results take the memory of operands that die with the instruction, where the `inplace` trait pairs them."""
    buffers, buffer_of, layouts = rows.buffers, rows.buffer_of, rows.layouts
    moves: dict[int, int] = {}
    for i, instr in enumerate(rows.instrs):
        for out, place in OPS[instr.op].inplace(len(instr.ins), len(instr.outs)):
            if place >= len(instr.ins):
                continue
            o, s = instr.outs[out], instr.ins[place]
            old, new = buffer_of[o], buffer_of[s]
            while new in moves:
                new = moves[new]
            a, b = buffers[old], buffers[new]
            if (
                a.kind == TEMP
                and b.kind == TEMP
                and old != new
                and b.last == i
                and a.first == i
                and a.nbytes == b.nbytes
                and rows.specs[o].dtype is rows.specs[s].dtype
                and layouts[s] == layouts[o]
                and _once(instr.ins, s, buffer_of, moves, new)
            ):
                moves[old] = new
                b.last, a.kind = a.last, "moved"
                break
    if moves:
        for k, b in enumerate(buffer_of):
            if b in moves:
                while b in moves:
                    b = moves[b]
                buffer_of[k] = b


def _once(ins: tuple[int, ...], slot: int, buffer_of: list[int], moves: dict[int, int], buffer: int) -> bool:
    """True if no other operand of the instruction looks at the buffer."""
    count = 0
    for s in ins:
        b = buffer_of[s]
        while b in moves:
            b = moves[b]
        count += b == buffer
    return count == 1
