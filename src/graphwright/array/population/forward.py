"""Run all genomes on all cases: the rows of a table, 16 cases at a time. Importing this module loads numba.

Memory: inputs and the bias are rows of cases that all genomes share; a genome's values are stored in one buffer per
call, with as many steps as the longest delay needs. Cases are padded to whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from graphwright.array.population.genes import compiled, native
from graphwright.array.population.names import ACTIVATIONS
from graphwright.array.population.table import Table
from graphwright.array.vm import vector as vec
from graphwright.array.vm.math import formulas


def _by_kind(functions: list[Any]) -> Any:
    """Dispatch on an activation's code, the index of its function."""

    def either(code: int, function: Any, others: Any) -> Callable[..., Any]:
        @native
        def run(kind: Any, x: Any, y: Any) -> Any:
            return function(x, y) if kind == code else others(kind, x, y)

        return run

    chosen: Any = native(lambda kind, x, y: x)
    for code in reversed(range(len(functions))):
        chosen = either(code, functions[code], chosen)
    return chosen


def _of_two(function: Any) -> Any:
    """A function of (x, y) that ignores y."""
    return native(lambda x, y: function(x))


_values = _by_kind([_of_two(getattr(formulas, name)) for name in ACTIVATIONS])
slope: Any = _by_kind([getattr(formulas, f"{name}_slope") for name in ACTIVATIONS])
"""slope(kind, x, y): dy/dx at a weighted sum x with activation y."""


@native
def activate(kind: Any, x: Any) -> Any:
    """The activation of a weighted sum."""
    return _values(kind, x, x)


LANES = 16
LINE = 64
"""Bytes of a cache line, and of a vector."""


@native
def _slot(step: int, ring: int) -> int:
    """Index of a step in a ring. Most rings hold one step, and a division takes as long as a row."""
    return step % ring if ring > 1 else 0


@native
def _genome(
    rows: int, count: int, links: int, ends: int, outputs: int, weight: int, x: int, x_ring: int, inputs: int,
    begin: int, steps: int, padded: int, values: int, ring: int, most: int, y: int,
) -> None:  # fmt: skip
    """Run some steps of one genome; for the arguments see `advance`."""
    row_bytes = 4 * padded
    step_bytes, seen_bytes = most * row_bytes, (inputs + 1) * row_bytes
    for t in range(begin, begin + steps):
        now, shown = values + _slot(t, ring) * step_bytes, x + _slot(t, x_ring) * seen_bytes
        for r in range(count):
            row = rows + 12 * r
            kind, low, high = vec.load_i32(row), vec.load_i32(row + 4), vec.load_i32(row + 8)
            for n in range(0, row_bytes, LINE):
                total = vec.splat(np.float32(0.0))
                for i in range(low, high):
                    link = links + 12 * i
                    src, delay = vec.load_i32(link), vec.load_i32(link + 4)
                    base = now - seen_bytes if src > inputs else shown  # rows follow inputs and bias
                    known = True
                    if delay:
                        before = t - delay
                        known = src > inputs or before >= 0
                        if src > inputs:
                            base = values + _slot(before + ring, ring) * step_bytes - seen_bytes
                        elif known:
                            base = x + _slot(before, x_ring) * seen_bytes
                    part = vec.splat(np.float32(0.0))
                    if known:
                        one = vec.splat(vec.load_f32(weight + 4 * vec.load_i32(link + 8)))
                        part = vec.load(base + src * row_bytes + n) * one
                    total = part if i == low else total + part
                vec.store(now + r * row_bytes + n, activate(kind, total))
        for o in range(outputs):
            source = now + vec.load_i32(ends + 4 * o) * row_bytes
            for n in range(0, row_bytes, LINE):
                vec.store(y + n, vec.load(source + n))
            y += row_bytes


@compiled
def answer(
    table: Table, weight: np.ndarray, x: np.ndarray, values: np.ndarray, y: np.ndarray, low: int, high: int
) -> None:
    """Run genomes low to high on all cases, from the first step on.

    Args:
        x: float32 [tiles, steps, inputs + 1, padded].
        values: float32 scratch for [ring, most, padded] and a line; genomes use it in turn.
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
                    vec.store(at, vec.splat(np.float32(0.0)))
            _genome(
                rows + 12 * table.row_off[g], table.row_off[g + 1] - table.row_off[g], links, ends + 4 * g * outputs,
                outputs, weight.ctypes.data, x.ctypes.data + k * x.strides[0], steps, seen - 1, 0, steps, padded,
                memory, table.ring, table.most, y.ctypes.data + k * y.strides[0] + g * y.strides[1],
            )  # fmt: skip


@compiled
def advance(
    table: Table, weight: np.ndarray, x: np.ndarray, values: np.ndarray, y: np.ndarray, step: int, low: int, high: int
) -> None:
    """Run one step of genomes low to high, each in its own cases.

    Args:
        x: float32 [G, ring, inputs + 1, padded]; a step is stored at its number modulo ring.
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
