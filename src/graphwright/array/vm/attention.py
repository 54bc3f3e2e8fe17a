"""Attention and its gradient in blocks of 64 queries by 64 keys; attention over a KV cache; writes to KV caches.

Blocked attention computes the scores of one block at a time with a running softmax (Dao 2023, "FlashAttention-2",
algorithms 1 and 2). A unit of work is one query head of one batch element; in the gradient, one key head with all its
query heads. Words of the instruction: 1 first unit, 2 number of units, 3 query heads, 4 key heads, 5 queries, 6 keys,
7 size of a key, 8 size of a value, 9 scale, 10 address of the first query's position (0: keys - queries),
11 causal, 12 window (0: none), 13 address of the key mask (0: none), 14 address of the block table (0: all blocks).
A row of operands follows, two for the gradient, with four words per operand: its address and its bytes per batch
element, head and position. Operands: q, k, v, out; for the gradient also the gradients of out, q, k, v.

A block table is int64: for each block of queries, the index at which its list of key blocks begins; then the end of
the last list; then the lists.

Attention over a cache takes the keys that a query sees 256 at a time, with a running maximum and sum (Milakov and
Gimelshein 2018, "Online normalizer calculation for softmax"): first all scores, 16 at once, then the weighted values,
so that no score waits for the sum before it. With a block table, the address of a key is looked up in it: blocks may be
stored anywhere, and no key is copied.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from graphwright.array.vm import vector as vec
from graphwright.array.vm.code import BLOCK, BYTES, DEPTH, STRIPS, TILES_END, Code
from graphwright.array.vm.elementwise import F, cell, loop, number
from graphwright.array.vm.math import exp, native, tanh
from graphwright.array.vm.other_products import gemm
from graphwright.array.vm.rows import copy_line

_SIDE = 64
_LINE = 4 * _SIDE
_SCORES, _SLOPES = TILES_END, TILES_END + _SIDE * _LINE  # after the part that products pack into
_TOP = _SLOPES + _SIDE * _LINE
_SUM, _ALPHA = _TOP + _LINE, _TOP + 2 * _LINE
_SAVED, _MOST = STRIPS, 4 * DEPTH * BLOCK // (_SIDE * _LINE)
"""Offset at which the gradient stores blocks of scores, and how many fit; products of one block do not use it."""


@native
def operand(row: Any, index: Any, batch: Any, head: Any) -> Any:
    """Return the address of the first position of operand `index`, such as q or k, for a batch element and head."""
    at = row + BYTES + 32 * index
    return vec.load_i64(at) + batch * vec.load_i64(at + 8) + head * vec.load_i64(at + 16)


@native
def step_of(row: Any, index: Any) -> Any:
    """Return the stride in bytes between positions of operand `index`."""
    return vec.load_i64(row + BYTES + 32 * index + 24)


@native
def _start(row: Any) -> Any:
    """Return the position of the first query in the sequence of keys."""
    given = cell(row, 10)
    return vec.load_i64(given) if given else cell(row, 6) - cell(row, 5)


@native
def _blocks(row: Any, i: Any, rows: Any) -> Any:
    """Return (begin, end), the range of numbers t, as in `_block`, of the key blocks that queries i:i + rows see."""
    table = cell(row, 14)
    if table:
        at = table + 8 * (i // _SIDE)
        return vec.load_i64(at), vec.load_i64(at + 8)
    begin, end = 0, (cell(row, 6) + _SIDE - 1) // _SIDE
    if cell(row, 11):
        start = _start(row)
        end = min(end, max(0, start + i + rows + _SIDE - 1) // _SIDE)
        if cell(row, 12):
            begin = max(0, start + i - cell(row, 12) + 1) // _SIDE
    return begin, max(begin, end)


@native
def _block(row: Any, t: Any) -> Any:
    """Return the index of the first key of block t. With a block table, t is an index into its lists of blocks."""
    table = cell(row, 14)
    if table:
        lists = (cell(row, 5) + _SIDE - 1) // _SIDE + 1
        return _SIDE * vec.load_i64(table + 8 * (lists + t))
    return _SIDE * t


@native
def _scores(row: Any, at: Any, q: Any, k: Any, rows: Any, keys: Any, scratch: Any) -> None:
    """Write the unscaled scores q·kᵀ of a block of queries and a block of keys to address `at`."""
    gemm(q, step_of(row, 0), 4, k, 4, step_of(row, 1), at, _LINE, rows, keys, cell(row, 7), 0, 0, scratch)


@native
def _seen(row: Any, batch: Any, query: Any, j: Any, keys: Any, v: Any) -> Any:
    """Return the mask of the 16 keys from j + 16·v on: true for keys that the query sees."""
    begin, end = 0, keys
    if cell(row, 11):
        position = _start(row) + query
        end = min(end, position + 1 - j)
        if cell(row, 12):
            begin = position + 1 - cell(row, 12) - j
    mask = vec.first(end - 16 * v) & vec.outside(begin - 16 * v)
    padding = cell(row, 13)
    if padding:
        mask = mask & vec.load_mask(padding + batch * cell(row, 6) + j + 16 * v, vec.first(keys - 16 * v))
    return mask


@native
def _open(row: Any, i: Any, j: Any, rows: Any, keys: Any) -> Any:
    """Return whether no mask is needed: queries i to i + rows see all keys j to j + keys, which fill whole vectors."""
    if keys & 15 or cell(row, 13):
        return False
    if cell(row, 11) == 0:
        return True
    position, window = _start(row) + i, cell(row, 12)
    return position >= j + keys - 1 and (window == 0 or position + rows - window <= j)


@native
def _bounded(row: Any, at: Any, scratch: Any, batch: Any, i: Any, j: Any, rows: Any, keys: Any) -> None:
    """Scale and mask a block's scores; write to `scratch` per query the new maximum and the factor of earlier sums."""
    low, scale, whole = vec.splat(F(-np.inf)), vec.splat(F(number(row, 9))), _open(row, i, j, rows, keys)
    for r in range(rows):
        line, top = at + _LINE * r, vec.load_f32(scratch + _TOP + 4 * r)
        best = vec.splat(top)
        for v in range(0, (keys + 15) // 16):
            value = vec.load(line + 64 * v) * scale
            if not whole:
                value = vec.select(_seen(row, batch, i + r, j, keys, v), value, low)
            vec.store(line + 64 * v, value)
            best = vec.maximum(best, value)
        new = vec.largest(best)
        alpha = F(1.0)
        if new != top:
            alpha = vec.largest(exp(vec.splat(F(top - new))))
        vec.store_f32(scratch + _TOP + 4 * r, new)
        vec.store_f32(scratch + _ALPHA + 4 * r, alpha)


@native
def _raised(at: Any, scratch: Any, rows: Any, keys: Any, keep: Any) -> None:
    """Add exp(score - maximum) of a block's scores to the sum of each query; with `keep`, store it over the score."""
    for r in range(rows):
        line, top = at + _LINE * r, vec.load_f32(scratch + _TOP + 4 * r)
        base = vec.splat(top if top > F(-np.inf) or top != top else F(0.0))  # no key seen yet: weights e^-inf
        part = vec.splat(F(0.0))
        for v in range(0, (keys + 15) // 16):
            weight = exp(vec.load(line + 64 * v) - base)
            if keep:
                vec.store(line + 64 * v, weight)
            part = part + weight
        before = vec.load_f32(scratch + _SUM + 4 * r) * vec.load_f32(scratch + _ALPHA + 4 * r)
        vec.store_f32(scratch + _SUM + 4 * r, before + vec.total(part))


@native
def _scaled(at: Any, step: Any, rows: Any, size: Any, factors: Any) -> None:
    """Multiply each of `rows` rows of `size` numbers by the factor of that row in `factors`."""
    for r in range(rows):
        factor = vec.load_f32(factors + 4 * r)
        if factor != F(1.0):
            wide = vec.splat(factor)
            for d in range(0, size, 16):
                mask = vec.first(size - d)
                position = at + r * step + 4 * d
                vec.store_first(position, vec.load_first(position, mask) * wide, mask)


@native
def _fresh(scratch: Any) -> None:
    """Set the running maximum of each query of a block to -inf, and its sum to 0."""
    for v in range(_SIDE // 16):
        vec.store(scratch + _TOP + 64 * v, vec.splat(F(-np.inf)))
        vec.store(scratch + _SUM + 64 * v, vec.splat(F(0.0)))


@loop(Code.ATTEND)
def attend(row: Any, scratch: Any) -> Any:
    """softmax(scale·q·kᵀ over the visible keys)·v; 0 for a query that sees no key."""
    heads, groups, queries, keys_all, wide = cell(row, 3), cell(row, 4), cell(row, 5), cell(row, 6), cell(row, 8)
    step_v, step_o = step_of(row, 2), step_of(row, 3)
    for unit in range(cell(row, 1), cell(row, 1) + cell(row, 2)):
        batch, head = unit // heads, unit % heads
        group = head // (heads // groups)
        q, k = operand(row, 0, batch, head), operand(row, 1, batch, group)
        v, out = operand(row, 2, batch, group), operand(row, 3, batch, head)
        for i in range(0, queries, _SIDE):
            rows = min(_SIDE, queries - i)
            at_q, at_o = q + i * step_of(row, 0), out + i * step_o
            _fresh(scratch)
            _cleared(at_o, step_o, rows, wide)
            begin, end = _blocks(row, i, rows)
            for t in range(begin, end):
                j = _block(row, t)
                keys = min(_SIDE, keys_all - j)
                _scores(row, scratch + _SCORES, at_q, k + j * step_of(row, 1), rows, keys, scratch)
                _bounded(row, scratch + _SCORES, scratch, batch, i, j, rows, keys)
                _raised(scratch + _SCORES, scratch, rows, keys, True)
                if t > begin:
                    _scaled(at_o, step_o, rows, wide, scratch + _ALPHA)
                gemm(
                    scratch + _SCORES, _LINE, 4, v + j * step_v, step_v, 4, at_o, step_o, rows, wide, keys,
                    at_o, step_o, scratch,
                )  # fmt: skip
            for r in range(rows):
                whole = vec.load_f32(scratch + _SUM + 4 * r)
                vec.store_f32(scratch + _ALPHA + 4 * r, F(1.0) / whole if whole > F(0.0) or whole != whole else F(0.0))
            _scaled(at_o, step_o, rows, wide, scratch + _ALPHA)
    return 1


@native
def _cleared(at: Any, step: Any, rows: Any, size: Any) -> None:
    for r in range(rows):
        for d in range(0, size, 16):
            vec.store_first(at + r * step + 4 * d, vec.splat(F(0.0)), vec.first(size - d))


@native
def _weights(row: Any, scratch: Any, batch: Any, i: Any, j: Any, rows: Any, keys: Any) -> None:
    """Turn a block's scores into softmax weights, given the maximum and 1 / sum of each query."""
    scale, whole = vec.splat(F(number(row, 9))), _open(row, i, j, rows, keys)
    for r in range(rows):
        line = scratch + _SCORES + _LINE * r
        top, factor = vec.splat(vec.load_f32(scratch + _TOP + 4 * r)), vec.splat(vec.load_f32(scratch + _SUM + 4 * r))
        for v in range(0, (keys + 15) // 16):
            weight = exp(vec.load(line + 64 * v) * scale - top) * factor
            if not whole:
                weight = vec.select(_seen(row, batch, i + r, j, keys, v), weight, 0.0)
            vec.store(line + 64 * v, weight)


@loop(Code.ATTEND_BACKWARD)
def attend_backward(row: Any, scratch: Any) -> Any:
    """Compute the gradients of q, k and v.

    D = rowsum(dO ⊙ O); dV = Pᵀ·dO; dS = scale·P ⊙ (dO·Vᵀ - D); dQ = dS·K; dK = dSᵀ·Q. P are the softmax weights:
    they are recomputed once if all key blocks of a query block fit the scratch, else twice.
    """
    heads, groups, queries, keys_all = cell(row, 3), cell(row, 4), cell(row, 5), cell(row, 6)
    deep, wide, scale = cell(row, 7), cell(row, 8), vec.splat(F(number(row, 9)))
    sq, sk, sv, so = step_of(row, 0), step_of(row, 1), step_of(row, 2), step_of(row, 3)
    sg, tq, tk, tv = step_of(row, 4), step_of(row, 5), step_of(row, 6), step_of(row, 7)
    share = heads // groups
    for unit in range(cell(row, 1), cell(row, 1) + cell(row, 2)):
        batch, group = unit // groups, unit % groups
        k, v = operand(row, 1, batch, group), operand(row, 2, batch, group)
        dk, dv = operand(row, 6, batch, group), operand(row, 7, batch, group)
        _cleared(dk, tk, keys_all, deep)
        _cleared(dv, tv, keys_all, wide)
        for head in range(group * share, (group + 1) * share):
            for i in range(0, queries, _SIDE):
                rows = min(_SIDE, queries - i)
                q, out = operand(row, 0, batch, head) + i * sq, operand(row, 3, batch, head) + i * so
                g, dq = operand(row, 4, batch, head) + i * sg, operand(row, 5, batch, head) + i * tq
                _cleared(dq, tq, rows, deep)
                _fresh(scratch)
                begin, end = _blocks(row, i, rows)
                kept = end - begin <= _MOST
                for t in range(begin, end):
                    j = _block(row, t)
                    keys = min(_SIDE, keys_all - j)
                    weights = scratch + (_SAVED + (t - begin) * _SIDE * _LINE if kept else _SCORES)
                    _scores(row, weights, q, k + j * sk, rows, keys, scratch)
                    _bounded(row, weights, scratch, batch, i, j, rows, keys)
                    if not kept:
                        _raised(weights, scratch, rows, keys, False)
                if kept:
                    for r in range(0, _SIDE, 16):  # the factors of earlier sums
                        vec.store(scratch + _ALPHA + 4 * r, vec.splat(F(1.0)))
                    for t in range(begin, end):
                        keys = min(_SIDE, keys_all - _block(row, t))
                        _raised(scratch + _SAVED + (t - begin) * _SIDE * _LINE, scratch, rows, keys, True)
                for r in range(rows):
                    whole, top = vec.load_f32(scratch + _SUM + 4 * r), vec.load_f32(scratch + _TOP + 4 * r)
                    seen = whole > F(0.0) or whole != whole
                    vec.store_f32(scratch + _SUM + 4 * r, F(1.0) / whole if seen else F(0.0))
                    vec.store_f32(scratch + _TOP + 4 * r, top if seen else F(0.0))
                    part = vec.splat(F(0.0))
                    for d in range(0, wide, 16):
                        mask = vec.first(wide - d)
                        slope, value = g + r * sg + 4 * d, out + r * so + 4 * d
                        part = vec.fma(vec.load_first(slope, mask), vec.load_first(value, mask), part)
                    vec.store_f32(scratch + _ALPHA + 4 * r, vec.total(part))
                for t in range(begin, end):
                    j = _block(row, t)
                    keys = min(_SIDE, keys_all - j)
                    weights = scratch + (_SAVED + (t - begin) * _SIDE * _LINE if kept else _SCORES)
                    slopes = scratch + _SLOPES
                    at_k, at_v, to_k, to_v = k + j * sk, v + j * sv, dk + j * tk, dv + j * tv
                    if kept:
                        _scaled(weights, _LINE, rows, keys, scratch + _SUM)
                    else:
                        _scores(row, weights, q, at_k, rows, keys, scratch)
                        _weights(row, scratch, batch, i, j, rows, keys)
                    gemm(weights, 4, _LINE, g, sg, 4, to_v, tv, keys, wide, rows, to_v, tv, scratch)
                    gemm(g, sg, 4, at_v, 4, sv, slopes, _LINE, rows, keys, wide, 0, 0, scratch)
                    for r in range(rows):
                        less = vec.splat(vec.load_f32(scratch + _ALPHA + 4 * r))
                        for d in range(0, 4 * keys, 64):
                            at = _LINE * r + d
                            slope = vec.load(weights + at) * (vec.load(slopes + at) - less) * scale
                            vec.store(slopes + at, slope)
                    gemm(slopes, _LINE, 4, at_k, sk, 4, dq, tq, rows, deep, keys, dq, tq, scratch)
                    gemm(slopes, 4, _LINE, q, sq, 4, to_k, tk, keys, deep, rows, to_k, tk, scratch)
    return 2


_ZERO = ir.Constant(vec.FLOATS, None)


def _rows_of(builder: Any, base: Any, stride: Any, count: Any) -> list[Any]:
    """Return 16 addresses: of `count` rows from `base` on, then of row 0 again, so that no other memory is read."""
    addresses = [builder.add(base, builder.mul(stride, vec.I64(r))) for r in range(vec.LANES)]
    return [builder.select(builder.icmp_signed(">", count, vec.I64(r)), at, base) for r, at in enumerate(addresses)]


def _along(builder: Any, width: Any, start: list[Any], step: Any) -> list[Any]:
    """Emit a loop over `width` entries, 16 at a time; `step(byte offset, mask or None, state) -> state` is its body."""
    whole = builder.and_(width, vec.I64(-vec.LANES))
    before = builder.block
    loop, rest, tail, done = (builder.append_basic_block(name) for name in ("full", "rest", "tail", "done"))
    builder.cbranch(builder.icmp_signed(">", whole, vec.I64(0)), loop, rest)
    builder.position_at_end(loop)
    at = builder.phi(vec.I64)
    phis = [builder.phi(vec.FLOATS) for _ in start]
    grown = step(builder.mul(at, vec.I64(4)), None, phis)
    next_at = builder.add(at, vec.I64(vec.LANES))
    for phi, first_value, then in ((at, vec.I64(0), next_at), *zip(phis, start, grown, strict=True)):
        phi.add_incoming(first_value, before)
        phi.add_incoming(then, loop)
    builder.cbranch(builder.icmp_signed("<", next_at, whole), loop, rest)
    builder.position_at_end(rest)
    middle = [vec.joined(builder, (a, before), (b, loop)) for a, b in zip(start, grown, strict=True)]
    builder.cbranch(builder.icmp_signed("<", whole, width), tail, done)
    builder.position_at_end(tail)
    last = step(builder.mul(whole, vec.I64(4)), vec.first_lanes(builder, builder.sub(width, whole)), middle)
    builder.branch(done)
    builder.position_at_end(done)
    return [vec.joined(builder, (a, rest), (b, tail)) for a, b in zip(middle, last, strict=True)]


def _sums(builder: Any, rows: list[Any]) -> Any:
    """Return a vector of the sums of 16 vectors: four rounds interleave vector i with vector i + half and add them."""
    while len(rows) > 1:
        half = len(rows) // 2
        rows = [builder.fadd(*vec.interleaved(builder, a, b)) for a, b in zip(rows[:half], rows[half:], strict=True)]
    return rows[0]


def dots(builder: Any, q: Any, rows: list[Any], width: Any) -> Any:
    """Emit the dot products of q with 16 rows of `width` entries at the given addresses; return a vector of them."""

    def step(at: Any, mask: Any, sums: list[Any]) -> list[Any]:
        x = vec.fetch(builder, builder.add(q, at), mask)
        terms = [(vec.fetch(builder, builder.add(row, at), mask), s) for row, s in zip(rows, sums, strict=True)]
        return [vec.intrinsic_call(builder, "llvm.fma.v16f32", vec.FLOATS, x, y, s) for y, s in terms]

    return _sums(builder, _along(builder, width, [_ZERO] * vec.LANES, step))


def add_rows(builder: Any, out: Any, kept: Any, p: Any, rows: list[Any], width: Any) -> None:
    """Emit out = kept·out + Σ p[r]·row r over 16 rows of `width` entries at the given addresses."""
    wide = [builder.shuffle_vector(p, p, ir.Constant(vec.INTS, [vec.I32(r)] * vec.LANES)) for r in range(vec.LANES)]

    def step(at: Any, mask: Any, phis: list[Any]) -> list[Any]:
        position = builder.add(out, at)
        even, odd = builder.fmul(vec.fetch(builder, position, mask), kept), _ZERO
        for r in range(0, vec.LANES, 2):
            a, b = (vec.fetch(builder, builder.add(rows[i], at), mask) for i in (r, r + 1))
            even = vec.intrinsic_call(builder, "llvm.fma.v16f32", vec.FLOATS, wide[r], a, even)
            odd = vec.intrinsic_call(builder, "llvm.fma.v16f32", vec.FLOATS, wide[r + 1], b, odd)
        vec.write(builder, builder.fadd(even, odd), position, mask)
        return []

    _along(builder, width, [], step)


@intrinsic
def _products(typingctx: Any, q: Any, k: Any, stride: Any, width: Any, count: Any) -> Any:
    """Return a vector of dot products of q with `count` rows of `width` entries from k on; more lanes are undefined."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        q, k, stride, width, count = args
        return dots(builder, q, _rows_of(builder, k, stride, count), width)

    return vec.V(vec.i64, vec.i64, vec.i64, vec.i64, vec.i64), codegen


@intrinsic
def _weighted(typingctx: Any, out: Any, kept: Any, p: Any, v: Any, stride: Any, width: Any, count: Any) -> Any:
    """out = kept·out + Σ p[r]·v[r], summed over the first `count` rows r of v."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, kept, p, v, stride, width, count = args
        add_rows(builder, out, kept, p, _rows_of(builder, v, stride, count), width)
        return ir.Constant(vec.I8.as_pointer(), None)

    return vec.void(vec.i64, vec.V, vec.V, vec.i64, vec.i64, vec.i64, vec.i64), codegen


_CHUNKS = 16
"""Vectors of scores that attention over a cache holds at a time."""
_VALUES = _SCORES + 64 * _CHUNKS
"""Offset in the scratch of the address of the first value of each vector of scores, and of the number of its keys."""


@loop(Code.ATTEND_CACHED)
def attend_cached(row: Any, scratch: Any) -> Any:
    """Compute attention over a KV cache, one query at a time.

    Instruction words: 1 first unit, 2 number of units (one query head of one batch element); addresses of 3 q, 4 k,
    5 v, 6 out; 7 query heads, 8 key heads, 9 queries, 10 size of a key, 11 size of a value, 12 address of the first
    query's position or 0, 13 that position if word 12 is 0, 14 window or 0, 15 scale. Words of the next row: 0 to 2
    bytes of k per batch element, head and key, 3 to 5 the same of v, 6 the largest number of keys, 7 address of the
    block table (int32) or 0, 8 its bytes per batch element, 9 keys in a block, 10 bytes of a block of k, 11 of v,
    12 the cap of scores or 0. With a block table, the positions are int32, one per batch element; a negative position
    marks an unused batch element, whose result is 0.
    """
    for unit in range(cell(row, 1), cell(row, 1) + cell(row, 2)):
        _attend_head(row, unit, scratch)
    return 1


@native
def _attend_head(row: Any, unit: Any, scratch: Any) -> None:
    more = row + BYTES
    heads, groups, queries = cell(row, 7), cell(row, 8), cell(row, 9)
    width, depth, window, scale = cell(row, 10), cell(row, 11), cell(row, 14), F(number(row, 15))
    cap = F(number(more, 12))
    b, h = unit // heads, unit % heads
    g = h // (heads // groups)
    step_k, step_v, table, block = cell(more, 2), cell(more, 5), cell(more, 7), cell(more, 9)
    start = cell(row, 13)
    if table:
        start = vec.load_i32(cell(row, 12) + 4 * b)
        table += b * cell(more, 8)
    elif cell(row, 12):
        start = vec.load_i64(cell(row, 12))
    k = cell(row, 4) + b * cell(more, 0) + g * cell(more, 1)
    v = cell(row, 5) + b * cell(more, 3) + g * cell(more, 4)
    for t in range(queries):
        at = unit * queries + t
        q, out = cell(row, 3) + 4 * width * at, cell(row, 6) + 4 * depth * at
        high = min(start + t + 1, cell(more, 6)) if start >= 0 else 0
        j = max(high - window, 0) if window else 0
        _cleared(out, 0, 1, depth)
        if j >= high:
            continue
        low = vec.splat(F(-np.inf))
        best, whole = low, vec.splat(F(0.0))
        while j < high:
            chunks, peak = 0, best
            while j < high and chunks < _CHUNKS:
                count, at_k, at_v = min(16, high - j), k + j * step_k, v + j * step_v
                if table:
                    inside, page = j % block, vec.load_i32(table + 4 * (j // block))
                    count = min(count, block - inside)
                    at_k = k + page * cell(more, 10) + inside * step_k
                    at_v = v + page * cell(more, 11) + inside * step_v
                scores: Any = _products(q, at_k, step_k, width, count)  # pyright: ignore[reportCallIssue]
                scores = scores * scale
                if cap:
                    scores = tanh(scores * (F(1.0) / cap)) * cap
                s = vec.select(vec.first(count), scores, low)
                peak = vec.maximum(s, peak)
                vec.store(scratch + _SCORES + 64 * chunks, s)
                vec.store_i64(scratch + _VALUES + 16 * chunks, at_v)
                vec.store_i64(scratch + _VALUES + 16 * chunks + 8, count)
                j += count
                chunks += 1
            top = vec.splat(vec.largest(peak))
            kept = exp(best - top)
            whole = whole * kept
            for c in range(chunks):
                p = exp(vec.load(scratch + _SCORES + 64 * c) - top)
                whole = whole + p
                at = scratch + _VALUES + 16 * c
                _weighted(  # pyright: ignore[reportCallIssue]
                    out, kept, p, vec.load_i64(at), step_v, depth, vec.load_i64(at + 8)
                )
                kept = vec.splat(F(1.0))
            best = top
        share = vec.splat(F(1.0) / vec.total(whole))
        for i in range(0, depth, 16):
            mask = vec.first(depth - i)
            vec.store_first(out + 4 * i, vec.load_first(out + 4 * i, mask) * share, mask)


@loop(Code.KV_APPEND)
def kv_append(row: Any) -> Any:
    """Write new entries into a KV cache. Return -1, and write nothing, if they do not fit.

    Instruction words: 1 cache, 2 new entries, 3 address of the start position, 4 batch, 5 heads, 6 number of new
    positions, 7 size of an entry, 8 to 10 bytes of the cache per batch element, head and position, 11 to 13 the same of
    the new entries, 14 capacity of the cache in positions.
    """
    start, rows, width = vec.load_i64(cell(row, 3)), cell(row, 6), cell(row, 7)
    if start < 0 or start + rows > cell(row, 14):
        return -1
    for b in range(cell(row, 4)):
        for g in range(cell(row, 5)):
            for t in range(rows):
                to = cell(row, 1) + b * cell(row, 8) + g * cell(row, 9) + (start + t) * cell(row, 10)
                at = cell(row, 2) + b * cell(row, 11) + g * cell(row, 12) + t * cell(row, 13)
                copy_line(to, at, width)
    return 0


@loop(Code.KV_SCATTER)
def kv_scatter(row: Any) -> Any:
    """Write new entries into the blocks of a paged KV cache. Return -1, and write nothing, if a position has no block.

    Instruction words: 1 pool of blocks, 2 new entries, 3 block table (int32), 4 lengths (int32), 5 batch, 6 heads,
    7 number of new positions, 8 size of an entry, 9 positions in a block, 10 blocks per batch element in the table,
    11 blocks in the pool, 12 to 14 bytes of the new entries per batch element, head and position. A batch element with
    a negative length is skipped.
    """
    table, lengths, batch, rows, width = cell(row, 3), cell(row, 4), cell(row, 5), cell(row, 7), cell(row, 8)
    heads, block, most = cell(row, 6), cell(row, 9), cell(row, 10)
    for b in range(batch):
        start = vec.load_i32(lengths + 4 * b)
        for t in range(rows if start >= 0 else 0):
            j = (start + t) // block
            if j >= most:
                return -1
            page = vec.load_i32(table + 4 * (b * most + j))
            if page < 0 or page >= cell(row, 11):
                return -1
    for b in range(batch):
        start = vec.load_i32(lengths + 4 * b)
        for t in range(rows if start >= 0 else 0):
            page = vec.load_i32(table + 4 * (b * most + (start + t) // block))
            inside = (start + t) % block
            for g in range(heads):
                to = cell(row, 1) + 4 * width * ((page * heads + g) * block + inside)
                at = cell(row, 2) + b * cell(row, 12) + g * cell(row, 13) + t * cell(row, 14)
                copy_line(to, at, width)
    return 0
