"""Random numbers as rows of code: Philox 4x32-10 by key, stream and place, the words that `array.random` gives.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from graphwright.array.vm.code import BERNOULLI, DROPOUT, ZEROS
from graphwright.array.vm.elementwise import F, cell, number
from graphwright.array.vm.llvm import FLOATS, I32, I64, INTS, LANES, aligned, broadcast, constant, pointer
from graphwright.array.vm.math import native
from graphwright.array.vm.vector import (
    define,
    div,
    effect,
    first,
    le,
    load,
    load_first,
    load_i64,
    lt,
    select,
    splat,
    store_first,
)

_LONGS = ir.VectorType(I64, LANES)
_MULTIPLIERS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_BLOCKS = LANES
_WORDS = 4 * _BLOCKS


def _product(b: Any, words: Any, factor: int) -> tuple[Any, Any]:
    """The upper and the lower half of 32-bit products."""
    wide = b.mul(b.zext(words, _LONGS), constant(I64, factor))
    return b.trunc(b.lshr(wide, constant(I64, 32)), INTS), b.trunc(wide, INTS)


def _pairs(b: Any, x: Any, y: Any, high: int, width: int) -> Any:
    """Runs of `width` lanes of two vectors in turn, from their lower or upper halves."""
    picks = []
    for run in range(LANES // (2 * width)):
        start = high * LANES // 2 + run * width
        picks += [start + k for k in range(width)] + [LANES + start + k for k in range(width)]
    return b.shuffle_vector(x, y, ir.Constant(INTS, [I32(p) for p in picks]))


def _uniform(b: Any, target: Any, block: Any, stream: Any, seed: Any, step: Any) -> None:
    """The numbers of 16 counters, 4 each, from a multiple of 16 on: upper 24 bits · 2⁻²⁴, written as float32."""

    def halves(word: Any) -> tuple[Any, Any]:
        return b.trunc(word, I32), b.trunc(b.lshr(word, I64(32)), I32)

    lanes = ir.Constant(INTS, [I32(i) for i in range(LANES)])
    low, high = halves(block)
    c = [b.add(broadcast(b, low), lanes), *(broadcast(b, w) for w in (high, b.trunc(stream, I32), halves(step)[0]))]
    keys = list(halves(seed))
    for _ in range(10):
        (h0, l0), (h1, l1) = (_product(b, c[i], m) for i, m in zip((0, 2), _MULTIPLIERS, strict=True))
        k0, k1 = (broadcast(b, k) for k in keys)
        c = [b.xor(b.xor(h1, c[1]), k0), l1, b.xor(b.xor(h0, c[3]), k1), l0]
        keys = [b.add(k, I32(w)) for k, w in zip(keys, _WEYL, strict=True)]
    u = [b.fmul(b.uitofp(b.lshr(w, constant(I32, 8)), FLOATS), constant(ir.FloatType(), 2.0**-24)) for w in c]
    for part in (0, 1):
        near, far = _pairs(b, u[0], u[1], part, 1), _pairs(b, u[2], u[3], part, 1)
        for half in (0, 1):
            place = b.add(target, I64(64 * (2 * part + half)))
            aligned(b.store(_pairs(b, near, far, half, 2), pointer(b, place, FLOATS)), 4)


uniforms = define("uniforms", types.void, (types.int64,) * 5, effect(_uniform))


@native
def noise(row: Any, scratch: Any) -> None:
    """Cells 2 count, 3 out, 6 x or p, 7 where seed and step lie, 8 stream, 9 kind; 10 what is kept from, 11 divisor."""
    count, o, x, key, kind = cell(row, 2), cell(row, 3), cell(row, 6), cell(row, 7), cell(row, 9)
    least, divisor, zero, drawn = splat(F(number(row, 10))), splat(F(number(row, 11))), splat(F(0.0)), scratch + ZEROS
    for start in range(0, count, _WORDS):
        uniforms(drawn, start // 4, cell(row, 8), load_i64(key), load_i64(key + 8))
        for i in range(start, min(count, start + _WORDS), 16):
            mask, u = first(count - i), load(drawn + 4 * (i - start))
            if kind == DROPOUT:
                u = div(select(le(least, u), load_first(x + 4 * i, mask), zero), divisor)
            elif kind == BERNOULLI:
                u = select(lt(u, load_first(x + 4 * i, mask)), splat(F(1.0)), zero)
            store_first(o + 4 * i, u, mask)
