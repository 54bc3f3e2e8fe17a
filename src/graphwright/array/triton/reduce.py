"""Reductions over axes and cumulative sums.

Few long rows are reduced in two stages: parts of a row to partial results in scratch, then these in order. Floats are
added in float32 (float64 stays), integers and bools in int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from graphwright.array.backend import Attrs
from graphwright.array.cpu.kernel import Bind, Tensors, statistic
from graphwright.array.dtype import int64
from graphwright.array.spec import Spec
from graphwright.array.triton.kernel import FLOATS, Launch, compiled, kernel, one_float
from graphwright.array.triton.rows import (
    ALONG,
    MOST,
    SIDEWAYS,
    TILES,
    Rows,
    all_aligned,
    along_two,
    multiple,
    narrow,
    rows_along,
    tile_rows,
    wide,
)

SUM, MEAN, PROD, AMAX, AMIN, ANY, ALL = range(7)
PARTS = 64
"""Most parts of a row in two stages."""
LONG_ROW = 512
"""Entries of the shortest part."""
ROWS_ENOUGH = 16384
"""Rows that occupy a GPU without being divided in parts."""
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@triton.jit
def exact(x):
    """Convert floats to float32 (float64 stays) and integers to int64."""
    if x.dtype.is_floating():
        return wide(x)
    else:
        return x.to(tl.int64)


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def _larger(a, b):
    """Return the larger number, NaN if one is NaN."""
    if a.dtype.is_floating():
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.maximum(a, b)


@triton.jit
def _reversed(x):
    """Reverse the order of numbers, and undo it: -x of floats, -1 - x of integers, of which the least has no -x."""
    if x.dtype.is_floating():
        return -x
    else:
        return -1 - x


@triton.jit
def _of_lanes(total, KIND: tl.constexpr):
    """Reduce a tile along its columns, which `keep_dims`."""
    if KIND <= 1:
        return tl.sum(total, 1, keep_dims=True)
    elif KIND == 2:
        return tl.reduce(total, 1, _times, keep_dims=True)
    elif KIND <= 4:
        highest = tl.max(total, 1, keep_dims=True)
        unknown = tl.max((total != total).to(tl.int32), 1, keep_dims=True)
        return tl.where(unknown != 0, float("nan"), highest) if total.dtype.is_floating() else highest
    elif KIND == 5:
        return tl.max(total, 1, keep_dims=True)
    else:
        return tl.min(total, 1, keep_dims=True)


@compiled
def reduce_rows(
    x, out, rows: tl.int32, reduced: tl.int32, inner: tl.int32, blocks: tl.int32, programs: tl.int32,
    all_rows: tl.int64, each: tl.int32, count: tl.float64, x_outer: tl.int64,
    x_row: tl.int64, x_far: tl.int64, x_near: tl.int64, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    LAYOUT: tl.constexpr, ALIGNED: tl.constexpr, SPLIT: tl.constexpr, KIND: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """Reduce entries part·each.. of x [outer, rows, reduced] to out [parts, outer·rows]; a program per (rows, part).

    Entry k is at (k // inner)·x_far + (k % inner)·x_near if SPLIT, else at k·x_near. Minima are the largest of the
    values in reverse order.
    """
    if LAYOUT == 0:
        reduced, x_row = multiple(reduced, ALIGNED), multiple(x_row, ALIGNED)
        x_near = 1
    if LAYOUT == 1:
        rows, x_near = multiple(rows, ALIGNED), multiple(x_near, ALIGNED)
        x_row = 1
    x_outer = multiple(x_outer, ALIGNED)
    program, part = along_two(programs)
    outer, row, present = tile_rows(program, rows, blocks, ROWS)
    start = part * each
    stop = tl.minimum(start + each, reduced)
    lane = tl.arange(0, COLUMNS)[None, :]
    first_values = exact(tl.load(x + lane + row, mask=(lane < 0) & present, other=0))  # its dtype alone matters
    if KIND <= 1:
        total = first_values * 0
    elif KIND == 2 or KIND == 6:
        total = first_values * 0 + 1
    elif KIND == 5:
        total = first_values * 0
    else:
        total = tl.full([ROWS, COLUMNS], LOWEST, first_values.dtype)
    for first in range(start, stop, COLUMNS):
        at = first + lane
        inside = present & (at < stop)
        if SPLIT:
            offset = (at // inner).to(tl.int64) * x_far + (at % inner).to(tl.int64) * x_near
        else:
            offset = at.to(tl.int64) * x_near
        values = exact(tl.load(x + outer * x_outer + row * x_row + offset, mask=inside, other=0))
        if KIND <= 1:
            total += values
        elif KIND == 2:
            total *= tl.where(inside, values, 1)
        elif KIND == 3:
            total = _larger(total, tl.where(inside, values, LOWEST))
        elif KIND == 4:
            total = _larger(total, tl.where(inside, _reversed(values), LOWEST))
        elif KIND == 5:
            total = tl.maximum(total, (inside & (values != 0)).to(total.dtype))
        else:
            total = tl.minimum(total, ((values != 0) | (inside == 0)).to(total.dtype))
    found = _of_lanes(total, KIND)
    if KIND == 1:
        found = found / tl.full([], count, found.dtype)
    if KIND == 4:
        found = _reversed(found)
    at = part * all_rows + outer * rows + row
    tl.store(out + at, narrow(found, out), mask=present)


@compiled
def extremum_index(
    x, out, rows: tl.int32, columns: tl.int32, blocks: tl.int32,
    x_outer: tl.int64, x_row: tl.int64, x_column: tl.int64,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LAYOUT: tl.constexpr, ALIGNED: tl.constexpr, LEAST: tl.constexpr,
    LOWEST: tl.constexpr,
):  # fmt: skip
    """Compute the index of the largest (LEAST: smallest) entry of each row: the first of equal ones, NaN before all."""
    if LAYOUT == 0:
        columns, x_row = multiple(columns, ALIGNED), multiple(x_row, ALIGNED)
        x_column = 1
    if LAYOUT == 1:
        rows, x_column = multiple(rows, ALIGNED), multiple(x_column, ALIGNED)
        x_row = 1
    outer, row, present = tile_rows(tl.program_id(0), rows, blocks, ROWS)
    lane = tl.arange(0, COLUMNS)[None, :]
    base = x + outer * multiple(x_outer, ALIGNED) + row * x_row
    best = exact(tl.load(base + lane.to(tl.int64) * x_column, mask=present & (lane < columns), other=0))
    if LEAST:
        best = -best
    best = tl.where(lane < columns, best, LOWEST)
    index = lane + tl.zeros([ROWS, COLUMNS], tl.int32)
    for first in range(COLUMNS, columns, COLUMNS):
        at = first + lane
        inside = present & (at < columns)
        values = exact(tl.load(base + at.to(tl.int64) * x_column, mask=inside, other=0))
        if LEAST:
            values = -values
        better = inside & ((values > best) | ((values != values) & (best == best)))
        best = tl.where(better, values, best)
        index = tl.where(better, at, index)
    unknown = best != best
    hit = tl.where(
        tl.max(unknown.to(tl.int32), 1, keep_dims=True) != 0, unknown, best == tl.max(best, 1, keep_dims=True)
    )
    found = tl.min(tl.where(hit & (index < columns), index, columns), 1, keep_dims=True)
    tl.store(out + outer * rows + row, found.to(tl.int64), mask=present)


@compiled
def cumulative_sum(
    x, out, rows: tl.int32, columns: tl.int32, blocks: tl.int32,
    x_outer: tl.int64, x_row: tl.int64, x_column: tl.int64,
    out_outer: tl.int64, out_row: tl.int64, out_column: tl.int64,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LAYOUT: tl.constexpr, ALIGNED: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Compute the sums of each row up to each entry, or from it on if REVERSE; a loop carries the sum of a tile."""
    if LAYOUT == 0:
        columns, x_row, out_row = multiple(columns, ALIGNED), multiple(x_row, ALIGNED), multiple(out_row, ALIGNED)
        x_column, out_column = 1, 1
    if LAYOUT == 1:
        rows, x_column = multiple(rows, ALIGNED), multiple(x_column, ALIGNED)
        out_column = multiple(out_column, ALIGNED)
        x_row, out_row = 1, 1
    outer, row, present = tile_rows(tl.program_id(0), rows, blocks, ROWS)
    lane = tl.arange(0, COLUMNS)[None, :]
    x_at, out_at = x + outer * x_outer + row * x_row, out + outer * out_outer + row * out_row
    none = exact(tl.load(x_at + lane, mask=(lane < 0) & present, other=0))
    sum_before = tl.sum(none * 0, 1, keep_dims=True)
    for first in range(0, columns, COLUMNS):
        at = first + lane
        inside = present & (at < columns)
        if REVERSE:
            at = columns - 1 - at
        at = at.to(tl.int64)
        values = exact(tl.load(x_at + at * x_column, mask=inside, other=0))
        tl.store(out_at + at * out_column, narrow(sum_before + tl.cumsum(values, 1), out), mask=inside)
        sum_before += tl.sum(values, 1, keep_dims=True)


class _Plan(NamedTuple):
    """A reduction: sizes and strides of up to two kept and two reduced axes."""

    kept: list[tuple[int, int]]
    reduced: list[tuple[int, int]]


def _axes(attrs: Attrs, rank: int) -> list[int]:
    """Return the axes to reduce as indices >= 0; all axes if the attribute `axes` is None."""
    return list(range(rank)) if attrs["axes"] is None else sorted({a % max(rank, 1) for a in attrs["axes"]})


def _groups(t: torch.Tensor, axes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (size, stride) of axes, merged where they are evenly spaced; at least one pair."""
    found: list[tuple[int, int]] = []
    for axis in axes:
        size, stride = t.shape[axis], t.stride(axis)
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return found or [(1, 1)]


def _plan(outs: Tensors, ins: Tensors, attrs: Attrs) -> _Plan | str:
    x, out = ins[0], outs[0]
    if not out.is_contiguous():
        return "the result is not contiguous"
    axes = _axes(attrs, x.dim())
    if x.numel() == 0:  # an empty sum
        return _Plan([(out.numel(), 1)], [(prod(x.shape[a] for a in axes) if out.numel() else 1, 1)])
    made = _Plan(_groups(x, [a for a in range(x.dim()) if a not in axes]), _groups(x, axes))
    if max(map(len, made)) > 2:
        return f"the axes of a layout do not merge: shape {tuple(x.shape)}, strides {x.stride()}"
    if max(prod(n for n, _ in side) for side in made) > MOST:
        return f"more than {MOST} entries or results"
    return made


def _parts(rows: int, entries: int) -> int:
    """Return into how many parts rows of so many entries are divided."""
    return max(1, min(PARTS, entries // LONG_ROW, ROWS_ENOUGH // max(rows, 1)))


def _partial(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    """Return scratch for the results of parts."""
    x, rows = ins[0], outs[0].size
    entries = prod(x.sizes[a] for a in _axes(attrs, len(x.sizes)))
    parts = _parts(rows, entries)
    return [Spec((parts, rows), statistic(x.dtype) if x.dtype.is_float else int64)] if parts > 1 else []


def _raw(t: torch.Tensor) -> torch.Tensor:
    """View a bool tensor as bytes."""
    return t.view(torch.uint8) if t.dtype == torch.bool else t


def _stage(kind: int, x: torch.Tensor, out: torch.Tensor, plan: _Plan, parts: int, count: int) -> Launch:
    """Return the launch that reduces x to out [parts, rows]."""
    (outer, x_outer), (rows, x_row) = ([(1, 0), *plan.kept])[-2:]
    (far, x_far), (near, x_near) = ([(1, 0), *plan.reduced])[-2:]
    entries = far * near
    each = -(-entries // parts)
    sideways = x_near != 1 and x_row == 1
    layout = ALONG if x_near == 1 else int(sideways) or 2
    tile = next((t for t in TILES if each <= t.columns), TILES[3]) if layout == ALONG else SIDEWAYS
    tile = TILES[3] if tile.columns > TILES[3].columns else tile
    blocks = -(-rows // tile.rows)
    others = (x_outer, x_row, x_far, entries) if layout == ALONG else (x_outer, x_near, x_far, rows)
    aligned = layout != 2 and all_aligned(*others, *((each,) if parts > 1 else ()))
    lowest: Any = float("-inf") if x.dtype in FLOATS else -(2**63)
    constants = {"ROWS": tile.rows, "COLUMNS": tile.columns, "LAYOUT": layout, "ALIGNED": aligned, "SPLIT": far > 1,
                 "KIND": kind, "LOWEST": lowest}  # fmt: skip
    args = (_raw(x), _raw(out), rows, entries, near, blocks, outer * blocks, outer * rows, each, float(count), x_outer,
            x_row, x_far, x_near)  # fmt: skip
    return Launch(reduce_rows, (outer * blocks * parts,), args, constants, tile.warps)


def _reduction(kind: int) -> Bind:
    def bind(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Launch]:
        plan, x, out = _plan(outs, ins, attrs), ins[0], outs[0]
        assert isinstance(plan, _Plan), plan
        count = prod(n for n, _ in plan.reduced)
        if not work:
            return [_stage(kind, x, out, plan, 1, count)]
        (parts, rows), first = work[0].shape, SUM if kind == MEAN else kind
        then = _Plan([(rows, 1)], [(parts, rows)])
        return [_stage(first, x, work[0], plan, parts, 1), _stage(kind, work[0], out, then, 1, count)]

    return bind


def _takes(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    x = ins[0]
    if x.dtype not in (*FLOATS, *INTEGERS):
        return f"no kernel for {x.dtype}"
    found = _plan(outs, ins, attrs)
    return found if isinstance(found, str) else ""


for _name, _kind in {
    "sum": SUM, "mean": MEAN, "prod": PROD, "amax": AMAX, "amin": AMIN, "any": ANY, "all": ALL,
}.items():  # fmt: skip
    kernel(_name, _partial, takes=_takes)(_reduction(_kind))


def _along(tensors: Tensors, attrs: Attrs) -> Rows | str:
    if tensors[0].dim() == 0:
        return "the operand has no axes"
    axis = attrs["axis"] % tensors[0].dim()
    return rows_along(tensors, axis, axis + 1)


def _takes_index(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    found = one_float(ins) or _along(ins, attrs)
    return found if isinstance(found, str) else "" if outs[0].is_contiguous() else "the result is not contiguous"


def _index(least: bool) -> Bind:
    def bind(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Launch:
        rows = _along(ins, attrs)
        assert isinstance(rows, Rows), rows
        constants = {**rows.constants, "LEAST": least, "LOWEST": float("-inf")}
        del constants["LOOP"]
        return Launch(
            extremum_index, rows.grid, (ins[0], outs[0], *rows.sizes, *rows.steps), constants, rows.tile.warps
        )

    return bind


kernel("argmax", takes=_takes_index)(_index(False))
kernel("argmin", takes=_takes_index)(_index(True))


def _takes_cumulative(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    if ins[0].dtype not in (*FLOATS, *INTEGERS):
        return f"no kernel for {ins[0].dtype}"
    found = _along([_raw(ins[0]), outs[0]], attrs)
    return found if isinstance(found, str) else ""


@kernel("cumsum", takes=_takes_cumulative)
def cumsum(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Launch:
    """Sum cumulatively along an axis; with `reverse`, from its end."""
    tensors = [_raw(ins[0]), outs[0]]
    rows = _along(tensors, attrs)
    assert isinstance(rows, Rows), rows
    constants = {**rows.constants, "REVERSE": attrs["reverse"]}
    del constants["LOOP"]
    return Launch(cumulative_sum, rows.grid, (*tensors, *rows.sizes, *rows.steps), constants, rows.tile.warps)
