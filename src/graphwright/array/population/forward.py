"""All genomes on all cases: the rows of a table, 16 cases at a time. Importing this module loads numba.

Memory: inputs and the bias are shared rows of cases; a genome's values live in one buffer per call, as many steps deep
as the longest delay asks for. Cases are padded to whole vectors.
"""

from __future__ import annotations

import numpy as np

from graphwright.array.population.activations import activate
from graphwright.array.population.genes import compiled, native
from graphwright.array.population.table import Table
from graphwright.array.vm import vector as v
from graphwright.array.vm.narrow import load_i32

LANES = 16
LINE = 64
"""Bytes of a cache line, and of a vector."""


@native
def _slot(step: int, ring: int) -> int:
    """Where a step lies in a ring. Most rings hold one step, and a division takes as long as a row."""
    return step % ring if ring > 1 else 0


@native
def _genome(
    rows: int, count: int, links: int, ends: int, outputs: int, weight: int, x: int, x_ring: int, inputs: int,
    begin: int, steps: int, padded: int, values: int, ring: int, most: int, y: int,
) -> None:  # fmt: skip
    """Some steps of one genome; for the arguments see `advance`."""
    row_bytes = 4 * padded
    step_bytes, seen_bytes = most * row_bytes, (inputs + 1) * row_bytes
    for t in range(begin, begin + steps):
        now, shown = values + _slot(t, ring) * step_bytes, x + _slot(t, x_ring) * seen_bytes
        for r in range(count):
            row = rows + 12 * r
            kind, low, high = load_i32(row), load_i32(row + 4), load_i32(row + 8)
            for n in range(0, row_bytes, LINE):
                total = v.splat(np.float32(0.0))
                for i in range(low, high):
                    link = links + 12 * i
                    src, delay = load_i32(link), load_i32(link + 4)
                    base = now - seen_bytes if src > inputs else shown  # rows stand behind inputs and bias
                    known = True
                    if delay:
                        before = t - delay
                        known = src > inputs or before >= 0
                        if src > inputs:
                            base = values + _slot(before + ring, ring) * step_bytes - seen_bytes
                        elif known:
                            base = x + _slot(before, x_ring) * seen_bytes
                    part = v.splat(np.float32(0.0))
                    if known:
                        one = v.splat(v.load_f32(weight + 4 * load_i32(link + 8)))
                        part = v.mul(v.load(base + src * row_bytes + n), one)
                    total = part if i == low else v.add(total, part)
                v.store(now + r * row_bytes + n, activate(kind, total))
        for o in range(outputs):
            source = now + load_i32(ends + 4 * o) * row_bytes
            for n in range(0, row_bytes, LINE):
                v.store(y + n, v.load(source + n))
            y += row_bytes


@compiled
def answer(
    table: Table, weight: np.ndarray, x: np.ndarray, values: np.ndarray, y: np.ndarray, low: int, high: int
) -> None:
    """Genomes low to high on all cases, from the first step on.

    Args:
        x: float32 [tiles, steps, inputs + 1, padded].
        values: float32 with room for [ring, most, padded] and a line; genomes use it in turn.
        y: float32 [tiles, G, steps, outputs, padded].
    """
    tiles, steps, seen, padded = x.shape
    rows, links, ends = table.rows.ctypes.data, table.links.ctypes.data, table.outputs.ctypes.data
    outputs = y.shape[3]
    memory = (values.ctypes.data + LINE - 1) // LINE * LINE
    size = 4 * table.ring * table.most * padded
    for k in range(tiles):
        for g in range(low, high):
            if table.ring > 1:  # delayed links read 0 before the first step
                for at in range(memory, memory + size, LINE):
                    v.store(at, v.splat(np.float32(0.0)))
            _genome(
                rows + 12 * table.row_off[g], table.row_off[g + 1] - table.row_off[g], links, ends + 4 * g * outputs,
                outputs, weight.ctypes.data, x.ctypes.data + k * x.strides[0], steps, seen - 1, 0, steps, padded,
                memory, table.ring, table.most, y.ctypes.data + k * y.strides[0] + g * y.strides[1],
            )  # fmt: skip


@compiled
def advance(
    table: Table, weight: np.ndarray, x: np.ndarray, values: np.ndarray, y: np.ndarray, step: int, low: int, high: int
) -> None:
    """One step of genomes low to high, each in cases of its own.

    Args:
        x: float32 [G, ring, inputs + 1, padded]; a step lies at its number modulo ring.
        values: float32 [G, ring, most, padded], zeros before the first step.
        y: float32 [G, outputs, padded].
        step: number of the step.
    """
    _, ring, seen, padded = x.shape
    rows, links, ends = table.rows.ctypes.data, table.links.ctypes.data, table.outputs.ctypes.data
    outputs = y.shape[1]
    for g in range(low, high):
        _genome(
            rows + 12 * table.row_off[g], table.row_off[g + 1] - table.row_off[g], links, ends + 4 * g * outputs,
            outputs, weight.ctypes.data, x.ctypes.data + g * x.strides[0], ring, seen - 1, step, 1, padded,
            values.ctypes.data + g * values.strides[0], ring, table.most, y.ctypes.data + g * y.strides[0],
        )  # fmt: skip
