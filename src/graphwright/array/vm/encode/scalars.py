"""Runs of scalar instructions packed into one row."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from graphwright.array.vm.code import LOCAL, Code
from graphwright.array.vm.encode.operands import Row, row_of, table_of

_UNARY = (Code.COPY, Code.NEG, Code.EXP, Code.LOG, Code.SQRT, Code.TANH, Code.SIGMOID)
_BINARY = (Code.ADD, Code.SUB, Code.MUL, Code.DIV)


def is_scalar(row: Row) -> bool:
    """True for a scalar instruction that can be packed."""
    return row[1] == row[2] == 1 and (row[0] in _UNARY or row[0] in _BINARY)


def packed(rows: Iterable[Row], scratch: int) -> list[Row]:
    """Pack scalar rows into one; `scratch` is the base of addresses below LOCAL."""
    table: list[int] = []
    for row in rows:
        addresses = [a + scratch if a < LOCAL else a for a in (row[3], row[6], row[9] if row[0] in _BINARY else row[6])]
        table += [row[0], *addresses]
    head = row_of(Code.SCALARS, len(table) // 4)
    return [head, *table_of(table)]


def pack_runs(units: Iterable[tuple[int, list[Row]]], scratch: int) -> list[tuple[int, list[Row]]]:
    """Pack consecutive scalar units into one, under the number of the first."""
    made: list[tuple[int, list[Row]]] = []
    for single, run in groupby(units, lambda unit: len(unit[1]) == 1 and is_scalar(unit[1][0])):
        parts = list(run)
        if single and len(parts) > 1:
            parts = [(parts[0][0], packed((rows[0] for _, rows in parts), scratch))]
        made += parts
    return made
