"""Products of groups of rows: each group of rows with a matrix of its own. The offsets of groups stay on the device.

A program finds its group in the offsets, so the grid has as many programs as the groups can need at most.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from graphwright.array.backend import Attrs
from graphwright.array.cpu.kernel import Tensors
from graphwright.array.triton.block_attention import product
from graphwright.array.triton.kernel import Launch, compiled, kernel, one_float
from graphwright.array.triton.rows import all_aligned, along_two, multiple, narrow

ROWS, COLUMNS, INNER = 64, 64, 32
"""Tile of a program, and how many terms of its sums it reads at once."""


@triton.jit
def find_group(offsets, tile, groups, rows, ROWS: tl.constexpr):
    """Return group, first row and end of the rows of a tile; group `groups` has the rows after the last group.

    Offsets are held within 0 and `rows`, so that invalid ones do not lead out of the arrays.
    """
    rows = rows.to(tl.int64)
    found, first, end, before = groups, rows, rows, rows * 0
    for g in range(0, groups + 1):
        start = tl.load(offsets + g, mask=g <= groups, other=0).to(tl.int64)
        stop = tl.load(offsets + g + 1, mask=g < groups, other=0).to(tl.int64)
        stop = tl.where(g < groups, stop, rows)
        start = tl.minimum(tl.maximum(start, 0), rows)
        stop = tl.minimum(tl.maximum(stop, start), rows)
        tiles = tl.cdiv(stop - start, ROWS)
        mine = (tile >= before) & (tile < before + tiles)
        found = tl.where(mine, g, found)
        first = tl.where(mine, start + (tile - before) * ROWS, first)
        end = tl.where(mine, stop, end)
        before += tiles
    return found, first, end


@compiled
def multiply_groups(
    x, w, offsets, out, rows: tl.int64, groups: tl.int32, width: tl.int32, columns: tl.int32,
    tiles: tl.int32, x_row: tl.int64, w_group: tl.int64, w_row: tl.int64, w_column: tl.int64,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, ALIGNED: tl.constexpr, ALONG: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Compute rows of group g of x [rows, width] · w[g] [width, columns]; rows without a group give 0.

    ALONG: the columns of w are contiguous, else its rows.
    """
    width, columns, x_row = multiple(width, ALIGNED), multiple(columns, ALIGNED), multiple(x_row, ALIGNED)
    if ALONG:
        w_column, w_row = 1, multiple(w_row, ALIGNED)
    else:
        w_row, w_column = 1, multiple(w_column, ALIGNED)
    tile, part = along_two(tiles)
    group, first, stop = find_group(offsets, tile, groups, rows, ROWS)
    row = first + tl.arange(0, ROWS)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    present, there = row < stop, column < columns
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    x_at = x + row[:, None] * x_row
    w_at = w + group.to(tl.int64) * multiple(w_group, ALIGNED) + column.to(tl.int64)[None, :] * w_column
    if group < groups:
        for at in range(0, width, INNER):
            term = at + tl.arange(0, INNER)
            a = tl.load(x_at + term[None, :], mask=present[:, None] & (term < width)[None, :], other=0.0)
            b = tl.load(
                w_at + term.to(tl.int64)[:, None] * w_row, mask=(term < width)[:, None] & there[None, :], other=0.0
            )
            total += product(a, b, WIDE)
    tl.store(out + row[:, None] * columns + column[None, :], narrow(total, out), mask=present[:, None] & there[None, :])


@compiled
def outer_groups(
    x, y, offsets, out, rows: tl.int64, groups: tl.int32, width: tl.int32, columns: tl.int32, tiles: tl.int32,
    x_row: tl.int64, y_row: tl.int64,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute x[rows of g]ᵀ · y[rows of g] of each group, [groups, width, columns]; a program per tile of a group."""
    width, columns = multiple(width, ALIGNED), multiple(columns, ALIGNED)
    x_row, y_row = multiple(x_row, ALIGNED), multiple(y_row, ALIGNED)
    program, part = along_two(groups * tiles)
    group, tile = program // tiles, program % tiles
    start = tl.load(offsets + group, mask=group < groups, other=0)
    stop = tl.load(offsets + group + 1, mask=group < groups, other=0)
    start = tl.minimum(tl.maximum(start, 0), rows)
    stop = tl.minimum(tl.maximum(stop, start), rows)
    own = tile * ROWS + tl.arange(0, ROWS)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    inside, there = own < width, column < columns
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(start, stop, INNER):
        row = at + tl.arange(0, INNER)
        present = (row < stop)[:, None]
        a = tl.load(x + row[:, None] * x_row + own[None, :], mask=present & inside[None, :], other=0.0)
        b = tl.load(y + row[:, None] * y_row + column[None, :], mask=present & there[None, :], other=0.0)
        total += product(tl.trans(a), b, WIDE)
    at = (group.to(tl.int64) * width + own[:, None]) * columns + column[None, :]
    tl.store(out + at, narrow(total, out), mask=inside[:, None] & there[None, :])


def _takes(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    *operands, offsets = ins
    if operands[0].dtype == torch.float64:
        return "no kernel for float64"
    if not offsets.is_contiguous() or not outs[0].is_contiguous():
        return "the offsets or the result are not contiguous"
    for t in operands:
        if t.dim() == 2 and t.shape[1] > 1 and t.stride(1) != 1:
            return "the rows of an operand are not contiguous"
        if t.dim() == 3 and 1 not in t.stride()[1:] and t.numel():
            return "neither the rows nor the columns of the matrices are contiguous"
    return one_float([*operands, *outs])


def _constants(*steps: int) -> dict[str, Any]:
    return {"ROWS": ROWS, "COLUMNS": COLUMNS, "INNER": INNER, "ALIGNED": all_aligned(*steps),
            "WIDE": knobs.runtime.interpret}  # fmt: skip


@kernel("grouped_matmul", takes=_takes)
def grouped_matmul(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Launch:
    (x, w, offsets), (out,) = ins, outs
    (groups, width, columns), rows = w.shape, x.shape[0]
    along = w.stride(2) == 1 or columns == 1
    steps = (x.stride(0), *w.stride())
    tiles = -(-rows // ROWS) + groups if rows else 0
    args = (x, w, offsets, out, rows, groups, width, columns, tiles, *steps)
    other = w.stride(1) if along else w.stride(2)
    constants = {**_constants(width, columns, x.stride(0), w.stride(0), other), "ALONG": along}
    return Launch(multiply_groups, (tiles * -(-columns // COLUMNS),), args, constants, stages=3)


@kernel("grouped_outer", takes=_takes)
def grouped_outer(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Launch:
    (x, y, offsets), (out,) = ins, outs
    (groups, width, columns), steps = out.shape, (x.stride(0), y.stride(0))
    tiles = -(-width // ROWS)
    args = (x, y, offsets, out, x.shape[0], groups, width, columns, tiles, *steps)
    constants = _constants(width, columns, *steps)
    return Launch(outer_groups, (groups * tiles * -(-columns // COLUMNS),), args, constants, stages=3)
