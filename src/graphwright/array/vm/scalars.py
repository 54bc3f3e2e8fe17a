"""Ops on single numbers: a run of them is one row of code, SCALARS (cell 1 how many), and a line of 4 cells for each.

A line: opcode, address of the result, of x and of y. A number is read and written as a number: a store of some lanes of
a vector would hold up the load that follows it.
"""

from __future__ import annotations

from typing import Any

from graphwright.array.vm.code import BYTES, Code
from graphwright.array.vm.elementwise import cell
from graphwright.array.vm.math import exp, log, native, sigmoid, tanh
from graphwright.array.vm.vector import load_f32, only, splat, sqrt, store_f32

LINE = 32
"""Bytes of a line."""


@native
def run(row: Any) -> None:
    """All lines of a run."""
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
            x = only(sigmoid(splat(x)))
        elif op == Code.EXP:
            x = only(exp(splat(x)))
        elif op == Code.LOG:
            x = only(log(splat(x)))
        elif op == Code.SQRT:
            x = only(sqrt(splat(x)))
        store_f32(out, x)
        line += LINE
