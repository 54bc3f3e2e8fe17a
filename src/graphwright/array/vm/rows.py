"""Loops over whole rows: sums, softmax, norms, losses, lookups, rotary embeddings. Operands as in `elementwise.py`."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array.vm import vector as vec
from graphwright.array.vm.code import Code
from graphwright.array.vm.elementwise import F, cell, loop, number, past, put, start
from graphwright.array.vm.math import cos_sin, exp, native, rsqrt

_BLOCK = 4096  # terms summed in float32 before they are added to a float64


@native
def _row_total(x: Any, cols: Any) -> Any:
    """Return the sum of a row of `cols` numbers: float32 sums of blocks of 4096 are added in float64."""
    whole, i = 0.0, 0
    while i < cols:
        end = min(cols, i + _BLOCK)
        a, b, c, d = vec.splat(F(0.0)), vec.splat(F(0.0)), vec.splat(F(0.0)), vec.splat(F(0.0))
        while i + 64 <= end:
            a, b = a + vec.load(x + 4 * i), b + vec.load(x + 4 * i + 64)
            c, d = c + vec.load(x + 4 * i + 128), d + vec.load(x + 4 * i + 192)
            i += 64
        while i < end:
            a = a + vec.load_first(x + 4 * i, vec.first(end - i))
            i += 16
        i = end
        whole += vec.total(a + b + (c + d))
    return whole


@loop(Code.SUM_ROWS)
def sum_rows(row: Any) -> None:
    """out[r] = Σ x[r, :] / d. Word 9 of the instruction is the divisor d, word 4 the stride of out in bytes."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4)
    x, sx, count = cell(row, 6), cell(row, 7), F(number(row, 9))
    for _ in range(rows):
        vec.store_f32(o, F(_row_total(x, cols)) / count)
        o += so
        x += sx


@loop(Code.SUM_COLUMNS)
def sum_columns(row: Any) -> None:
    """out[c] = Σ x[:, c] / d, summed 256 rows at a time. Word 9 of the instruction is the divisor d."""
    rows, cols, o = cell(row, 1), cell(row, 2), cell(row, 3)
    x, sx, count = cell(row, 6), cell(row, 7), vec.splat(F(number(row, 9)))
    for i in range(0, cols, 16):
        mask = vec.first(cols - i)
        whole = vec.splat(F(0.0))
        for begin in range(0, rows, 256):
            a, b = vec.splat(F(0.0)), vec.splat(F(0.0))
            r, end = begin, min(rows, begin + 256)
            while r + 2 <= end:
                a = a + vec.load_first(x + r * sx + 4 * i, mask)
                b = b + vec.load_first(x + (r + 1) * sx + 4 * i, mask)
                r += 2
            if r < end:
                a = a + vec.load_first(x + r * sx + 4 * i, mask)
            whole = whole + (a + b)
        vec.store_first(o + 4 * i, whole / count, mask)


@native
def _row_largest(x: Any, cols: Any) -> Any:
    low = vec.splat(F(-np.inf))
    best, i = low, 0
    while i + 16 <= cols:
        best = vec.maximum(best, vec.load(x + 4 * i))
        i += 16
    if i < cols:
        mask = vec.first(cols - i)
        best = vec.maximum(best, vec.select(mask, vec.load_first(x + 4 * i, mask), low))
    return vec.largest(best)


@native
def _row_top(x: Any, cols: Any) -> Any:
    """Return the largest number of a row, ignoring NaN: the softmax that follows is NaN there anyway."""
    low = vec.splat(F(-np.inf))
    a, b, i = low, low, 0
    while i + 32 <= cols:
        a, b = vec.most(a, vec.load(x + 4 * i)), vec.most(b, vec.load(x + 4 * i + 64))
        i += 32
    while i < cols:
        mask = vec.first(cols - i)
        a = vec.most(a, vec.select(mask, vec.load_first(x + 4 * i, mask), low))
        i += 16
    return vec.top(vec.most(a, b))


@loop(Code.AMAX_ROWS)
def amax_rows(row: Any) -> None:
    """out[r] = max x[r, :]."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4)
    x, sx = cell(row, 6), cell(row, 7)
    for _ in range(rows):
        vec.store_f32(o, _row_largest(x, cols))
        o += so
        x += sx


@loop(Code.SOFTMAX)
def softmax(row: Any, turn: Any, scratch: Any) -> None:
    """out[r, :] = e / Σ e, where e = exp(x[r, :] - max x[r, :])."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), start(row, 3, turn, scratch), cell(row, 4)
    x, sx = start(row, 6, turn, scratch), cell(row, 7)
    for _ in range(rows):
        high, i = vec.splat(_row_top(x, cols)), 0
        while i + 16 <= cols:
            vec.store(o + 4 * i, exp(vec.load(x + 4 * i) - high))
            i += 16
        if i < cols:
            mask = vec.first(cols - i)
            vec.store_first(o + 4 * i, exp(vec.load_first(x + 4 * i, mask) - high), mask)
        scale, i = vec.splat(F(1.0 / _row_total(o, cols))), 0
        while i + 16 <= cols:
            vec.store(o + 4 * i, vec.load(o + 4 * i) * scale)
            i += 16
        if i < cols:
            mask = vec.first(cols - i)
            vec.store_first(o + 4 * i, vec.load_first(o + 4 * i, mask) * scale, mask)
        o += so
        x += sx


@native
def _scaled_exponentials(x: Any, cols: Any, shift: Any) -> Any:
    """Σ exp(x - shift) of a row."""
    whole, i, high = 0.0, 0, vec.splat(shift)
    while i < cols:
        end = min(cols, i + _BLOCK)
        part, other = vec.splat(F(0.0)), vec.splat(F(0.0))
        while i + 32 <= end:
            part = part + exp(vec.load(x + 4 * i) - high)
            other = other + exp(vec.load(x + 4 * i + 64) - high)
            i += 32
        while i < end:
            mask = vec.first(end - i)
            part = part + vec.select(mask, exp(vec.load_first(x + 4 * i, mask) - high), 0.0)
            i += 16
        i = end
        whole += vec.total(part + other)
    return whole


@loop(Code.CROSS_ENTROPY)
def cross_entropy(row: Any) -> Any:
    """Compute the loss and log Σ exp of each row; return -1 for a target outside the classes.

    Instruction words: 3 loss, 6 scores, 7 their bytes per row, 8 targets (int64), 9 log Σ exp, 10 ignored target,
    11 label smoothing.
    """
    smoothing = F(number(row, 11))
    rows, cols, loss, x, sx = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 6), cell(row, 7)
    targets, lse, ignored = cell(row, 8), cell(row, 9), cell(row, 10)
    for r in range(rows):
        target = vec.load_i64(targets + 8 * r)
        if target != ignored and not 0 <= target < cols:
            return -1
        high = _row_top(x, cols)
        rest = F(np.log(_scaled_exponentials(x, cols, high)))
        vec.store_f32(lse + 4 * r, rest + high)
        value = F(0.0)
        if target != ignored:
            value = rest - (vec.load_f32(x + 4 * target) - high)
            if smoothing > 0:
                value += smoothing * (vec.load_f32(x + 4 * target) - F(_row_total(x, cols) / cols))
        vec.store_f32(loss + 4 * r, value)
        x += sx
    return 0


@loop(Code.CROSS_ENTROPY_BACKWARD)
def cross_entropy_backward(row: Any) -> Any:
    """out[r, :] = g[r]·(softmax - (1 - s)·one-hot - s/K); return -1 for a target outside the classes.

    Words: 3 out, 4 its stride, 6 scores, 7 their stride, 8 targets, 9 log Σ exp, 10 ignored target, 11 g, 12 stride,
    13 label smoothing s.
    """
    rows, cols, o, so = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4)
    x, sx, targets, lse, ignored = cell(row, 6), cell(row, 7), cell(row, 8), cell(row, 9), cell(row, 10)
    g, sg, smoothing = cell(row, 11), cell(row, 12), F(number(row, 13))
    share = smoothing / F(cols)
    for r in range(rows):
        target = vec.load_i64(targets + 8 * r)
        if target != ignored and not 0 <= target < cols:
            return -1
        weight = F(0.0) if target == ignored else vec.load_f32(g)
        scale, less, i, streamed = vec.splat(weight), vec.splat(vec.load_f32(lse + 4 * r)), 0, past(row, o)
        off = vec.splat(-weight * share)
        while i + 16 <= cols:
            put(o + 4 * i, vec.fma(exp(vec.load(x + 4 * i) - less), scale, off), streamed)
            i += 16
        if i < cols:
            mask = vec.first(cols - i)
            vec.store_first(o + 4 * i, vec.fma(exp(vec.load_first(x + 4 * i, mask) - less), scale, off), mask)
        if target != ignored:
            exact = vec.only(exp(vec.splat(vec.load_f32(x + 4 * target) - vec.load_f32(lse + 4 * r))))
            vec.store_f32(o + 4 * target, exact * weight - weight * (F(1.0) - smoothing + share))
        o += so
        x += sx
        g += sg
    return 0


@loop(Code.RMS_NORM)
def rms_norm(row: Any, turn: Any, scratch: Any) -> None:
    """out[r, :] = x[r, :] / √(mean x² + eps)·w. Instruction words: 9 w, 10 its stride in a LOOP, 11 eps."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), start(row, 3, turn, scratch), cell(row, 4)
    x, sx, eps = start(row, 6, turn, scratch), cell(row, 7), F(number(row, 11))
    w = start(row, 9, turn, scratch)
    for _ in range(rows):
        whole, i = 0.0, 0
        while i < cols:
            end = min(cols, i + _BLOCK)
            part, other = vec.splat(F(0.0)), vec.splat(F(0.0))
            while i + 32 <= end:
                u, v = vec.load(x + 4 * i), vec.load(x + 4 * i + 64)
                part, other = vec.fma(u, u, part), vec.fma(v, v, other)
                i += 32
            while i < end:
                v = vec.load_first(x + 4 * i, vec.first(end - i))
                part = vec.fma(v, v, part)
                i += 16
            i = end
            whole += vec.total(part + other)
        scale, i, streamed = rsqrt(vec.splat(F(whole) / F(cols) + eps)), 0, past(row, o)
        while i + 16 <= cols:
            put(o + 4 * i, vec.load(x + 4 * i) * scale * vec.load(w + 4 * i), streamed)
            i += 16
        if i < cols:
            mask = vec.first(cols - i)
            normal = vec.load_first(x + 4 * i, mask) * scale
            vec.store_first(o + 4 * i, normal * vec.load_first(w + 4 * i, mask), mask)
        o += so
        x += sx


@loop(Code.LAYER_NORM)
def layer_norm(row: Any) -> None:
    """out[r, :] = (x[r, :] - mean) / √(var + eps)·w + b.

    Instruction words: 9 w, 11 whether w is used, 12 b, 14 whether b is used, 15 eps. The variance is computed from the
    differences in a second pass, which loses no digits where the mean is large.
    """
    rows, cols, o, so = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4)
    x, sx, w, b = cell(row, 6), cell(row, 7), cell(row, 9), cell(row, 12)
    weighs, shifts, eps = cell(row, 11), cell(row, 14), F(number(row, 15))
    for _ in range(rows):
        mean, whole, i = vec.splat(F(_row_total(x, cols) / cols)), 0.0, 0
        while i < cols:
            end, part = min(cols, i + _BLOCK), vec.splat(F(0.0))
            while i < end:
                mask = vec.first(end - i)
                apart = vec.select(mask, vec.load_first(x + 4 * i, mask) - mean, 0.0)
                part = vec.fma(apart, apart, part)
                i += 16
            i = end
            whole += vec.total(part)
        scale, streamed = rsqrt(vec.splat(F(whole / cols) + eps)), past(row, o)
        for i in range(0, cols, 16):
            mask = vec.first(cols - i)
            y = (vec.load_first(x + 4 * i, mask) - mean) * scale
            if weighs:
                y = y * vec.load_first(w + 4 * i, mask)
            if shifts:
                y = y + vec.load_first(b + 4 * i, mask)
            if streamed and i + 16 <= cols:
                put(o + 4 * i, y, streamed)
            else:
                vec.store_first(o + 4 * i, y, mask)
        o += so
        x += sx


# -- moves -------------------------------------------------------------------------------------------------------------
@native
def copy_line(target: Any, source: Any, cols: Any) -> None:
    """Copy `cols` adjacent 4-byte numbers."""
    i = 0
    while i + 16 <= cols:
        vec.store(target + 4 * i, vec.load(source + 4 * i))
        i += 16
    if i < cols:
        mask = vec.first(cols - i)
        vec.store_first(target + 4 * i, vec.load_first(source + 4 * i, mask), mask)


@loop(Code.COPY_AXES)
def copy_axes(row: Any) -> None:
    """Copy an array of four axes to a result with other strides.

    Instruction words: 1 to 4 sizes, 5 result, 6 to 8 its first strides (the last is 4), 9 x, 10 to 13 its strides.
    """
    cols, step = cell(row, 4), cell(row, 13)
    for a in range(cell(row, 1)):
        for b in range(cell(row, 2)):
            target = cell(row, 5) + a * cell(row, 6) + b * cell(row, 7)
            source = cell(row, 9) + a * cell(row, 10) + b * cell(row, 11)
            for _ in range(cell(row, 3)):
                if step == 4:
                    copy_line(target, source, cols)
                else:
                    for i in range(0, cols, 16):
                        mask = vec.first(cols - i)
                        vec.store_first(target + 4 * i, vec.pick_first(source + i * step, step, mask), mask)
                target += cell(row, 8)
                source += cell(row, 12)


@loop(Code.GATHER_ROWS)
def gather_rows(row: Any) -> Any:
    """out[i] = table[ids[i]]; return -1 if an id is outside the table.

    Instruction words: 1 number of ids, 2 columns, 3 out, 4 its stride, 6 table, 7 its stride, 8 ids, 9 rows of table.
    """
    out, ids, cols = cell(row, 3), cell(row, 8), cell(row, 2)
    for i in range(cell(row, 1)):
        index = vec.load_i64(ids + 8 * i)
        if not 0 <= index < cell(row, 9):
            return -1
        copy_line(out + i * cell(row, 4), cell(row, 6) + index * cell(row, 7), cols)
    return 0


@loop(Code.ADD_ROWS)
def add_rows(row: Any) -> Any:
    """Set out to zeros, then out[ids[i]] += x[i] in order; return -1 if an id is outside the rows of out.

    Instruction words: 1 number of ids, 2 columns, 3 out, 4 its stride, 5 rows of out, 6 x, 7 its stride, 8 ids.
    """
    out, step, ids, cols = cell(row, 3), cell(row, 4), cell(row, 8), cell(row, 2)
    for r in range(cell(row, 5)):
        for i in range(0, cols, 16):
            vec.store_first(out + r * step + 4 * i, vec.splat(F(0.0)), vec.first(cols - i))
    for k in range(cell(row, 1)):
        index = vec.load_i64(ids + 8 * k)
        if not 0 <= index < cell(row, 5):
            return -1
        target, source = out + index * step, cell(row, 6) + k * cell(row, 7)
        for i in range(0, cols, 16):
            mask = vec.first(cols - i)
            value = vec.load_first(target + 4 * i, mask) + vec.load_first(source + 4 * i, mask)
            vec.store_first(target + 4 * i, value, mask)
    return 0


@loop(Code.ROPE)
def rope(row: Any) -> None:
    """Rotate pairs (a, b) -> (a·cos - b·sin, b·cos + a·sin), half an axis apart; copy the entries after both halves.

    Instruction words: 1 batch, 2 positions, 3 heads, 4 size of a head, 5 size of a half, 6 x, 7 to 9 its bytes per
    batch element, position, head; 10 result, packed as [batch, head, position, size]; 11 cos, 12 sin, 13 their bytes
    per batch element, 14 the result's bytes per batch element.
    """
    positions, heads, size, half = cell(row, 2), cell(row, 3), cell(row, 4), cell(row, 5)
    for b in range(cell(row, 1)):
        for h in range(heads):
            out = cell(row, 10) + 4 * size * positions * (b * heads + h)
            x = cell(row, 6) + b * cell(row, 7) + h * cell(row, 9)
            cos, sin = cell(row, 11) + b * cell(row, 13), cell(row, 12) + b * cell(row, 13)
            for _ in range(positions):
                for i in range(0, half, 16):
                    mask = vec.first(half - i)
                    one, other = vec.load_first(x + 4 * i, mask), vec.load_first(x + 4 * (half + i), mask)
                    c, s = vec.load_first(cos + 4 * i, mask), vec.load_first(sin + 4 * i, mask)
                    vec.store_first(out + 4 * i, one * c - other * s, mask)
                    vec.store_first(out + 4 * (half + i), other * c + one * s, mask)
                if 2 * half < size:
                    copy_line(out + 8 * half, x + 8 * half, size - 2 * half)
                out += 4 * size
                x += cell(row, 8)
                cos += 4 * half
                sin += 4 * half


@loop(Code.ROPE_TABLE)
def rope_table(row: Any) -> None:
    """Compute tables of cos and sin of position·frequency, multiplied by a factor.

    Instruction words: 1 number of positions, 2 of frequencies, 3 cos, 4 sin, both packed as [position, frequency];
    5 positions (int64), 6 frequencies, 7 the factor.
    """
    half, cos, sin, scale = cell(row, 2), cell(row, 3), cell(row, 4), vec.splat(F(number(row, 7)))
    for t in range(cell(row, 1)):
        position = vec.splat(F(vec.load_i64(cell(row, 5) + 8 * t)))
        for i in range(0, half, 16):
            mask = vec.first(half - i)
            c, s = cos_sin(position * vec.load_first(cell(row, 6) + 4 * i, mask))
            vec.store_first(cos + 4 * i, c * scale, mask)
            vec.store_first(sin + 4 * i, s * scale, mask)
        cos += 4 * half
        sin += 4 * half


@loop(Code.TOPK)
def topk(row: Any) -> None:
    """Find the k largest entries of each row, in descending order, and their indices; ties by ascending index.

    Words: 1 rows, 2 columns, 3 values, 4 their bytes per row, 5 bytes per row of the indices, 6 x, 7 its bytes per
    row, 8 indices (int64), 9 k. NaN counts as the largest number.
    """
    rows, n, values, x, ids, k = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 6), cell(row, 8), cell(row, 9)
    for _ in range(rows):
        found, worst = 0, F(0.0)
        for i in range(0, n, 16):
            v = vec.load_first(x + 4 * i, vec.first(n - i))
            if found == k and vec.largest(vec.select(v <= vec.splat(worst), 0.0, 1.0)) == F(0.0):
                continue
            for j in range(i, min(i + 16, n)):
                one = vec.load_f32(x + 4 * j)
                if found < k:
                    at = found
                    found += 1
                elif _above(one, worst):
                    at = k - 1
                else:
                    continue
                while at > 0 and _above(one, vec.load_f32(values + 4 * (at - 1))):
                    vec.store_f32(values + 4 * at, vec.load_f32(values + 4 * (at - 1)))
                    vec.store_i64(ids + 8 * at, vec.load_i64(ids + 8 * (at - 1)))
                    at -= 1
                vec.store_f32(values + 4 * at, one)
                vec.store_i64(ids + 8 * at, j)
                worst = vec.load_f32(values + 4 * (found - 1))
        values, x, ids = values + cell(row, 4), x + cell(row, 7), ids + cell(row, 5)


@native
def _above(x: Any, y: Any) -> Any:
    return x > y or (x != x and y == y)
