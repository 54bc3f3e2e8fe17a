"""Elementwise loops of the machine's code, and how a row names its operands.

A row is 16 int64 cells; cell 0 is the opcode. An elementwise row loops over `rows` times `cols` elements: cells 1 and 2
are the counts. Three cells per operand follow, the result first: its address, the bytes from one row to the next, and
the step along a row, 1 or 0 (one value for all columns). The result's columns are adjacent; a step of PAST asks for
non-temporal stores. Inside a LOOP, a row of code computes one row of elements per turn. Addresses below LOCAL are
offsets into the scratch of the thread that runs the code, so that several threads can run the same rows.

Ops on single numbers are packed: a run of them is one row, SCALARS (cell 1 how many), and a line of 4 cells for each:
opcode, address of the result, of x and of y. They use scalar loads and stores, because a masked vector store would
stall the load that follows it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array.vm.code import BYTES, LOCAL, PAST, Code
from graphwright.array.vm.math import exp, formulas, log, native, tanh
from graphwright.array.vm.narrow import load1_bf16, load_bf16, load_first_bf16, store_bf16, store_first_bf16
from graphwright.array.vm.vector import (
    first,
    load,
    load_f32,
    load_f64,
    load_first,
    load_i64,
    load_mask,
    load_u8,
    only,
    select,
    splat,
    sqrt,
    store,
    store_f32,
    store_first,
    store_i64,
    store_mask,
    stream,
)  # fmt: skip

F = np.float32
LINE = 32
"""Bytes of a line of SCALARS."""


@native
def cell(row: Any, index: Any) -> Any:
    """One int64 of a row."""
    return load_i64(row + 8 * index)


@native
def number(row: Any, index: Any) -> Any:
    """A float64 stored in a cell."""
    return load_f64(row + 8 * index)


@native
def start(row: Any, index: Any, turn: Any, scratch: Any) -> Any:
    """The address of the operand in cells `index` and following, at a turn of a loop."""
    address = cell(row, index)
    return (address + scratch if address < LOCAL else address) + turn * cell(row, index + 1)


@native
def _part(p: Any, step: Any, i: Any) -> Any:
    return load(p + 4 * i) if step else splat(load_f32(p))


@native
def _rest(p: Any, step: Any, i: Any, mask: Any) -> Any:
    return load_first(p + 4 * i, mask) if step else splat(load_f32(p))


@native
def past(row: Any, out: Any) -> Any:
    """Whether the result that begins at `out` is written with non-temporal stores."""
    return cell(row, 5) == PAST and out & 63 == 0


@native
def put(p: Any, x: Any, streamed: Any) -> None:
    """Write 16 entries of a result."""
    if streamed:
        stream(p, x)
    else:
        store(p, x)


def unary(f: Any, part: Any = _part, rest: Any = _rest, write: Any = put, write_rest: Any = store_first, size: int = 4):
    """out = f(x), for entries of the result of `size` bytes; the other arguments read and write 16 entries."""

    @native
    def run(row: Any, turn: Any, scratch: Any) -> None:
        rows, cols, o, so = cell(row, 1), cell(row, 2), start(row, 3, turn, scratch), cell(row, 4)
        x, sx, cx = start(row, 6, turn, scratch), cell(row, 7), cell(row, 8)
        for _ in range(rows):
            i, streamed = 0, past(row, o)
            while i + 16 <= cols:
                write(o + size * i, f(part(x, cx, i)), streamed)
                i += 16
            if i < cols:
                mask = first(cols - i)
                write_rest(o + size * i, f(rest(x, cx, i, mask)), mask)
            o += so
            x += sx

    return run


def binary(f: Any) -> Any:
    """out = f(x, y)."""

    @native
    def run(row: Any, turn: Any, scratch: Any) -> None:
        rows, cols, o, so = cell(row, 1), cell(row, 2), start(row, 3, turn, scratch), cell(row, 4)
        x, sx, cx = start(row, 6, turn, scratch), cell(row, 7), cell(row, 8)
        y, sy, cy = start(row, 9, turn, scratch), cell(row, 10), cell(row, 11)
        for _ in range(rows):
            i, streamed = 0, past(row, o)
            while i + 16 <= cols:
                put(o + 4 * i, f(_part(x, cx, i), _part(y, cy, i)), streamed)
                i += 16
            if i < cols:
                mask = first(cols - i)
                store_first(o + 4 * i, f(_rest(x, cx, i, mask), _rest(y, cy, i, mask)), mask)
            o += so
            x += sx
            y += sy

    return run


def comparison(f: Any) -> Any:
    """out = f(x, y), a byte of 0 or 1 per element."""

    @native
    def run(row: Any, turn: Any, scratch: Any) -> None:
        rows, cols, o, so = cell(row, 1), cell(row, 2), start(row, 3, turn, scratch), cell(row, 4)
        x, sx, cx = start(row, 6, turn, scratch), cell(row, 7), cell(row, 8)
        y, sy, cy = start(row, 9, turn, scratch), cell(row, 10), cell(row, 11)
        for _ in range(rows):
            for i in range(0, cols, 16):
                mask = first(cols - i)
                store_mask(o + i, f(_rest(x, cx, i, mask), _rest(y, cy, i, mask)), mask)
            o += so
            x += sx
            y += sy

    return run


@native
def where(row: Any, turn: Any, scratch: Any) -> None:
    """out = x where the byte is not 0, else y; the condition is in cells 6 to 8."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), start(row, 3, turn, scratch), cell(row, 4)
    c, sc, cc = start(row, 6, turn, scratch), cell(row, 7), cell(row, 8)
    x, sx, cx = start(row, 9, turn, scratch), cell(row, 10), cell(row, 11)
    y, sy, cy = start(row, 12, turn, scratch), cell(row, 13), cell(row, 14)
    for _ in range(rows):
        for i in range(0, cols, 16):
            mask = first(cols - i)
            if cc:
                picked = select(load_mask(c + i, mask), _rest(x, cx, i, mask), _rest(y, cy, i, mask))
            else:
                picked = _rest(x, cx, i, mask) if load_u8(c) else _rest(y, cy, i, mask)
            store_first(o + 4 * i, picked, mask)
        o += so
        c += sc
        x += sx
        y += sy


@native
def fill(row: Any, turn: Any, scratch: Any) -> None:
    """out = the number in cell 6."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), start(row, 3, turn, scratch), cell(row, 4)
    value = splat(F(number(row, 6)))
    for _ in range(rows):
        i, streamed = 0, past(row, o)
        while i + 16 <= cols:
            put(o + 4 * i, value, streamed)
            i += 16
        if i < cols:
            store_first(o + 4 * i, value, first(cols - i))
        o += so


@native
def add_i64(row: Any) -> None:
    """out = x + y, of int64; not inside a LOOP."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4)
    x, sx, cx = cell(row, 6), cell(row, 7), 8 * cell(row, 8)
    y, sy, cy = cell(row, 9), cell(row, 10), 8 * cell(row, 11)
    for _ in range(rows):
        for i in range(cols):
            store_i64(o + 8 * i, load_i64(x + cx * i) + load_i64(y + cy * i))
        o += so
        x += sx
        y += sy


@native
def _part_bf16(p: Any, step: Any, i: Any) -> Any:
    return load_bf16(p + 2 * i) if step else splat(load1_bf16(p))


@native
def _rest_bf16(p: Any, step: Any, i: Any, mask: Any) -> Any:
    return load_first_bf16(p + 2 * i, mask) if step else splat(load1_bf16(p))


_same = native(lambda x: x)
widen = unary(_same, _part_bf16, _rest_bf16)
"""bfloat16 to float32."""
narrow = unary(_same, write=native(lambda p, x, streamed: store_bf16(p, x)), write_rest=store_first_bf16, size=2)
"""float32 to bfloat16."""


@native
def scalars(row: Any) -> None:
    """Run the lines of a SCALARS row."""
    line = row + BYTES
    stop = line + LINE * cell(row, 1)
    while line < stop:
        op, out, x, y = cell(line, 0), cell(line, 1), load_f32(cell(line, 2)), load_f32(cell(line, 3))
        if op == Code.MUL:
            x = x * y
        elif op == Code.ADD:
            x = x + y
        elif op == Code.SUB:
            x = x - y
        elif op == Code.DIV:
            x = x / y
        elif op == Code.NEG:
            x = -x
        elif op == Code.TANH:
            x = only(tanh(splat(x)))
        elif op == Code.SIGMOID:
            x = only(formulas.sigmoid(splat(x)))
        elif op == Code.EXP:
            x = only(exp(splat(x)))
        elif op == Code.LOG:
            x = only(log(splat(x)))
        elif op == Code.SQRT:
            x = only(sqrt(splat(x)))
        store_f32(out, x)
        line += LINE
