"""Scaled dot-product attention and its gradients, with an online softmax over tiles of keys.

A program has rows of one batch element and key head: the queries of all heads that share the key head, head by head, so
that decoding with few queries reads each key once. The backward pass recomputes the log-sum-exp of each row with dq,
then computes dk and dv, a program per tile of keys: no two programs write the same entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from graphwright.array.backend import Attrs
from graphwright.array.cpu.kernel import Tensors
from graphwright.array.dtype import float32
from graphwright.array.spec import Spec
from graphwright.array.triton.block_attention import product
from graphwright.array.triton.kernel import (
    ALL_REGISTERS,
    Launch,
    Tiles,
    TileTable,
    compiled,
    kernel,
    one_float,
    tiles_of,
)
from graphwright.array.triton.launch import aligned_heads, padded
from graphwright.array.triton.rows import multiple, narrow, number, tanh, wide

LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def load_vectors(base, rows, step, inside_rows, width, PADDED: tl.constexpr):
    """Load vectors [rows, PADDED] at row offsets `rows`·step, 0 outside."""
    lane = tl.arange(0, PADDED)[None, :]
    at = base + rows.to(tl.int64)[:, None] * step + lane
    return tl.load(at, mask=inside_rows[:, None] & (lane < width), other=0.0)


@triton.jit
def put_vectors(base, rows, step, inside_rows, width, values, PADDED: tl.constexpr):
    """Store the counterpart of `load_vectors`."""
    lane = tl.arange(0, PADDED)[None, :]
    at = base + rows.to(tl.int64)[:, None] * step + lane
    tl.store(at, narrow(values, base), mask=inside_rows[:, None] & (lane < width))


@triton.jit
def softcapped(s, softcap, SOFTCAP: tl.constexpr):
    """Return c·tanh(s / c) and its slope; s and 1 without a softcap."""
    slope = tl.full(s.shape, 1.0, s.dtype)
    if SOFTCAP:
        cap = number(softcap, s)
        part = tanh(s / cap)
        s = part * cap
        slope = 1.0 - part * part
    return s, slope


@triton.jit
def _scores(
    q, k, position, columns, inside_rows, keys, scale, softcap, window, key_mask, bias, bias_rows, bias_key,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PADDING: tl.constexpr, BIAS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Return scores [rows, keys] of tiles, -inf for keys that a row does not see, and their slopes by q·k."""
    s = product(q, tl.trans(k), WIDE)
    factor = number(scale, s)
    s, slope = softcapped(s * factor, softcap, SOFTCAP)
    seen = inside_rows[:, None] & (columns < keys)[None, :]
    if CAUSAL:
        seen = seen & (columns[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (columns[None, :] > position[:, None] - window)
    if PADDING:
        seen = seen & (tl.load(key_mask + columns, mask=columns < keys, other=0) != 0)[None, :]
    if BIAS > 0:
        added = tl.load(bias + bias_rows[:, None] + columns[None, :] * bias_key, mask=seen, other=0)
        if BIAS == 2:
            seen = seen & (added != 0)
        else:
            s = s + added.to(tl.float32)
    return tl.where(seen, s, LOWEST), slope * factor


@triton.jit
def rows_of(block, queries, share, ROWS: tl.constexpr):
    """Return head within the group, query, and whether there is such a row, of the rows of a program."""
    row = block * ROWS + tl.arange(0, ROWS)
    return row // queries, row % queries, row < share * queries


@triton.jit
def first_position(q_start, queries, keys, START: tl.constexpr):
    """Return the position of the first query: q_start, or such that the last query has that of the last key."""
    start = keys - queries
    if START:
        start = tl.load(q_start, mask=queries > 0, other=0).to(tl.int32)
    return start


@triton.jit
def _span(position, inside, keys, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the first key, a multiple of COLUMNS, and the end of the keys that some row can see."""
    first, stop = 0, keys
    if CAUSAL:
        stop = tl.minimum(keys, tl.max(tl.where(inside, position, -1), 0) + 1)
        if WINDOW:
            least = tl.min(tl.where(inside, position, keys), 0)
            first = tl.maximum(least - window + 1, 0) // COLUMNS * COLUMNS
    return first, stop


@compiled
def attend(
    q, k, v, key_mask, q_start, bias, sinks, out, queries: tl.int32, keys: tl.int32, groups: tl.int32, share: tl.int32,
    width: tl.int32, value_width: tl.int32, blocks: tl.int32, window: tl.int32, scale: tl.float64, softcap: tl.float64,
    q_n: tl.int64, q_h: tl.int64, q_t: tl.int64, k_n: tl.int64, k_h: tl.int64, k_t: tl.int64,
    v_n: tl.int64, v_h: tl.int64, v_t: tl.int64, bias_n: tl.int32, bias_h: tl.int32, bias_q: tl.int32, bias_k: tl.int32,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PADDING: tl.constexpr, START: tl.constexpr, BIAS: tl.constexpr,
    SINKS: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute out [B, H, Tq, Dv], row-major; a program per (rows of a group, key head, batch element)."""
    width, q_h, q_t = multiple(width, ALIGNED), multiple(q_h, ALIGNED), multiple(q_t, ALIGNED)
    value_width, k_h, k_t = multiple(value_width, ALIGNED), multiple(k_h, ALIGNED), multiple(k_t, ALIGNED)
    v_h, v_t = multiple(v_h, ALIGNED), multiple(v_t, ALIGNED)
    q_n, k_n, v_n = multiple(q_n, ALIGNED), multiple(k_n, ALIGNED), multiple(v_n, ALIGNED)
    pair = tl.program_id(0) // blocks
    group, n = pair % groups, (pair // groups).to(tl.int64)
    member, t, inside = rows_of(tl.program_id(0) % blocks, queries, share, ROWS)
    head = (group * share + member).to(tl.int64)
    start = first_position(q_start, queries, keys, START)
    position = t + start
    q_tile = load_vectors(q + n * q_n, head * q_h + t * q_t, 1, inside, width, D)
    k_base, v_base = k + n * k_n + group * k_h, v + n * v_n + group * v_h
    bias_rows = (n * bias_n + head * bias_h).to(tl.int32) + t * bias_q
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        top = tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32)
        total = tl.full([ROWS], 1.0, tl.float32)
    mixed = tl.zeros([ROWS, DV], tl.float32)
    first, stop = _span(position, inside, keys, window, CAUSAL, WINDOW, COLUMNS)
    for at in range(first, stop, COLUMNS):
        columns = at + tl.arange(0, COLUMNS)
        there = columns < keys
        k_tile = load_vectors(k_base, columns, k_t, there, width, D)
        s, _ = _scores(q_tile, k_tile, position, columns, inside, keys, scale, softcap, window, key_mask + n * keys,
                       bias, bias_rows, bias_k, CAUSAL, WINDOW, SOFTCAP, PADDING, BIAS, WIDE)  # fmt: skip
        highest = tl.maximum(top, tl.max(s, 1))
        base = tl.where(highest > LOWEST, highest, 0.0)
        e = tl.exp(s - base[:, None])
        kept = tl.exp(top - base)
        total = total * kept + tl.sum(e, 1)
        v_tile = load_vectors(v_base, columns, v_t, there, value_width, DV)
        mixed = mixed * kept[:, None] + product(e.to(v_tile.dtype), v_tile, WIDE)
        top = highest
    result = mixed / tl.where(total > 0, total, 1.0)[:, None]
    rows = (n * groups * share + head) * queries + t
    put_vectors(out, rows, value_width, inside, value_width, result, DV)


@compiled
def attend_slopes(
    q, k, v, key_mask, q_start, bias, sinks, out, grad, dq, lse, less,
    queries: tl.int32, keys: tl.int32, groups: tl.int32, share: tl.int32,
    width: tl.int32, value_width: tl.int32, blocks: tl.int32, window: tl.int32, scale: tl.float64, softcap: tl.float64,
    q_n: tl.int64, q_h: tl.int64, q_t: tl.int64, k_n: tl.int64, k_h: tl.int64, k_t: tl.int64,
    v_n: tl.int64, v_h: tl.int64, v_t: tl.int64, bias_n: tl.int32, bias_h: tl.int32, bias_q: tl.int32, bias_k: tl.int32,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PADDING: tl.constexpr, START: tl.constexpr, BIAS: tl.constexpr,
    SINKS: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute dq, the log-sum-exp of each row and `less` = Σ grad·out, [B, H, Tq]; programs as in `attend`."""
    width, q_h, q_t = multiple(width, ALIGNED), multiple(q_h, ALIGNED), multiple(q_t, ALIGNED)
    value_width, k_h, k_t = multiple(value_width, ALIGNED), multiple(k_h, ALIGNED), multiple(k_t, ALIGNED)
    v_h, v_t = multiple(v_h, ALIGNED), multiple(v_t, ALIGNED)
    q_n, k_n, v_n = multiple(q_n, ALIGNED), multiple(k_n, ALIGNED), multiple(v_n, ALIGNED)
    pair = tl.program_id(0) // blocks
    group, n = pair % groups, (pair // groups).to(tl.int64)
    member, t, inside = rows_of(tl.program_id(0) % blocks, queries, share, ROWS)
    head = (group * share + member).to(tl.int64)
    start = first_position(q_start, queries, keys, START)
    position = t + start
    rows = (n * groups * share + head) * queries + t
    q_tile = load_vectors(q + n * q_n, head * q_h + t * q_t, 1, inside, width, D)
    k_base, v_base = k + n * k_n + group * k_h, v + n * v_n + group * v_h
    bias_rows = (n * bias_n + head * bias_h).to(tl.int32) + t * bias_q
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        top = tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32)
        total = tl.full([ROWS], 1.0, tl.float32)
    first, stop = _span(position, inside, keys, window, CAUSAL, WINDOW, COLUMNS)
    for at in range(first, stop, COLUMNS):
        columns = at + tl.arange(0, COLUMNS)
        k_tile = load_vectors(k_base, columns, k_t, columns < keys, width, D)
        s, _ = _scores(q_tile, k_tile, position, columns, inside, keys, scale, softcap, window, key_mask + n * keys,
                       bias, bias_rows, bias_k, CAUSAL, WINDOW, SOFTCAP, PADDING, BIAS, WIDE)  # fmt: skip
        highest = tl.maximum(top, tl.max(s, 1))
        base = tl.where(highest > LOWEST, highest, 0.0)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(s - base[:, None]), 1)
        top = highest
    sums = tl.where(total == 0, LOWEST, top + tl.log(tl.where(total == 0, 1.0, total)))  # NaN stays
    g_tile = load_vectors(grad, rows, value_width, inside, value_width, DV)
    o_tile = load_vectors(out, rows, value_width, inside, value_width, DV)
    subtracted = tl.sum(wide(g_tile) * wide(o_tile), 1)
    tl.store(lse + rows, sums, mask=inside)
    tl.store(less + rows, subtracted, mask=inside)
    level = tl.where(sums == LOWEST, 0.0, sums)[:, None]
    slopes = tl.zeros([ROWS, D], tl.float32)
    for at in range(first, stop, COLUMNS):
        columns = at + tl.arange(0, COLUMNS)
        there = columns < keys
        k_tile = load_vectors(k_base, columns, k_t, there, width, D)
        s, slope = _scores(q_tile, k_tile, position, columns, inside, keys, scale, softcap, window, key_mask + n * keys,
                           bias, bias_rows, bias_k, CAUSAL, WINDOW, SOFTCAP, PADDING, BIAS, WIDE)  # fmt: skip
        v_tile = load_vectors(v_base, columns, v_t, there, value_width, DV)
        ds = tl.exp(s - level) * (product(g_tile, tl.trans(v_tile), WIDE) - subtracted[:, None]) * slope
        slopes += product(ds.to(k_tile.dtype), k_tile, WIDE)
    put_vectors(dq, rows, width, inside, width, slopes, D)


@compiled
def key_slopes(
    q, k, v, key_mask, q_start, bias, lse, less, grad, dk, dv,
    queries: tl.int32, keys: tl.int32, groups: tl.int32, share: tl.int32,
    width: tl.int32, value_width: tl.int32, blocks: tl.int32, window: tl.int32, scale: tl.float64, softcap: tl.float64,
    q_n: tl.int64, q_h: tl.int64, q_t: tl.int64, k_n: tl.int64, k_h: tl.int64, k_t: tl.int64,
    v_n: tl.int64, v_h: tl.int64, v_t: tl.int64, bias_n: tl.int32, bias_h: tl.int32, bias_q: tl.int32, bias_k: tl.int32,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PADDING: tl.constexpr, START: tl.constexpr, BIAS: tl.constexpr,
    ALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of COLUMNS keys of one key head, row-major; the query heads of the group add up in order."""
    width, q_h, q_t = multiple(width, ALIGNED), multiple(q_h, ALIGNED), multiple(q_t, ALIGNED)
    value_width, k_h, k_t = multiple(value_width, ALIGNED), multiple(k_h, ALIGNED), multiple(k_t, ALIGNED)
    v_h, v_t = multiple(v_h, ALIGNED), multiple(v_t, ALIGNED)
    q_n, k_n, v_n = multiple(q_n, ALIGNED), multiple(k_n, ALIGNED), multiple(v_n, ALIGNED)
    pair = tl.program_id(0) // blocks
    group, n = pair % groups, (pair // groups).to(tl.int64)
    first_key = (tl.program_id(0) % blocks) * COLUMNS
    columns = first_key + tl.arange(0, COLUMNS)
    there = columns < keys
    start = first_position(q_start, queries, keys, START)
    k_tile = load_vectors(k + n * k_n + group * k_h, columns, k_t, there, width, D)
    v_tile = load_vectors(v + n * v_n + group * v_h, columns, v_t, there, value_width, DV)
    k_total = tl.zeros([COLUMNS, D], tl.float32)
    v_total = tl.zeros([COLUMNS, DV], tl.float32)
    first, stop = 0, queries
    if CAUSAL:  # queries that see some key of the tile
        first = tl.maximum(first_key - start, 0) // ROWS * ROWS
        if WINDOW:
            stop = tl.maximum(tl.minimum(queries, first_key + COLUMNS - 1 + window - start), 0)
    for member in range(0, share):
        head = (group * share + member).to(tl.int64)
        for at in range(first, stop, ROWS):
            t = at + tl.arange(0, ROWS)
            inside = t < queries
            rows = (n * groups * share + head) * queries + t
            q_tile = load_vectors(q + n * q_n + head * q_h, t, q_t, inside, width, D)
            bias_rows = (n * bias_n + head * bias_h).to(tl.int32) + t * bias_q
            s, slope = _scores(q_tile, k_tile, t + start, columns, inside, keys, scale, softcap, window,
                               key_mask + n * keys, bias, bias_rows, bias_k,
                               CAUSAL, WINDOW, SOFTCAP, PADDING, BIAS, WIDE)  # fmt: skip
            sums = tl.load(lse + rows, mask=inside, other=0.0).to(tl.float32)
            subtracted = tl.load(less + rows, mask=inside, other=0.0).to(tl.float32)
            p = tl.exp(s - tl.where(sums == LOWEST, 0.0, sums)[:, None])
            g_tile = load_vectors(grad, rows, value_width, inside, value_width, DV)
            v_total += product(tl.trans(p).to(g_tile.dtype), g_tile, WIDE)
            ds = p * (product(g_tile, tl.trans(v_tile), WIDE) - subtracted[:, None]) * slope
            k_total += product(tl.trans(ds).to(q_tile.dtype), q_tile, WIDE)
    written = pair.to(tl.int64) * keys + columns
    put_vectors(dk, written, width, there, width, k_total, D)
    put_vectors(dv, written, value_width, there, value_width, v_total, DV)


FEW = 16
"""Rows of the tiles for up to so many queries of a group, as in decoding."""
TILES: dict[str, TileTable] = {
    "attend": {
        (2, 64): (Tiles(128, 64, 8, 3), Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 1), Tiles(32, 64, 8, 1)),
        (2, 128): (Tiles(128, 32, 8, 3), Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 1), Tiles(16, 32, 8, 1)),
        (2, 256): (Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 2), Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1)),
        (4, 64): (Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
        (4, 128): (Tiles(32, 32, 8, 2), Tiles(16, 32, 4, 1), Tiles(16, 32, 8, 1), Tiles(16, 32, 8, 1)),
    },
    "attend_slopes": {
        (2, 64): (Tiles(64, 64, 4, 2), Tiles(64, 32, 8, 2), Tiles(64, 64, 8, 1), Tiles(32, 32, 8, 1)),
        (2, 128): (Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 1), Tiles(16, 32, 8, 1)),
        (2, 256): (Tiles(32, 64, 8, 2), Tiles(16, 32, 4, 2), Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1)),
        (4, 64): (Tiles(16, 32, 4, 1), Tiles(16, 32, 4, 1), Tiles(16, 32, 8, 1), Tiles(16, 32, 8, 1)),
        (4, 128): (Tiles(16, 16, 8, 1), None, None, None),
    },
    "key_slopes": {
        (2, 64): (Tiles(32, 64, 8, 2), Tiles(32, 32, 4, 2), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
        (2, 128): (Tiles(32, 64, 8, 2), Tiles(32, 32, 4, 2), Tiles(32, 32, 8, 1), Tiles(16, 32, 8, 1)),
        (2, 256): (Tiles(32, 32, 8, 1), Tiles(16, 32, 8, 1), Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1)),
        (4, 64): (Tiles(16, 32, 8, 1), Tiles(16, 16, 4, 1), Tiles(16, 32, 8, 1), Tiles(16, 16, 8, 1)),
        (4, 128): (Tiles(16, 16, 8, 1), None, None, None),
    },
}  # fmt: skip
"""Kernel -> its largest tiles without spills; a form is rich with a bias or a softcap."""


class _Bound:
    """Arguments that the kernels share."""

    def __init__(self, ins: Tensors, attrs: Attrs) -> None:
        self.q, self.k, self.v = ins[:3]
        given = dict(zip(attrs["optional"], ins[3:], strict=False))
        batch, heads, queries, width = self.q.shape
        groups, self.keys, value_width = *self.k.shape[1:3], self.v.shape[3]
        share = heads // max(groups, 1)
        self.rows, self.pairs = share * queries, batch * groups
        key_mask, start, bias, sinks = (given.get(name) for name in ("key_mask", "q_start", "bias", "sinks"))
        # an argument that is not given is any tensor
        self.operands = [self.q if t is None else _raw(t) for t in (key_mask, start, bias)]
        self.sinks = self.q if sinks is None else sinks
        self.sizes = (queries, self.keys, groups, share, width, value_width)
        cap, window = attrs["softcap"], attrs["window"] if attrs["causal"] else None
        strides = [s for t in ins[:3] for s in t.stride()[:3]]
        of_bias = [0] * 4
        if bias is not None:
            spread = bias.expand(batch, heads, queries, self.keys)
            of_bias = [step if n > 1 else 0 for n, step in zip(spread.shape, spread.stride(), strict=True)]
        self.numbers = (window or 0, attrs["scale"], 1.0 if cap is None else cap, *strides, *of_bias)
        self.form = _form(*ins[:3], attrs)
        self.constants: dict[str, Any] = {
            "D": padded(width), "DV": padded(value_width), "CAUSAL": attrs["causal"], "WINDOW": window is not None,
            "SOFTCAP": cap is not None, "PADDING": key_mask is not None, "START": start is not None,
            "BIAS": 0 if bias is None else 2 if bias.dtype == torch.bool else 1,
            "ALIGNED": self.form[3], "WIDE": knobs.runtime.interpret,
        }  # fmt: skip
        self.with_sinks = {"SINKS": sinks is not None}

    def launch(self, function: Any, tensors: Sequence[torch.Tensor], by_rows: bool, **constants: bool) -> Launch:
        """Return the launch of a kernel, a program per tile of rows, or of keys, of a batch element and key head."""
        tiles = tiles_of(TILES[function.__name__], *self.form)
        assert tiles is not None, "_takes refuses the others"
        if by_rows and self.rows <= FEW:
            tiles = tiles._replace(rows=FEW, warps=4 if self.form[3] else tiles.warps)
        blocks = -(-self.rows // tiles.rows) if by_rows else -(-self.keys // tiles.columns)
        args = (self.q, self.k, self.v, *self.operands, *tensors, *self.sizes, blocks, *self.numbers)
        constants = {"ROWS": tiles.rows, "COLUMNS": tiles.columns, **self.constants, **constants}
        return Launch(function, (blocks * self.pairs,), args, constants, tiles.warps, tiles.stages, ALL_REGISTERS)


def _raw(t: torch.Tensor) -> torch.Tensor:
    """View a bool tensor as bytes."""
    return t.view(torch.uint8) if t.dtype == torch.bool else t


def _form(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attrs: Attrs) -> tuple[int, int, bool, bool]:
    """Return what the tiles depend on, as arguments of `tiles_of`."""
    rich = "bias" in attrs["optional"] or attrs["softcap"] is not None
    return q.element_size(), padded(max(q.shape[3], v.shape[3])), rich, aligned_heads(q, k, v)


def _reach(t: torch.Tensor) -> int:
    """Return the largest offset of an entry from the first."""
    return sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))


def _takes(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    q, k, v, *rest = ins
    given = dict(zip(attrs["optional"], rest, strict=False))
    tiles = TILES["attend"] if len(outs) == 1 else TILES["attend_slopes"]
    if tiles_of(tiles, *_form(q, k, v, attrs)) is None or min(q.shape[3], v.shape[3]) == 0:
        return f"no tiles for {q.dtype}, heads of {q.shape[3]} and {v.shape[3]}, and these options"
    if "bias" in given and (reach := _reach(given["bias"])) >= 2**31:
        return f"a bias whose entries are up to {reach} apart"
    if any(t.shape[-1] > 1 and t.stride(-1) != 1 for t in (q, k, v)):
        return "the entries of a head are not contiguous"
    contiguous = (*outs, *rest[len(given) :], *(t for name, t in given.items() if name != "bias"))
    if not all(t.is_contiguous() for t in contiguous):
        return "a result, a mask or a gradient is not contiguous"
    return one_float([q, k, v, *outs])


@kernel("sdpa", takes=_takes)
def sdpa(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Launch:
    b = _Bound(ins, attrs)
    return b.launch(attend, [b.sinks, outs[0]], True, **b.with_sinks)


def _row_scratch(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    return [Spec(ins[0].shape[:3], float32)] * 2


@kernel("sdpa_backward", _row_scratch, takes=_takes)
def sdpa_backward(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Launch]:
    """Compute dq with the log-sum-exp and Σ grad·out of rows, then dk and dv."""
    *ins, out, grad = ins
    (dq, dk, dv), (lse, less), b = outs, work, _Bound(ins, attrs)
    return [
        b.launch(attend_slopes, [b.sinks, out, grad, dq, lse, less], True, **b.with_sinks),
        b.launch(key_slopes, [lse, less, grad, dk, dv], False),
    ]
