"""Ops on single numbers: a run of them is one row of code, SCALARS (cell 1 how many), and a line of 4 cells for each.

A line: opcode, address of the result, of x and of y. A number is read and written as a number: a store of some lanes of
a vector would hold up the load that follows it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from graphwright.array.vm.code import BYTES, LOCAL, Code
from graphwright.array.vm.elementwise import cell
from graphwright.array.vm.encode.operands import Row, row_of, table_of
from graphwright.array.vm.math import exp, log, native, sigmoid, tanh
from graphwright.array.vm.vector import load_f32, only, splat, sqrt, store_f32

LINE = 32
"""Bytes of a line."""
_UNARY = (Code.COPY, Code.NEG, Code.EXP, Code.LOG, Code.SQRT, Code.TANH, Code.SIGMOID)
_BINARY = (Code.ADD, Code.SUB, Code.MUL, Code.DIV)


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


def is_scalar(row: Row) -> bool:
    """True for a row that a run may hold."""
    return row[1] == row[2] == 1 and (row[0] in _UNARY or row[0] in _BINARY)


def packed(rows: Iterable[Row], scratch: int) -> list[Row]:
    """Rows of single numbers as one run; `scratch` is where addresses below LOCAL count from."""
    table: list[int] = []
    for row in rows:
        places = [a + scratch if a < LOCAL else a for a in (row[3], row[6], row[9] if row[0] in _BINARY else row[6])]
        table += [row[0], *places]
    head = row_of(Code.SCALARS, len(table) // 4)
    return [head, *table_of(table)]


def pack_runs(units: Iterable[tuple[int, list[Row]]], scratch: int) -> list[tuple[int, list[Row]]]:
    """Numbered rows that belong together; stretches of single numbers become one, under the number of their first."""
    made: list[tuple[int, list[Row]]] = []
    for single, stretch in groupby(units, lambda unit: len(unit[1]) == 1 and is_scalar(unit[1][0])):
        parts = list(stretch)
        if single and len(parts) > 1:
            parts = [(parts[0][0], packed((rows[0] for _, rows in parts), scratch))]
        made += parts
    return made
