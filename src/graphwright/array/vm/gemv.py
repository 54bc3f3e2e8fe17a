"""Products with weights as a checkpoint stores them: y[t, n] = Σ w[n, k]·x[t, k] (+ b[n]), summed in float32.

Products of few rows of x are bound by reading w, so w is read once and widened in registers from float32, bfloat16, or
int8 with a float32 scale per group of 64 along a row. No weight is packed. For a single row of x, w is read as four
streams (int8: two), a quarter of the rows apart: while the core waits for a page of one stream it continues in the
others, which is up to twice as fast. x is rearranged once per product. For bfloat16 its even entries are separated from
the odd ones, because widening separates neighbouring weights. For int8, x is rounded to 16 bits with a scale per group:
integer products are exact, and only x is rounded, by max |x| / 65534 of its group. For many rows of x, a panel of w is
widened while it is packed, and x is used as it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array.vm import vector as vec
from graphwright.array.vm.code import DEPTH, GROUP, ZEROS, Code
from graphwright.array.vm.elementwise import F, cell, loop
from graphwright.array.vm.gemm import PANEL, tiles, transposer
from graphwright.array.vm.math import native
from graphwright.array.vm.narrow import (
    dot_i8,
    evens,
    evens_bf16,
    fetch_bf16,
    fetch_i8,
    load_first_bf16,
    odds,
    odds_bf16,
    products_i8,
    store_i16,
)


@native
def _second(w: Any) -> Any:
    return vec.load(w + 64)


def _dots(low: Any, high: Any, read_first: Any, size: Any) -> tuple[Any, Any, Any]:
    """Dot products of `k` terms, for weights of `size` bytes: one row with x, four rows with x, one row with x and y.

    `low` and `high` widen the two halves of 32 weights; x is in the order that they produce. The last k % 32 terms are
    in memory order in `plain`. Four rows, `far` bytes apart, give the same bits as one row each.
    """

    @native
    def add_64(at: Any, x: Any, s: Any) -> Any:
        a, b = vec.fma(low(at), vec.load(x), s[0]), vec.fma(high(at), vec.load(x + 64), s[1])
        at += 32 * size
        return a, b, vec.fma(low(at), vec.load(x + 128), s[2]), vec.fma(high(at), vec.load(x + 192), s[3])

    @native
    def rest(w: Any, x: Any, plain: Any, k: Any, s: Any) -> Any:
        a, b, i = s[0], s[1], k - k % 64
        if i + 32 <= k:
            a = vec.fma(low(w + size * i), vec.load(x + 4 * i), a)
            b = vec.fma(high(w + size * i), vec.load(x + 4 * i + 64), b)
            i += 32
        while i < k:
            mask = vec.first(k - i)
            a = vec.fma(read_first(w + size * i, mask), vec.load_first(plain + 4 * i, mask), a)
            i += 16
        return vec.total(a + b + (s[2] + s[3]))

    @native
    def one(w: Any, x: Any, plain: Any, k: Any) -> Any:
        none = vec.splat(F(0.0))
        s = none, none, none, none
        for i in range(0, k - 63, 64):
            s = add_64(w + size * i, x + 4 * i, s)
        return rest(w, x, plain, k, s)

    @native
    def four(w: Any, far: Any, x: Any, plain: Any, k: Any) -> Any:
        none = vec.splat(F(0.0))
        p = q = r = s = none, none, none, none
        for i in range(0, k - 63, 64):
            at, here = w + size * i, x + 4 * i
            p, q = add_64(at, here, p), add_64(at + far, here, q)
            r, s = add_64(at + 2 * far, here, r), add_64(at + 3 * far, here, s)
        return (
            rest(w, x, plain, k, p), rest(w + far, x, plain, k, q),
            rest(w + 2 * far, x, plain, k, r), rest(w + 3 * far, x, plain, k, s),
        )  # fmt: skip

    @native
    def two(w: Any, x: Any, y: Any, plain_x: Any, plain_y: Any, k: Any) -> Any:
        a, b, c, d = vec.splat(F(0.0)), vec.splat(F(0.0)), vec.splat(F(0.0)), vec.splat(F(0.0))
        i = 0
        while i + 32 <= k:
            u, v = low(w + size * i), high(w + size * i)
            a, c = vec.fma(u, vec.load(x + 4 * i), a), vec.fma(u, vec.load(y + 4 * i), c)
            b, d = vec.fma(v, vec.load(x + 4 * i + 64), b), vec.fma(v, vec.load(y + 4 * i + 64), d)
            i += 32
        while i < k:
            mask = vec.first(k - i)
            u = read_first(w + size * i, mask)
            a = vec.fma(u, vec.load_first(plain_x + 4 * i, mask), a)
            c = vec.fma(u, vec.load_first(plain_y + 4 * i, mask), c)
            i += 16
        return vec.total(a + b), vec.total(c + d)

    return one, four, two


@native
def _apart(x: Any, k: Any, to: Any) -> None:
    """Separate the even from the odd entries of every 32 numbers."""
    for i in range(0, k - 31, 32):
        u, v = vec.load(x + 4 * i), vec.load(x + 4 * i + 64)
        vec.store(to + 4 * i, evens(u, v))
        vec.store(to + 4 * i + 64, odds(u, v))


@native
def _cells(row: Any) -> Any:
    """1 w, 2 rows of w, 3 terms, 4 bias or 0, 5 x, 6 bytes per row of x, 7 y, 8 bytes per row of y, 9 rows of x."""
    w, n, k, bias, x = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4), cell(row, 5)
    return w, n, k, bias, x, cell(row, 6), cell(row, 7), cell(row, 8), cell(row, 9)


def _few_rows(code: Code, low: Any, high: Any, read_first: Any, size: Any) -> None:
    """Define a loop for a product of few rows of x; `code.WORK` is the size of its scratch."""
    one, four, two = _dots(low, high, read_first, size)

    @loop(code)
    def run(row: Any, scratch: Any) -> None:
        w, n, k, bias, plain, gap, y, sy, tokens = _cells(row)
        x, sx = plain, gap
        if size == 2:
            x, sx = scratch + ZEROS, 4 * k
            for t in range(tokens):
                _apart(plain + t * gap, k, x + t * sx)
        quarter = n // 4 if tokens == 1 else 0
        for r in range(quarter):
            sums = four(w + r * k * size, quarter * k * size, x, plain, k)
            for i, row_sum in enumerate(sums):
                place = 4 * (r + i * quarter)
                vec.store_f32(y + place, row_sum + (vec.load_f32(bias + place) if bias else F(0.0)))
        for r in range(4 * quarter, n):
            start = vec.load_f32(bias + 4 * r) if bias else F(0.0)
            at, t = w + r * k * size, 0
            while t + 2 <= tokens:
                p, q = two(at, x + t * sx, x + (t + 1) * sx, plain + t * gap, plain + (t + 1) * gap, k)
                vec.store_f32(y + t * sy + 4 * r, p + start)
                vec.store_f32(y + (t + 1) * sy + 4 * r, q + start)
                t += 2
            if t < tokens:
                vec.store_f32(y + t * sy + 4 * r, one(at, x + t * sx, plain + t * gap, k) + start)


_few_rows(Code.ROWS_F32, vec.load, _second, vec.load_first, 4)
_few_rows(Code.ROWS_BF16, evens_bf16, odds_bf16, load_first_bf16, 2)


_MOST, _LEAST = 32767.0, 1e-30
"""Largest rounded value; largest entry of a group that is rounded to 0, because its inverse would overflow."""


@native
def _rounded(x: Any, k: Any, q: Any, steps: Any) -> None:
    """Quantise to int16 with a float32 step per group: q = round(x / step), step = max |x| / 32767; zeros from k on.

    A group with a non-finite number gets a non-finite step, and zeros.
    """
    for i in range(0, k, GROUP):
        at = x + 4 * i
        a, b = vec.load_first(at, vec.first(k - i)), vec.load_first(at + 64, vec.first(k - i - 16))
        c, d = vec.load_first(at + 128, vec.first(k - i - 32)), vec.load_first(at + 192, vec.first(k - i - 48))
        some, others = vec.maximum(vec.absolute(a), vec.absolute(b)), vec.maximum(vec.absolute(c), vec.absolute(d))
        most = vec.largest(vec.maximum(some, others))
        vec.store_f32(steps + 4 * (i // GROUP), F(0.0) if most <= F(_LEAST) else most * F(1 / _MOST))
        if F(_LEAST) < most < F(np.inf):
            up = vec.splat(F(_MOST) / most)
            a, b, c, d = vec.rint(a * up), vec.rint(b * up), vec.rint(c * up), vec.rint(d * up)
        else:
            a = b = c = d = vec.splat(F(0.0))
        place = q + 2 * i
        store_i16(place, a)
        store_i16(place + 32, b)
        store_i16(place + 64, c)
        store_i16(place + 96, d)


@native
def _add_groups(w: Any, scales: Any, q: Any, steps: Any, s: Any) -> Any:
    p, r = dot_i8(w, q), dot_i8(w + GROUP, q + 2 * GROUP)
    a = vec.fma(p * vec.load_f32(scales), vec.load_f32(steps), s[0])
    return a, vec.fma(r * vec.load_f32(scales + 4), vec.load_f32(steps + 4), s[1])


@native
def _scaled_rest(w: Any, scales: Any, q: Any, steps: Any, k: Any, s: Any) -> Any:
    a, i = s[0], k - k % (2 * GROUP)
    while i < k:
        g, end, p = 4 * (i // GROUP), min(k, i + GROUP), vec.splat(F(0.0))
        while i < end:
            p = products_i8(w + i, q + 2 * i, vec.first(end - i)) + p
            i += 16
        i = end
        a = vec.fma(p * vec.load_f32(scales + g), vec.load_f32(steps + g), a)
    return vec.total(a + s[1])


@native
def _scaled(w: Any, scales: Any, q: Any, steps: Any, k: Any) -> Any:
    none = vec.splat(F(0.0))
    s = none, none
    for i in range(0, k - 2 * GROUP + 1, 2 * GROUP):
        g = 4 * (i // GROUP)
        s = _add_groups(w + i, scales + g, q + 2 * i, steps + g, s)
    return _scaled_rest(w, scales, q, steps, k, s)


@native
def _two_scaled(w: Any, far: Any, scales: Any, far_scales: Any, q: Any, steps: Any, k: Any) -> Any:
    """Two rows, with the same bits as one row each."""
    none = vec.splat(F(0.0))
    s = t = none, none
    v, more = w + far, scales + far_scales
    for i in range(0, k - 2 * GROUP + 1, 2 * GROUP):
        g, x = 4 * (i // GROUP), q + 2 * i
        s, t = _add_groups(w + i, scales + g, x, steps + g, s), _add_groups(v + i, more + g, x, steps + g, t)
    return _scaled_rest(w, scales, q, steps, k, s), _scaled_rest(v, more, q, steps, k, t)


@loop(Code.ROWS_I8)
def int8_rows(row: Any, scratch: Any) -> None:
    """A product with int8 weights; and cell 10 scales [rows of w, groups]."""
    (w, n, k, bias, x, sx, y, sy, tokens), scales = _cells(row), cell(row, 10)
    groups = (k + GROUP - 1) // GROUP
    q, steps = scratch + ZEROS, scratch + ZEROS + 2 * GROUP * groups * tokens
    for t in range(tokens):
        _rounded(x + t * sx, k, q + 2 * GROUP * groups * t, steps + 4 * groups * t)
    half = n // 2 if tokens == 1 else 0
    for r in range(half):
        sums = _two_scaled(w + r * k, half * k, scales + 4 * r * groups, 4 * half * groups, q, steps, k)
        for i, row_sum in enumerate(sums):
            place = 4 * (r + i * half)
            vec.store_f32(y + place, row_sum + (vec.load_f32(bias + place) if bias else F(0.0)))
    for r in range(2 * half, n):
        start = vec.load_f32(bias + 4 * r) if bias else F(0.0)
        for t in range(tokens):
            value = _scaled(w + r * k, scales + 4 * r * groups, q + 2 * GROUP * groups * t, steps + 4 * groups * t, k)
            vec.store_f32(y + t * sy + 4 * r, value + start)


_turn_bf16, _turn_i8 = transposer(fetch_bf16), transposer(fetch_i8)


@native
def _widened(w: Any, k: Any, panel: Any, terms: Any, columns: Any) -> None:
    for j in range(0, columns, 16):
        for i in range(0, terms, 16):
            _turn_bf16(w + 2 * (j * k + i), 2 * k, panel + 4 * j + 4 * PANEL * i, 4 * PANEL, columns - j, terms - i)


@native
def _dequantised(w: Any, k: Any, panel: Any, terms: Any, columns: Any, scales: Any, groups: Any) -> None:
    """As `_widened`; the panel is multiplied by the scales of 16 rows after packing."""
    for j in range(0, columns, 16):
        for i in range(0, terms, 16):
            place = panel + 4 * j + 4 * PANEL * i
            _turn_i8(w + j * k + i, k, place, 4 * PANEL, columns - j, terms - i)
            row = panel + 4 * PANEL * (DEPTH + 1) + 4 * j  # one row after the panel, which no product reads
            for r in range(min(16, columns - j)):
                vec.store_f32(row + 4 * r, vec.load_f32(scales + 4 * ((j + r) * groups + i // GROUP)))
            scale = vec.load(row)
            for t in range(min(16, terms - i)):
                vec.store(place + 4 * PANEL * t, vec.load(place + 4 * PANEL * t) * scale)


@loop(Code.PANELS_BF16, Code.PANELS_I8)
def panels(row: Any, scratch: Any) -> None:
    """A product of many rows of x; cell 10 as in `int8_rows`."""
    (w, n, k, bias, x, sx, y, sy, tokens), quantised = _cells(row), cell(row, 0) == Code.PANELS_I8
    panel, groups = scratch + ZEROS, (k + GROUP - 1) // GROUP
    for k0 in range(0, k, DEPTH):
        terms = min(DEPTH, k - k0)
        for r in range(0, n, PANEL):
            columns = min(PANEL, n - r)
            if quantised:
                scales = cell(row, 10) + 4 * (r * groups + k0 // GROUP)
                _dequantised(w + r * k + k0, k, panel, terms, columns, scales, groups)
            else:
                _widened(w + 2 * (r * k + k0), k, panel, terms, columns)
            init, step = (y + 4 * r, sy) if k0 else (bias + 4 * r if bias else scratch, 0)
            tiles(x + 4 * k0, sx, sx, 4, panel, 4 * PANEL, y + 4 * r, sy, tokens, terms, columns, init, step)
