"""Rows of code that move entries: copies between layouts, gathers and scatters of rows, rotary embeddings."""

from __future__ import annotations

from typing import Any

from graphwright.array.vm.elementwise import F, cell, number
from graphwright.array.vm.math import cos_sin, native
from graphwright.array.vm.vector import (
    first,
    load,
    load_first,
    load_i64,
    pick_first,
    splat,
    store,
    store_first,
)


@native
def _line(target: Any, source: Any, cols: Any) -> None:
    i = 0
    while i + 16 <= cols:
        store(target + 4 * i, load(source + 4 * i))
        i += 16
    if i < cols:
        mask = first(cols - i)
        store_first(target + 4 * i, load_first(source + 4 * i, mask), mask)


@native
def copy_axes(row: Any) -> None:
    """Copy between layouts: cells 1 to 4 sizes, 5 result, 6 to 8 strides (the last is 4), 9 x, 10 to 13 its strides."""
    cols, step = cell(row, 4), cell(row, 13)
    for a in range(cell(row, 1)):
        for b in range(cell(row, 2)):
            target = cell(row, 5) + a * cell(row, 6) + b * cell(row, 7)
            source = cell(row, 9) + a * cell(row, 10) + b * cell(row, 11)
            for _ in range(cell(row, 3)):
                if step == 4:
                    _line(target, source, cols)
                else:
                    for i in range(0, cols, 16):
                        mask = first(cols - i)
                        store_first(target + 4 * i, pick_first(source + i * step, step, mask), mask)
                target += cell(row, 8)
                source += cell(row, 12)


@native
def gather_rows(row: Any) -> Any:
    """out[i] = table[ids[i]]; cells 1 ids, 2 columns, 3 out, 4 bytes per row, 6 table, 7 bytes, 8 ids, 9 rows."""
    out, ids, cols = cell(row, 3), cell(row, 8), cell(row, 2)
    for i in range(cell(row, 1)):
        index = load_i64(ids + 8 * i)
        if not 0 <= index < cell(row, 9):
            return False
        _line(out + i * cell(row, 4), cell(row, 6) + index * cell(row, 7), cols)
    return True


@native
def add_rows(row: Any) -> Any:
    """Zeros, then out[ids[i]] += x[i] in order; cells 1 ids, 2 columns, 3 out, 4 bytes, 5 rows, 6 x, 7 bytes, 8 ids."""
    out, step, ids, cols = cell(row, 3), cell(row, 4), cell(row, 8), cell(row, 2)
    for r in range(cell(row, 5)):
        for i in range(0, cols, 16):
            store_first(out + r * step + 4 * i, splat(F(0.0)), first(cols - i))
    for k in range(cell(row, 1)):
        index = load_i64(ids + 8 * k)
        if not 0 <= index < cell(row, 5):
            return False
        target, source = out + index * step, cell(row, 6) + k * cell(row, 7)
        for i in range(0, cols, 16):
            mask = first(cols - i)
            store_first(target + 4 * i, load_first(target + 4 * i, mask) + load_first(source + 4 * i, mask), mask)
    return True


@native
def rope(row: Any) -> None:
    """Rotate pairs (a, b) -> (a·cos - b·sin, b·cos + a·sin), half an axis apart; entries after both halves are copied.

    Cells 1 batch, 2 positions, 3 heads, 4 size, 5 half, 6 x and 7 to 9 its bytes per batch element, position, head; 10
    result, packed as [batch, head, position, size]; 11 cos, 12 sin, 13 their bytes per batch element, 14 the result's.
    """
    positions, heads, size, half = cell(row, 2), cell(row, 3), cell(row, 4), cell(row, 5)
    for b in range(cell(row, 1)):
        for h in range(heads):
            out = cell(row, 10) + 4 * size * positions * (b * heads + h)
            x = cell(row, 6) + b * cell(row, 7) + h * cell(row, 9)
            cos, sin = cell(row, 11) + b * cell(row, 13), cell(row, 12) + b * cell(row, 13)
            for _ in range(positions):
                for i in range(0, half, 16):
                    mask = first(half - i)
                    one, other = load_first(x + 4 * i, mask), load_first(x + 4 * (half + i), mask)
                    c, s = load_first(cos + 4 * i, mask), load_first(sin + 4 * i, mask)
                    store_first(out + 4 * i, one * c - other * s, mask)
                    store_first(out + 4 * (half + i), other * c + one * s, mask)
                if 2 * half < size:
                    _line(out + 8 * half, x + 8 * half, size - 2 * half)
                out += 4 * size
                x += cell(row, 8)
                cos += 4 * half
                sin += 4 * half


@native
def rope_table(row: Any) -> None:
    """Tables of cos and sin of position·frequency, multiplied by a factor.

    Cells 1 positions, 2 frequencies, 3 cos, 4 sin, both packed as [position, frequency]; 5 positions (int64), 6
    frequencies, 7 the factor.
    """
    half, cos, sin, scale = cell(row, 2), cell(row, 3), cell(row, 4), splat(F(number(row, 7)))
    for t in range(cell(row, 1)):
        position = splat(F(load_i64(cell(row, 5) + 8 * t)))
        for i in range(0, half, 16):
            mask = first(half - i)
            c, s = cos_sin(position * load_first(cell(row, 6) + 4 * i, mask))
            store_first(cos + 4 * i, c * scale, mask)
            store_first(sin + 4 * i, s * scale, mask)
        cos += 4 * half
        sin += 4 * half
