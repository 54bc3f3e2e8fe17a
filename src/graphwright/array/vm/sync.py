"""What threads that run one piece of code need: an atomic counter, and a call through a pointer to start them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from graphwright.array.vm.llvm import I8, I32, I64, pointer
from graphwright.array.vm.vector import define, effect

i64, void = types.int64, types.void
_BLOCK = I8.as_pointer()
_PARALLEL = ir.FunctionType(ir.VoidType(), [_BLOCK, _BLOCK, I32, I32])


def _start(builder: Any, parallel: Any, function: Any, data: Any, threads: Any) -> None:
    target = builder.inttoptr(parallel, _PARALLEL.as_pointer())
    at = [pointer(builder, address, I8) for address in (function, data)]
    builder.call(target, [*at, builder.trunc(threads, I32), I32(0)])


fetch_add = define("fetch_add", i64, (i64, i64), lambda b, p, x: b.atomic_rmw("add", pointer(b, p, I64), x, "seq_cst"))
"""The word as it was before."""
start = define("start", void, (i64, i64, i64, i64), effect(_start))
"""GOMP_parallel at its address: `threads` times function(data), this thread included; returns when all did."""
