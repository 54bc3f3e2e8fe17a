"""Elementwise loops of the machine's code, and how a row names its operands.

A row is 16 int64 cells; cell 0 is the opcode.
Elementwise rows walk `rows` times `cols` elements: cells 1 and 2 are the counts, then per operand its address, the
bytes from one row to the next, and the step along a row, 1 or 0 (one value for all columns). The result comes first and
its columns are adjacent; a step of PAST says that they go past the caches. Within a LOOP a row of code does one row of
elements at a turn, the one of that turn.
Addresses below LOCAL count from the scratch of whoever runs the code, so that several threads may run the same rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array.vm.code import LOCAL, PAST
from graphwright.array.vm.math import native
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
    select,
    splat,
    store,
    store_first,
    store_i64,
    store_mask,
    stream,
)

F = np.float32


@native
def cell(row: Any, index: Any) -> Any:
    """One int64 of a row."""
    return load_i64(row + 8 * index)


@native
def number(row: Any, index: Any) -> Any:
    """A float64 kept in a cell."""
    return load_f64(row + 8 * index)


@native
def place(row: Any, index: Any, turn: Any, scratch: Any) -> Any:
    """Where the operand in cells `index` and following begins at a turn of a loop."""
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
    """True if a result that begins at `out` goes past the caches."""
    return cell(row, 5) == PAST and out & 63 == 0


@native
def put(p: Any, x: Any, streamed: Any) -> None:
    """Write 16 entries of a result."""
    if streamed:
        stream(p, x)
    else:
        store(p, x)


def unary(f: Any) -> Any:
    """Out = f(x)."""

    @native
    def run(row: Any, turn: Any, scratch: Any) -> None:
        rows, cols, o, so = cell(row, 1), cell(row, 2), place(row, 3, turn, scratch), cell(row, 4)
        x, sx, cx = place(row, 6, turn, scratch), cell(row, 7), cell(row, 8)
        for _ in range(rows):
            i, streamed = 0, past(row, o)
            while i + 16 <= cols:
                put(o + 4 * i, f(_part(x, cx, i)), streamed)
                i += 16
            if i < cols:
                mask = first(cols - i)
                store_first(o + 4 * i, f(_rest(x, cx, i, mask)), mask)
            o += so
            x += sx

    return run


def binary(f: Any) -> Any:
    """Out = f(x, y)."""

    @native
    def run(row: Any, turn: Any, scratch: Any) -> None:
        rows, cols, o, so = cell(row, 1), cell(row, 2), place(row, 3, turn, scratch), cell(row, 4)
        x, sx, cx = place(row, 6, turn, scratch), cell(row, 7), cell(row, 8)
        y, sy, cy = place(row, 9, turn, scratch), cell(row, 10), cell(row, 11)
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
    """out, a byte of 0 or 1 each, = f(x, y)."""

    @native
    def run(row: Any, turn: Any, scratch: Any) -> None:
        rows, cols, o, so = cell(row, 1), cell(row, 2), place(row, 3, turn, scratch), cell(row, 4)
        x, sx, cx = place(row, 6, turn, scratch), cell(row, 7), cell(row, 8)
        y, sy, cy = place(row, 9, turn, scratch), cell(row, 10), cell(row, 11)
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
    """Out = x where the byte is not 0, else y; the bytes come first, in cells 6 to 8."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), place(row, 3, turn, scratch), cell(row, 4)
    c, sc, cc = place(row, 6, turn, scratch), cell(row, 7), cell(row, 8)
    x, sx, cx = place(row, 9, turn, scratch), cell(row, 10), cell(row, 11)
    y, sy, cy = place(row, 12, turn, scratch), cell(row, 13), cell(row, 14)
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
    """Out = the number in cell 6."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), place(row, 3, turn, scratch), cell(row, 4)
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
    """Out = x + y of int64, in no loop."""
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
def widen(row: Any, turn: Any, scratch: Any) -> None:
    """Out = x of bfloat16."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), place(row, 3, turn, scratch), cell(row, 4)
    x, sx, cx = place(row, 6, turn, scratch), cell(row, 7), cell(row, 8)
    for _ in range(rows):
        i, streamed = 0, past(row, o)
        while i + 16 <= cols:
            put(o + 4 * i, load_bf16(x + 2 * i) if cx else splat(load1_bf16(x)), streamed)
            i += 16
        if i < cols:
            mask = first(cols - i)
            store_first(o + 4 * i, load_first_bf16(x + 2 * i, mask) if cx else splat(load1_bf16(x)), mask)
        o += so
        x += sx


@native
def narrow(row: Any, turn: Any, scratch: Any) -> None:
    """Out, of bfloat16, = x."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), place(row, 3, turn, scratch), cell(row, 4)
    x, sx, cx = place(row, 6, turn, scratch), cell(row, 7), cell(row, 8)
    for _ in range(rows):
        i = 0
        while i + 16 <= cols:
            store_bf16(o + 2 * i, _part(x, cx, i))
            i += 16
        if i < cols:
            mask = first(cols - i)
            store_first_bf16(o + 2 * i, _rest(x, cx, i, mask), mask)
        o += so
        x += sx
