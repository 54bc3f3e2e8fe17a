"""Attention by blocks of 64 queries and 64 keys: scores of one block at a time, softmax on the way.

Source: Dao 2023, "FlashAttention-2", algorithms 1 and 2. A row of code, and two more that hold operands: cells 1 first
unit, 2 units, 3 query heads, 4 key heads, 5 queries, 6 keys, 7 and 8 their sizes and the values', 9 scale, 10 address
of the first query's place among the keys (0: keys - queries), 11 causal, 12 window (0: none), 13 key mask (0: none), 14
block table (0: all blocks). Then per operand its address and bytes per batch element, head and position: q, k, v, out;
for the gradient also that of out, and those of q, k, v. A unit is a batch element's query head, in the gradient a key
head with all its query heads.

A block table holds, for each block of queries, where its list begins, one more for the end, then key blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array.vm.code import BLOCK, BYTES, DEPTH, STRIPS, TILES_END
from graphwright.array.vm.elementwise import F, cell, number
from graphwright.array.vm.gemm import gemm
from graphwright.array.vm.math import exp, native
from graphwright.array.vm.vector import (
    add,
    both,
    first,
    fma,
    largest,
    load,
    load_f32,
    load_first,
    load_i64,
    load_mask,
    maximum,
    mul,
    outside,
    select,
    splat,
    store,
    store_f32,
    store_first,
    sub,
    total,
)

_SIDE = 64
_LINE = 4 * _SIDE
_SCORES, _SLOPES = TILES_END, TILES_END + _SIDE * _LINE  # behind what a product packs into
_TOP = _SLOPES + _SIDE * _LINE
_SUM, _ALPHA = _TOP + _LINE, _TOP + 2 * _LINE
_KEPT, _MOST = STRIPS, 4 * DEPTH * BLOCK // (_SIDE * _LINE)
"""Where the gradient keeps the scores of that many blocks: no product of a block packs rows of A into strips."""


@native
def _operand(row: Any, index: Any, batch: Any, head: Any) -> Any:
    """Where an operand of a batch element and head begins."""
    at = row + BYTES + 32 * index
    return load_i64(at) + batch * load_i64(at + 8) + head * load_i64(at + 16)


@native
def _step(row: Any, index: Any) -> Any:
    """Bytes from one position of an operand to the next."""
    return load_i64(row + BYTES + 32 * index + 24)


@native
def _start(row: Any) -> Any:
    """The place of the first query among the keys."""
    given = cell(row, 10)
    return load_i64(given) if given else cell(row, 6) - cell(row, 5)


@native
def _blocks(row: Any, i: Any, rows: Any) -> Any:
    """(first, behind the last) key block that queries i to i + rows may read; with a table, places in its list."""
    table = cell(row, 14)
    if table:
        at = table + 8 * (i // _SIDE)
        return load_i64(at), load_i64(at + 8)
    begin, end = 0, (cell(row, 6) + _SIDE - 1) // _SIDE
    if cell(row, 11):
        start = _start(row)
        end = min(end, max(0, start + i + rows + _SIDE - 1) // _SIDE)
        if cell(row, 12):
            begin = max(0, start + i - cell(row, 12) + 1) // _SIDE
    return begin, max(begin, end)


@native
def _block(row: Any, t: Any) -> Any:
    """The first key of a block."""
    table = cell(row, 14)
    if table:
        lists = (cell(row, 5) + _SIDE - 1) // _SIDE + 1
        return _SIDE * load_i64(table + 8 * (lists + t))
    return _SIDE * t


@native
def _scores(row: Any, at: Any, q: Any, k: Any, rows: Any, keys: Any, scratch: Any) -> None:
    """Products of a block of queries and one of keys."""
    gemm(q, _step(row, 0), 4, k, 4, _step(row, 1), at, _LINE, rows, keys, cell(row, 7), 0, 0, scratch)


@native
def _seen(row: Any, batch: Any, query: Any, j: Any, keys: Any, v: Any) -> Any:
    """Which of 16 keys from j + 16 v on a query reads."""
    begin, end = 0, keys
    if cell(row, 11):
        place = _start(row) + query
        end = min(end, place + 1 - j)
        if cell(row, 12):
            begin = place + 1 - cell(row, 12) - j
    mask = both(first(end - 16 * v), outside(begin - 16 * v))
    padding = cell(row, 13)
    if padding:
        mask = both(mask, load_mask(padding + batch * cell(row, 6) + j + 16 * v, first(keys - 16 * v)))
    return mask


@native
def _open(row: Any, i: Any, j: Any, rows: Any, keys: Any) -> Any:
    """True if every query of a block reads every key, and these are whole vectors."""
    if keys & 15 or cell(row, 13):
        return False
    if cell(row, 11) == 0:
        return True
    place, window = _start(row) + i, cell(row, 12)
    return place >= j + keys - 1 and (window == 0 or place + rows - window <= j)


@native
def _bounded(row: Any, at: Any, scratch: Any, batch: Any, i: Any, j: Any, rows: Any, keys: Any) -> None:
    """Scores of a block into scaled and masked ones; the maximum per query with them, and ALPHA, what scales everything
    from before.
    """
    low, scale, whole = splat(F(-np.inf)), splat(F(number(row, 9))), _open(row, i, j, rows, keys)
    for r in range(rows):
        line, top = at + _LINE * r, load_f32(scratch + _TOP + 4 * r)
        best = splat(top)
        for v in range(0, (keys + 15) // 16):
            value = mul(load(line + 64 * v), scale)
            if not whole:
                value = select(_seen(row, batch, i + r, j, keys, v), value, low)
            store(line + 64 * v, value)
            best = maximum(best, value)
        new = largest(best)
        alpha = F(1.0)
        if new != top:
            alpha = _exponential(top - new)
        store_f32(scratch + _TOP + 4 * r, new)
        store_f32(scratch + _ALPHA + 4 * r, alpha)


@native
def _raised(at: Any, scratch: Any, rows: Any, keys: Any, keep: Any) -> None:
    """Sums of exponentials of a block's bounded scores and of those before; with `keep` they take the scores' place."""
    for r in range(rows):
        line, top = at + _LINE * r, load_f32(scratch + _TOP + 4 * r)
        base = splat(top if top > F(-np.inf) or top != top else F(0.0))  # nothing seen yet: weights of e^-inf
        part = splat(F(0.0))
        for v in range(0, (keys + 15) // 16):
            weight = exp(sub(load(line + 64 * v), base))
            if keep:
                store(line + 64 * v, weight)
            part = add(part, weight)
        before = load_f32(scratch + _SUM + 4 * r) * load_f32(scratch + _ALPHA + 4 * r)
        store_f32(scratch + _SUM + 4 * r, before + total(part))


@native
def _exponential(x: Any) -> Any:
    return largest(exp(splat(F(x))))


@native
def _scaled(at: Any, step: Any, rows: Any, size: Any, factors: Any) -> None:
    """Each row times its own factor."""
    for r in range(rows):
        factor = load_f32(factors + 4 * r)
        if factor != F(1.0):
            wide = splat(factor)
            for d in range(0, size, 16):
                mask = first(size - d)
                place = at + r * step + 4 * d
                store_first(place, mul(load_first(place, mask), wide), mask)


@native
def _fresh(scratch: Any) -> None:
    """Nothing seen yet."""
    for v in range(_SIDE // 16):
        store(scratch + _TOP + 64 * v, splat(F(-np.inf)))
        store(scratch + _SUM + 64 * v, splat(F(0.0)))


@native
def attend(row: Any, scratch: Any) -> None:
    """softmax(scale · q kᵀ over the visible keys) v; 0 for a query that sees none."""
    heads, groups, queries, keys_all, wide = cell(row, 3), cell(row, 4), cell(row, 5), cell(row, 6), cell(row, 8)
    step_v, step_o = _step(row, 2), _step(row, 3)
    for unit in range(cell(row, 1), cell(row, 1) + cell(row, 2)):
        batch, head = unit // heads, unit % heads
        group = head // (heads // groups)
        q, k = _operand(row, 0, batch, head), _operand(row, 1, batch, group)
        v, out = _operand(row, 2, batch, group), _operand(row, 3, batch, head)
        for i in range(0, queries, _SIDE):
            rows = min(_SIDE, queries - i)
            at_q, at_o = q + i * _step(row, 0), out + i * step_o
            _fresh(scratch)
            _cleared(at_o, step_o, rows, wide)
            begin, end = _blocks(row, i, rows)
            for t in range(begin, end):
                j = _block(row, t)
                keys = min(_SIDE, keys_all - j)
                _scores(row, scratch + _SCORES, at_q, k + j * _step(row, 1), rows, keys, scratch)
                _bounded(row, scratch + _SCORES, scratch, batch, i, j, rows, keys)
                _raised(scratch + _SCORES, scratch, rows, keys, True)
                if t > begin:
                    _scaled(at_o, step_o, rows, wide, scratch + _ALPHA)
                gemm(
                    scratch + _SCORES, _LINE, 4, v + j * step_v, step_v, 4, at_o, step_o, rows, wide, keys,
                    at_o, step_o, scratch,
                )  # fmt: skip
            for r in range(rows):
                whole = load_f32(scratch + _SUM + 4 * r)
                store_f32(scratch + _ALPHA + 4 * r, F(1.0) / whole if whole > F(0.0) or whole != whole else F(0.0))
            _scaled(at_o, step_o, rows, wide, scratch + _ALPHA)


@native
def _alike(scratch: Any) -> None:
    """Nothing from before is to be scaled."""
    for v in range(_SIDE // 16):
        store(scratch + _ALPHA + 64 * v, splat(F(1.0)))


@native
def _cleared(at: Any, step: Any, rows: Any, size: Any) -> None:
    for r in range(rows):
        for d in range(0, size, 16):
            store_first(at + r * step + 4 * d, splat(F(0.0)), first(size - d))


@native
def _weights(row: Any, scratch: Any, batch: Any, i: Any, j: Any, rows: Any, keys: Any) -> None:
    """Scores of a block into weights, by maximum and sum of the queries."""
    scale, whole = splat(F(number(row, 9))), _open(row, i, j, rows, keys)
    for r in range(rows):
        line = scratch + _SCORES + _LINE * r
        top, factor = splat(load_f32(scratch + _TOP + 4 * r)), splat(load_f32(scratch + _SUM + 4 * r))
        for v in range(0, (keys + 15) // 16):
            weight = mul(exp(sub(mul(load(line + 64 * v), scale), top)), factor)
            if not whole:
                weight = select(_seen(row, batch, i + r, j, keys, v), weight, splat(F(0.0)))
            store(line + 64 * v, weight)


@native
def attend_backward(row: Any, scratch: Any) -> None:
    """Gradients of q, k, v; weights are computed again, once where all blocks of a query are kept, else twice.

    D = rowsum(dO ⊙ O); dV = Pᵀ dO; dS = scale · P ⊙ (dO Vᵀ - D); dQ = dS K; dK = dSᵀ Q.
    """
    heads, groups, queries, keys_all = cell(row, 3), cell(row, 4), cell(row, 5), cell(row, 6)
    deep, wide, scale = cell(row, 7), cell(row, 8), splat(F(number(row, 9)))
    sq, sk, sv, so = _step(row, 0), _step(row, 1), _step(row, 2), _step(row, 3)
    sg, tq, tk, tv = _step(row, 4), _step(row, 5), _step(row, 6), _step(row, 7)
    share = heads // groups
    for unit in range(cell(row, 1), cell(row, 1) + cell(row, 2)):
        batch, group = unit // groups, unit % groups
        k, v = _operand(row, 1, batch, group), _operand(row, 2, batch, group)
        dk, dv = _operand(row, 6, batch, group), _operand(row, 7, batch, group)
        _cleared(dk, tk, keys_all, deep)
        _cleared(dv, tv, keys_all, wide)
        for head in range(group * share, (group + 1) * share):
            for i in range(0, queries, _SIDE):
                rows = min(_SIDE, queries - i)
                q, out = _operand(row, 0, batch, head) + i * sq, _operand(row, 3, batch, head) + i * so
                g, dq = _operand(row, 4, batch, head) + i * sg, _operand(row, 5, batch, head) + i * tq
                _cleared(dq, tq, rows, deep)
                _fresh(scratch)
                begin, end = _blocks(row, i, rows)
                kept = end - begin <= _MOST
                for t in range(begin, end):
                    j = _block(row, t)
                    keys = min(_SIDE, keys_all - j)
                    weights = scratch + (_KEPT + (t - begin) * _SIDE * _LINE if kept else _SCORES)
                    _scores(row, weights, q, k + j * sk, rows, keys, scratch)
                    _bounded(row, weights, scratch, batch, i, j, rows, keys)
                    if not kept:
                        _raised(weights, scratch, rows, keys, False)
                if kept:
                    _alike(scratch)
                    for t in range(begin, end):
                        keys = min(_SIDE, keys_all - _block(row, t))
                        _raised(scratch + _KEPT + (t - begin) * _SIDE * _LINE, scratch, rows, keys, True)
                for r in range(rows):
                    whole, top = load_f32(scratch + _SUM + 4 * r), load_f32(scratch + _TOP + 4 * r)
                    seen = whole > F(0.0) or whole != whole
                    store_f32(scratch + _SUM + 4 * r, F(1.0) / whole if seen else F(0.0))
                    store_f32(scratch + _TOP + 4 * r, top if seen else F(0.0))
                    part = splat(F(0.0))
                    for d in range(0, wide, 16):
                        mask = first(wide - d)
                        part = fma(load_first(g + r * sg + 4 * d, mask), load_first(out + r * so + 4 * d, mask), part)
                    store_f32(scratch + _ALPHA + 4 * r, total(part))
                for t in range(begin, end):
                    j = _block(row, t)
                    keys = min(_SIDE, keys_all - j)
                    weights = scratch + (_KEPT + (t - begin) * _SIDE * _LINE if kept else _SCORES)
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
                        less = splat(load_f32(scratch + _ALPHA + 4 * r))
                        for d in range(0, 4 * keys, 64):
                            at = _LINE * r + d
                            slope = mul(mul(load(weights + at), sub(load(slopes + at), less)), scale)
                            store(slopes + at, slope)
                    gemm(slopes, _LINE, 4, at_k, sk, 4, dq, tq, rows, deep, keys, dq, tq, scratch)
                    gemm(slopes, 4, _LINE, q, sq, 4, to_k, tk, keys, deep, rows, to_k, tk, scratch)
