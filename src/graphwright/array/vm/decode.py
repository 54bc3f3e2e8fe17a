"""Attention query by query over cached keys, and appending rows to a cache.

One pass over the keys with a running maximum and sum (Milakov and Gimelshein 2018, "Online normalizer calculation for
softmax"), 16 keys at a time, of those keys only that a query sees. Where there is a block table, a key's row is found
through it: blocks may lie anywhere, and nothing is gathered.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from graphwright.array.vm.code import BYTES
from graphwright.array.vm.elementwise import F, cell, number
from graphwright.array.vm.llvm import (
    FLOATS,
    I8,
    I32,
    I64,
    INTS,
    LANES,
    aligned,
    first_lanes,
    intrinsic_call,
    joined,
    masked_load,
    masked_store,
    pointer,
)
from graphwright.array.vm.math import exp, native, tanh
from graphwright.array.vm.narrow import load_i32
from graphwright.array.vm.vector import (
    V,
    first,
    fma,
    i64,
    largest,
    load_first,
    load_i64,
    maximum,
    mul,
    select,
    splat,
    store_first,
    sub,
    total,
    void,
)

_ZERO = ir.Constant(FLOATS, None)


def _places(builder: Any, base: Any, stride: Any, count: Any) -> list[Any]:
    """Addresses of 16 rows; those from `count` on are the first one's again, so that no other memory is read."""
    return [
        builder.select(builder.icmp_signed(">", count, I64(r)), builder.add(base, builder.mul(stride, I64(r))), base)
        for r in range(LANES)
    ]


def _along(builder: Any, width: Any, start: list[Any], step: Any) -> list[Any]:
    """`step(offset in bytes, mask or None, carried) -> carried` for every 16 entries of `width`; what is carried."""
    whole = builder.and_(width, I64(-LANES))
    before = builder.block
    loop, rest, tail, done = (builder.append_basic_block(name) for name in ("full", "rest", "tail", "done"))
    builder.cbranch(builder.icmp_signed(">", whole, I64(0)), loop, rest)
    builder.position_at_end(loop)
    at = builder.phi(I64)
    carried = [builder.phi(FLOATS) for _ in start]
    grown = step(builder.mul(at, I64(4)), None, carried)
    next_at = builder.add(at, I64(LANES))
    for phi, first_value, then in ((at, I64(0), next_at), *zip(carried, start, grown, strict=True)):
        phi.add_incoming(first_value, before)
        phi.add_incoming(then, loop)
    builder.cbranch(builder.icmp_signed("<", next_at, whole), loop, rest)
    builder.position_at_end(rest)
    middle = [joined(builder, (a, before), (b, loop)) for a, b in zip(start, grown, strict=True)]
    builder.cbranch(builder.icmp_signed("<", whole, width), tail, done)
    builder.position_at_end(tail)
    last = step(builder.mul(whole, I64(4)), first_lanes(builder, builder.sub(width, whole)), middle)
    builder.branch(done)
    builder.position_at_end(done)
    return [joined(builder, (a, rest), (b, tail)) for a, b in zip(middle, last, strict=True)]


def _fetch(builder: Any, address: Any, mask: Any) -> Any:
    if mask is None:
        return aligned(builder.load(pointer(builder, address, FLOATS)), 4)
    return masked_load(builder, address, mask, FLOATS, "v16f32", 4)


def _sums(builder: Any, rows: list[Any]) -> Any:
    """The sum of each of 16 vectors, in one: four rounds that interleave row i with row i + half and add."""
    low = ir.Constant(INTS, [I32(i // 2 + LANES * (i % 2)) for i in range(LANES)])
    high = ir.Constant(INTS, [I32(8 + i // 2 + LANES * (i % 2)) for i in range(LANES)])
    while len(rows) > 1:
        half = len(rows) // 2
        rows = [
            builder.fadd(builder.shuffle_vector(a, b, low), builder.shuffle_vector(a, b, high))
            for a, b in zip(rows[:half], rows[half:], strict=True)
        ]
    return rows[0]


@intrinsic
def _scores(typingctx: Any, q: Any, k: Any, stride: Any, width: Any, count: Any) -> Any:
    """Products of q with `count` rows of `width`; lanes from `count` on mean nothing."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        q, k, stride, width, count = args
        rows = _places(builder, k, stride, count)

        def step(at: Any, mask: Any, sums: list[Any]) -> list[Any]:
            x = _fetch(builder, builder.add(q, at), mask)
            return [
                intrinsic_call(
                    builder, "llvm.fma.v16f32", FLOATS, x, _fetch(builder, builder.add(row, at), mask), s
                )
                for row, s in zip(rows, sums, strict=True)
            ]  # fmt: skip

        return _sums(builder, _along(builder, width, [_ZERO] * LANES, step))

    return V(i64, i64, i64, i64, i64), codegen


@intrinsic
def _weighted(typingctx: Any, out: Any, kept: Any, p: Any, v: Any, stride: Any, width: Any, count: Any) -> Any:
    """Out = kept · out + Σ p[r] · row r of v."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, kept, p, v, stride, width, count = args
        rows = _places(builder, v, stride, count)
        wide = [builder.shuffle_vector(p, p, ir.Constant(INTS, [I32(r)] * LANES)) for r in range(LANES)]

        def step(at: Any, mask: Any, carried: list[Any]) -> list[Any]:
            place = builder.add(out, at)
            even, odd = builder.fmul(_fetch(builder, place, mask), kept), _ZERO
            for r in range(0, LANES, 2):
                a, b = (_fetch(builder, builder.add(rows[i], at), mask) for i in (r, r + 1))
                even = intrinsic_call(builder, "llvm.fma.v16f32", FLOATS, wide[r], a, even)
                odd = intrinsic_call(builder, "llvm.fma.v16f32", FLOATS, wide[r + 1], b, odd)
            total = builder.fadd(even, odd)
            if mask is None:
                aligned(builder.store(total, pointer(builder, place, FLOATS)), 4)
            else:
                masked_store(builder, total, place, mask, "v16f32", 4)
            return []

        _along(builder, width, [], step)
        return ir.Constant(I8.as_pointer(), None)

    return void(i64, V, V, i64, i64, i64, i64), codegen


@native
def _filled(out: Any, value: Any, width: Any) -> None:
    for i in range(0, width, 16):
        store_first(out + 4 * i, splat(value), first(width - i))


@native
def attend_cached(row: Any) -> None:
    """Cells 1 first unit, 2 units, each a batch element's query head, 3 q, 4 k, 5 v, 6 out, 7 query heads, 8 key heads,
    9 queries, 10 entries of a key, 11 of a value, 12 address of the first query's place or 0, 13 that place if there is
    no address, 14 window or 0, 15 scale.

    The row behind it holds 0 to 2 bytes per batch element, head and key of k, 3 to 5 of v, 6 keys at most, 7 block
    table (int32) or 0, 8 its bytes per batch element, 9 keys in a block, 10 bytes of a block of k, 11 of v, 12 what
    scores are capped at or 0. With a table the places are int32, one per batch element; below 0 nobody asks, and the
    result is 0.
    """
    for unit in range(cell(row, 1), cell(row, 1) + cell(row, 2)):
        _attend_head(row, unit)


@native
def _attend_head(row: Any, unit: Any) -> None:
    more = row + BYTES
    heads, groups, queries = cell(row, 7), cell(row, 8), cell(row, 9)
    width, depth, window, scale = cell(row, 10), cell(row, 11), cell(row, 14), F(number(row, 15))
    cap = F(number(more, 12))
    b, h = unit // heads, unit % heads
    g = h // (heads // groups)
    step_k, step_v, table, block = cell(more, 2), cell(more, 5), cell(more, 7), cell(more, 9)
    start = cell(row, 13)
    if table:
        start = load_i32(cell(row, 12) + 4 * b)
        table += b * cell(more, 8)
    elif cell(row, 12):
        start = load_i64(cell(row, 12))
    k = cell(row, 4) + b * cell(more, 0) + g * cell(more, 1)
    v = cell(row, 5) + b * cell(more, 3) + g * cell(more, 4)
    for t in range(queries):
        q, out = (
            cell(row, 3) + 4 * width * (unit * queries + t),
            cell(row, 6) + 4 * depth * (unit * queries + t),
        )
        high = min(start + t + 1, cell(more, 6)) if start >= 0 else 0
        j = max(high - window, 0) if window else 0
        _filled(out, F(0.0), depth)
        if j >= high:
            continue
        low = splat(F(-np.inf))
        best, whole = low, splat(F(0.0))
        while j < high:
            count, at_k, at_v = min(16, high - j), k + j * step_k, v + j * step_v
            if table:
                inside, page = j % block, load_i32(table + 4 * (j // block))
                count = min(count, block - inside)
                at_k = k + page * cell(more, 10) + inside * step_k
                at_v = v + page * cell(more, 11) + inside * step_v
            products: Any = _scores(q, at_k, step_k, width, count)  # pyright: ignore[reportCallIssue]
            scores = mul(products, splat(scale))
            if cap:
                scores = mul(tanh(mul(scores, splat(F(1.0) / cap))), splat(cap))
            s = select(first(count), scores, low)
            top = splat(largest(maximum(s, best)))
            p, kept = exp(sub(s, top)), exp(sub(best, top))
            whole = fma(kept, whole, p)
            _weighted(out, kept, p, at_v, step_v, depth, count)
            best = top
            j += count
        share = splat(F(1.0) / total(whole))
        for i in range(0, depth, 16):
            mask = first(depth - i)
            store_first(out + 4 * i, mul(load_first(out + 4 * i, mask), share), mask)


@native
def kv_append(row: Any) -> Any:
    """Rows into a cache: cells 1 cache, 2 rows, 3 address of the start, 4 batch, 5 heads, 6 rows, 7 entries, 8 to 10
    bytes per batch element, head and row of the cache, 11 to 13 of the rows, 14 rows that the cache holds.

    Returns False, and writes nothing, if they do not fit.
    """
    start, rows, width = load_i64(cell(row, 3)), cell(row, 6), cell(row, 7)
    if start < 0 or start + rows > cell(row, 14):
        return False
    for b in range(cell(row, 4)):
        for g in range(cell(row, 5)):
            for t in range(rows):
                to = cell(row, 1) + b * cell(row, 8) + g * cell(row, 9) + (start + t) * cell(row, 10)
                at = cell(row, 2) + b * cell(row, 11) + g * cell(row, 12) + t * cell(row, 13)
                for i in range(0, width, 16):
                    mask = first(width - i)
                    store_first(to + 4 * i, load_first(at + 4 * i, mask), mask)
    return True


@native
def kv_scatter(row: Any) -> Any:
    """Rows into blocks of a pool: cells 1 pool, 2 rows, 3 block table (int32), 4 lengths (int32), 5 batch, 6 heads,
    7 rows, 8 entries, 9 rows in a block, 10 blocks in the table per batch element, 11 blocks in the pool, 12 to 14
    bytes per batch element, head and row of the rows. A length below 0 takes no rows.

    Returns False, and writes nothing, if a row has no block.
    """
    table, lengths, batch, rows, width = cell(row, 3), cell(row, 4), cell(row, 5), cell(row, 7), cell(row, 8)
    heads, block, most = cell(row, 6), cell(row, 9), cell(row, 10)
    for b in range(batch):
        start = load_i32(lengths + 4 * b)
        for t in range(rows if start >= 0 else 0):
            j = (start + t) // block
            if j >= most:
                return False
            page = load_i32(table + 4 * (b * most + j))
            if page < 0 or page >= cell(row, 11):
                return False
    for b in range(batch):
        start = load_i32(lengths + 4 * b)
        for t in range(rows if start >= 0 else 0):
            page = load_i32(table + 4 * (b * most + (start + t) // block))
            inside = (start + t) % block
            for g in range(heads):
                to = cell(row, 1) + 4 * width * ((page * heads + g) * block + inside)
                at = cell(row, 2) + b * cell(row, 12) + g * cell(row, 13) + t * cell(row, 14)
                for i in range(0, width, 16):
                    mask = first(width - i)
                    store_first(to + 4 * i, load_first(at + 4 * i, mask), mask)
    return True
