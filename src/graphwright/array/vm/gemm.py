"""Matrix products of float32 on one core: tiles of C in registers, panels of B of 32 columns, 256 terms at a time.

Source of the scheme: Goto and van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication". A may have any
two strides; B is packed where its columns are not adjacent. All strides are in bytes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from graphwright.array.vm.code import ZEROS
from graphwright.array.vm.llvm import (
    F32,
    FLOATS,
    I32,
    I64,
    INTS,
    aligned,
    broadcast,
    first_lanes,
    intrinsic_call,
    joined,
    masked_load,
    masked_store,
    pointer,
)
from graphwright.array.vm.math import native
from graphwright.array.vm.vector import first, fma, load_f32, load_first, pick_first, splat, store_f32, store_first

DEPTH, PANEL = 256, 32


def _tile(rows: int, vectors: int) -> Any:
    """C[rows, 16 · vectors] = init + A[rows, k] · B with C in registers; the last vector is cut to `columns`.

    `init` is added to the finished sum: of many terms, each stretch is summed by itself, and keeps its digits.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, row_a, col_a, b, row_b, c, row_c, k, columns, init, row_i = args
        cut = first_lanes(builder, builder.sub(columns, I64(16 * (vectors - 1))))
        whole = ir.Constant(ir.VectorType(ir.IntType(1), 16), [ir.IntType(1)(1)] * 16)
        masks = [whole] * (vectors - 1) + [cut]

        def place(base: Any, stride: Any, r: int, v: int) -> Any:
            return builder.add(builder.add(base, builder.mul(stride, I64(r))), I64(64 * v))

        def fetch(address: Any, v: int) -> Any:
            if masks[v] is whole:
                return aligned(builder.load(pointer(builder, address, FLOATS)), 4)
            return masked_load(builder, address, masks[v], FLOATS, "v16f32", 4)

        before = builder.block
        loop, done = builder.append_basic_block("terms"), builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed(">", k, I64(0)), loop, done)
        builder.position_at_end(loop)
        left, at_a, at_b = (builder.phi(I64) for _ in range(3))
        none, sums = ir.Constant(FLOATS, None), [[builder.phi(FLOATS) for _ in range(vectors)] for _ in range(rows)]
        panel = [fetch(builder.add(at_b, I64(64 * v)), v) for v in range(vectors)]
        grown = []
        for r in range(rows):
            entry = aligned(builder.load(pointer(builder, place(at_a, row_a, r, 0), F32)), 4)
            wide = broadcast(builder, entry)
            grown.append(
                [intrinsic_call(builder, "llvm.fma.v16f32", FLOATS, wide, panel[v], sums[r][v]) for v in range(vectors)]
            )
        steps = ((left, k, builder.sub(left, I64(1))), (at_a, a, builder.add(at_a, col_a)))
        for phi, begin, then in (*steps, (at_b, b, builder.add(at_b, row_b))):
            phi.add_incoming(begin, before)
            phi.add_incoming(then, loop)
        for r in range(rows):
            for v in range(vectors):
                sums[r][v].add_incoming(none, before)
                sums[r][v].add_incoming(grown[r][v], loop)
        builder.cbranch(builder.icmp_signed(">", left, I64(1)), loop, done)
        builder.position_at_end(done)
        for r in range(rows):
            for v in range(vectors):
                sums[r][v] = joined(builder, (none, before), (grown[r][v], loop))
        for r in range(rows):
            for v in range(vectors):
                value = builder.fadd(sums[r][v], fetch(place(init, row_i, r, v), v))
                masked_store(builder, value, place(c, row_c, r, v), masks[v], "v16f32", 4)
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    def tile(typingctx, a, row_a, col_a, b, row_b, c, row_c, k, columns, init, row_i):
        return types.void(*[types.int64] * 11), codegen

    return intrinsic(tile)


def _rows(height: int, vectors: int) -> Any:
    """Tiles of one height as long as there are rows for them; returns the row reached."""
    tile = _tile(height, vectors)

    @native
    def run(
        i: Any, m: Any, a: Any, row_a: Any, col_a: Any, b: Any, row_b: Any, c: Any, row_c: Any,
        k: Any, columns: Any, init: Any, row_i: Any,
    ) -> Any:  # fmt: skip
        while i + height <= m:
            tile(a + i * row_a, row_a, col_a, b, row_b, c + i * row_c, row_c, k, columns, init + i * row_i, row_i)
            i += height
        return i

    return run


_wide12, _wide8, _wide4, _wide2, _wide1 = (_rows(height, 2) for height in (12, 8, 4, 2, 1))
_thin16, _thin8, _thin4, _thin2, _thin1 = (_rows(height, 1) for height in (16, 8, 4, 2, 1))


def _transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """The 16 x 16 transpose of 16 vectors: four rounds of interleaving row i with row i + 8."""
    low = ir.Constant(INTS, [I32(i // 2 + 16 * (i % 2)) for i in range(16)])
    high = ir.Constant(INTS, [I32(8 + i // 2 + 16 * (i % 2)) for i in range(16)])
    for _ in range(4):
        mixed = []
        for i in range(8):
            mixed += [builder.shuffle_vector(rows[i], rows[i + 8], pick) for pick in (low, high)]
        rows = mixed
    return rows


def turned(fetch: Any) -> Any:
    """16 rows of `source`, 16 numbers each, as columns of `target` (rows of 128 bytes); what is outside reads as 0.

    `fetch(builder, address, mask)` reads 16 numbers as float32.
    """

    def turn(typingctx, source, stride, target, rows, columns):
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source, stride, target, rows, columns = args
            inside = first_lanes(builder, columns)
            none = ir.Constant(inside.type, None)
            taken = []
            for r in range(16):
                mask = builder.select(builder.icmp_signed(">", rows, I64(r)), inside, none)
                taken.append(fetch(builder, builder.add(source, builder.mul(stride, I64(r))), mask))
            for r, vector in enumerate(_transpose(builder, taken)):
                aligned(builder.store(vector, pointer(builder, builder.add(target, I64(4 * PANEL * r)), FLOATS)), 4)
            return ir.Constant(ir.IntType(8).as_pointer(), None)

        return types.void(*[types.int64] * 5), codegen

    return intrinsic(turn)


_turn = turned(lambda b, address, mask: masked_load(b, address, mask, FLOATS, "v16f32", 4))


@native
def _pack(b: Any, row_b: Any, col_b: Any, terms: Any, columns: Any, scratch: Any) -> None:
    """B[terms, columns] into rows of 32."""
    if row_b == 4:
        for j in range(0, columns, 16):
            for k in range(0, terms, 16):
                _turn(b + j * col_b + 4 * k, col_b, scratch + 4 * j + 4 * PANEL * k, columns - j, terms - k)
    else:
        for k in range(terms):
            for j in range(columns):
                store_f32(scratch + 4 * (PANEL * k + j), load_f32(b + k * row_b + j * col_b))


@native
def _small(
    a: Any, row_a: Any, col_a: Any, b: Any, row_b: Any, col_b: Any, c: Any, row_c: Any,
    m: Any, n: Any, k: Any, init: Any, row_i: Any,
) -> None:  # fmt: skip
    """Four rows of C at a time, B gathered as it lies; the last rows are computed again where fewer are left."""
    mask = first(n)
    for i in range(0, m, 4):
        i1, i2, i3 = min(i + 1, m - 1), min(i + 2, m - 1), min(i + 3, m - 1)
        s0, s1 = load_first(init + i * row_i, mask), load_first(init + i1 * row_i, mask)
        s2, s3 = load_first(init + i2 * row_i, mask), load_first(init + i3 * row_i, mask)
        a0, a1, a2, a3, at_b = a + i * row_a, a + i1 * row_a, a + i2 * row_a, a + i3 * row_a, b
        for _ in range(k):
            line = load_first(at_b, mask) if col_b == 4 or n == 1 else pick_first(at_b, col_b, mask)
            s0, s1 = fma(splat(load_f32(a0)), line, s0), fma(splat(load_f32(a1)), line, s1)
            s2, s3 = fma(splat(load_f32(a2)), line, s2), fma(splat(load_f32(a3)), line, s3)
            a0, a1, a2, a3, at_b = a0 + col_a, a1 + col_a, a2 + col_a, a3 + col_a, at_b + row_b
        store_first(c + i * row_c, s0, mask)
        store_first(c + i1 * row_c, s1, mask)
        store_first(c + i2 * row_c, s2, mask)
        store_first(c + i3 * row_c, s3, mask)


@native
def tiles(
    a: Any, row_a: Any, col_a: Any, b: Any, row_b: Any, c: Any, row_c: Any, m: Any, terms: Any, columns: Any,
    init: Any, row_i: Any,
) -> None:  # fmt: skip
    """C[m, columns] = init + A[m, terms] · B for one panel of at most 32 adjacent columns."""
    if columns > 16:
        i = _wide12(0, m, a, row_a, col_a, b, row_b, c, row_c, terms, columns, init, row_i)
        i = _wide8(i, m, a, row_a, col_a, b, row_b, c, row_c, terms, columns, init, row_i)
        i = _wide4(i, m, a, row_a, col_a, b, row_b, c, row_c, terms, columns, init, row_i)
        i = _wide2(i, m, a, row_a, col_a, b, row_b, c, row_c, terms, columns, init, row_i)
        _wide1(i, m, a, row_a, col_a, b, row_b, c, row_c, terms, columns, init, row_i)
    else:
        i = _thin16(0, m, a, row_a, col_a, b, row_b, c, row_c, terms, columns, init, row_i)
        i = _thin8(i, m, a, row_a, col_a, b, row_b, c, row_c, terms, columns, init, row_i)
        i = _thin4(i, m, a, row_a, col_a, b, row_b, c, row_c, terms, columns, init, row_i)
        i = _thin2(i, m, a, row_a, col_a, b, row_b, c, row_c, terms, columns, init, row_i)
        _thin1(i, m, a, row_a, col_a, b, row_b, c, row_c, terms, columns, init, row_i)


@native
def gemm(
    a: Any, row_a: Any, col_a: Any, b: Any, row_b: Any, col_b: Any, c: Any, row_c: Any,
    m: Any, n: Any, k: Any, init: Any, row_i: Any, scratch: Any,
) -> None:  # fmt: skip
    """C[m, n] = init + A[m, k] · B[k, n]; columns of C and of `init` are adjacent, `row_i` 0 repeats one row.

    `init` 0 stands for zeros.
    """
    if n <= 16 and m <= 16 and k <= 32:
        _small(a, row_a, col_a, b, row_b, col_b, c, row_c, m, n, k, init or scratch, row_i)
        return
    panel = scratch + ZEROS
    for k0 in range(0, max(k, 1), DEPTH):
        terms = min(DEPTH, k - k0)
        for j in range(0, n, PANEL):
            columns = min(PANEL, n - j)
            at_b, step_b = b + k0 * row_b + 4 * j, row_b
            if col_b != 4 and columns > 1:
                _pack(b + k0 * row_b + j * col_b, row_b, col_b, terms, columns, panel)
                at_b, step_b = panel, 4 * PANEL
            elif col_b != 4:
                at_b = b + k0 * row_b + j * col_b
            start, step_i = (init + 4 * j, row_i) if k0 == 0 else (c + 4 * j, row_c)
            if k0 == 0 and init == 0:
                start = scratch
            at_a, out = a + k0 * col_a, c + 4 * j
            tiles(at_a, row_a, col_a, at_b, step_b, out, row_c, m, terms, columns, start, step_i)
