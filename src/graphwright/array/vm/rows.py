"""Loops over whole rows: sums, softmax, norms, losses. Cells as in `elementwise.py`."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array.vm.elementwise import F, cell, number, past, put, start
from graphwright.array.vm.math import exp, native, rsqrt
from graphwright.array.vm.vector import (
    first,
    fma,
    largest,
    load,
    load_f32,
    load_first,
    load_i64,
    maximum,
    most,
    only,
    select,
    splat,
    store,
    store_f32,
    store_first,
    top,
    total,
)

_BLOCK = 4096  # terms summed in float32 before they are added to a float64


@native
def _row_total(x: Any, cols: Any) -> Any:
    """Sum of a row: 4 vectors at a time, blocks of 4096 terms added in float64."""
    whole, i = 0.0, 0
    while i < cols:
        end = min(cols, i + _BLOCK)
        a, b, c, d = splat(F(0.0)), splat(F(0.0)), splat(F(0.0)), splat(F(0.0))
        while i + 64 <= end:
            a, b = a + load(x + 4 * i), b + load(x + 4 * i + 64)
            c, d = c + load(x + 4 * i + 128), d + load(x + 4 * i + 192)
            i += 64
        while i < end:
            a = a + load_first(x + 4 * i, first(end - i))
            i += 16
        i = end
        whole += total(a + b + (c + d))
    return whole


@native
def sum_rows(row: Any) -> None:
    """out[r] = Σ x[r, :] / cell 9; `so` is the stride of out."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4)
    x, sx, count = cell(row, 6), cell(row, 7), F(number(row, 9))
    for _ in range(rows):
        store_f32(o, F(_row_total(x, cols)) / count)
        o += so
        x += sx


@native
def sum_columns(row: Any) -> None:
    """out[c] = Σ x[:, c] / cell 9; 256 rows at a time."""
    rows, cols, o = cell(row, 1), cell(row, 2), cell(row, 3)
    x, sx, count = cell(row, 6), cell(row, 7), splat(F(number(row, 9)))
    for i in range(0, cols, 16):
        mask = first(cols - i)
        whole = splat(F(0.0))
        for begin in range(0, rows, 256):
            a, b = splat(F(0.0)), splat(F(0.0))
            r, end = begin, min(rows, begin + 256)
            while r + 2 <= end:
                a = a + load_first(x + r * sx + 4 * i, mask)
                b = b + load_first(x + (r + 1) * sx + 4 * i, mask)
                r += 2
            if r < end:
                a = a + load_first(x + r * sx + 4 * i, mask)
            whole = whole + (a + b)
        store_first(o + 4 * i, whole / count, mask)


@native
def _row_largest(x: Any, cols: Any) -> Any:
    low = splat(F(-np.inf))
    best, i = low, 0
    while i + 16 <= cols:
        best = maximum(best, load(x + 4 * i))
        i += 16
    if i < cols:
        mask = first(cols - i)
        best = maximum(best, select(mask, load_first(x + 4 * i, mask), low))
    return largest(best)


@native
def _row_top(x: Any, cols: Any) -> Any:
    """The largest number of a row, without NaN, which the exponentials will propagate."""
    low = splat(F(-np.inf))
    a, b, i = low, low, 0
    while i + 32 <= cols:
        a, b = most(a, load(x + 4 * i)), most(b, load(x + 4 * i + 64))
        i += 32
    while i < cols:
        mask = first(cols - i)
        a = most(a, select(mask, load_first(x + 4 * i, mask), low))
        i += 16
    return top(most(a, b))


@native
def amax_rows(row: Any) -> None:
    """out[r] = max x[r, :]."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4)
    x, sx = cell(row, 6), cell(row, 7)
    for _ in range(rows):
        store_f32(o, _row_largest(x, cols))
        o += so
        x += sx


@native
def softmax(row: Any, turn: Any, scratch: Any) -> None:
    """out[r, :] = exp(x[r, :] - max) / Σ."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), start(row, 3, turn, scratch), cell(row, 4)
    x, sx = start(row, 6, turn, scratch), cell(row, 7)
    for _ in range(rows):
        high, i = splat(_row_top(x, cols)), 0
        while i + 16 <= cols:
            store(o + 4 * i, exp(load(x + 4 * i) - high))
            i += 16
        if i < cols:
            mask = first(cols - i)
            store_first(o + 4 * i, exp(load_first(x + 4 * i, mask) - high), mask)
        scale, i = splat(F(1.0 / _row_total(o, cols))), 0
        while i + 16 <= cols:
            store(o + 4 * i, load(o + 4 * i) * scale)
            i += 16
        if i < cols:
            mask = first(cols - i)
            store_first(o + 4 * i, load_first(o + 4 * i, mask) * scale, mask)
        o += so
        x += sx


@native
def _scaled_exponentials(x: Any, cols: Any, shift: Any) -> Any:
    """Σ exp(x - shift) of a row."""
    whole, i, high = 0.0, 0, splat(shift)
    while i < cols:
        end = min(cols, i + _BLOCK)
        part, other = splat(F(0.0)), splat(F(0.0))
        while i + 32 <= end:
            part = part + exp(load(x + 4 * i) - high)
            other = other + exp(load(x + 4 * i + 64) - high)
            i += 32
        while i < end:
            mask = first(end - i)
            part = part + select(mask, exp(load_first(x + 4 * i, mask) - high), 0.0)
            i += 16
        i = end
        whole += total(part + other)
    return whole


@native
def cross_entropy(row: Any) -> Any:
    """Loss and log Σ exp per row; cells 6 scores, 7 bytes per row, 8 targets int64, 9 lse, 10 ignored target.

    Returns False for a target outside the classes.
    """
    rows, cols, loss, x, sx = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 6), cell(row, 7)
    targets, lse, ignored = cell(row, 8), cell(row, 9), cell(row, 10)
    for r in range(rows):
        target = load_i64(targets + 8 * r)
        if target != ignored and not 0 <= target < cols:
            return False
        high = _row_top(x, cols)
        rest = F(np.log(_scaled_exponentials(x, cols, high)))
        store_f32(lse + 4 * r, rest + high)
        value = F(0.0)
        if target != ignored:
            value = rest - (load_f32(x + 4 * target) - high)
        store_f32(loss + 4 * r, value)
        x += sx
    return True


@native
def cross_entropy_backward(row: Any) -> Any:
    """g·(softmax - one-hot) per row; cells as in `cross_entropy`, 11 g and 12 its bytes per row."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4)
    x, sx, targets, lse, ignored = cell(row, 6), cell(row, 7), cell(row, 8), cell(row, 9), cell(row, 10)
    g, sg = cell(row, 11), cell(row, 12)
    for r in range(rows):
        target = load_i64(targets + 8 * r)
        if target != ignored and not 0 <= target < cols:
            return False
        weight = F(0.0) if target == ignored else load_f32(g)
        scale, less, i, streamed = splat(weight), splat(load_f32(lse + 4 * r)), 0, past(row, o)
        while i + 16 <= cols:
            put(o + 4 * i, exp(load(x + 4 * i) - less) * scale, streamed)
            i += 16
        if i < cols:
            mask = first(cols - i)
            store_first(o + 4 * i, exp(load_first(x + 4 * i, mask) - less) * scale, mask)
        if target != ignored:
            exact = only(exp(splat(load_f32(x + 4 * target) - load_f32(lse + 4 * r))))
            store_f32(o + 4 * target, exact * weight - weight)
        o += so
        x += sx
        g += sg
    return True


@native
def rms_norm(row: Any, turn: Any, scratch: Any) -> None:
    """out[r, :] = x[r, :] / √(mean x² + eps)·w; cells 9 w, 10 its stride per turn, 11 eps."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), start(row, 3, turn, scratch), cell(row, 4)
    x, sx, eps = start(row, 6, turn, scratch), cell(row, 7), F(number(row, 11))
    w = start(row, 9, turn, scratch)
    for _ in range(rows):
        whole, i = 0.0, 0
        while i < cols:
            end = min(cols, i + _BLOCK)
            part, other = splat(F(0.0)), splat(F(0.0))
            while i + 32 <= end:
                u, v = load(x + 4 * i), load(x + 4 * i + 64)
                part, other = fma(u, u, part), fma(v, v, other)
                i += 32
            while i < end:
                v = load_first(x + 4 * i, first(end - i))
                part = fma(v, v, part)
                i += 16
            i = end
            whole += total(part + other)
        scale, i, streamed = rsqrt(splat(F(whole) / F(cols) + eps)), 0, past(row, o)
        while i + 16 <= cols:
            put(o + 4 * i, load(x + 4 * i) * scale * load(w + 4 * i), streamed)
            i += 16
        if i < cols:
            mask = first(cols - i)
            normal = load_first(x + 4 * i, mask) * scale
            store_first(o + 4 * i, normal * load_first(w + 4 * i, mask), mask)
        o += so
        x += sx


@native
def layer_norm(row: Any) -> None:
    """out[r, :] = (x[r, :] - mean) / √(var + eps)·w + b; cells 9 w, 11 is w used, 12 b, 14 is b used, 15 eps.

    The variance is computed from the differences in a second pass, which loses no digits where the mean is large.
    """
    rows, cols, o, so = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4)
    x, sx, w, b = cell(row, 6), cell(row, 7), cell(row, 9), cell(row, 12)
    weighs, shifts, eps = cell(row, 11), cell(row, 14), F(number(row, 15))
    for _ in range(rows):
        mean, whole, i = splat(F(_row_total(x, cols) / cols)), 0.0, 0
        while i < cols:
            end, part = min(cols, i + _BLOCK), splat(F(0.0))
            while i < end:
                mask = first(end - i)
                apart = select(mask, load_first(x + 4 * i, mask) - mean, 0.0)
                part = fma(apart, apart, part)
                i += 16
            i = end
            whole += total(part)
        scale, streamed = rsqrt(splat(F(whole / cols) + eps)), past(row, o)
        for i in range(0, cols, 16):
            mask = first(cols - i)
            y = (load_first(x + 4 * i, mask) - mean) * scale
            if weighs:
                y = y * load_first(w + 4 * i, mask)
            if shifts:
                y = y + load_first(b + 4 * i, mask)
            if streamed and i + 16 <= cols:
                put(o + 4 * i, y, streamed)
            else:
                store_first(o + 4 * i, y, mask)
        o += so
        x += sx
