"""Matrix products of float32 on one core: tiles of C in registers, panels of B of 32 columns, 256 terms at a time.

Source of the scheme: Goto and van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication". A may have any
two strides; B is packed where its columns are not adjacent. All strides are in bytes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from graphwright.array.vm import vector as vec
from graphwright.array.vm.code import BLOCK, DEPTH, STRIPS, ZEROS, Code
from graphwright.array.vm.elementwise import cell, loop
from graphwright.array.vm.math import native

PANEL = 32
_FAR = 1 << 23  # rows of A times the bytes that a panel of B spans, above which the panel is copied


def _tile(rows: int, vectors: int) -> Any:
    """C[rows, 16·vectors] = init + A[rows, k]·B with C in registers; the last vector is cut to `columns`.

    `init` is added to the finished sum, so that long sums are accumulated block by block, with a smaller error.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, row_a, col_a, b, row_b, c, row_c, k, columns, init, row_i = args
        cut = vec.first_lanes(builder, builder.sub(columns, vec.I64(16 * (vectors - 1))))
        masks = [None] * (vectors - 1) + [cut]

        def place(base: Any, stride: Any, r: int, v: int) -> Any:
            return builder.add(builder.add(base, builder.mul(stride, vec.I64(r))), vec.I64(64 * v))

        def terms(count: Any, at_a: Any, at_b: Any, sums: Any, unrolled: int) -> tuple[Any, ...]:
            """Emit a loop of `count` turns that adds `unrolled` terms each; returns addresses and sums after it."""
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
                    one = builder.load(vec.pointer(builder, place(a, row_a, r, 0), vec.F32))
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
                value = builder.fadd(sums[vectors * r + v], vec.fetch(builder, place(init, row_i, r, v), masks[v]))
                vec.write(builder, value, place(c, row_c, r, v), masks[v])
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    def tile(typingctx, a, row_a, col_a, b, row_b, c, row_c, k, columns, init, row_i):
        return types.void(*[types.int64] * 11), codegen

    return intrinsic(tile)


def _rows(height: int, vectors: int) -> Any:
    """A loop over tiles of one height while enough rows are left; it returns the next row."""
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


def _transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """The 16 x 16 transpose of 16 vectors: four rounds of interleaving row i with row i + 8."""
    for _ in range(4):
        rows = [vector for i in range(8) for vector in vec.interleaved(builder, rows[i], rows[i + 8])]
    return rows


def transposer(fetch: Any) -> Any:
    """Transpose 16 rows of 16 numbers from `source` into `target` (`pitch` bytes a row), with 0 for missing entries.

    Rows of the target are written whole and in order: where they overlap, the later one remains.
    `fetch(builder, address, mask)` reads 16 numbers as float32.
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
            for r, vector in enumerate(_transpose(builder, taken)):
                place = builder.add(target, builder.mul(pitch, vec.I64(r)))
                vec.aligned(builder.store(vector, vec.pointer(builder, place, vec.FLOATS)), 4)
            return ir.Constant(ir.IntType(8).as_pointer(), None)

        return types.void(*[types.int64] * 6), codegen

    return intrinsic(turn)


_turn = transposer(lambda b, address, mask: vec.masked_load(b, address, mask, vec.FLOATS, "v16f32", 4))


@native
def _pack(b: Any, row_b: Any, col_b: Any, terms: Any, columns: Any, scratch: Any) -> None:
    """Pack B[terms, columns] into rows of 32."""
    if col_b == 4:
        mask, more = vec.first(columns), vec.first(columns - 16)
        for k in range(terms):
            vec.store(scratch + 4 * PANEL * k, vec.load_first(b + k * row_b, mask))
            vec.store(scratch + 4 * PANEL * k + 64, vec.load_first(b + k * row_b + 64, more))
    elif row_b == 4:
        for j in range(0, columns, 16):
            for k in range(0, terms, 16):
                _turn(b + j * col_b + 4 * k, col_b, scratch + 4 * j + 4 * PANEL * k, 4 * PANEL, columns - j, terms - k)
    else:
        for k in range(terms):
            for j in range(columns):
                vec.store_f32(scratch + 4 * (PANEL * k + j), vec.load_f32(b + k * row_b + j * col_b))


@native
def _small(
    a: Any, row_a: Any, col_a: Any, b: Any, row_b: Any, col_b: Any, c: Any, row_c: Any,
    m: Any, n: Any, k: Any, init: Any, row_i: Any,
) -> None:  # fmt: skip
    """Compute four rows of C at a time without packing B; the last row is computed repeatedly where fewer are left."""
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
    """Pack A[m, terms], contiguous along one axis, into strips of the height of the tiles that read them."""
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
                _turn(a + i * row_a + 4 * k, row_a, at + 4 * height * k, 4 * height, height, terms - k)
        i, at = i + height, at + 4 * height * terms


@native
def tiles(
    a: Any, step_a: Any, row_a: Any, col_a: Any, b: Any, row_b: Any, c: Any, row_c: Any,
    m: Any, terms: Any, columns: Any, init: Any, row_i: Any,
) -> None:  # fmt: skip
    """C[m, columns] = init + A[m, terms]·B for one panel of at most 32 adjacent columns.

    `step_a` is the stride of A between tiles, `row_a` its row stride within a tile; `col_a` 0 means packed strips.
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
    """C[m, n] = init + A[m, k]·B[k, n]; columns of C and of `init` are adjacent, `row_i` 0 repeats one row.

    `init` 0 means zeros.
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
    """A matrix product as a row of code: cells 1 to 13 are the arguments of `gemm`."""
    gemm(
        cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4), cell(row, 5), cell(row, 6), cell(row, 7), cell(row, 8),
        cell(row, 9), cell(row, 10), cell(row, 11), cell(row, 12), cell(row, 13), scratch,
    )  # fmt: skip
