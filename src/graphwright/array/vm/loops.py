"""One loop per opcode: what a row of the machine's code does. A row is 16 int64 cells; cell 0 is the opcode.

Elementwise rows walk `rows` times `cols` elements: cells 1 and 2 are the counts, then per operand its address, the
bytes from one row to the next, and the step along a row, 1 or 0 (one value for all columns). The result comes first and
its columns are adjacent.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array.vm.gemm import gemm
from graphwright.array.vm.math import exp, native, rsqrt
from graphwright.array.vm.vector import (
    add,
    div,
    first,
    fma,
    largest,
    load,
    load_f32,
    load_f64,
    load_first,
    load_i64,
    load_mask,
    load_u8,
    maximum,
    mul,
    select,
    splat,
    sqrt,
    store,
    store_f32,
    store_first,
    store_mask,
    sub,
    total,
)

F = np.float32
_BLOCK = 4096  # terms summed in float32 before they go into a float64


@native
def cell(row: Any, index: Any) -> Any:
    """One int64 of a row."""
    return load_i64(row + 8 * index)


@native
def number(row: Any, index: Any) -> Any:
    """A float64 kept in a cell."""
    return load_f64(row + 8 * index)


@native
def _part(p: Any, step: Any, i: Any) -> Any:
    return load(p + 4 * i) if step else splat(load_f32(p))


@native
def _rest(p: Any, step: Any, i: Any, mask: Any) -> Any:
    return load_first(p + 4 * i, mask) if step else splat(load_f32(p))


def unary(f: Any) -> Any:
    """Out = f(x)."""

    @native
    def run(row: Any) -> None:
        rows, cols, o, so = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4)
        x, sx, cx = cell(row, 6), cell(row, 7), cell(row, 8)
        for _ in range(rows):
            i = 0
            while i + 16 <= cols:
                store(o + 4 * i, f(_part(x, cx, i)))
                i += 16
            if i < cols:
                mask = first(cols - i)
                store_first(o + 4 * i, f(_rest(x, cx, i, mask)), mask)
            o += so
            x += sx

    return run


def binary(f: Any) -> Any:
    """Out = f(x, y)."""

    @native
    def run(row: Any) -> None:
        rows, cols, o, so = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4)
        x, sx, cx = cell(row, 6), cell(row, 7), cell(row, 8)
        y, sy, cy = cell(row, 9), cell(row, 10), cell(row, 11)
        for _ in range(rows):
            i = 0
            while i + 16 <= cols:
                store(o + 4 * i, f(_part(x, cx, i), _part(y, cy, i)))
                i += 16
            if i < cols:
                mask = first(cols - i)
                store_first(o + 4 * i, f(_rest(x, cx, i, mask), _rest(y, cy, i, mask)), mask)
            o += so
            x += sx
            y += sy

    return run


def comparison(f: Any) -> Any:
    """out, a byte of 0 or 1 each, = f(x, y)."""

    @native
    def run(row: Any) -> None:
        rows, cols, o, so = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4)
        x, sx, cx = cell(row, 6), cell(row, 7), cell(row, 8)
        y, sy, cy = cell(row, 9), cell(row, 10), cell(row, 11)
        for _ in range(rows):
            for i in range(0, cols, 16):
                mask = first(cols - i)
                store_mask(o + i, f(_rest(x, cx, i, mask), _rest(y, cy, i, mask)), mask)
            o += so
            x += sx
            y += sy

    return run


@native
def where(row: Any) -> None:
    """Out = x where the byte is not 0, else y; the bytes come first, in cells 6 to 8."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4)
    c, sc, cc = cell(row, 6), cell(row, 7), cell(row, 8)
    x, sx, cx = cell(row, 9), cell(row, 10), cell(row, 11)
    y, sy, cy = cell(row, 12), cell(row, 13), cell(row, 14)
    for _ in range(rows):
        for i in range(0, cols, 16):
            mask = first(cols - i)
            if cc:
                picked = select(load_mask(c + i, mask), _rest(x, cx, i, mask), _rest(y, cy, i, mask))
            else:
                picked = _rest(x, cx, i, mask) if load_u8(c) else _rest(y, cy, i, mask)
            store_first(o + 4 * i, picked, mask)
        o += so
        c += sc
        x += sx
        y += sy


@native
def fill(row: Any) -> None:
    """Out = the number in cell 6."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4)
    value = splat(F(number(row, 6)))
    for _ in range(rows):
        i = 0
        while i + 16 <= cols:
            store(o + 4 * i, value)
            i += 16
        if i < cols:
            store_first(o + 4 * i, value, first(cols - i))
        o += so


@native
def _row_total(x: Any, cols: Any) -> Any:
    """Σ of a row: 4 vectors at a time, blocks of 4096 into float64."""
    whole, i = 0.0, 0
    while i < cols:
        end = min(cols, i + _BLOCK)
        a, b, c, d = splat(F(0.0)), splat(F(0.0)), splat(F(0.0)), splat(F(0.0))
        while i + 64 <= end:
            a, b = add(a, load(x + 4 * i)), add(b, load(x + 4 * i + 64))
            c, d = add(c, load(x + 4 * i + 128)), add(d, load(x + 4 * i + 192))
            i += 64
        while i < end:
            a = add(a, load_first(x + 4 * i, first(end - i)))
            i += 16
        i = end
        whole += total(add(add(a, b), add(c, d)))
    return whole


@native
def sum_rows(row: Any) -> None:
    """out[r] = Σ x[r, :] / cell 9; out is one column after the other."""
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
        for start in range(0, rows, 256):
            a, b = splat(F(0.0)), splat(F(0.0))
            r, end = start, min(rows, start + 256)
            while r + 2 <= end:
                a = add(a, load_first(x + r * sx + 4 * i, mask))
                b = add(b, load_first(x + (r + 1) * sx + 4 * i, mask))
                r += 2
            if r < end:
                a = add(a, load_first(x + r * sx + 4 * i, mask))
            whole = add(whole, add(a, b))
        store_first(o + 4 * i, div(whole, count), mask)


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
def amax_rows(row: Any) -> None:
    """out[r] = max x[r, :]."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4)
    x, sx = cell(row, 6), cell(row, 7)
    for _ in range(rows):
        store_f32(o, _row_largest(x, cols))
        o += so
        x += sx


@native
def softmax(row: Any) -> None:
    """out[r, :] = exp(x[r, :] - max) / Σ."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4)
    x, sx = cell(row, 6), cell(row, 7)
    for _ in range(rows):
        top = splat(_row_largest(x, cols))
        for i in range(0, cols, 16):
            mask = first(cols - i)
            store_first(o + 4 * i, exp(sub(load_first(x + 4 * i, mask), top)), mask)
        scale = splat(F(1.0 / _row_total(o, cols)))
        for i in range(0, cols, 16):
            mask = first(cols - i)
            store_first(o + 4 * i, mul(load_first(o + 4 * i, mask), scale), mask)
        o += so
        x += sx


@native
def _scaled_exponentials(x: Any, cols: Any, top: Any) -> Any:
    """Σ exp(x - top) of a row."""
    whole, i, high = 0.0, 0, splat(top)
    while i < cols:
        end = min(cols, i + _BLOCK)
        part = splat(F(0.0))
        while i < end:
            mask = first(end - i)
            part = add(part, select(mask, exp(sub(load_first(x + 4 * i, mask), high)), splat(F(0.0))))
            i += 16
        i = end
        whole += total(part)
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
        top = _row_largest(x, cols)
        rest = F(np.log(_scaled_exponentials(x, cols, top)))
        store_f32(lse + 4 * r, rest + top)
        value = F(0.0)
        if target != ignored:
            value = rest - (load_f32(x + 4 * target) - top)
        store_f32(loss + 4 * r, value)
        x += sx
    return True


@native
def cross_entropy_backward(row: Any) -> Any:
    """G (softmax - one hot) per row; cells as in `cross_entropy`, 11 g and 12 its bytes per row."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4)
    x, sx, targets, lse, ignored = cell(row, 6), cell(row, 7), cell(row, 8), cell(row, 9), cell(row, 10)
    g, sg = cell(row, 11), cell(row, 12)
    for r in range(rows):
        target = load_i64(targets + 8 * r)
        if target != ignored and not 0 <= target < cols:
            return False
        weight = F(0.0) if target == ignored else load_f32(g)
        scale, less = splat(weight), splat(load_f32(lse + 4 * r))
        for i in range(0, cols, 16):
            mask = first(cols - i)
            store_first(o + 4 * i, mul(exp(sub(load_first(x + 4 * i, mask), less)), scale), mask)
        if target != ignored:
            store_f32(o + 4 * target, load_f32(o + 4 * target) - weight)
        o += so
        x += sx
        g += sg
    return True


@native
def rms_norm(row: Any) -> None:
    """out[r, :] = x[r, :] / √(mean x² + eps) · w; cells 9 w, 10 eps."""
    rows, cols, o, so = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4)
    x, sx, w, eps = cell(row, 6), cell(row, 7), cell(row, 9), F(number(row, 10))
    for _ in range(rows):
        whole, i = 0.0, 0
        while i < cols:
            end = min(cols, i + _BLOCK)
            part = splat(F(0.0))
            while i < end:
                v = load_first(x + 4 * i, first(end - i))
                part = fma(v, v, part)
                i += 16
            i = end
            whole += total(part)
        scale = rsqrt(splat(F(whole) / F(cols) + eps))
        for i in range(0, cols, 16):
            mask = first(cols - i)
            normal = mul(load_first(x + 4 * i, mask), scale)
            store_first(o + 4 * i, mul(normal, load_first(w + 4 * i, mask)), mask)
        o += so
        x += sx


@native
def product(row: Any, scratch: Any) -> None:
    """A matrix product; cells 1 to 13 are the arguments of `gemm`."""
    gemm(
        cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4), cell(row, 5), cell(row, 6), cell(row, 7), cell(row, 8),
        cell(row, 9), cell(row, 10), cell(row, 11), cell(row, 12), cell(row, 13), scratch,
    )  # fmt: skip


@native
def adamw(row: Any) -> None:
    """One step in place: cells 1 count, 2 param, 3 gradient, 4 m, 5 v, 6 steps made, 7 lr (float64), 8 to 11 β₁, β₂,
    eps, decay, 12 the flag under which all stays as it is.

    Source: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2.
    """
    count, p, g, m, v = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4), cell(row, 5)
    if load_f32(cell(row, 12)) != 0.0:
        return
    steps, lr = np.float64(load_f32(cell(row, 6))) + 1.0, load_f64(cell(row, 7))
    store_f32(cell(row, 6), F(steps))
    beta1, beta2, eps, decay = number(row, 8), number(row, 9), number(row, 10), number(row, 11)
    rate = splat(F(lr / (1.0 - beta1**steps)))
    root = splat(F(np.sqrt(1.0 - beta2**steps)))
    kept, small = splat(F(1.0 - lr * decay)), splat(F(eps))
    b1, b2, c1, c2 = splat(F(beta1)), splat(F(beta2)), splat(F(1.0 - beta1)), splat(F(1.0 - beta2))
    for i in range(0, count, 16):
        mask = first(count - i)
        grad = load_first(g + 4 * i, mask)
        mean = fma(b1, load_first(m + 4 * i, mask), mul(c1, grad))
        square = fma(b2, load_first(v + 4 * i, mask), mul(mul(c2, grad), grad))
        new = mul(load_first(p + 4 * i, mask), kept)
        new = sub(new, div(mul(rate, mean), add(div(sqrt(square), root), small)))
        store_first(m + 4 * i, mean, mask)
        store_first(v + 4 * i, square, mask)
        store_first(p + 4 * i, new, mask)
