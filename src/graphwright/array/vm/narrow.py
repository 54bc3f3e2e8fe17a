"""Conversion of bfloat16, int8 and int16 from and to vectors of 16 float32, and integer dot products."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from graphwright.array.vm import vector as vec
from graphwright.array.vm.vector import FLOATS, I32, INTS, V, aligned, constant, define, effect, i64, pointer, void

_HALVES = ir.VectorType(vec.I16, vec.LANES)
_TWICE = 2 * vec.LANES


def from_bf16(builder: Any, bits: Any) -> Any:
    """Convert bfloat16 to float32: its 16 bits become the upper half of the float32."""
    return builder.bitcast(builder.shl(builder.zext(bits, INTS), constant(I32, 16)), FLOATS)


def _one_bf16(builder: Any, address: Any) -> Any:
    bits = builder.zext(aligned(builder.load(pointer(builder, address, vec.I16)), 2), I32)
    return builder.bitcast(builder.shl(bits, I32(16)), vec.F32)


def _to_bf16(builder: Any, x: Any) -> Any:
    """Round float32 to the nearest bfloat16, ties to even; NaN remains NaN."""
    bits = builder.bitcast(x, INTS)
    upper = builder.lshr(bits, constant(I32, 16))
    half = builder.add(builder.and_(upper, constant(I32, 1)), constant(I32, 0x7FFF))
    rounded = builder.lshr(builder.add(bits, half), constant(I32, 16))
    quiet = builder.or_(upper, constant(I32, 0x40))
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", x, x), quiet, rounded), _HALVES)


rounded_bf16 = define("rounded_bf16", V, (V,), lambda b, x: from_bf16(b, _to_bf16(b, x)))
"""Round to the nearest bfloat16; the result is float32."""
load1_bf16 = define("load1_bf16", vec.f32, (i64,), _one_bf16)
load_bf16 = define("load_bf16", V, (i64,), lambda b, p: from_bf16(b, aligned(b.load(pointer(b, p, _HALVES)), 2)))
load_first_bf16 = define("load_first_bf16", V, (i64, vec.M), lambda b, p, m: fetch_bf16(b, p, m))
store_bf16 = define(
    "store_bf16", void, (i64, V), effect(lambda b, p, x: aligned(b.store(_to_bf16(b, x), pointer(b, p, _HALVES)), 2))
)
store_first_bf16 = define(
    "store_first_bf16",
    void,
    (i64, V, vec.M),
    effect(lambda b, p, x, m: vec.masked_store(b, _to_bf16(b, x), p, m, "v16i16", 2)),
)


def fetch_bf16(builder: Any, address: Any, mask: Any) -> Any:
    """Load the bfloat16 in the lanes of a mask, converted to float32; the other lanes are 0."""
    return from_bf16(builder, vec.masked_load(builder, address, mask, _HALVES, "v16i16", 2))


def fetch_i8(builder: Any, address: Any, mask: Any) -> Any:
    """Load the int8 in the lanes of a mask, converted to float32; the other lanes are 0."""
    whole = vec.masked_load(builder, address, mask, vec.BYTES, "v16i8", 1)
    return builder.sitofp(builder.sext(whole, INTS), FLOATS)


# -- two bfloat16 in 32 bits -------------------------------------------------------------------------------------------
def _couples(builder: Any, address: Any) -> Any:
    return aligned(builder.load(pointer(builder, address, INTS)), 2)


evens_bf16 = define("evens_bf16", V, (i64,), lambda b, p: b.bitcast(b.shl(_couples(b, p), constant(I32, 16)), FLOATS))
"""Entries 0, 2, .. 30 of 32 bfloat16; separating even and odd entries is cheaper than widening 16 adjacent ones."""
odds_bf16 = define(
    "odds_bf16", V, (i64,), lambda b, p: b.bitcast(b.and_(_couples(b, p), constant(I32, 0xFFFF0000)), FLOATS)
)


def _every_second(start: int) -> Any:
    index = ir.Constant(INTS, [I32(2 * i + start) for i in range(vec.LANES)])
    return lambda builder, x, y: builder.shuffle_vector(x, y, index)


evens = define("evens", V, (V, V), _every_second(0))
odds = define("odds", V, (V, V), _every_second(1))


# -- products of whole numbers -----------------------------------------------------------------------------------------
def _pairs(builder: Any, x: Any, y: Any) -> Any:
    """x[2i]·y[2i] + x[2i + 1]·y[2i + 1] in lane i; x and y are vectors of 32 int16."""
    if vec.PAIRED:
        return vec.intrinsic_call(builder, "llvm.x86.avx512.pmaddw.d.512", INTS, x, y)
    wide = ir.VectorType(I32, _TWICE)
    products = builder.mul(builder.sext(x, wide), builder.sext(y, wide))
    return builder.add(_every_second(0)(builder, products, products), _every_second(1)(builder, products, products))


def _dot_i8(builder: Any, w: Any, x: Any) -> Any:
    total = None
    for half in range(2):
        at_w, at_x = builder.add(w, vec.I64(_TWICE * half)), builder.add(x, vec.I64(2 * _TWICE * half))
        eight = builder.load(pointer(builder, at_w, ir.VectorType(vec.I8, _TWICE)))
        sixteen = builder.load(pointer(builder, at_x, ir.VectorType(vec.I16, _TWICE)))
        wide = builder.sext(aligned(eight, 1), sixteen.type)
        sums = _pairs(builder, wide, aligned(sixteen, 2))
        total = sums if total is None else builder.add(total, sums)
    return builder.sitofp(total, FLOATS)


dot_i8 = define("dot_i8", V, (i64, i64), _dot_i8)
"""Products of 64 int8 at w with 64 int16 at x, summed into 16 lanes; below 2²⁴, so exact in float32."""
products_i8 = define(
    "products_i8",
    V,
    (i64, i64, vec.M),
    lambda b, w, x, m: b.sitofp(
        b.mul(
            b.sext(vec.masked_load(b, w, m, vec.BYTES, "v16i8", 1), INTS),
            b.sext(aligned(b.load(pointer(b, x, _HALVES)), 2), INTS),
        ),
        FLOATS,
    ),
)
"""Products of 16 int8 and int16 under a mask; 0 in the other lanes."""
store_i16 = define(
    "store_i16",
    void,
    (i64, V),
    effect(lambda b, p, x: aligned(b.store(b.trunc(b.fptosi(x, INTS), _HALVES), pointer(b, p, _HALVES)), 2)),
)
"""Store whole numbers as int16."""
