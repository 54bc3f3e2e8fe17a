"""The k largest or smallest entries of rows, without sorting: k times the best of the entries not yet chosen."""

from __future__ import annotations

from math import prod

import triton.language as tl

from graphwright.array.backend import Attrs
from graphwright.array.cpu.kernel import Tensors
from graphwright.array.triton.kernel import Launch, compiled, kernel, one_float
from graphwright.array.triton.rows import TILES, Rows, all_aligned, multiple, narrow, rows_along, wide

MOST = 64
"""Largest k: the time grows with k, from here on a sort is faster."""
LOWEST = tl.constexpr(float("-inf"))


@compiled
def select_rows(
    x, values, indices, rows: tl.int32, columns: tl.int32, k: tl.int32, x_outer: tl.int64, x_row: tl.int64,
    x_column: tl.int64, inner: tl.int32,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Write the k best entries of each row and their columns to [outer, k, inner], best first, equal ones by column.

    Row r has outer index r // inner. NaN counts as larger than all numbers.
    """
    columns, x_row = multiple(columns, ALIGNED), multiple(x_row, ALIGNED)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = (row < rows)[:, None]
    outer, within = (row // inner).to(tl.int64)[:, None], (row % inner).to(tl.int64)[:, None]
    lane = tl.arange(0, COLUMNS)[None, :]
    inside = present & (lane < columns)
    at = outer * multiple(x_outer, ALIGNED) + within * x_row + lane.to(tl.int64) * x_column
    entries = wide(tl.load(x + at, mask=inside, other=0.0))
    unknown = entries != entries
    if LARGEST:
        keys = entries
    else:
        keys = -entries
    bits = entries.to(tl.int64 if entries.dtype == tl.float64 else tl.int32, bitcast=True)
    left = lane + tl.zeros([ROWS, COLUMNS], tl.int32) < columns
    for step in range(0, k):
        numbers = left & (unknown == 0)
        top = tl.max(tl.where(numbers, keys, LOWEST), 1, keep_dims=True)
        best = numbers & (keys == top)
        if LARGEST:  # NaN comes first
            others = tl.max((left & unknown).to(tl.int32), 1, keep_dims=True) != 0
            best = (others & left & unknown) | ((others == 0) & best)
        else:  # and last
            others = tl.max(numbers.to(tl.int32), 1, keep_dims=True) == 0
            best = (others & left) | best
        column = tl.min(tl.where(best, lane, COLUMNS), 1, keep_dims=True)
        chosen = lane == column
        value = tl.sum(tl.where(chosen, bits, 0), 1, keep_dims=True).to(entries.dtype, bitcast=True)  # -0.0 too
        to = (outer * k + step) * inner + within
        tl.store(values + to, narrow(value, values), mask=present)
        tl.store(indices + to, column.to(tl.int64), mask=present)
        left = left & (chosen == 0)


def _rows(ins: Tensors, attrs: Attrs) -> Rows | str:
    x = ins[0]
    if x.dim() == 0:
        return "the operand has no axes"
    axis = attrs["axis"] % x.dim()
    return rows_along([x], axis, axis + 1)


def _takes(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    rows = _rows(ins, attrs)
    if isinstance(rows, str):
        return rows
    if attrs["k"] > MOST or rows.columns > TILES[-1].columns:
        return f"{attrs['k']} of {rows.columns} entries"
    if not all(t.is_contiguous() for t in outs):
        return "a result is not contiguous"
    return one_float([ins[0], outs[0]])


@kernel("topk", takes=_takes)
def topk(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Launch:
    rows = _rows(ins, attrs)
    assert isinstance(rows, Rows), rows
    (outer, row, column), last = rows.strides[0], prod(ins[0].shape[attrs["axis"] % ins[0].dim() + 1 :]) == 1
    count, inner = rows.outer * rows.rows, 1 if last else rows.rows
    tile = next(tile for tile in TILES if rows.columns <= tile.columns)
    steps = (row, 0, column) if last else (outer, row, column)  # rows of one outer index are outer indices themselves
    aligned = column == 1 and all_aligned(rows.columns, *steps[:2])
    constants = {"ROWS": tile.rows, "COLUMNS": tile.columns, "ALIGNED": aligned, "LARGEST": attrs["largest"]}
    args = (ins[0], *outs, count, rows.columns, attrs["k"], *steps, max(inner, 1))
    return Launch(select_rows, (-(-count // tile.rows) if attrs["k"] else 0,), args, constants, tile.warps)
