"""Numbers of 8 and 16 bits as vectors of 16 float32, and shared words by which threads of compiled code meet."""

from __future__ import annotations

import os
from platform import machine
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from graphwright.array.vm.llvm import BYTES, FLOATS, I32, INTS, LANES, aligned, constant, masked_load, pointer
from graphwright.array.vm.vector import M, V, _define, _void, i64, void

_HALVES = ir.VectorType(ir.IntType(16), LANES)
_WORD = ir.IntType(64)


# -- narrow numbers ----------------------------------------------------------------------------------------------------
def from_bf16(builder: Any, bits: Any) -> Any:
    """Bfloat16 by its bits: the upper half of a float32."""
    return builder.bitcast(builder.shl(builder.zext(bits, INTS), constant(I32, 16)), FLOATS)


def from_i8(builder: Any, whole: Any) -> Any:
    """Whole numbers of 8 bits."""
    return builder.sitofp(builder.sext(whole, INTS), FLOATS)


load_bf16 = _define("load_bf16", V, (i64,), lambda b, p: from_bf16(b, aligned(b.load(pointer(b, p, _HALVES)), 2)))
load_first_bf16 = _define("load_first_bf16", V, (i64, M), lambda b, p, m: fetch_bf16(b, p, m))
load_i8 = _define("load_i8", V, (i64,), lambda b, p: from_i8(b, aligned(b.load(pointer(b, p, BYTES)), 1)))
load_first_i8 = _define("load_first_i8", V, (i64, M), lambda b, p, m: fetch_i8(b, p, m))


def fetch_bf16(builder: Any, address: Any, mask: Any) -> Any:
    """Bfloat16 under a mask."""
    return from_bf16(builder, masked_load(builder, address, mask, _HALVES, "v16i16", 2))


def fetch_i8(builder: Any, address: Any, mask: Any) -> Any:
    """Whole numbers of 8 bits under a mask."""
    return from_i8(builder, masked_load(builder, address, mask, BYTES, "v16i8", 1))


load_i32 = _define("load_i32", i64, (i64,), lambda b, p: b.sext(aligned(b.load(pointer(b, p, I32)), 4), _WORD))


# -- shared words ------------------------------------------------------------------------------------------------------
def _pause(builder: Any) -> None:
    if machine().lower() in ("x86_64", "amd64"):
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])


fetch_add = _define(
    "fetch_add", i64, (i64, i64), lambda b, p, x: b.atomic_rmw("add", pointer(b, p, _WORD), x, "seq_cst")
)
"""Add to a word; what it was before."""
read_word = _define("read_word", i64, (i64,), lambda b, p: b.load_atomic(pointer(b, p, _WORD), "seq_cst", 8))
write_word = _define(
    "write_word",
    void,
    (i64, i64),
    _void(lambda b, p, x: b.store_atomic(x, pointer(b, p, _WORD), "seq_cst", 8)),
)
pause = _define("pause", void, (), _void(_pause))
"""Tell the core that the thread waits in a loop."""


def _give_way(builder: Any) -> None:
    if os.name == "posix":
        builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, []), "sched_yield"), [])


give_way = _define("give_way", void, (), _void(_give_way))
"""Let another thread have the core, where one wants it."""
