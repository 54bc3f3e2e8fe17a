"""Softmax and its logarithm along an axis: one pass over rows that fit in a tile, two over longer ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphwright.array.backend import Attrs
from graphwright.array.cpu.kernel import Tensors
from graphwright.array.triton.kernel import Launch, compiled, kernel, one_float
from graphwright.array.triton.rows import Rows, multiple, narrow, rows_along, tile_rows, wide

LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def _read(x, mask, x_at, m_at, inside, MASK: tl.constexpr):
    """Load a tile widened, -inf outside and where the mask is false, and load the mask."""
    values = wide(tl.load(x + x_at, mask=inside, other=LOWEST))
    shown = inside
    if MASK:
        shown = inside & (tl.load(mask + m_at, mask=inside, other=0) != 0)
        values = tl.where(shown, values, LOWEST)
    return values, shown


@compiled
def softmax_rows(
    x, mask, out, rows: tl.int32, columns: tl.int32, blocks: tl.int32,
    x_outer: tl.int64, x_row: tl.int64, x_column: tl.int64,
    out_outer: tl.int64, out_row: tl.int64, out_column: tl.int64,
    mask_outer: tl.int64, mask_row: tl.int64, mask_column: tl.int64,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LOOP: tl.constexpr, LAYOUT: tl.constexpr, ALIGNED: tl.constexpr,
    MASK: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Compute e^(x - max) / Σ e^(x - max) of rows, or its logarithm; entries where the mask is false give 0."""
    if LAYOUT == 0:
        columns, x_row, out_row = multiple(columns, ALIGNED), multiple(x_row, ALIGNED), multiple(out_row, ALIGNED)
        x_column, out_column = 1, 1
    if LAYOUT == 1:
        rows, x_column = multiple(rows, ALIGNED), multiple(x_column, ALIGNED)
        out_column = multiple(out_column, ALIGNED)
        x_row, out_row = 1, 1
    x_outer, out_outer = multiple(x_outer, ALIGNED), multiple(out_outer, ALIGNED)
    outer, row, present = tile_rows(tl.program_id(0), rows, blocks, ROWS)
    x_at, out_at = outer * x_outer + row * x_row, outer * out_outer + row * out_row
    mask_at = outer * mask_outer + row * mask_row
    column = tl.arange(0, COLUMNS)[None, :]
    if LOOP:
        top = tl.full([ROWS, 1], LOWEST, tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32)
        total = tl.zeros_like(top)
        for first in range(0, columns, COLUMNS):
            at = first + column
            inside = present & (at < columns)
            at = at.to(tl.int64)
            values, shown = _read(x, mask, x_at + at * x_column, mask_at + at * mask_column, inside, MASK)
            highest = tl.maximum(top, tl.max(values, 1, keep_dims=True))
            base = tl.where(highest == LOWEST, 0.0, highest)
            total = total * tl.exp(top - base) + tl.sum(tl.where(shown, tl.exp(values - base), 0.0), 1, keep_dims=True)
            top = highest
        for first in range(0, columns, COLUMNS):
            at = first + column
            inside = present & (at < columns)
            at = at.to(tl.int64)
            values, shown = _read(x, mask, x_at + at * x_column, mask_at + at * mask_column, inside, MASK)
            if LOG:
                result = values - top - tl.log(total)
            else:
                result = tl.exp(values - top) / total
            if MASK:
                result = tl.where(shown, result, 0.0)
            tl.store(out + out_at + at * out_column, narrow(result, out), mask=inside)
    else:
        inside = present & (column < columns)
        at = column.to(tl.int64)
        values, shown = _read(x, mask, x_at + at * x_column, mask_at + at * mask_column, inside, MASK)
        apart = values - tl.max(values, 1, keep_dims=True)
        total = tl.sum(tl.where(shown, tl.exp(apart), 0.0), 1, keep_dims=True)
        if LOG:
            result = apart - tl.log(total)
        else:
            result = tl.exp(apart) / total
        if MASK:
            result = tl.where(shown, result, 0.0)
        tl.store(out + out_at + at * out_column, narrow(result, out), mask=inside)


def _rows(outs: Tensors, ins: Tensors, attrs: Attrs) -> Rows | str:
    x, *masks = ins
    if x.dim() == 0:
        return "the operand has no axes"
    axis = attrs["axis"] % x.dim()
    return rows_along([x, outs[0], *(m.expand(x.shape) for m in masks)], axis, axis + 1)


def _takes(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    found = one_float([ins[0], outs[0]]) or _rows(outs, ins, attrs)
    return found if isinstance(found, str) else ""


def _bind(outs: Tensors, ins: Tensors, attrs: Attrs, log: bool) -> Launch:
    rows = _rows(outs, ins, attrs)
    assert isinstance(rows, Rows)
    x, out, masked = ins[0], outs[0], len(ins) > 1
    mask = ins[1].view(torch.uint8) if masked else x
    steps = rows.steps if masked else (*rows.steps, 0, 0, 0)
    constants = {**rows.constants, "MASK": masked, "LOG": log}
    return Launch(softmax_rows, rows.grid, (x, mask, out, *rows.sizes, *steps), constants, rows.tile.warps)


@kernel("softmax", takes=_takes)
def softmax(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Launch:
    return _bind(outs, ins, attrs, log=False)


@kernel("log_softmax", takes=_takes)
def log_softmax(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Launch:
    return _bind(outs, ins, attrs, log=True)
