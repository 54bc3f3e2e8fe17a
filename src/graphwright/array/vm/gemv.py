"""Products with the weights of a checkpoint as they lie: y[t, n] = Σ w[n, k] x[t, k] (+ b[n]), sums in float32.

For few rows of x what bounds them is reading w, so it is read row by row, once, and widened in registers: float32,
bfloat16, or int8 with a float32 scale per group of 64 along a row. Nothing is packed: one row after the other is what a
core prefetches best, and it reaches the bandwidth of a plain sum. For many rows of x a panel of w is widened while it
is packed.
"""

from __future__ import annotations

from typing import Any

from graphwright.array.vm.code import GROUP, ZEROS
from graphwright.array.vm.elementwise import F, cell
from graphwright.array.vm.gemm import DEPTH, PANEL, tiles, turned
from graphwright.array.vm.math import native
from graphwright.array.vm.narrow import fetch_bf16, fetch_i8, load_bf16, load_first_bf16, load_first_i8, load_i8
from graphwright.array.vm.vector import (
    add,
    first,
    fma,
    load,
    load_f32,
    load_first,
    mul,
    splat,
    store,
    store_f32,
    total,
)


def _dots(read: Any, read_first: Any, size: Any) -> tuple[Any, Any]:
    """(row · x, (row · x, row · y)) of `k` terms, for weights of `size` bytes."""

    @native
    def one(w: Any, x: Any, k: Any) -> Any:
        a, b, c, d = splat(F(0.0)), splat(F(0.0)), splat(F(0.0)), splat(F(0.0))
        i = 0
        while i + 64 <= k:
            a = fma(read(w + size * i), load(x + 4 * i), a)
            b = fma(read(w + size * (i + 16)), load(x + 4 * i + 64), b)
            c = fma(read(w + size * (i + 32)), load(x + 4 * i + 128), c)
            d = fma(read(w + size * (i + 48)), load(x + 4 * i + 192), d)
            i += 64
        while i < k:
            mask = first(k - i)
            a = fma(read_first(w + size * i, mask), load_first(x + 4 * i, mask), a)
            i += 16
        return total(add(add(a, b), add(c, d)))

    @native
    def two(w: Any, x: Any, y: Any, k: Any) -> Any:
        a, b, c, d = splat(F(0.0)), splat(F(0.0)), splat(F(0.0)), splat(F(0.0))
        i = 0
        while i + 32 <= k:
            u, v = read(w + size * i), read(w + size * (i + 16))
            a, c = fma(u, load(x + 4 * i), a), fma(u, load(y + 4 * i), c)
            b, d = fma(v, load(x + 4 * i + 64), b), fma(v, load(y + 4 * i + 64), d)
            i += 32
        while i < k:
            mask = first(k - i)
            u = read_first(w + size * i, mask)
            a, c = fma(u, load_first(x + 4 * i, mask), a), fma(u, load_first(y + 4 * i, mask), c)
            i += 16
        return total(add(a, b)), total(add(c, d))

    return one, two


def _rows(read: Any, read_first: Any, size: Any) -> Any:
    """A product: cells 1 w, 2 rows of w, 3 terms, 4 bias or 0, 5 x, 6 bytes per row of x, 7 y, 8 bytes per row of y,
    9 rows of x.
    """
    one, two = _dots(read, read_first, size)

    @native
    def run(row: Any) -> None:
        w, n, k, bias, x, sx, y, sy, tokens = (
            cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4), cell(row, 5),
            cell(row, 6), cell(row, 7), cell(row, 8), cell(row, 9),
        )  # fmt: skip
        for r in range(n):
            start = load_f32(bias + 4 * r) if bias else F(0.0)
            at, t = w + r * k * size, 0
            while t + 2 <= tokens:
                p, q = two(at, x + t * sx, x + (t + 1) * sx, k)
                store_f32(y + t * sy + 4 * r, p + start)
                store_f32(y + (t + 1) * sy + 4 * r, q + start)
                t += 2
            if t < tokens:
                store_f32(y + t * sy + 4 * r, one(at, x + t * sx, k) + start)

    return run


float32_rows = _rows(load, load_first, 4)
bfloat16_rows = _rows(load_bf16, load_first_bf16, 2)


@native
def _group(w: Any, x: Any) -> Any:
    p = mul(load_i8(w), load(x))
    p = fma(load_i8(w + 16), load(x + 64), p)
    p = fma(load_i8(w + 32), load(x + 128), p)
    return fma(load_i8(w + 48), load(x + 192), p)


@native
def _scaled(w: Any, scales: Any, x: Any, k: Any) -> Any:
    a, b, i = splat(F(0.0)), splat(F(0.0)), 0
    while i + 2 * GROUP <= k:
        a = fma(_group(w + i, x + 4 * i), splat(load_f32(scales)), a)
        b = fma(_group(w + i + GROUP, x + 4 * (i + GROUP)), splat(load_f32(scales + 4)), b)
        scales += 8
        i += 2 * GROUP
    while i < k:
        end, p = min(k, i + GROUP), splat(F(0.0))
        while i < end:
            mask = first(end - i)
            p = fma(load_first_i8(w + i, mask), load_first(x + 4 * i, mask), p)
            i += 16
        i = end
        a = fma(p, splat(load_f32(scales)), a)
        scales += 4
    return total(add(a, b))


@native
def int8_rows(row: Any) -> None:
    """As the others; cell 10 scales [rows of w, groups]."""
    w, n, k, bias, x, sx, y, sy, tokens, scales = (
        cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4), cell(row, 5), cell(row, 6),
        cell(row, 7), cell(row, 8), cell(row, 9), cell(row, 10),
    )  # fmt: skip
    groups = (k + GROUP - 1) // GROUP
    for r in range(n):
        start = load_f32(bias + 4 * r) if bias else F(0.0)
        for t in range(tokens):
            value = _scaled(w + r * k, scales + 4 * r * groups, x + t * sx, k)
            store_f32(y + t * sy + 4 * r, value + start)


_turn_bf16, _turn_i8 = turned(fetch_bf16), turned(fetch_i8)


@native
def _widened(w: Any, k: Any, panel: Any, terms: Any, columns: Any) -> None:
    for j in range(0, columns, 16):
        for i in range(0, terms, 16):
            _turn_bf16(w + 2 * (j * k + i), 2 * k, panel + 4 * j + 4 * PANEL * i, columns - j, terms - i)


@native
def _dequantised(w: Any, k: Any, panel: Any, terms: Any, columns: Any, scales: Any, groups: Any) -> None:
    """As `_widened`; the scales of 16 rows are one column of the panel, multiplied in after it was packed."""
    for j in range(0, columns, 16):
        for i in range(0, terms, 16):
            place = panel + 4 * j + 4 * PANEL * i
            _turn_i8(w + j * k + i, k, place, columns - j, terms - i)
            row = panel + 4 * PANEL * (DEPTH + 1) + 4 * j  # behind the panel: a row of it that no product reads
            for r in range(min(16, columns - j)):
                store_f32(row + 4 * r, load_f32(scales + 4 * ((j + r) * groups + i // GROUP)))
            scale = load(row)
            for t in range(min(16, terms - i)):
                store(place + 4 * PANEL * t, mul(load(place + 4 * PANEL * t), scale))


@native
def panels(row: Any, scratch: Any, quantised: Any) -> None:
    """A product of many rows, cells as above; works in `scratch`."""
    w, n, k, bias, x, sx, y, sy, tokens = (
        cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4), cell(row, 5),
        cell(row, 6), cell(row, 7), cell(row, 8), cell(row, 9),
    )  # fmt: skip
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
            tiles(x + 4 * k0, sx, 4, panel, 4 * PANEL, y + 4 * r, sy, tokens, terms, columns, init, step)
