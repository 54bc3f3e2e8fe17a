"""Rows of arrays by index, and rows added or written by index: in the order of the operands, without atomics.

Sums sort the indices by counting: the rank of an index is the number of smaller ones, and of equal ones before it.
n indices take n² comparisons, 1 ms for 2¹⁶ of them; no memory is allocated and no value is read by the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, copy_to_outputs
from graphwright.array.dtype import int64
from graphwright.array.spec import Spec
from graphwright.array.triton.kernel import Launch, compiled, kernel, one_float
from graphwright.array.triton.rows import MOST, all_aligned, along_two, multiple, narrow, wide

ROWS, COLUMNS = 8, 256
"""Tile of a program that copies or adds rows."""
RANKED, COMPARED = 32, 128
"""Indices that a program ranks, and with how many at once it compares them."""
MOST_RANKED = 2**18
"""Most indices that are ranked: the comparisons take about 10 ms."""


@triton.jit
def _wrapped(index, wrap):
    """Return an index with `wrap`, the number of entries, added if it is negative; `wrap` is 0 for no such indices."""
    return tl.where(index < 0, index + wrap, index)


@compiled
def take_rows(
    table, ids, out, rows: tl.int64, count: tl.int32, entries: tl.int32, wrap: tl.int32, width: tl.int32,
    tiles: tl.int32, table_lead: tl.int64, table_row: tl.int64, out_row: tl.int64,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Copy rows ids[i] of each table [entries, width] to rows i of its result; NaN for an index out of range."""
    width, table_row, out_row = multiple(width, ALIGNED), multiple(table_row, ALIGNED), multiple(out_row, ALIGNED)
    tile, part = along_two(tiles)
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (part * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    present = row < rows
    index = _wrapped(tl.load(ids + row % count, mask=present, other=0).to(tl.int64), wrap)[:, None]
    known = (index >= 0) & (index < entries)
    inside = present[:, None] & (column < width)
    table_at = (row // count)[:, None] * multiple(table_lead, ALIGNED) + index * table_row
    values = tl.load(table + table_at + column, mask=inside & known, other=0)
    if table.dtype.element_ty.is_floating():
        values = tl.where(known, values, float("nan")).to(values.dtype)
    tl.store(out + row[:, None] * out_row + column, values, mask=inside)


@compiled
def rank_indices(
    ids, order, sorted_ids, count: tl.int32, wrap: tl.int32, RANKED: tl.constexpr, COMPARED: tl.constexpr
):  # fmt: skip
    """Compute `order`, the positions of the indices in ascending order, and the indices in this order; stable."""
    own = tl.program_id(0) * RANKED + tl.arange(0, RANKED)
    present = own < count
    index = _wrapped(tl.load(ids + own, mask=present, other=0).to(tl.int64), wrap)
    rank = tl.zeros([RANKED], tl.int32)
    for first in range(0, count, COMPARED):
        at = first + tl.arange(0, COMPARED)
        other = _wrapped(tl.load(ids + at, mask=at < count, other=0).to(tl.int64), wrap)[None, :]
        before = (other < index[:, None]) | ((other == index[:, None]) & (at[None, :] < own[:, None]))
        rank += tl.sum((before & (at < count)[None, :]).to(tl.int32), 1)
    tl.store(order + rank, own, mask=present)
    tl.store(sorted_ids + rank, index, mask=present)


@compiled
def put_rows(
    rows, order, ids, out, count: tl.int32, entries: tl.int32, width: tl.int32,
    row_lead: tl.int64, row_step: tl.int64, out_lead: tl.int64, out_step: tl.int64, leads: tl.int32,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write the last row of each index to its row of `out`; arguments as in `add_rows`."""
    width, row_lead, row_step = multiple(width, ALIGNED), multiple(row_lead, ALIGNED), multiple(row_step, ALIGNED)
    out_lead, out_step = multiple(out_lead, ALIGNED), multiple(out_step, ALIGNED)
    program, part = along_two(count * leads)
    at, lead = program // leads, (program % leads).to(tl.int64)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    index = tl.load(ids + at, mask=at < count, other=0).to(tl.int64)
    after = tl.load(ids + at + 1, mask=at + 1 < count, other=-(2**62))
    row = tl.load(order + at, mask=at < count, other=0).to(tl.int64)
    known = (index >= 0) & (index < entries) & (after != index)
    inside = (column < width) & (known.to(tl.int32) + 0 * column > 0)
    values = tl.load(rows + lead * row_lead + row * row_step + column, mask=inside, other=0)
    tl.store(out + lead * out_lead + index * out_step + column, values, mask=inside)


@compiled
def add_rows(
    rows, order, ids, out, count: tl.int32, entries: tl.int32, width: tl.int32,
    row_lead: tl.int64, row_step: tl.int64, out_lead: tl.int64, out_step: tl.int64, leads: tl.int32,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Add the rows of each index to its row of `out` [leads, entries, width]: a program for each index that occurs.

    `order` and `ids` are those of `rank_indices`; an index out of range is left out.
    """
    width, row_lead, row_step = multiple(width, ALIGNED), multiple(row_lead, ALIGNED), multiple(row_step, ALIGNED)
    out_lead, out_step = multiple(out_lead, ALIGNED), multiple(out_step, ALIGNED)
    program, part = along_two(count * leads)
    start, lead = program // leads, (program % leads).to(tl.int64)
    column = (part * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    here = start < count
    index = tl.load(ids + start, mask=here, other=0).to(tl.int64)
    before = tl.load(ids + start - 1, mask=here & (start > 0), other=-(2**62))
    known = (index >= 0) & (index < entries)
    if known & (before != index):
        inside = column < width
        at = out + lead * out_lead + index * out_step + column
        total = wide(tl.load(at, mask=inside, other=0.0))
        first, more = start, True
        while more:
            position = first + tl.arange(0, ROWS)
            there = position < count
            same = there & (tl.load(ids + position, mask=there, other=-1) == index)
            row = tl.load(order + position, mask=same, other=0).to(tl.int64)[:, None]
            values = tl.load(rows + lead * row_lead + row * row_step + column, mask=same[:, None] & inside, other=0.0)
            total += tl.sum(wide(values), 0, keep_dims=True)
            first += ROWS
            more = tl.sum(same.to(tl.int32), 0) == ROWS
        tl.store(at, narrow(total, out), mask=inside)


def _takes(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    table, ids = ins
    if (table.stride(1) != 1 and table.shape[1] > 1) or not ids.is_contiguous() or not outs[0].is_contiguous():
        return "the rows or the indices are not contiguous"
    return one_float([table, outs[0]])


def constants(*steps: int) -> dict[str, Any]:
    """Return the constants of kernels for rows with this width and these strides."""
    return {"ROWS": ROWS, "COLUMNS": COLUMNS, "ALIGNED": all_aligned(*steps)}


@kernel("embedding", takes=_takes)
def embedding(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Launch:
    (table, ids), out = ins, outs[0]
    count, (entries, width) = ids.numel(), table.shape
    tiles = -(-count // ROWS)
    args = (table, ids, out, count, count, entries, 0, width, tiles, 0, table.stride(0), width)
    return Launch(take_rows, (tiles * -(-width // COLUMNS),), args, constants(width, table.stride(0)))


def order_scratch(count: int) -> list[Spec]:
    """Return the specs of the scratch for `rank_indices`."""
    return [Spec((count,), int64)] * 2


def _sum_scratch(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    return order_scratch(ins[1].size)


def _takes_sum(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    if not all(t.is_contiguous() for t in (*ins, *outs)):
        return "an operand is not contiguous"
    if ins[1].numel() > MOST_RANKED:
        return f"more than {MOST_RANKED} indices"
    return one_float([ins[0], outs[0]])


def ranked(ids: torch.Tensor, work: Tensors, wrap: int = 0) -> Launch:
    """Return the launch that ranks contiguous indices in scratch; negative ones count from `wrap` down."""
    count = ids.numel()
    args = (ids, *work, count, wrap)
    return Launch(rank_indices, (-(-count // RANKED),), args, {"RANKED": RANKED, "COMPARED": COMPARED})


@kernel("embedding_backward", _sum_scratch, takes=_takes_sum)
def embedding_backward(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Sum the gradient rows of each id."""
    (grad, ids), (out,), (order, found) = ins, outs, work
    count, (entries, width) = ids.numel(), out.shape
    args = (grad, order, found, out, count, entries, width, 0, width, 0, width, 1)
    add = Launch(add_rows, (count * -(-width // COLUMNS),), args, constants(width))
    return [out.zero_, ranked(ids, work), add]


class _Indexed(NamedTuple):
    """An array [lead, entries, width] of which one axis is indexed by `count` indices."""

    lead: int
    entries: int
    width: int
    count: int

    @property
    def programs(self) -> int:
        """Programs that add or write rows."""
        return self.count * self.lead * -(-self.width // COLUMNS)


def _indexed(x: torch.Tensor, ids: torch.Tensor, attrs: Attrs) -> _Indexed:
    axis = attrs["axis"] % x.dim()
    return _Indexed(prod(x.shape[:axis]), x.shape[axis], prod(x.shape[axis + 1 :]), ids.numel())


def _takes_index(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    if len(ins) != 2:
        return "more than one index array"
    return "" if all(t.is_contiguous() for t in (*ins, *outs)) else "an operand is not contiguous"


def _raw(t: torch.Tensor) -> torch.Tensor:
    """View a bool tensor as bytes."""
    return t.view(torch.uint8) if t.dtype == torch.bool else t


@kernel("index", takes=_takes_index)
def index(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Launch:
    """Copy entries by one index array, whose negative indices count from the end."""
    (x, ids), (out,) = map(_raw, ins), map(_raw, outs)
    at = _indexed(x, ids, attrs)
    rows, lead = at.lead * at.count, at.entries * at.width
    tiles = -(-rows // ROWS)
    args = (x, ids, out, rows, at.count, at.entries, at.entries, at.width, tiles, lead, at.width, at.width)
    return Launch(take_rows, (tiles * -(-at.width // COLUMNS),), args, constants(at.width))


def _takes_updates(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    *operands, ids = ins
    if len(ins) != (2 if "shape" in attrs else 3):
        return "more than one index array"
    if not all(t.is_contiguous() for t in (*ins, *outs)):
        return "an operand is not contiguous"
    at = _indexed(outs[0], ids, attrs)
    if operands[-1].numel() != at.lead * at.count * at.width:
        return "the values are broadcast"
    if at.programs > MOST:
        return f"more than {MOST} rows"
    return "" if at.count <= MOST_RANKED else f"more than {MOST_RANKED} indices"


def _update(function: Any, values: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, attrs: Attrs,
            work: Tensors) -> list[Call]:  # fmt: skip
    """Return the launches that add or write values [lead, count, width] to rows of `out`."""
    at, (order, found) = _indexed(out, ids, attrs), work
    args = (values, order, found, out, at.count, at.entries, at.width, at.count * at.width, at.width,
            at.entries * at.width, at.width, at.lead)  # fmt: skip
    return [ranked(ids, work, at.entries), Launch(function, (at.programs,), args, constants(at.width))]


def _last_scratch(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    return order_scratch(ins[-1].size)


def _takes_sums(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    return one_float([*ins[:-1], *outs]) or _takes_updates(outs, ins, attrs)


@kernel("index_sum", _last_scratch, takes=_takes_sums)
def index_sum(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    return [outs[0].zero_, *_update(add_rows, *ins, outs[0], attrs, work)]


@kernel("index_add", _last_scratch, takes=_takes_sums)
def index_add(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    return [*copy_to_outputs(outs, ins[:1]), *_update(add_rows, *ins[1:], outs[0], attrs, work)]


@kernel("index_put", _last_scratch, takes=_takes_updates)
def index_put(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Write values by index; of equal indices the last one counts."""
    values, ids = ins[1:]
    return [*copy_to_outputs(outs, ins[:1]), *_update(put_rows, _raw(values), ids, _raw(outs[0]), attrs, work)]
