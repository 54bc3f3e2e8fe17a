"""Numbers of 8 and 16 bits as vectors of 16 float32, and int32 as int64."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from graphwright.array.vm.llvm import BYTES, FLOATS, I32, I64, INTS, LANES, aligned, constant, masked_load, pointer
from graphwright.array.vm.vector import M, V, define, i64

_HALVES = ir.VectorType(ir.IntType(16), LANES)


def from_bf16(builder: Any, bits: Any) -> Any:
    """Bfloat16 by its bits: the upper half of a float32."""
    return builder.bitcast(builder.shl(builder.zext(bits, INTS), constant(I32, 16)), FLOATS)


def from_i8(builder: Any, whole: Any) -> Any:
    """Whole numbers of 8 bits."""
    return builder.sitofp(builder.sext(whole, INTS), FLOATS)


load_bf16 = define("load_bf16", V, (i64,), lambda b, p: from_bf16(b, aligned(b.load(pointer(b, p, _HALVES)), 2)))
load_first_bf16 = define("load_first_bf16", V, (i64, M), lambda b, p, m: fetch_bf16(b, p, m))
load_i8 = define("load_i8", V, (i64,), lambda b, p: from_i8(b, aligned(b.load(pointer(b, p, BYTES)), 1)))
load_first_i8 = define("load_first_i8", V, (i64, M), lambda b, p, m: fetch_i8(b, p, m))


def fetch_bf16(builder: Any, address: Any, mask: Any) -> Any:
    """Bfloat16 under a mask."""
    return from_bf16(builder, masked_load(builder, address, mask, _HALVES, "v16i16", 2))


def fetch_i8(builder: Any, address: Any, mask: Any) -> Any:
    """Whole numbers of 8 bits under a mask."""
    return from_i8(builder, masked_load(builder, address, mask, BYTES, "v16i8", 1))


load_i32 = define("load_i32", i64, (i64,), lambda b, p: b.sext(aligned(b.load(pointer(b, p, I32)), 4), I64))
