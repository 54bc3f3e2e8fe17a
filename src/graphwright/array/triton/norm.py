"""Normalisations: root mean square, layer and group norms by rows, batch norms by channels.

Rows that fit in a tile are read once, longer ones once per statistic and once for the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import triton
import triton.language as tl

from graphwright.array.backend import Attrs
from graphwright.array.cpu.kernel import Tensors, statistic
from graphwright.array.spec import Spec
from graphwright.array.triton.kernel import FLOATS, Launch, compiled, kernel, one_float
from graphwright.array.triton.rows import Rows, multiple, narrow, number, rows_along, wide

PARTS = 64
"""Most programs that share the statistics of a channel."""
ACROSS = 1024
"""Elements that a program of a batch norm reads at once."""


@triton.jit
def _sum_of_squares(x, x_at, present, columns, less, COLUMNS: tl.constexpr):
    """Return Σ (x - less)² of rows, in a loop."""
    column = tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros_like(less)
    for first in range(0, columns, COLUMNS):
        inside = present & (first + column < columns)
        apart = tl.where(inside, wide(tl.load(x + x_at + first + column, mask=inside, other=0.0)) - less, 0.0)
        total += tl.sum(apart * apart, 1, keep_dims=True)
    return total


@triton.jit
def _root_mean_scaled(values, r, weight, out, UNIT_OFFSET: tl.constexpr, CAST_FIRST: tl.constexpr):
    """Return the result of an RMS norm: each step rounded to the dtype that the op states."""
    unit = values * r
    factor = wide(weight)
    if UNIT_OFFSET:
        factor = factor + 1.0
    if CAST_FIRST:
        unit = wide(narrow(unit, out))
        factor = wide(narrow(factor, out))
    return narrow(unit * factor, out)


@compiled
def rms_rows(
    x, w, out, rows: tl.int32, columns: tl.int32, x_row: tl.int64, out_row: tl.int64, w_column: tl.int64,
    eps: tl.float64,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LOOP: tl.constexpr, ALIGNED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr, CAST_FIRST: tl.constexpr,
):  # fmt: skip
    """Compute x / √(mean(x²) + eps) · w of rows with contiguous columns."""
    count = columns
    columns, x_row, out_row = multiple(columns, ALIGNED), multiple(x_row, ALIGNED), multiple(out_row, ALIGNED)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = (row < rows)[:, None]
    row = row.to(tl.int64)[:, None]
    x_at, out_at = row * x_row, row * out_row
    column = tl.arange(0, COLUMNS)[None, :]
    if LOOP:
        none = tl.zeros([ROWS, 1], tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32)
        square = _sum_of_squares(x, x_at, present, columns, none, COLUMNS)
        r = tl.rsqrt(square / count + number(eps, square))
        for first in range(0, columns, COLUMNS):
            at = first + column
            inside = present & (at < columns)
            values = wide(tl.load(x + x_at + at, mask=inside, other=0.0))
            weight = tl.load(w + at * w_column, mask=at < columns, other=0.0)
            tl.store(out + out_at + at, _root_mean_scaled(values, r, weight, out, UNIT_OFFSET, CAST_FIRST), mask=inside)
    else:
        inside = present & (column < columns)
        values = wide(tl.load(x + x_at + column, mask=inside, other=0.0))
        square = tl.sum(values * values, 1, keep_dims=True)
        r = tl.rsqrt(square / count + number(eps, square))
        weight = tl.load(w + column * w_column, mask=column < columns, other=0.0)
        tl.store(out + out_at + column, _root_mean_scaled(values, r, weight, out, UNIT_OFFSET, CAST_FIRST), mask=inside)


@triton.jit
def _affine(unit, w, b, at, inside, SCALE: tl.constexpr):
    """Return x̂·w + b with the entries of w and b at `at`; SCALE is their number."""
    if SCALE > 0:
        unit = unit * wide(tl.load(w + at, mask=inside, other=0.0))
    if SCALE > 1:
        unit = unit + wide(tl.load(b + at, mask=inside, other=0.0))
    return unit


@compiled
def standard_rows(
    x, w, b, out, rows: tl.int32, columns: tl.int32, x_row: tl.int64, out_row: tl.int64,
    groups: tl.int32, channels: tl.int32, inner: tl.int32, eps: tl.float64,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LOOP: tl.constexpr, ALIGNED: tl.constexpr,
    SCALE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute (x - mean) / √(var + eps) · w + b of rows with contiguous columns.

    The entry of w and b is that of the column; with CHANNELS, a row is a group of `channels` channels of `inner`
    positions, the group `row % groups`.
    """
    count = columns
    columns, x_row, out_row = multiple(columns, ALIGNED), multiple(x_row, ALIGNED), multiple(out_row, ALIGNED)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = (row < rows)[:, None]
    first_channel = ((row % groups) * channels)[:, None]
    row = row.to(tl.int64)[:, None]
    x_at, out_at = row * x_row, row * out_row
    column = tl.arange(0, COLUMNS)[None, :]
    if LOOP:
        total = tl.zeros([ROWS, 1], tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32)
        for first in range(0, columns, COLUMNS):
            inside = present & (first + column < columns)
            values = wide(tl.load(x + x_at + first + column, mask=inside, other=0.0))
            total += tl.sum(values, 1, keep_dims=True)
        mean = total / count
        var = _sum_of_squares(x, x_at, present, columns, mean, COLUMNS) / count
        r = tl.rsqrt(var + number(eps, var))
        for first in range(0, columns, COLUMNS):
            at = first + column
            inside = present & (at < columns)
            unit = (wide(tl.load(x + x_at + at, mask=inside, other=0.0)) - mean) * r
            if CHANNELS:
                unit = _affine(unit, w, b, first_channel + at // inner, inside, SCALE)
            else:
                unit = _affine(unit, w, b, at, inside, SCALE)
            tl.store(out + out_at + at, narrow(unit, out), mask=inside)
    else:
        inside = present & (column < columns)
        values = wide(tl.load(x + x_at + column, mask=inside, other=0.0))
        mean = tl.sum(values, 1, keep_dims=True) / count
        apart = tl.where(inside, values - mean, 0.0)
        var = tl.sum(apart * apart, 1, keep_dims=True) / count
        unit = apart * tl.rsqrt(var + number(eps, var))
        if CHANNELS:
            unit = _affine(unit, w, b, first_channel + column // inner, inside, SCALE)
        else:
            unit = _affine(unit, w, b, column, inside, SCALE)
        tl.store(out + out_at + column, narrow(unit, out), mask=inside)


def _contiguous_rows(tensors: Tensors, first: int) -> Rows | str:
    """Return the rows whose columns are the axes from `first` on, which must be contiguous, or the reason if not."""
    rows = rows_along(tensors, first, tensors[0].dim())
    if isinstance(rows, Rows) and any(s[2] != 1 for s in rows.strides) and rows.columns > 1:
        return "the normalised axes are not contiguous"
    return rows


def _reason(found: Rows | str) -> str:
    return found if isinstance(found, str) else ""


def _known(found: Rows | str) -> Rows:
    assert isinstance(found, Rows), found
    return found


def _sizes(rows: Rows) -> tuple[int, ...]:
    """Return the arguments rows, columns, x_row, out_row."""
    return rows.rows, rows.columns, rows.strides[0][1], rows.strides[1][1]


def _constants(rows: Rows) -> dict[str, Any]:
    tile = rows.tile
    return {"ROWS": tile.rows, "COLUMNS": tile.columns, "LOOP": tile.loop, "ALIGNED": rows.aligned}


def _takes_rms(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    return one_float([*ins, *outs]) or _reason(_contiguous_rows([ins[0], outs[0]], ins[0].dim() - 1))


@kernel("rms_norm", takes=_takes_rms)
def rms_norm(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Launch:
    (x, w), out = ins, outs[0]
    rows = _known(_contiguous_rows([x, out], x.dim() - 1))
    constants = {**_constants(rows), "UNIT_OFFSET": attrs["unit_offset"], "CAST_FIRST": attrs["cast_before_scale"]}
    args = (x, w, out, *_sizes(rows), w.stride(0), attrs["eps"])
    return Launch(rms_rows, rows.grid, args, constants, rows.tile.warps)


def _takes_layer(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    found = one_float([*ins, *outs]) or _reason(_contiguous_rows([ins[0], outs[0]], ins[0].dim() - attrs["rank"]))
    return found or _contiguous(ins[1:])


def _contiguous(scale: Tensors) -> str:
    return "" if all(t.is_contiguous() for t in scale) else "the weight or bias is not contiguous"


def _standard(rows: Rows, outs: Tensors, ins: Tensors, attrs: Attrs, channels: tuple[int, int, int] | None) -> Launch:
    """Return the launch for `rows`; `channels`: groups, channels of a group, positions of a channel."""
    x, *scale = ins
    w, b = (*scale, x, x)[:2]
    constants = {**_constants(rows), "SCALE": len(scale), "CHANNELS": channels is not None}
    args = (x, w, b, outs[0], *_sizes(rows), *(channels or (1, 1, 1)), attrs["eps"])
    return Launch(standard_rows, rows.grid, args, constants, rows.tile.warps)


@kernel("layer_norm", takes=_takes_layer)
def layer_norm(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Launch:
    rows = _known(_contiguous_rows([ins[0], outs[0]], ins[0].dim() - attrs["rank"]))
    return _standard(rows, outs, ins, attrs, None)


def _by_group(outs: Tensors, ins: Tensors, attrs: Attrs) -> list[torch.Tensor]:
    """View x and the result [N, C, ...] as [N, G, C/G, ...]."""
    each = ins[0].shape[1] // attrs["groups"]
    return [t.unflatten(1, (attrs["groups"], each)) for t in (ins[0], outs[0])]


def _takes_group(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    found = one_float([*ins, *outs]) or _reason(_contiguous_rows(_by_group(outs, ins, attrs), 2))
    return found or _contiguous(ins[1:])


@kernel("group_norm", takes=_takes_group)
def group_norm(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Launch:
    x, groups = ins[0], attrs["groups"]
    rows = _known(_contiguous_rows(_by_group(outs, ins, attrs), 2))
    channels = (groups, x.shape[1] // groups, max(prod(x.shape[2:]), 1))
    return _standard(rows, outs, ins, attrs, channels)


@triton.jit
def _entries(first, count, inner, channel, channels, ACROSS: tl.constexpr):
    """Return offsets in x [N, C, inner] of entries `first`... of a channel, and which there are."""
    at = first + tl.arange(0, ACROSS)
    inside = at < count
    n = (at // inner).to(tl.int64)
    return (n * channels + channel) * inner + at % inner, inside


@compiled
def channel_moments(
    x, moments, count: tl.int32, channels: tl.int32, inner: tl.int32, parts: tl.int32, each: tl.int32,
    ACROSS: tl.constexpr,
):  # fmt: skip
    """Compute [channels, parts, 2]: the mean, and Σ (x - mean)², of `each` entries of a channel; a program for each."""
    channel, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    start, stop = part * each, tl.minimum(count, part * each + each)
    kind: tl.constexpr = moments.dtype.element_ty
    size = tl.maximum(stop - start, 1)
    total = tl.zeros([ACROSS], kind)
    for first in range(start, stop, ACROSS):
        at, inside = _entries(first, stop, inner, channel, channels, ACROSS)
        total += wide(tl.load(x + at, mask=inside, other=0.0))
    mean = tl.sum(total, 0) / size
    square = tl.zeros([ACROSS], kind)
    for first in range(start, stop, ACROSS):
        at, inside = _entries(first, stop, inner, channel, channels, ACROSS)
        apart = tl.where(inside, wide(tl.load(x + at, mask=inside, other=0.0)) - mean, 0.0)
        square += apart * apart
    lane = tl.arange(0, 2)
    found = tl.where(lane == 0, mean, tl.sum(square, 0))
    tl.store(moments + tl.program_id(0).to(tl.int64) * 2 + lane, found, mask=lane < 2)


@triton.jit
def _combined(moments, channel, count, parts, each, PARTS: tl.constexpr):
    """Return (mean, Σ (x - mean)²) of a channel from those of its parts (Chan, Golub and LeVeque 1979, eq. 2.1)."""
    part = tl.arange(0, PARTS)
    there = part < parts
    size = tl.where(there, tl.minimum(count - part * each, each), 0)
    at = (channel.to(tl.int64) * parts + part) * 2
    means = wide(tl.load(moments + at, mask=there, other=0.0))
    squares = wide(tl.load(moments + at + 1, mask=there, other=0.0))
    mean = tl.sum(means * size, 0) / count
    apart = tl.where(there, means - mean, 0.0)
    return mean, tl.sum(squares + apart * apart * size, 0)


@compiled
def channel_norm(
    x, mean, var, w, b, moments, out, new_mean, new_var, count: tl.int32, channels: tl.int32, inner: tl.int32,
    blocks: tl.int32, parts: tl.int32, each: tl.int32, eps: tl.float64, momentum: tl.float64,
    SCALE: tl.constexpr, TRAIN: tl.constexpr, ACROSS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute (x - mean) / √(var + eps) · w + b of ACROSS entries of a channel of x [N, C, inner].

    With TRAIN, mean and variance are those of the batch, and the channel's first program moves the running ones.
    """
    channel, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    here = channel < channels
    if TRAIN:
        center, square = _combined(moments, channel, count, parts, each, PARTS)
        spread = square / count
        if block == 0:
            old_mean = wide(tl.load(mean + channel, mask=here, other=0.0))
            old_var = wide(tl.load(var + channel, mask=here, other=0.0))
            pull = number(momentum, center)
            moved = old_mean * (1.0 - pull) + center.to(old_mean.dtype) * pull
            tl.store(new_mean + channel, narrow(moved, new_mean), mask=here)
            unbiased = square / tl.maximum(count - 1, 1)
            moved = old_var * (1.0 - pull) + unbiased.to(old_var.dtype) * pull
            tl.store(new_var + channel, narrow(moved, new_var), mask=here)
    else:
        center = wide(tl.load(mean + channel, mask=here, other=0.0))
        spread = wide(tl.load(var + channel, mask=here, other=1.0))
    at, inside = _entries(block * ACROSS, count, inner, channel, channels, ACROSS)
    values = wide(tl.load(x + at, mask=inside, other=0.0))
    center, spread = center.to(values.dtype), spread.to(values.dtype)
    unit = (values - center) * tl.rsqrt(spread + number(eps, spread))
    unit = _affine(unit, w, b, channel, here, SCALE)
    tl.store(out + at, narrow(unit, out), mask=inside)


def _takes_batch(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    x, mean, var, *scale = ins
    if not {mean.dtype, var.dtype} <= {*FLOATS} or (mean.dtype == torch.float64) != (x.dtype == torch.float64):
        return f"x is {x.dtype}, its running statistics are {mean.dtype}"
    contiguous = all(t.is_contiguous() for t in (*ins, *outs))
    if x.numel() >= 2**31:
        return "the operand has 2**31 entries or more"
    return one_float([x, *scale, outs[0]]) or ("" if contiguous else "an operand is not contiguous")


def _split(x: Spec | torch.Tensor) -> tuple[int, int, int, int, int]:
    """Return (entries of a channel, channels, positions, parts of a channel, entries of a part)."""
    shape = [int(n) for n in x.shape]
    inner = prod(shape[2:])
    count = shape[0] * inner
    parts = min(PARTS, max(1, -(-count // (4 * ACROSS))))
    each = -(-count // parts) if count else 1
    return count, shape[1], max(inner, 1), -(-count // each) or 1, each


def _normed(outs: Tensors, ins: Tensors, attrs: Attrs, moments: torch.Tensor | None) -> Launch:
    x, mean, var, *scale = ins
    w, b = (*scale, x, x)[:2]
    count, channels, inner, parts, each = _split(x)
    out, new_mean, new_var = (*outs, x, x)[:3]
    blocks = -(-count // ACROSS)
    args = (x, mean, var, w, b, x if moments is None else moments, out, new_mean, new_var, count, channels, inner,
            blocks, parts, each, attrs["eps"], attrs.get("momentum", 0.0))  # fmt: skip
    constants = {"SCALE": len(scale), "TRAIN": moments is not None, "ACROSS": ACROSS, "PARTS": PARTS}
    return Launch(channel_norm, (channels * blocks,), args, constants)


@kernel("batch_norm", takes=_takes_batch)
def batch_norm(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Launch:
    return _normed(outs, ins, attrs, None)


def _moments(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    x = ins[0]
    _, channels, _, parts, _ = _split(x)
    return [Spec((channels, parts, 2), statistic(x.dtype))]


@kernel("batch_norm_train", _moments, takes=_takes_batch)
def batch_norm_train(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Launch]:
    x, (moments,) = ins[0], work
    count, channels, inner, parts, each = _split(x)
    args = (x, moments, count, channels, inner, parts, each)
    first = Launch(channel_moments, (channels * parts,), args, {"ACROSS": ACROSS})
    return [first, _normed(outs, ins, attrs, moments)]
