"""Attention over lists of key blocks, and its gradient.

A list belongs to a tile of queries of one key head, and to all query heads of that key head. If a tile is one query,
these heads are the rows of its products, else each head has the queries of the tile as rows. The scores of one block
are computed at a time, with a running softmax as in `attention`. All sums of a list are its own, in the order of the
list. A unit of work is a run of lists of one key head of one batch element; in the gradient, all of its lists.

Words of the instruction: 1 first unit, 2 number of units, 3 query heads, 4 key heads, 5 queries, 6 keys, 7 size of a
key, 8 size of a value, 9 scale, 10 address of the first query's position (0: keys - queries), 11 nanoseconds of a unit.
Rows of operands follow, one or for the gradient two, as in `attention`: q, k, v, out; also the gradients of out, q, k,
v. A last row has the words of the lists: 0 address of the blocks, 1 of the gates, 2 of the gradients of the gates,
3 number of lists R, 4 length of a list, 5 keys of a block, 6 queries of a tile, 7 lists of a unit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array.formulas.selected import STEEPEST
from graphwright.array.vm import vector as vec
from graphwright.array.vm.code import BYTES, TILES_END, Code
from graphwright.array.vm.elementwise import F, cell, loop, number
from graphwright.array.vm.math import exp, native
from graphwright.array.vm.other_products import gemm

_SIDE = 64
_LINE = 4 * _SIDE
_SCORES, _SLOPES = TILES_END, TILES_END + _SIDE * _LINE  # after the part that products pack into
_TOP = _SLOPES + _SIDE * _LINE
_SUM, _ALPHA = _TOP + _LINE, _TOP + 2 * _LINE
_FEW = 4
"""Rows or terms below which a product is computed without packing its operands."""
_STEEPEST = F(STEEPEST)


@native
def _operand(row: Any, index: Any, batch: Any, head: Any, position: Any) -> Any:
    """Return the address of a position of operand `index`, such as q or k, for a batch element and head."""
    at = row + BYTES + 32 * index
    start = vec.load_i64(at) + batch * vec.load_i64(at + 8) + head * vec.load_i64(at + 16)
    return start + position * vec.load_i64(at + 24)


@native
def _step(row: Any, index: Any, by_head: Any) -> Any:
    """Return the stride in bytes of operand `index` between positions, or with `by_head` between heads."""
    return vec.load_i64(row + BYTES + 32 * index + (16 if by_head else 24))


@native
def _start(row: Any) -> Any:
    given = cell(row, 10)
    return vec.load_i64(given) if given else cell(row, 6) - cell(row, 5)


@native
def _dots(at: Any, a: Any, sa: Any, b: Any, sb: Any, rows: Any, keys: Any, deep: Any, scratch: Any) -> None:
    """Write a·bᵀ of `rows` rows of a and `keys` rows of b to the lines at address `at`."""
    if rows >= _FEW:
        gemm(a, sa, 4, b, 4, sb, at, _LINE, rows, keys, deep, 0, 0, scratch)
    else:
        for r in range(rows):
            for j in range(keys):
                part = vec.splat(F(0.0))
                for d in range(0, deep, 16):
                    mask = vec.first(deep - d)
                    left, right = vec.load_first(a + r * sa + 4 * d, mask), vec.load_first(b + j * sb + 4 * d, mask)
                    part = vec.fma(left, right, part)
                vec.store_f32(at + _LINE * r + 4 * j, vec.total(part))


@native
def _add(
    to: Any, step: Any, w: Any, along: Any, across: Any, b: Any, sb: Any, rows: Any, size: Any, terms: Any,
    scratch: Any,
) -> None:  # fmt: skip
    """Add Σ_j w[r, j]·b[j] to each of `rows` rows of `size` numbers; w[r, j] is at w + r·along + j·across."""
    if rows >= _FEW and terms >= _FEW:
        gemm(w, along, across, b, sb, 4, to, step, rows, size, terms, to, step, scratch)
    else:
        for r in range(rows):
            for d in range(0, size, 16):
                mask = vec.first(size - d)
                total = vec.load_first(to + r * step + 4 * d, mask)
                for j in range(terms):
                    weight = vec.splat(vec.load_f32(w + r * along + j * across))
                    total = vec.fma(weight, vec.load_first(b + j * sb + 4 * d, mask), total)
                vec.store_first(to + r * step + 4 * d, total, mask)


@native
def _cleared(at: Any, step: Any, rows: Any, size: Any) -> None:
    for r in range(rows):
        for d in range(0, size, 16):
            vec.store_first(at + r * step + 4 * d, vec.splat(F(0.0)), vec.first(size - d))


@native
def _scaled(at: Any, step: Any, rows: Any, size: Any, factors: Any) -> None:
    """Multiply each of `rows` rows of `size` numbers by the factor of that row in `factors`."""
    for r in range(rows):
        factor = vec.splat(vec.load_f32(factors + 4 * r))
        for d in range(0, size, 16):
            mask = vec.first(size - d)
            vec.store_first(at + r * step + 4 * d, vec.load_first(at + r * step + 4 * d, mask) * factor, mask)


@native
def _seen(position: Any, j: Any, keys: Any, v: Any) -> Any:
    """Return the mask of the 16 keys from j + 16·v on: true for keys up to the position."""
    return vec.first(min(keys, position + 1 - j) - 16 * v)


@native
def _bounded(row: Any, scratch: Any, position: Any, forward: Any, j: Any, rows: Any, keys: Any) -> None:
    """Scale and mask a block's scores; write to `scratch` per row the new maximum and the factor of earlier sums.

    Row r is at position + r·forward.
    """
    low, scale = vec.splat(F(-np.inf)), vec.splat(F(number(row, 9)))
    for r in range(rows):
        line, top = scratch + _SCORES + _LINE * r, vec.load_f32(scratch + _TOP + 4 * r)
        best = vec.splat(top)
        for v in range(0, (keys + 15) // 16):
            mask = _seen(position + r * forward, j, keys, v)
            value = vec.select(mask, vec.load(line + 64 * v) * scale, low)
            vec.store(line + 64 * v, value)
            best = vec.maximum(best, value)
        new = vec.largest(best)
        alpha = F(1.0)
        if new != top:
            alpha = vec.largest(exp(vec.splat(F(top - new))))
        vec.store_f32(scratch + _TOP + 4 * r, new)
        vec.store_f32(scratch + _ALPHA + 4 * r, alpha)


@native
def _raised(scratch: Any, rows: Any, keys: Any, gate: Any) -> None:
    """Turn a block's scores into gate·exp(score - maximum), and add them to the sum of each row."""
    for r in range(rows):
        line, top = scratch + _SCORES + _LINE * r, vec.load_f32(scratch + _TOP + 4 * r)
        base, part = vec.splat(top if top > F(-np.inf) or top != top else F(0.0)), vec.splat(F(0.0))
        for v in range(0, (keys + 15) // 16):
            weight = exp(vec.load(line + 64 * v) - base) * gate
            vec.store(line + 64 * v, weight)
            part = part + weight
        before = vec.load_f32(scratch + _SUM + 4 * r) * vec.load_f32(scratch + _ALPHA + 4 * r)
        vec.store_f32(scratch + _SUM + 4 * r, before + vec.total(part))


@native
def _fresh(scratch: Any) -> None:
    for v in range(_SIDE // 16):
        vec.store(scratch + _TOP + 64 * v, vec.splat(F(-np.inf)))
        vec.store(scratch + _SUM + 64 * v, vec.splat(F(0.0)))


@native
def _inverted(scratch: Any, rows: Any) -> None:
    """Replace the sum of each row by its inverse; where it is 0, by 0, and the maximum by 0."""
    for r in range(rows):
        whole, top = vec.load_f32(scratch + _SUM + 4 * r), vec.load_f32(scratch + _TOP + 4 * r)
        seen = whole > F(0.0) or whole != whole
        vec.store_f32(scratch + _SUM + 4 * r, F(1.0) / whole if seen else F(0.0))
        vec.store_f32(scratch + _TOP + 4 * r, top if seen else F(0.0))


@loop(Code.ATTEND_LISTS)
def attend_lists(row: Any, scratch: Any) -> Any:
    """softmax over the visible keys of the listed blocks, times v; 0 for a query that sees no key."""
    more, groups, queries = row + 2 * BYTES, cell(row, 4), cell(row, 5)
    keys_all, deep, wide = cell(row, 6), cell(row, 7), cell(row, 8)
    lists, length, block, tile = cell(more, 3), cell(more, 4), cell(more, 5), cell(more, 6)
    heads, start, each = cell(row, 3) // groups, _start(row), cell(more, 7)
    runs = (lists + each - 1) // each
    by_head = tile == 1
    step_q, step_o = _step(row, 0, by_head), _step(row, 3, by_head)
    step_k, step_v = _step(row, 1, False), _step(row, 2, False)
    for unit in range(cell(row, 1), cell(row, 1) + cell(row, 2)):
        part, first = unit // runs, unit % runs * each
        batch, group = part // groups, part % groups
        k, v = _operand(row, 1, batch, group, 0), _operand(row, 2, batch, group, 0)
        for number_ in range(first, min(first + each, lists)):
            at_list, token = (part * lists + number_) * length, number_ * tile
            outer, inner = (1, heads) if by_head else (heads, min(tile, queries - token))
            for head in range(outer):
                for i in range(0, inner, _SIDE):
                    rows = min(_SIDE, inner - i)
                    own, here = (group * heads + i, token) if by_head else (group * heads + head, token + i)
                    q, out = _operand(row, 0, batch, own, here), _operand(row, 3, batch, own, here)
                    position, forward = start + here, 0 if by_head else 1
                    _fresh(scratch)
                    _cleared(out, step_o, rows, wide)
                    for c in range(length):
                        b = vec.load_i32(cell(more, 0) + 4 * (at_list + c))
                        gate = vec.load_f32(cell(more, 1) + 4 * (at_list + c))
                        if b < 0 or gate == F(0.0):
                            continue
                        if b * block >= keys_all:
                            return -1
                        end = min(b * block + block, keys_all, position + forward * (rows - 1) + 1)
                        for j in range(b * block, end, _SIDE):
                            keys = min(_SIDE, end - j)
                            _dots(scratch + _SCORES, q, step_q, k + j * step_k, step_k, rows, keys, deep, scratch)
                            _bounded(row, scratch, position, forward, j, rows, keys)
                            _raised(scratch, rows, keys, gate)
                            _scaled(out, step_o, rows, wide, scratch + _ALPHA)
                            _add(
                                out, step_o, scratch + _SCORES, _LINE, 4, v + j * step_v, step_v, rows, wide, keys,
                                scratch,
                            )  # fmt: skip
                    _inverted(scratch, rows)
                    _scaled(out, step_o, rows, wide, scratch + _SUM)
    return 2


@native
def _weights(row: Any, scratch: Any, position: Any, forward: Any, j: Any, rows: Any, keys: Any, gate: Any) -> Any:
    """Turn scores into gated weights and slopes of weights into slopes of scores; return the gradient of the gate."""
    scale, found = vec.splat(F(number(row, 9))), vec.splat(F(0.0))
    for r in range(rows):
        line, other = scratch + _SCORES + _LINE * r, scratch + _SLOPES + _LINE * r
        top, factor = vec.splat(vec.load_f32(scratch + _TOP + 4 * r)), vec.splat(vec.load_f32(scratch + _SUM + 4 * r))
        less = vec.splat(vec.load_f32(scratch + _ALPHA + 4 * r))
        for v in range(0, (keys + 15) // 16):
            mask = _seen(position + r * forward, j, keys, v)
            value = exp(vec.least(vec.load(line + 64 * v) * scale - top, _STEEPEST)) * factor
            value = vec.select(mask, value, 0.0)
            slope = vec.select(mask, value * (vec.load(other + 64 * v) - less), 0.0)
            found = found + slope
            vec.store(line + 64 * v, value * gate)
            vec.store(other + 64 * v, slope * scale * gate)
    return vec.total(found)


@loop(Code.ATTEND_LISTS_BACKWARD)
def attend_lists_backward(row: Any, scratch: Any) -> Any:
    """Compute the gradients of q, k, v and of the gates, those of blocks with gate 0 too.

    With p = e^(s - max) / Σ g·e^(s - max) and slopes p ⊙ (dO·Vᵀ - D), D = rowsum(dO ⊙ O): the gradient of a gate is
    the sum of the slopes of its block, dS = scale·g·slopes, dQ = dS·K, dK = dSᵀ·Q, dV = (g·p)ᵀ·dO.
    """
    more, groups, queries = row + 3 * BYTES, cell(row, 4), cell(row, 5)
    keys_all, deep, wide = cell(row, 6), cell(row, 7), cell(row, 8)
    lists, length, block, tile = cell(more, 3), cell(more, 4), cell(more, 5), cell(more, 6)
    heads, start = cell(row, 3) // groups, _start(row)
    by_head = tile == 1
    step_q, step_o = _step(row, 0, by_head), _step(row, 3, by_head)
    step_g, to_q = _step(row, 4, by_head), _step(row, 5, by_head)
    step_k, step_v, to_k, to_v = _step(row, 1, False), _step(row, 2, False), _step(row, 6, False), _step(row, 7, False)
    for part in range(cell(row, 1), cell(row, 1) + cell(row, 2)):
        batch, group = part // groups, part % groups
        k, v = _operand(row, 1, batch, group, 0), _operand(row, 2, batch, group, 0)
        dk, dv = _operand(row, 6, batch, group, 0), _operand(row, 7, batch, group, 0)
        _cleared(dk, to_k, keys_all, deep)
        _cleared(dv, to_v, keys_all, wide)
        for number_ in range(lists):
            at_list, token = (part * lists + number_) * length, number_ * tile
            _cleared(cell(more, 2) + 4 * at_list, 0, 1, length)
            outer, inner = (1, heads) if by_head else (heads, min(tile, queries - token))
            for head in range(outer):
                for i in range(0, inner, _SIDE):
                    rows = min(_SIDE, inner - i)
                    own, here = (group * heads + i, token) if by_head else (group * heads + head, token + i)
                    q, out = _operand(row, 0, batch, own, here), _operand(row, 3, batch, own, here)
                    g, dq = _operand(row, 4, batch, own, here), _operand(row, 5, batch, own, here)
                    position, forward = start + here, 0 if by_head else 1
                    last = position + forward * (rows - 1) + 1
                    _cleared(dq, to_q, rows, deep)
                    _fresh(scratch)
                    for c in range(length):
                        b = vec.load_i32(cell(more, 0) + 4 * (at_list + c))
                        gate = vec.load_f32(cell(more, 1) + 4 * (at_list + c))
                        if b < 0 or gate == F(0.0):
                            continue
                        if b * block >= keys_all:
                            return -1
                        end = min(b * block + block, keys_all, last)
                        for j in range(b * block, end, _SIDE):
                            keys = min(_SIDE, end - j)
                            _dots(scratch + _SCORES, q, step_q, k + j * step_k, step_k, rows, keys, deep, scratch)
                            _bounded(row, scratch, position, forward, j, rows, keys)
                            _raised(scratch, rows, keys, gate)
                    _inverted(scratch, rows)
                    for r in range(rows):
                        inside = vec.splat(F(0.0))
                        for d in range(0, wide, 16):
                            mask = vec.first(wide - d)
                            slope, value = g + r * step_g + 4 * d, out + r * step_o + 4 * d
                            inside = vec.fma(vec.load_first(slope, mask), vec.load_first(value, mask), inside)
                        vec.store_f32(scratch + _ALPHA + 4 * r, vec.total(inside))
                    for c in range(length):
                        b = vec.load_i32(cell(more, 0) + 4 * (at_list + c))
                        at_gate = 4 * (at_list + c)
                        gate, total = vec.load_f32(cell(more, 1) + at_gate), F(0.0)
                        if b < 0:
                            continue
                        if b * block >= keys_all:
                            return -1
                        end = min(b * block + block, keys_all, last)
                        for j in range(b * block, end, _SIDE):
                            keys, at_k, at_v = min(_SIDE, end - j), k + j * step_k, v + j * step_v
                            scores, slopes = scratch + _SCORES, scratch + _SLOPES
                            _dots(scores, q, step_q, at_k, step_k, rows, keys, deep, scratch)
                            _dots(slopes, g, step_g, at_v, step_v, rows, keys, wide, scratch)
                            total += _weights(row, scratch, position, forward, j, rows, keys, gate)
                            if gate != F(0.0):
                                _add(dq, to_q, slopes, _LINE, 4, at_k, step_k, rows, deep, keys, scratch)
                                _add(dk + j * to_k, to_k, slopes, 4, _LINE, q, step_q, keys, deep, rows, scratch)
                                _add(dv + j * to_v, to_v, scores, 4, _LINE, g, step_g, keys, wide, rows, scratch)
                        before = vec.load_f32(cell(more, 2) + at_gate)
                        vec.store_f32(cell(more, 2) + at_gate, before + total)
    return 3
