"""Split long instructions into tickets for several threads, pack runs of scalar instructions, and estimate run times.

A ticket is a share of an instruction's elements that one thread computes. A SHARED instruction (word 1: number of
tickets, word 2: rows of code of each, word 3: estimated nanoseconds of each) precedes its tickets. With one thread it
does nothing, and the tickets run one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import prod
from typing import NamedTuple

import numpy as np

from graphwright.array.vm.code import CELLS, FEW, GROUP, LOCAL, STORED, UNARY, UPDATES, WORKERS, Code
from graphwright.array.vm.encode import operands as vm

SPLIT_FROM = 100_000
"""Estimated nanoseconds from which on an instruction is split: waking a helper thread takes about 5 us or more."""
_TICKET = 25_000  # nanoseconds; a short ticket limits the wait for a thread that was interrupted
_MOST = 32
_SIDE = 96  # the least rows or columns of a product's ticket
_TABLES: dict[int, int] = {
    **{Code.ATTEND: 1, Code.ATTEND_BACKWARD: 2, Code.ATTEND_CACHED: 1},
    **{Code.BLOCK_PACK: 0, Code.BLOCK_ATTEND: 3, Code.BLOCK_ATTEND_BACKWARD: 3},
    **{Code.BLOCK_MASS: 3, Code.BLOCK_GATE_GRADIENT: 3, Code.BLOCK_ENTROPY: 3},
}
"""Opcode -> number of rows of operands that follow the instruction."""


class _Walk(NamedTuple):
    """The address words of an instruction, and how far addresses advance per row and per column when it is split.

    `rows` holds pairs (index of an address word, index of the word with its bytes per row), `fixed` pairs (index of an
    address word, bytes per row), `columns` pairs (index of an address word, bytes per column).
    """

    rows: tuple[tuple[int, int], ...]
    fixed: tuple[tuple[int, int], ...] = ()
    columns: tuple[tuple[int, int], ...] = ()
    ns: float = 0.2  # per element
    counts: tuple[int, ...] = (1, 2)  # words whose product is the number of elements


_ONE, _TWO = ((3, 4), (6, 7)), ((3, 4), (6, 7), (9, 10))
_SLOW = frozenset({Code.EXP, Code.LOG, Code.TANH, Code.SIGMOID, Code.ERF, Code.SILU, Code.GELU, Code.GELU_TANH,
                   Code.EXPM1, Code.LOG1P, Code.SIN, Code.COS})  # fmt: skip
_WALKS: dict[int, _Walk] = {
    **{c: _Walk(_ONE, (), ((3, 4), (6, 4)), 0.4 if c in _SLOW else 0.1) for c in UNARY},
    **{c: _Walk(_TWO, (), ((3, 4), (6, 4), (9, 4)), 0.1) for c in range(Code.ADD, Code.ADD_SILU + 1)},
    **{c: _Walk(_TWO, (), ((3, 1), (6, 4), (9, 4)), 0.1) for c in (Code.EQ, Code.LT, Code.LE, Code.NE)},
    Code.WIDEN: _Walk(_ONE, (), ((3, 4), (6, 2)), 0.1),
    Code.NARROW: _Walk(_ONE, (), ((3, 2), (6, 4)), 0.1),
    Code.WHERE: _Walk((*_TWO, (12, 13)), (), ((3, 4), (6, 1), (9, 4), (12, 4)), 0.1),
    Code.FILL: _Walk(((3, 4),), (), ((3, 4),), 0.05),
    Code.SUM_ROWS: _Walk(_ONE, ns=0.1),
    Code.AMAX_ROWS: _Walk(_ONE, ns=0.1),
    Code.SUM_COLUMNS: _Walk((), (), ((3, 4), (6, 4)), 0.1),
    Code.SOFTMAX: _Walk(_ONE, ns=0.5),
    Code.RMS_NORM: _Walk(_TWO, ns=0.2),
    Code.LAYER_NORM: _Walk(_ONE, ns=0.3),
    Code.NOISE: _Walk((), ns=1.0),
    Code.TOPK: _Walk(((3, 4), (6, 7), (8, 5)), ns=0.5),
    Code.COPY_AXES: _Walk(((5, 6), (9, 10)), ns=0.15, counts=(1, 2, 3, 4)),
    Code.GATHER_ROWS: _Walk(((3, 4),), ((8, 8),), ns=0.15),
    Code.ADD_ROWS: _Walk((), ns=0.2),
    Code.ROPE: _Walk(((6, 7), (10, 14), (11, 13), (12, 13)), ns=0.3, counts=(1, 2, 3, 4)),
    Code.CROSS_ENTROPY: _Walk(((6, 7),), ((3, 4), (8, 8), (9, 4)), ns=0.5),
    Code.CROSS_ENTROPY_BACKWARD: _Walk(((3, 4), (6, 7), (11, 12)), ((8, 8), (9, 4)), ns=0.5),
}
_STEPS = {3: 5, 6: 8, 9: 11, 12: 14}  # index of an address word -> index of the word with its step along a row


def operand_cells(row: vm.Row) -> tuple[int, ...]:
    """Return the indices of an instruction's address words; the word after each is its stride in a LOOP."""
    walk = _WALKS[row[0]]
    return tuple(cell for cell, _ in walk.columns or walk.rows)


_UNARY = (Code.COPY, Code.NEG, Code.EXP, Code.LOG, Code.SQRT, Code.TANH, Code.SIGMOID)
_BINARY = (Code.ADD, Code.SUB, Code.MUL, Code.DIV)


def is_scalar(row: vm.Row) -> bool:
    """Return whether an instruction works on single numbers and can be packed."""
    return row[1] == row[2] == 1 and (row[0] in _UNARY or row[0] in _BINARY)


def pack_runs(units: Iterable[tuple[int, list[vm.Row]]], scratch: int) -> list[tuple[int, list[vm.Row]]]:
    """Merge each run of scalar instructions among `units`, pairs (op index, rows of code), into one packed unit.

    It gets the first op index. `scratch`: address of the scratch, which is added to offsets into it.
    """
    made: list[tuple[int, list[vm.Row]]] = []
    for single, run in groupby(units, lambda unit: len(unit[1]) == 1 and is_scalar(unit[1][0])):
        parts = list(run)
        if single and len(parts) > 1:
            parts = [(parts[0][0], _packed([rows[0] for _, rows in parts], scratch))]
        made += parts
    return made


def _packed(rows: Sequence[vm.Row], scratch: int) -> list[vm.Row]:
    """Pack scalar instructions into one SCALARS instruction; add the address `scratch` to offsets into the scratch."""
    table: list[int] = []
    for row in rows:
        operands = (row[3], row[6], row[9] if row[0] in _BINARY else row[6])
        table += [row[0], *(a + scratch if a < LOCAL else a for a in operands)]
    return [vm.row_of(Code.SCALARS, len(rows)), *vm.table_of(table)]


class Cut:
    """The code of an op, split for threads. A unit is an instruction with its loop body or table.

    Attributes:
        parts: units, each split into tickets if it takes long.
        ns: estimated nanoseconds on one core.
        code: int64 [rows, CELLS], all parts.
        scalar: whether a part is a scalar instruction that can be packed.
        shares: whether a part is split for threads.
    """

    __slots__ = ("code", "ns", "parts", "scalar", "shares")

    def __init__(self, parts: Sequence[list[vm.Row]], ns: float) -> None:
        self.parts, self.ns = parts, ns
        self.code = np.array([row for part in parts for row in part], np.int64).reshape(-1, CELLS)
        self.scalar = any(len(part) == 1 and is_scalar(part[0]) for part in parts)
        self.shares = any(part[0][0] == Code.SHARED for part in parts)


def cut(rows: Sequence[vm.Row]) -> Cut:
    """Split the long instructions of an op into tickets, and estimate the run time of the op."""
    timed = [(unit, _nanoseconds(unit)) for unit in units(rows)]
    return Cut([shared(unit, ns) for unit, ns in timed], sum([ns for _, ns in timed]))


def units(rows: Sequence[vm.Row]) -> Iterator[list[vm.Row]]:
    """Group each instruction with the body (of a loop) or the table (of operands or parameters) that follows it."""
    i = 0
    while i < len(rows):
        row = rows[i]
        more = _TABLES.get(row[0], 0)
        if row[0] in (Code.LOOP, Code.EXPERT_RUNS):
            more = row[1]
        elif row[0] in UPDATES:
            more = (row[1] + 1) // 2
        yield list(rows[i : i + 1 + more])
        i += 1 + more


def _nanoseconds(unit: list[vm.Row]) -> float:
    row = unit[0]
    if row[0] == Code.LOOP:
        return row[2] * sum(_nanoseconds([inner]) for inner in unit[1:])
    if row[0] in UPDATES:
        table = [cell for line in unit[1:] for cell in line]
        return sum(table[::8]) * 0.5
    if row[0] in STORED:
        each = max(STORED[row[0]] / 35, row[9] / 40) if row[9] <= FEW else 0.1 + row[9] / 100
        return 20 + row[2] * row[3] * each
    if row[0] == Code.ATTEND_CACHED:  # as if the cache were full
        return 20 + row[2] * row[9] * unit[1][6] * (row[10] + row[11]) / 20
    if row[0] == Code.BLOCK_PACK:
        return 20 + row[2] * row[5] * 8
    if row[0] in (
        Code.BLOCK_ATTEND,
        Code.BLOCK_ENTROPY,
        Code.BLOCK_ATTEND_BACKWARD,
    ):  # as if half of all pairs were connected
        queries = 5 * row[2] * row[5] * row[3] // row[4] if row[0] == Code.BLOCK_ATTEND_BACKWARD else 64 * row[2]
        return 20 + queries * row[6] * (row[7] + row[8]) / 120
    if row[0] in (Code.BLOCK_MASS, Code.BLOCK_GATE_GRADIENT):  # the latter for blocks of 64
        pairs = row[5] * row[6] // 128 if row[0] == Code.BLOCK_MASS else 4096
        return 20 + row[2] * pairs * row[3] * (row[7] + row[8]) / 60
    if row[0] in _TABLES:  # multiplications of a unit, half of them masked if causal
        each = row[5] * row[6] * (row[7] + row[8]) * (1 if row[0] == Code.ATTEND else 3 * row[3] // row[4])
        return row[2] * each / (120 if row[11] else 60)
    if row[0] == Code.PRODUCT:
        return 20 + row[9] * row[10] * row[11] / 60
    if row[0] in WORKERS:
        return row[3]
    if row[0] == Code.DISPATCH:
        return 20 + row[1] * row[2] * 5
    if row[0] == Code.SAMPLE_TOKEN:  # as if a random draw is needed
        return 20 + row[1] * row[2] * 3
    walk = _WALKS.get(row[0])
    return 5 + (prod(row[c] for c in walk.counts) * walk.ns if walk is not None else 0)


def shared(unit: list[vm.Row], taken: float) -> list[vm.Row]:
    """Split a unit into tickets if its run time, `taken` nanoseconds, is long; else return it unchanged."""
    parts = _parts(unit, min(_MOST, int(taken / _TICKET))) if taken > SPLIT_FROM else [unit]
    if len(parts) < 2:
        return unit
    head = vm.row_of(Code.SHARED, len(parts), len(unit), int(taken / len(parts)))
    return [head, *(row for part in parts for row in part)]


def _parts(unit: list[vm.Row], count: int) -> list[list[vm.Row]]:
    row = unit[0]
    if row[0] == Code.LOOP:
        return [_turns(unit, begin, size) for begin, size in _spans(row[2], count, 1)]
    if row[0] in _TABLES:
        spans = _spans(row[2], count, 1)
        return [[_moved(row, 2, n, [(1, begin)]), *unit[1:]] for begin, n in spans]
    if row[0] == Code.PRODUCT:
        return [[part] for part in _product(row, count)]
    if row[0] in STORED:
        return _stored(row, count)
    if row[0] in WORKERS:
        return [[_moved(row, 2, w, [(1, w + 1)])] for w in range(row[4])] if row[4] > 1 else [unit]
    walk = _WALKS.get(row[0])
    if walk is not None and walk.rows and row[1] >= min(count, 8):
        steps = [(a, row[stride]) for a, stride in walk.rows] + list(walk.fixed)
        return _split(row, 1, steps, count, 1)
    if walk is not None and walk.columns and (row[1] == 1 or not walk.rows):
        return _split(row, 2, [(a, s * bool(row[_STEPS[a]])) for a, s in walk.columns], count, 64 if walk.rows else 16)
    return [unit]


def _turns(unit: list[vm.Row], begin: int, size: int) -> list[vm.Row]:
    """Return the code of `size` iterations of a LOOP unit, from iteration `begin` on."""
    head, *body = unit
    moved = [_moved(row, 0, row[0], [(a, begin * row[a + 1]) for a in operand_cells(row)]) for row in body]
    return [_moved(head, 2, size, []), *moved]


def _spans(total: int, count: int, grain: int) -> list[tuple[int, int]]:
    """Split `total` into about `count` equal spans (begin, size); all sizes but the last are multiples of `grain`."""
    size = -(-total // (count * grain)) * grain
    return [(begin, min(size, total - begin)) for begin in range(0, total, size)]


def _split(row: vm.Row, counted: int, steps: Sequence[tuple[int, int]], count: int, grain: int) -> list[list[vm.Row]]:
    """Split the loop that word `counted` counts into about `count` parts, of a multiple of `grain` iterations each.

    `steps` are pairs (index of an address word, bytes per iteration).
    """
    spans = _spans(row[counted], count, grain)
    return [[_moved(row, counted, size, [(a, begin * step) for a, step in steps])] for begin, size in spans]


def _moved(row: vm.Row, counted: int, size: int, moves: Sequence[tuple[int, int]]) -> vm.Row:
    part = row.copy()
    part[counted] = size
    for address, by in moves:
        part[address] += by
    return part


def _product(row: vm.Row, count: int) -> list[vm.Row]:
    """Split a product into at most `count` rectangles of the result: rows in tiles of 12, columns in panels of 32.

    No side is so short that A or B would be read too often.
    """
    m, n = row[9], row[10]
    down = max(1, min(count, m // _SIDE))
    across = max(1, min(count // down, n // _SIDE)) if down < 4 else 1
    parts = []
    for top, height in _spans(m, down, 12):
        moves = [(1, top * row[2]), (7, top * row[8])] + ([(12, top * row[13])] if row[12] else [])
        line = _moved(row, 9, height, moves)
        for left, width in _spans(n, across, 32):
            moves = [(4, left * row[6]), (7, 4 * left)] + ([(12, 4 * left)] if row[12] else [])
            parts.append(_moved(line, 10, width, moves))
    return parts


def _stored(row: vm.Row, count: int) -> list[list[vm.Row]]:
    """Split a product with stored weights into at most `count` parts: spans of weight rows, in panels of 32 rows."""
    steps = [(1, STORED[row[0]] * row[3]), (7, 4)]
    steps += ([(4, 4)] if row[4] else []) + ([(10, -(-row[3] // GROUP) * 4)] if row[10] else [])
    return _split(row, 2, steps, count, 32)
