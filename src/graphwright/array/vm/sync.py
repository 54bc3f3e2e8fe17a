"""Atomic words, and calls of C functions by address."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from graphwright.array.vm.llvm import I8, I32, I64, pointer
from graphwright.array.vm.vector import define, effect

i64, void = types.int64, types.void
_FUNCTION = ir.FunctionType(I32, [I8.as_pointer()])
_QUESTION = ir.FunctionType(I8.as_pointer(), [I8.as_pointer()])


def _called(builder: Any, function: Any, argument: Any) -> None:
    builder.call(builder.inttoptr(function, _FUNCTION.as_pointer()), [pointer(builder, argument, I8)])


def _asked(builder: Any, function: Any, argument: Any) -> Any:
    answer = builder.call(builder.inttoptr(function, _QUESTION.as_pointer()), [pointer(builder, argument, I8)])
    return builder.ptrtoint(answer, I64)


read = define("read", i64, (i64,), lambda b, p: b.load_atomic(pointer(b, p, I64), "seq_cst", 8))
write = define("write", void, (i64, i64), effect(lambda b, p, x: b.store_atomic(x, pointer(b, p, I64), "seq_cst", 8)))
fetch_add = define("fetch_add", i64, (i64, i64), lambda b, p, x: b.atomic_rmw("add", pointer(b, p, I64), x, "seq_cst"))
"""The word as it was before."""
exchange = define("exchange", i64, (i64, i64), lambda b, p, x: b.atomic_rmw("xchg", pointer(b, p, I64), x, "seq_cst"))
called = define("called", void, (i64, i64), effect(_called))
"""Call int(void *) at an address."""
asked = define("asked", i64, (i64, i64), _asked)
"""Call void *(void *) at an address."""
