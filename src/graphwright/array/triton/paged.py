"""KV caches: attention over pages, and writing new entries to caches. Tables of pages and lengths stay on the device.

Where the CPU raises an error for a page that is missing, the queries that need it become NaN, and nothing is written.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, copy_to_outputs
from graphwright.array.triton.attention import FEW, load_vectors, put_vectors, rows_of, softcapped
from graphwright.array.triton.block_attention import product
from graphwright.array.triton.kernel import ALL_REGISTERS, Launch, compiled, kernel
from graphwright.array.triton.launch import aligned_heads, padded
from graphwright.array.triton.rows import multiple, number

LOWEST = tl.constexpr(float("-inf"))
ROWS, COLUMNS, WARPS = 64, 32, 8
ENTRIES = 16
"""Entries of a cache that a program writes."""


@triton.jit
def _pages(table, sequence, position, there, blocks, block, pages):
    """Return the page of each position of a sequence, its offset in the page, and whether there is such a page."""
    column = position // block
    listed = there & (position >= 0) & (column < blocks)
    page = tl.load(table + sequence * blocks + column, mask=listed, other=-1)
    return page, position % block, listed & (page >= 0) & (page < pages)


@triton.jit
def _shared(x, dtype):
    """Convert an operand of a product to the dtype that holds it and numbers of `dtype`: float32 if they differ."""
    if x.dtype == dtype:
        return x
    else:
        return x.to(tl.float32)


@compiled
def attend_pages(
    q, k, v, table, lengths, sinks, out, queries: tl.int32, groups: tl.int32, share: tl.int32, width: tl.int32,
    value_width: tl.int32, tiles: tl.int32, window: tl.int32, pages: tl.int32, block: tl.int32, blocks: tl.int32,
    scale: tl.float64, softcap: tl.float64, q_n: tl.int64, q_h: tl.int64, q_t: tl.int64,
    k_page: tl.int64, k_h: tl.int64, k_t: tl.int64, v_page: tl.int64, v_h: tl.int64, v_t: tl.int64,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute out [B, H, T, Dv], row-major, of queries at positions lengths[b] + t; programs as in `attend`."""
    width, q_h, q_t = multiple(width, ALIGNED), multiple(q_h, ALIGNED), multiple(q_t, ALIGNED)
    value_width, k_h, k_t = multiple(value_width, ALIGNED), multiple(k_h, ALIGNED), multiple(k_t, ALIGNED)
    v_h, v_t, q_n = multiple(v_h, ALIGNED), multiple(v_t, ALIGNED), multiple(q_n, ALIGNED)
    k_page, v_page = multiple(k_page, ALIGNED), multiple(v_page, ALIGNED)
    pair = tl.program_id(0) // tiles
    group, n = pair % groups, (pair // groups).to(tl.int64)
    member, t, inside = rows_of(tl.program_id(0) % tiles, queries, share, ROWS)
    head = (group * share + member).to(tl.int64)
    start = tl.load(lengths + n, mask=queries > 0, other=-1).to(tl.int32)
    position = t + start
    q_tile = load_vectors(q + n * q_n, head * q_h + t * q_t, 1, inside, width, D)
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        top = tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32)
        total = tl.full([ROWS], 1.0, tl.float32)
    mixed = tl.zeros([ROWS, DV], tl.float32)
    stop = tl.max(tl.where(inside, position, -1), 0) + 1
    stop = tl.where(start < 0, 0, stop)
    first = 0
    if WINDOW:
        first = tl.maximum(tl.min(tl.where(inside, position, stop), 0) - window + 1, 0) // COLUMNS * COLUMNS
    for at in range(first, stop, COLUMNS):
        columns = at + tl.arange(0, COLUMNS)
        page, offset, known = _pages(table, n, columns, columns < stop, blocks, block, pages)
        page, offset = page.to(tl.int64), offset.to(tl.int64)
        k_tile = load_vectors(k, page * k_page + group * k_h + offset * k_t, 1, known, width, D)
        s = product(_shared(q_tile, k_tile.dtype), tl.trans(_shared(k_tile, q_tile.dtype)), WIDE)
        s, _ = softcapped(s * number(scale, s), softcap, SOFTCAP)
        seen = inside[:, None] & (columns[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (columns[None, :] > position[:, None] - window)
        s = tl.where(seen, tl.where(known[None, :], s, float("nan")), LOWEST)
        highest = tl.maximum(top, tl.max(s, 1))
        base = tl.where(highest > LOWEST, highest, 0.0)
        e = tl.exp(s - base[:, None])
        kept = tl.exp(top - base)
        total = total * kept + tl.sum(e, 1)
        v_tile = load_vectors(v, page * v_page + group * v_h + offset * v_t, 1, known, value_width, DV)
        values = _shared(v_tile, q_tile.dtype)
        mixed = mixed * kept[:, None] + product(e.to(values.dtype), values, WIDE)
        top = highest
    result = mixed / tl.where(total == 0, 1.0, total)[:, None]
    rows = (n * groups * share + head) * queries + t
    put_vectors(out, rows, value_width, inside, value_width, result, DV)


@compiled
def append_entries(
    cache, rows, table, starts, count: tl.int32, groups: tl.int32, width: tl.int32, room: tl.int32, pages: tl.int32,
    blocks: tl.int32, tiles: tl.int32, cache_n: tl.int64, cache_h: tl.int64, cache_t: tl.int64,
    rows_n: tl.int64, rows_h: tl.int64, rows_t: tl.int64,
    ENTRIES: tl.constexpr, PADDED: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Write entries [B, G, count, width] to a cache from the position `starts` on; a program per ENTRIES of a head.

    The cache is [B, G, room, width], or with PAGED a pool [pages, G, room, width] of blocks. A sequence whose entries
    do not all fit, or whose start is negative, is left as it is.
    """
    pair = tl.program_id(0) // tiles
    group, n = (pair % groups).to(tl.int64), (pair // groups).to(tl.int64)
    t = (tl.program_id(0) % tiles) * ENTRIES + tl.arange(0, ENTRIES)
    there = t < count
    rows_at = n * rows_n + group * rows_h + t.to(tl.int64) * rows_t
    if PAGED:
        start = tl.load(starts + n, mask=count > 0, other=-1).to(tl.int32)
        missing = 0
        for first in range(0, count, ENTRIES):  # nothing is written if a page is missing
            position = start + first + tl.arange(0, ENTRIES)
            wanted = first + tl.arange(0, ENTRIES) < count
            _, _, known = _pages(table, n, position, wanted, blocks, room, pages)
            missing += tl.sum((wanted & (known == 0)).to(tl.int32), 0)
        page, offset, known = _pages(table, n, start + t, there, blocks, room, pages)
        there = there & known & (missing + 0 * t == 0) & (start + 0 * t >= 0)
        to = page.to(tl.int64) * cache_n + group * cache_h + offset.to(tl.int64) * cache_t
    else:
        start = tl.load(starts, mask=count > 0, other=-1).to(tl.int32)
        there = there & (start + 0 * t >= 0) & (start + count + 0 * t <= room)
        to = n * cache_n + group * cache_h + (start + t).to(tl.int64) * cache_t
    values = load_vectors(rows, rows_at, 1, there, width, PADDED)
    put_vectors(cache, to, 1, there, width, values, PADDED)


def _low(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Return whether products are of 16-bit numbers."""
    return q.element_size() == 2 and q.dtype == k.dtype


def _takes(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    q, k, v, *rest = ins
    if max(q.shape[3], v.shape[3]) > (256 if _low(q, k) else 128) or q.element_size() > 4:
        return f"no kernel for {q.dtype} and heads of {q.shape[3]} and {v.shape[3]}"
    if k.element_size() > 4 or min(q.shape[3], v.shape[3]) == 0:
        return f"no kernel for a cache of {k.dtype}"
    if any(t.shape[-1] > 1 and t.stride(-1) != 1 for t in (q, k, v)):
        return "the entries of a head are not contiguous"
    return "" if all(t.is_contiguous() for t in (*rest, *outs)) else "a table or the result is not contiguous"


def _tile(low: bool, width: int, aligned: bool) -> tuple[int, int]:
    """Return the most rows and keys of a tile, for products of 16-bit numbers if `low`, without spills.

    If sizes and strides are not aligned, each element has an address of its own in registers.
    """
    if not aligned:
        return 32 if width <= 64 else FEW, COLUMNS if width <= 64 or (low and width <= 128) else 16
    return ROWS if low and width <= 128 else 32 if low or width <= 64 else FEW, COLUMNS


@kernel("sdpa_paged", takes=_takes)
def sdpa_paged(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Launch:
    (q, k, v, table, lengths, *sinks), (out,) = ins, outs
    (batch, heads, queries, width), (pages, groups, block, value_width) = q.shape, v.shape
    share = heads // max(groups, 1)
    window, cap = attrs["window"], attrs["softcap"]
    strides = [s for t in (q, k, v) for s in t.stride()[:3]]
    aligned = aligned_heads(q, k, v)
    large, columns = _tile(_low(q, k), max(width, value_width), aligned)
    rows = FEW if share * queries <= FEW else large
    tiles = -(-share * queries // rows)
    numbers = (queries, groups, share, width, value_width, tiles, window or 0, pages, block, table.shape[1],
               attrs["scale"], 1.0 if cap is None else cap, *strides)  # fmt: skip
    constants: dict[str, Any] = {
        "ROWS": rows, "COLUMNS": columns, "D": padded(width), "DV": padded(value_width), "WINDOW": window is not None,
        "SOFTCAP": cap is not None, "SINKS": len(sinks) > 0,
        "ALIGNED": aligned, "WIDE": knobs.runtime.interpret,
    }  # fmt: skip
    args = (q, k, v, table, lengths, (*sinks, q)[0], out, *numbers)
    warps = 4 if rows == FEW and aligned else WARPS
    return Launch(attend_pages, (tiles * batch * groups,), args, constants, warps, 2, ALL_REGISTERS)


def _takes_append(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    cache, rows, *tables = ins
    if any(t.shape[-1] > 1 and t.stride(-1) != 1 for t in (cache, rows, outs[0])):
        return "the entries of a head are not contiguous"
    if rows.shape[-1] > 256:
        return f"heads of {rows.shape[-1]}"
    return "" if all(t.is_contiguous() for t in tables) else "a table is not contiguous"


def _append(outs: Tensors, ins: Tensors, paged: bool) -> list[Call]:
    cache, rows, *tables = ins
    batch, groups, count, width = rows.shape
    pages, _, room, _ = cache.shape
    table, starts = tables if paged else (tables[0], tables[0])
    tiles = -(-count // ENTRIES)
    numbers = (count, groups, width, room, pages, table.shape[1] if paged else 0, tiles)
    strides = (*outs[0].stride()[:3], *rows.stride()[:3])
    constants = {"ENTRIES": ENTRIES, "PADDED": padded(width), "PAGED": paged}
    args = (outs[0], rows, table, starts, *numbers, *strides)
    return [*copy_to_outputs(outs, [cache]), Launch(append_entries, (tiles * batch * groups,), args, constants)]


@kernel("kv_append", takes=_takes_append)
def kv_append(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    return _append(outs, ins, paged=False)


@kernel("kv_append_paged", takes=_takes_append)
def kv_append_paged(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    return _append(outs, ins, paged=True)
