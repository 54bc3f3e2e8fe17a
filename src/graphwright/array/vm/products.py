"""Matrix products of float32 on one core, and products with stored weights: in the layout and dtype of a checkpoint.

General products: tiles of C in registers, panels of B of 32 columns, 256 terms at a time. Source of the scheme: Goto
and van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication". A may have any two strides; B is packed
where its columns are not adjacent. All strides are in bytes.

Stored weights: y[t, n] = Σ w[n, k]·x[t, k] (+ b[n]), summed in float32. Products of few rows of x are bound by reading
w, so w is read once and widened in registers from float32, bfloat16, or int8 with a float32 scale per group of 64 along
a row. No weight is packed. For a single row of x, w is read as four streams (int8: two), a quarter of the rows apart:
while the core waits for a page of one stream it continues in the others, which is up to twice as fast. x is rearranged
once per product. For bfloat16 its even entries are separated from the odd ones, because widening separates neighbouring
weights. For int8, x is rounded to 16 bits with a scale per group: integer products are exact, and only x is rounded, by
max |x| / 65534 of its group. For many rows of x, a panel of w is widened while it is packed, and x is used as it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from graphwright.array.vm import narrow
from graphwright.array.vm import vector as vec
from graphwright.array.vm.code import BLOCK, DEPTH, GROUP, STRIPS, ZEROS, Code
from graphwright.array.vm.elementwise import F, cell, loop
from graphwright.array.vm.math import native

PANEL = 32
_FAR = 1 << 23  # rows of A times the bytes that a panel of B spans, above which the panel is copied


def _tile(rows: int, vectors: int) -> Any:
    """Return an intrinsic for C[rows, columns] = init + A[rows, k]·B, with C in registers, `vectors` vectors per row.

    `init` is added to the finished sum, so that long sums are accumulated block by block, with a smaller error.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, row_a, col_a, b, row_b, c, row_c, k, columns, init, row_i = args
        cut = vec.first_lanes(builder, builder.sub(columns, vec.I64(16 * (vectors - 1))))
        masks = [None] * (vectors - 1) + [cut]

        def address_of(base: Any, stride: Any, r: int, v: int) -> Any:
            return builder.add(builder.add(base, builder.mul(stride, vec.I64(r))), vec.I64(64 * v))

        def terms(count: Any, at_a: Any, at_b: Any, sums: Any, unrolled: int) -> tuple[Any, ...]:
            """Emit a loop of `count` iterations that add `unrolled` terms each; return addresses and sums after it."""
            before = builder.block
            loop, done = builder.append_basic_block("terms"), builder.append_basic_block("done")
            builder.cbranch(builder.icmp_signed(">", count, vec.I64(0)), loop, done)
            builder.position_at_end(loop)
            given = (count, at_a, at_b, *sums)
            phis = [builder.phi(value.type) for value in given]
            left, a, b, *grown = phis
            for _ in range(unrolled):
                panel = [vec.fetch(builder, builder.add(b, vec.I64(64 * v)), masks[v]) for v in range(vectors)]
                for r in range(rows):
                    one = builder.load(vec.pointer(builder, address_of(a, row_a, r, 0), vec.F32))
                    wide = vec.broadcast(builder, vec.aligned(one, 4))
                    for v in range(vectors):
                        i = vectors * r + v
                        grown[i] = vec.intrinsic_call(builder, "llvm.fma.v16f32", vec.FLOATS, wide, panel[v], grown[i])
                a, b = builder.add(a, col_a), builder.add(b, row_b)
            then = (builder.sub(left, vec.I64(1)), a, b, *grown)
            for phi, begin, end in zip(phis, given, then, strict=True):
                phi.add_incoming(begin, before)
                phi.add_incoming(end, loop)
            builder.cbranch(builder.icmp_signed(">", left, vec.I64(1)), loop, done)
            builder.position_at_end(done)
            return tuple(vec.joined(builder, (x, before), (y, loop)) for x, y in zip(given[1:], then[1:], strict=True))

        none = ir.Constant(vec.FLOATS, None)
        reached_a, reached_b, *pairs = terms(builder.ashr(k, vec.I64(1)), a, b, [none] * (rows * vectors), 2)
        _, _, *sums = terms(builder.and_(k, vec.I64(1)), reached_a, reached_b, pairs, 1)
        for r in range(rows):
            for v in range(vectors):
                value = builder.fadd(sums[vectors * r + v], vec.fetch(builder, address_of(init, row_i, r, v), masks[v]))
                vec.write(builder, value, address_of(c, row_c, r, v), masks[v])
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    def tile(typingctx, a, row_a, col_a, b, row_b, c, row_c, k, columns, init, row_i):
        return types.void(*[types.int64] * 11), codegen

    return intrinsic(tile)


def _rows(height: int, vectors: int) -> Any:
    """Return a loop that computes tiles of `height` rows while that many are left, and returns the next row's index."""
    tile = _tile(height, vectors)

    @native
    def run(
        i: Any, m: Any, a: Any, step_a: Any, row_a: Any, col_a: Any, b: Any, row_b: Any, c: Any, row_c: Any,
        k: Any, columns: Any, init: Any, row_i: Any,
    ) -> Any:  # fmt: skip
        col_a = col_a or 4 * height
        while i + height <= m:
            tile(a + i * step_a, row_a, col_a, b, row_b, c + i * row_c, row_c, k, columns, init + i * row_i, row_i)
            i += height
        return i

    return run


_wide12, _wide8, _wide4, _wide2, _wide1 = (_rows(height, 2) for height in (12, 8, 4, 2, 1))
_thin12, _thin8, _thin4, _thin2, _thin1 = (_rows(height, 1) for height in (12, 8, 4, 2, 1))


def transposer(fetch: Any) -> Any:
    """Return an intrinsic that transposes up to 16 rows of 16 numbers from `source` to `target` (`pitch` bytes a row).

    Missing entries become 0. Rows of the target are written whole and in order: where they overlap, the later one
    remains. `fetch(builder, address, mask)` reads 16 numbers as float32.
    """

    def turn(typingctx, source, stride, target, pitch, rows, columns):
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source, stride, target, pitch, rows, columns = args
            inside = vec.first_lanes(builder, columns)
            none = ir.Constant(inside.type, None)
            taken = []
            for r in range(16):
                mask = builder.select(builder.icmp_signed(">", rows, vec.I64(r)), inside, none)
                taken.append(fetch(builder, builder.add(source, builder.mul(stride, vec.I64(r))), mask))
            for _ in range(4):  # the transpose of 16 vectors: four rounds of interleaving row i with row i + 8
                taken = [row for i in range(8) for row in vec.interleaved(builder, taken[i], taken[i + 8])]
            for r, vector in enumerate(taken):
                address = builder.add(target, builder.mul(pitch, vec.I64(r)))
                vec.aligned(builder.store(vector, vec.pointer(builder, address, vec.FLOATS)), 4)
            return ir.Constant(ir.IntType(8).as_pointer(), None)

        return types.void(*[types.int64] * 6), codegen

    return intrinsic(turn)


transpose = transposer(lambda b, address, mask: vec.masked_load(b, address, mask, vec.FLOATS, "v16f32", 4))


@native
def _pack(b: Any, row_b: Any, col_b: Any, terms: Any, columns: Any, scratch: Any) -> None:
    """Copy B[terms, columns] to the scratch, as rows of 32 adjacent numbers."""
    if col_b == 4:
        mask, more = vec.first(columns), vec.first(columns - 16)
        for k in range(terms):
            vec.store(scratch + 4 * PANEL * k, vec.load_first(b + k * row_b, mask))
            vec.store(scratch + 4 * PANEL * k + 64, vec.load_first(b + k * row_b + 64, more))
    elif row_b == 4:
        for j in range(0, columns, 16):
            for k in range(0, terms, 16):
                transpose(
                    b + j * col_b + 4 * k, col_b, scratch + 4 * j + 4 * PANEL * k, 4 * PANEL, columns - j, terms - k
                )
    else:
        for k in range(terms):
            for j in range(columns):
                vec.store_f32(scratch + 4 * (PANEL * k + j), vec.load_f32(b + k * row_b + j * col_b))


@native
def _small(
    a: Any, row_a: Any, col_a: Any, b: Any, row_b: Any, col_b: Any, c: Any, row_c: Any,
    m: Any, n: Any, k: Any, init: Any, row_i: Any,
) -> None:  # fmt: skip
    """C = init + A·B for n <= 16 columns, without packing B, four rows at a time; the last row may be repeated."""
    mask = vec.first(n)
    for i in range(0, m, 4):
        i1, i2, i3 = min(i + 1, m - 1), min(i + 2, m - 1), min(i + 3, m - 1)
        s0, s1 = vec.load_first(init + i * row_i, mask), vec.load_first(init + i1 * row_i, mask)
        s2, s3 = vec.load_first(init + i2 * row_i, mask), vec.load_first(init + i3 * row_i, mask)
        a0, a1, a2, a3, at_b = a + i * row_a, a + i1 * row_a, a + i2 * row_a, a + i3 * row_a, b
        for _ in range(k):
            line = vec.load_first(at_b, mask) if col_b == 4 or n == 1 else vec.pick_first(at_b, col_b, mask)
            s0, s1 = vec.fma(vec.load_f32(a0), line, s0), vec.fma(vec.load_f32(a1), line, s1)
            s2, s3 = vec.fma(vec.load_f32(a2), line, s2), vec.fma(vec.load_f32(a3), line, s3)
            a0, a1, a2, a3, at_b = a0 + col_a, a1 + col_a, a2 + col_a, a3 + col_a, at_b + row_b
        vec.store_first(c + i * row_c, s0, mask)
        vec.store_first(c + i1 * row_c, s1, mask)
        vec.store_first(c + i2 * row_c, s2, mask)
        vec.store_first(c + i3 * row_c, s3, mask)


@native
def _strips(a: Any, row_a: Any, col_a: Any, m: Any, terms: Any, packed: Any) -> None:
    """Copy A[m, terms], contiguous on one axis, to `packed`: the rows of each tile together, column after column."""
    i, at = 0, packed
    while i < m:
        left = m - i
        height = 12 if left >= 12 else 8 if left >= 8 else 4 if left >= 4 else 2 if left >= 2 else 1
        if row_a == 4:
            mask = vec.first(height)
            for k in range(terms):
                vec.store(at + 4 * height * k, vec.load_first(a + 4 * i + k * col_a, mask))
        else:
            for k in range(0, terms, 16):
                transpose(a + i * row_a + 4 * k, row_a, at + 4 * height * k, 4 * height, height, terms - k)
        i, at = i + height, at + 4 * height * terms


@native
def tiles(
    a: Any, step_a: Any, row_a: Any, col_a: Any, b: Any, row_b: Any, c: Any, row_c: Any,
    m: Any, terms: Any, columns: Any, init: Any, row_i: Any,
) -> None:  # fmt: skip
    """C[m, columns] = init + A[m, terms]·B for one panel of at most 32 adjacent columns.

    Row i of A, if it starts a tile, is at `a + i·step_a`; rows within a tile are `row_a` bytes apart. If `col_a` is 0,
    A is packed: the rows of each tile are stored column after column.
    """
    if columns > 16:
        i = _wide12(0, m, a, step_a, row_a, col_a, b, row_b, c, row_c, terms, columns, init, row_i)
        i = _wide8(i, m, a, step_a, row_a, col_a, b, row_b, c, row_c, terms, columns, init, row_i)
        i = _wide4(i, m, a, step_a, row_a, col_a, b, row_b, c, row_c, terms, columns, init, row_i)
        i = _wide2(i, m, a, step_a, row_a, col_a, b, row_b, c, row_c, terms, columns, init, row_i)
        _wide1(i, m, a, step_a, row_a, col_a, b, row_b, c, row_c, terms, columns, init, row_i)
    else:
        i = _thin12(0, m, a, step_a, row_a, col_a, b, row_b, c, row_c, terms, columns, init, row_i)
        i = _thin8(i, m, a, step_a, row_a, col_a, b, row_b, c, row_c, terms, columns, init, row_i)
        i = _thin4(i, m, a, step_a, row_a, col_a, b, row_b, c, row_c, terms, columns, init, row_i)
        i = _thin2(i, m, a, step_a, row_a, col_a, b, row_b, c, row_c, terms, columns, init, row_i)
        _thin1(i, m, a, step_a, row_a, col_a, b, row_b, c, row_c, terms, columns, init, row_i)


@native
def gemm(
    a: Any, row_a: Any, col_a: Any, b: Any, row_b: Any, col_b: Any, c: Any, row_c: Any,
    m: Any, n: Any, k: Any, init: Any, row_i: Any, scratch: Any,
) -> None:  # fmt: skip
    """C[m, n] = init + A[m, k]·B[k, n]; columns of C and of `init` are adjacent.

    If the address `init` is 0, nothing is added. If its row stride `row_i` is 0, one row is added to all rows of C.
    """
    if n <= 16 and m <= 16 and k <= 32:
        _small(a, row_a, col_a, b, row_b, col_b, c, row_c, m, n, k, init or scratch, row_i)
        return
    panel, strips = scratch + ZEROS, scratch + STRIPS
    stripped = n >= 4 * PANEL and ((row_a == 4 and col_a >= 1024) or (col_a == 4 and row_a >= 4096))
    copied = col_b != 4 or min(m, BLOCK) * min(k, DEPTH) * row_b > _FAR
    for k0 in range(0, max(k, 1), DEPTH):
        terms = min(DEPTH, k - k0)
        for i in range(0, m, BLOCK):
            rows = min(BLOCK, m - i)
            at_a, step_a, down_a, along_a = a + i * row_a + k0 * col_a, row_a, row_a, col_a
            if stripped:
                _strips(at_a, row_a, col_a, rows, terms, strips)
                at_a, step_a, down_a, along_a = strips, 4 * terms, 4, 0
            for j in range(0, n, PANEL):
                columns = min(PANEL, n - j)
                at_b, step_b = b + k0 * row_b + j * col_b, row_b
                if copied and columns > 1:
                    _pack(at_b, row_b, col_b, terms, columns, panel)
                    at_b, step_b = panel, 4 * PANEL
                out = c + i * row_c + 4 * j
                start, step_i = (init + i * row_i + 4 * j, row_i) if k0 == 0 else (out, row_c)
                if k0 == 0 and init == 0:
                    start = scratch
                tiles(at_a, step_a, down_a, along_a, at_b, step_b, out, row_c, rows, terms, columns, start, step_i)


@loop(Code.PRODUCT)
def product(row: Any, scratch: Any) -> None:
    """Compute C = init + A·B. Words 1 to 13: a, row_a, col_a, b, row_b, col_b, c, row_c, m, n, k, init, row_i."""
    gemm(
        cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4), cell(row, 5), cell(row, 6), cell(row, 7), cell(row, 8),
        cell(row, 9), cell(row, 10), cell(row, 11), cell(row, 12), cell(row, 13), scratch,
    )  # fmt: skip


def _dots(low: Any, high: Any, read_first: Any, size: Any) -> tuple[Any, Any, Any]:
    """Return functions for dot products: one weight row with x, four weight rows with x, one weight row with x and y.

    Rows have k weights of `size` bytes. `low` and `high` each load 16 of 32 weights; x and y are stored in the same
    order; `read_first(address, mask)` loads the last k % 32, for which x is read in its original order, from `plain`.
    `far` is the distance of the four rows in bytes. The functions for one and for four rows give the same bits.
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
    """Copy x to `to`, with the even entries of every 32 numbers before the odd ones; the last k % 32 are left out."""
    for i in range(0, k - 31, 32):
        u, v = vec.load(x + 4 * i), vec.load(x + 4 * i + 64)
        vec.store(to + 4 * i, narrow.evens(u, v))
        vec.store(to + 4 * i + 64, narrow.odds(u, v))


@native
def _cells(row: Any) -> Any:
    """Return instruction words 1 to 9: w, its rows, k, bias or 0, x, bytes per row, y, bytes per row, rows of x."""
    w, n, k, bias, x = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4), cell(row, 5)
    return w, n, k, bias, x, cell(row, 6), cell(row, 7), cell(row, 8), cell(row, 9)


def _few_rows(code: Code, low: Any, high: Any, read_first: Any, size: Any) -> Any:
    """Return a function for stored weights of `size` bytes times few rows of x, the loop of opcode `code`.

    `low` and `high` each load 16 of 32 weights, `read_first(address, mask)` loads fewer.
    """
    one, four, two = _dots(low, high, read_first, size)

    @native
    def run(
        w: Any, n: Any, k: Any, bias: Any, plain: Any, gap: Any, y: Any, sy: Any, tokens: Any, scratch: Any
    ) -> None:
        x, sx = plain, gap
        if size == 2:
            x, sx = scratch + ZEROS, 4 * k
            for t in range(tokens):
                _apart(plain + t * gap, k, x + t * sx)
        quarter = n // 4 if tokens == 1 else 0
        for r in range(quarter):
            sums = four(w + r * k * size, quarter * k * size, x, plain, k)
            for i, row_sum in enumerate(sums):
                offset = 4 * (r + i * quarter)
                vec.store_f32(y + offset, row_sum + (vec.load_f32(bias + offset) if bias else F(0.0)))
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

    @loop(code)
    def entry(row: Any, scratch: Any) -> None:
        w, n, k, bias, plain, gap, y, sy, tokens = _cells(row)
        run(w, n, k, bias, plain, gap, y, sy, tokens, scratch)

    return run


rows_f32 = _few_rows(Code.ROWS_F32, vec.load, native(lambda w: vec.load(w + 64)), vec.load_first, 4)
rows_bf16 = _few_rows(Code.ROWS_BF16, narrow.evens_bf16, narrow.odds_bf16, narrow.load_first_bf16, 2)


_MOST, _LEAST = 32767.0, 1e-30
"""The largest quantised value; the largest max |x| of a group that becomes 0, as its inverse would overflow."""


@native
def _rounded(x: Any, k: Any, q: Any, steps: Any) -> None:
    """Quantise x to int16 with a float32 step per group of 64: q = round(x / step), step = max |x| / 32767.

    q is 0 after the k entries of x. In a group with a non-finite number, q is 0 and the step is non-finite.
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
        target = q + 2 * i
        narrow.store_i16(target, a)
        narrow.store_i16(target + 32, b)
        narrow.store_i16(target + 64, c)
        narrow.store_i16(target + 96, d)


@native
def _add_groups(w: Any, scales: Any, q: Any, steps: Any, s: Any) -> Any:
    p, r = narrow.dot_i8(w, q), narrow.dot_i8(w + GROUP, q + 2 * GROUP)
    a = vec.fma(p * vec.load_f32(scales), vec.load_f32(steps), s[0])
    return a, vec.fma(r * vec.load_f32(scales + 4), vec.load_f32(steps + 4), s[1])


@native
def _scaled_rest(w: Any, scales: Any, q: Any, steps: Any, k: Any, s: Any) -> Any:
    a, i = s[0], k - k % (2 * GROUP)
    while i < k:
        g, end, p = 4 * (i // GROUP), min(k, i + GROUP), vec.splat(F(0.0))
        while i < end:
            p = narrow.products_i8(w + i, q + 2 * i, vec.first(end - i)) + p
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
    """Return dot products of x (q, steps) with two rows of int8 weights, `far` bytes apart; same bits as one by one."""
    none = vec.splat(F(0.0))
    s = t = none, none
    v, more = w + far, scales + far_scales
    for i in range(0, k - 2 * GROUP + 1, 2 * GROUP):
        g, x = 4 * (i // GROUP), q + 2 * i
        s, t = _add_groups(w + i, scales + g, x, steps + g, s), _add_groups(v + i, more + g, x, steps + g, t)
    return _scaled_rest(w, scales, q, steps, k, s), _scaled_rest(v, more, q, steps, k, t)


@loop(Code.ROWS_I8)
def int8_rows(row: Any, scratch: Any) -> None:
    """Multiply few rows of x by int8 weights.

    Words: 1 w, 2 its rows, 3 k, 4 bias or 0, 5 x, 6 its stride, 7 y, 8 its stride, 9 rows of x, 10 scales of w.
    """
    (w, n, k, bias, x, sx, y, sy, tokens), scales = _cells(row), cell(row, 10)
    groups = (k + GROUP - 1) // GROUP
    q, steps = scratch + ZEROS, scratch + ZEROS + 2 * GROUP * groups * tokens
    for t in range(tokens):
        _rounded(x + t * sx, k, q + 2 * GROUP * groups * t, steps + 4 * groups * t)
    half = n // 2 if tokens == 1 else 0
    for r in range(half):
        sums = _two_scaled(w + r * k, half * k, scales + 4 * r * groups, 4 * half * groups, q, steps, k)
        for i, row_sum in enumerate(sums):
            offset = 4 * (r + i * half)
            vec.store_f32(y + offset, row_sum + (vec.load_f32(bias + offset) if bias else F(0.0)))
    for r in range(2 * half, n):
        start = vec.load_f32(bias + 4 * r) if bias else F(0.0)
        for t in range(tokens):
            value = _scaled(w + r * k, scales + 4 * r * groups, q + 2 * GROUP * groups * t, steps + 4 * groups * t, k)
            vec.store_f32(y + t * sy + 4 * r, value + start)


_turn_bf16, _turn_i8 = transposer(narrow.fetch_bf16), transposer(narrow.fetch_i8)


@native
def _widened(w: Any, k: Any, panel: Any, terms: Any, columns: Any) -> None:
    for j in range(0, columns, 16):
        for i in range(0, terms, 16):
            _turn_bf16(w + 2 * (j * k + i), 2 * k, panel + 4 * j + 4 * PANEL * i, 4 * PANEL, columns - j, terms - i)


@native
def _dequantised(w: Any, k: Any, panel: Any, terms: Any, columns: Any, scales: Any, groups: Any) -> None:
    """Pack a panel of int8 weights as float32, each multiplied by the scale of its row and group."""
    for j in range(0, columns, 16):
        for i in range(0, terms, 16):
            target = panel + 4 * j + 4 * PANEL * i
            _turn_i8(w + j * k + i, k, target, 4 * PANEL, columns - j, terms - i)
            row = panel + 4 * PANEL * (DEPTH + 1) + 4 * j  # one row after the panel, which no product reads
            for r in range(min(16, columns - j)):
                vec.store_f32(row + 4 * r, vec.load_f32(scales + 4 * ((j + r) * groups + i // GROUP)))
            scale = vec.load(row)
            for t in range(min(16, terms - i)):
                vec.store(target + 4 * PANEL * t, vec.load(target + 4 * PANEL * t) * scale)


@native
def _many_rows(
    w: Any, n: Any, k: Any, bias: Any, x: Any, sx: Any, y: Any, sy: Any, tokens: Any, quantised: Any, all_scales: Any,
    scratch: Any,
) -> None:  # fmt: skip
    panel, groups = scratch + ZEROS, (k + GROUP - 1) // GROUP
    for k0 in range(0, k, DEPTH):
        terms = min(DEPTH, k - k0)
        for r in range(0, n, PANEL):
            columns = min(PANEL, n - r)
            if quantised:
                scales = all_scales + 4 * (r * groups + k0 // GROUP)
                _dequantised(w + r * k + k0, k, panel, terms, columns, scales, groups)
            else:
                _widened(w + 2 * (r * k + k0), k, panel, terms, columns)
            init, step = (y + 4 * r, sy) if k0 else (bias + 4 * r if bias else scratch, 0)
            tiles(x + 4 * k0, sx, sx, 4, panel, 4 * PANEL, y + 4 * r, sy, tokens, terms, columns, init, step)


@native
def many_bf16(w: Any, n: Any, k: Any, bias: Any, x: Any, sx: Any, y: Any, sy: Any, tokens: Any, scratch: Any) -> None:
    """Multiply many rows of x by bfloat16 weights."""
    _many_rows(w, n, k, bias, x, sx, y, sy, tokens, False, 0, scratch)


@loop(Code.PANELS_BF16, Code.PANELS_I8)
def panels(row: Any, scratch: Any) -> None:
    """Multiply many rows of x by bfloat16 or int8 weights.

    Words: 1 w, 2 its rows, 3 k, 4 bias or 0, 5 x, 6 its stride, 7 y, 8 its stride, 9 rows of x, 10 scales (int8 only).
    """
    w, n, k, bias, x, sx, y, sy, tokens = _cells(row)
    _many_rows(w, n, k, bias, x, sx, y, sy, tokens, cell(row, 0) == Code.PANELS_I8, cell(row, 10), scratch)
