"""Elementwise loops of the VM, and how an instruction describes its operands.

An elementwise instruction loops over `rows` times `cols` elements: words 1 and 2 are these counts. Three words per
operand follow, the result first: its address, the bytes from one row to the next, and the step along a row, 1 or 0
(one value for all columns). The result's columns are adjacent; a step of PAST asks for non-temporal stores. Inside a
LOOP, an instruction computes one row per iteration. Addresses below LOCAL are offsets into the scratch of the
thread that runs the code, so that several threads can run the same code.

Instructions on single numbers are packed: a run of them is one SCALARS instruction (word 1: their number), followed by
a line of 4 words for each: opcode, address of the result, of x and of y. They use scalar loads and stores, because a
masked vector store would stall the load that follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from graphwright.array.vm import narrow
from graphwright.array.vm import vector as vec
from graphwright.array.vm.code import BYTES, LOCAL, PAST, UNARY, Code
from graphwright.array.vm.math import cos_sin, exp, expm1, formulas, log, log1p, native, rsqrt, tanh

F = np.float32
LINE = 32
"""Bytes of a line of a SCALARS instruction."""
LOOPS: dict[int, Any] = {}
"""Opcode -> compiled loop, a function of those of `row` (address of the instruction), `turn`, `scratch` that it names.

It returns None, the number of further rows that it read, or -1 if an index is out of range.
"""


def loop(*codes: Code) -> Callable[[Any], Any]:
    """Return a decorator that compiles a function and registers it as the loop of the given opcodes."""

    def enter(function: Any) -> Any:
        compiled = native(function)
        LOOPS.update(dict.fromkeys(codes, compiled))
        return compiled

    return enter


@native
def cell(row: Any, index: Any) -> Any:
    """Return word `index` of an instruction."""
    return vec.load_i64(row + 8 * index)


@native
def number(row: Any, index: Any) -> Any:
    """Return word `index` of an instruction as a float64."""
    return vec.load_f64(row + 8 * index)


@native
def start(row: Any, index: Any, turn: Any, scratch: Any) -> Any:
    """Return the address, in iteration `turn` of a LOOP, of the operand whose description begins at word `index`."""
    address = cell(row, index)
    return (address + scratch if address < LOCAL else address) + turn * cell(row, index + 1)


@native
def _part(p: Any, step: Any, i: Any) -> Any:
    return vec.load(p + 4 * i) if step else vec.splat(vec.load_f32(p))


@native
def _rest(p: Any, step: Any, i: Any, mask: Any) -> Any:
    return vec.load_first(p + 4 * i, mask) if step else vec.splat(vec.load_f32(p))


@native
def past(row: Any, out: Any) -> Any:
    """Return whether the result at address `out` is written with non-temporal stores (aligned, and step PAST)."""
    return cell(row, 5) == PAST and out & 63 == 0


@native
def put(p: Any, x: Any, streamed: Any) -> None:
    """Write 16 entries of a result, with a non-temporal store if `streamed`."""
    if streamed:
        vec.stream(p, x)
    else:
        vec.store(p, x)


def unary(
    f: Any, part: Any = _part, rest: Any = _rest, write: Any = put, write_rest: Any = vec.store_first, size: int = 4
) -> Any:
    """Return a compiled loop out = f(x), where entries of out have `size` bytes.

    `part` and `write` read and write 16 entries, `rest` and `write_rest` the fewer entries at the end of a row.
    """

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
                mask = vec.first(cols - i)
                write_rest(o + size * i, f(rest(x, cx, i, mask)), mask)
            o += so
            x += sx

    return run


def binary(f: Any, write: Any = put, write_rest: Any = vec.store_first, size: int = 4) -> Any:
    """Return a compiled loop out = f(x, y), where entries of out have `size` bytes.

    `write` writes 16 entries, `write_rest` the fewer entries at the end of a row.
    """

    @native
    def run(row: Any, turn: Any, scratch: Any) -> None:
        rows, cols, o, so = cell(row, 1), cell(row, 2), start(row, 3, turn, scratch), cell(row, 4)
        x, sx, cx = start(row, 6, turn, scratch), cell(row, 7), cell(row, 8)
        y, sy, cy = start(row, 9, turn, scratch), cell(row, 10), cell(row, 11)
        for _ in range(rows):
            i, streamed = 0, past(row, o)
            while i + 16 <= cols:
                write(o + size * i, f(_part(x, cx, i), _part(y, cy, i)), streamed)
                i += 16
            if i < cols:
                mask = vec.first(cols - i)
                write_rest(o + size * i, f(_rest(x, cx, i, mask), _rest(y, cy, i, mask)), mask)
            o += so
            x += sx
            y += sy

    return run


@loop(Code.WHERE)
def where(row: Any, turn: Any, scratch: Any) -> None:
    """out = x where c is not 0, else y; words 6 to 8 of the instruction describe c, which has one byte per element."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), start(row, 3, turn, scratch), cell(row, 4)
    c, sc, cc = start(row, 6, turn, scratch), cell(row, 7), cell(row, 8)
    x, sx, cx = start(row, 9, turn, scratch), cell(row, 10), cell(row, 11)
    y, sy, cy = start(row, 12, turn, scratch), cell(row, 13), cell(row, 14)
    for _ in range(rows):
        for i in range(0, cols, 16):
            mask = vec.first(cols - i)
            if cc:
                picked = vec.select(vec.load_mask(c + i, mask), _rest(x, cx, i, mask), _rest(y, cy, i, mask))
            else:
                picked = _rest(x, cx, i, mask) if vec.load_u8(c) else _rest(y, cy, i, mask)
            vec.store_first(o + 4 * i, picked, mask)
        o += so
        c += sc
        x += sx
        y += sy


@loop(Code.FILL)
def fill(row: Any, turn: Any, scratch: Any) -> None:
    """Set all entries of out to the float64 in word 6 of the instruction."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), start(row, 3, turn, scratch), cell(row, 4)
    value = vec.splat(F(number(row, 6)))
    for _ in range(rows):
        i, streamed = 0, past(row, o)
        while i + 16 <= cols:
            put(o + 4 * i, value, streamed)
            i += 16
        if i < cols:
            vec.store_first(o + 4 * i, value, vec.first(cols - i))
        o += so


@loop(Code.PUT_I64)
def put_i64(row: Any) -> None:
    """Write the int64 in word 2 of the instruction to the address in word 1."""
    vec.store_i64(cell(row, 1), cell(row, 2))


@loop(Code.ADD_I64)
def add_i64(row: Any) -> None:
    """out = x + y, for int64; it must not be inside a LOOP."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4)
    x, sx, cx = cell(row, 6), cell(row, 7), 8 * cell(row, 8)
    y, sy, cy = cell(row, 9), cell(row, 10), 8 * cell(row, 11)
    for _ in range(rows):
        for i in range(cols):
            vec.store_i64(o + 8 * i, vec.load_i64(x + cx * i) + vec.load_i64(y + cy * i))
        o += so
        x += sx
        y += sy


_part_bf16 = native(lambda p, step, i: narrow.load_bf16(p + 2 * i) if step else vec.splat(narrow.load1_bf16(p)))
_rest_bf16 = native(
    lambda p, step, i, m: narrow.load_first_bf16(p + 2 * i, m) if step else vec.splat(narrow.load1_bf16(p))
)
_put_bf16 = native(lambda p, x, streamed: narrow.store_bf16(p, x))
_put_mask = native(lambda p, x, streamed: vec.store_mask(p, x, vec.first(16)))
_UNARY: dict[Code, Any] = {
    Code.COPY: lambda x: x, Code.NEG: lambda x: -x, Code.RECIPROCAL: lambda x: 1.0 / x,
    Code.FLOOR: lambda x: vec.floor(x), Code.LOG: lambda x: log(x), Code.RSQRT: lambda x: rsqrt(x),
    Code.ROUND: lambda x: narrow.rounded_bf16(x), Code.EXPM1: lambda x: expm1(x), Code.LOG1P: lambda x: log1p(x),
}  # fmt: skip
_BINARY: dict[Code, Any] = {
    Code.ADD: lambda x, y: x + y, Code.SUB: lambda x, y: x - y, Code.MUL: lambda x, y: x * y,
    Code.DIV: lambda x, y: x / y, Code.MINIMUM: lambda x, y: vec.minimum(x, y),
    Code.MAXIMUM: lambda x, y: vec.maximum(x, y), Code.SWIGLU: lambda x, y: formulas.silu(x) * y,
    Code.ADD_SILU: lambda x, y: formulas.silu(x + y),
}  # fmt: skip
_COMPARISONS: dict[Code, Any] = {
    Code.EQ: lambda x, y: x == y, Code.NE: lambda x, y: x != y, Code.LT: lambda x, y: x < y,
    Code.LE: lambda x, y: x <= y,
}  # fmt: skip
LOOPS |= {
    c: unary(native(_UNARY[c]) if c in _UNARY else getattr(formulas, c.name.lower()))
    for c in UNARY
    if c not in (Code.SIN, Code.COS)
}
LOOPS |= {code: binary(native(f)) for code, f in _BINARY.items()}
LOOPS |= {code: binary(native(f), _put_mask, vec.store_mask, 1) for code, f in _COMPARISONS.items()}  # bytes of 0 or 1
LOOPS[Code.WIDEN] = unary(native(lambda x: x), _part_bf16, _rest_bf16)
LOOPS[Code.NARROW] = unary(native(lambda x: x), write=_put_bf16, write_rest=narrow.store_first_bf16, size=2)


@loop(Code.SIN, Code.COS)
def angle(row: Any, turn: Any, scratch: Any) -> None:
    """out = sin x or cos x; beyond 10⁵ computed in float64, one by one."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), start(row, 3, turn, scratch), cell(row, 4)
    x, sx, cx, sine = start(row, 6, turn, scratch), cell(row, 7), cell(row, 8), cell(row, 0) == Code.SIN
    for _ in range(rows):
        for i in range(0, cols, 16):
            mask = vec.first(cols - i)
            given = _rest(x, cx, i, mask)
            if vec.largest(vec.absolute(given)) <= 1e5:
                cosines, sines = cos_sin(given)
                vec.store_first(o + 4 * i, sines if sine else cosines, mask)
            else:
                for k in range(i, min(cols, i + 16)):
                    one = vec.load_f32(x + 4 * k * cx)
                    if abs(one) <= 1e5:  # the bits must not depend on the other 15 numbers
                        cosines, sines = cos_sin(vec.splat(one))
                        vec.store_f32(o + 4 * k, vec.only(sines if sine else cosines))
                    else:
                        vec.store_f32(o + 4 * k, F(np.sin(np.float64(one)) if sine else np.cos(np.float64(one))))
        o += so
        x += sx


@loop(Code.SCALARS)
def scalars(row: Any) -> Any:
    """Run the operations packed in a SCALARS instruction; return how many rows of code they take (four fit a row)."""
    line = row + BYTES
    stop = line + LINE * cell(row, 1)
    while line < stop:
        op, out, x, y = cell(line, 0), cell(line, 1), vec.load_f32(cell(line, 2)), vec.load_f32(cell(line, 3))
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
            x = vec.only(tanh(vec.splat(x)))
        elif op == Code.SIGMOID:
            x = vec.only(formulas.sigmoid(vec.splat(x)))
        elif op == Code.EXP:
            x = vec.only(exp(vec.splat(x)))
        elif op == Code.LOG:
            x = vec.only(log(vec.splat(x)))
        elif op == Code.SQRT:
            x = vec.only(vec.sqrt(vec.splat(x)))
        vec.store_f32(out, x)
        line += LINE
    return (cell(row, 1) + 3) // 4
