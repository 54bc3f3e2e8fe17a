"""The machine: one compiled function that runs rows of code over memory. No plan, edit or shape compiles anything.

It is built once per install; numba keeps it on disk, and makes it again when any file of this folder changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path
from time import perf_counter
from typing import Any

import numba
import numpy as np
from numba import njit

from graphwright.array.vm import loops
from graphwright.array.vm import math as functions
from graphwright.array.vm import vector as v
from graphwright.array.vm.attend import kv_append, kv_scatter, rope
from graphwright.array.vm.code import BYTES, Code
from graphwright.array.vm.math import native
from graphwright.array.vm.team import assist, spread
from graphwright.array.vm.vector import load_i64

Machine = Callable[[int, int, int, int], int]
"""(address of the code, number of rows, address of scratch, team or 0) -> -1, or the row that found an index out of
range."""

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)

copy = loops.unary(native(lambda x: x))
neg = loops.unary(native(lambda x: v.neg(x)))
absolute = loops.unary(native(lambda x: v.absolute(x)))
sign = loops.unary(functions.sign)
floor = loops.unary(native(lambda x: v.floor(x)))
exp = loops.unary(functions.exp)
log = loops.unary(functions.log)
sqrt = loops.unary(native(lambda x: v.sqrt(x)))
rsqrt = loops.unary(functions.rsqrt)
reciprocal = loops.unary(native(lambda x: v.div(v.splat(_ONE), x)))
tanh = loops.unary(functions.tanh)
sigmoid = loops.unary(functions.sigmoid)
erf = loops.unary(functions.erf)
relu = loops.unary(native(lambda x: v.maximum(x, v.splat(_ZERO))))
silu = loops.unary(functions.silu)
gelu = loops.unary(functions.gelu)
gelu_tanh = loops.unary(functions.gelu_tanh)
add = loops.binary(native(lambda x, y: v.add(x, y)))
sub = loops.binary(native(lambda x, y: v.sub(x, y)))
mul = loops.binary(native(lambda x, y: v.mul(x, y)))
div = loops.binary(native(lambda x, y: v.div(x, y)))
minimum = loops.binary(native(lambda x, y: v.minimum(x, y)))
maximum = loops.binary(native(lambda x, y: v.maximum(x, y)))
eq = loops.comparison(native(lambda x, y: v.eq(x, y)))
lt = loops.comparison(native(lambda x, y: v.lt(x, y)))
le = loops.comparison(native(lambda x, y: v.le(x, y)))


def _dispatcher(source: int) -> Any:
    """The interpreter; `source` is part of what numba knows it by."""

    @njit("int64(int64, int64, int64, int64)", cache=True, error_model="numpy", nogil=True)
    def machine(code: Any, count: Any, scratch: Any, team: Any) -> Any:
        for i in range(count):
            row = code + BYTES * i
            op, fine = load_i64(row), True
            if op == Code.ADD:
                add(row)
            elif op == Code.MUL:
                mul(row)
            elif op == Code.SUB:
                sub(row)
            elif op == Code.DIV:
                div(row)
            elif op == Code.PRODUCT:
                loops.product(row, scratch)
            elif op == Code.COPY:
                copy(row)
            elif op == Code.NEG:
                neg(row)
            elif op == Code.ABS:
                absolute(row)
            elif op == Code.SIGN:
                sign(row)
            elif op == Code.FLOOR:
                floor(row)
            elif op == Code.EXP:
                exp(row)
            elif op == Code.LOG:
                log(row)
            elif op == Code.SQRT:
                sqrt(row)
            elif op == Code.RSQRT:
                rsqrt(row)
            elif op == Code.RECIPROCAL:
                reciprocal(row)
            elif op == Code.TANH:
                tanh(row)
            elif op == Code.SIGMOID:
                sigmoid(row)
            elif op == Code.ERF:
                erf(row)
            elif op == Code.RELU:
                relu(row)
            elif op == Code.SILU:
                silu(row)
            elif op == Code.GELU:
                gelu(row)
            elif op == Code.GELU_TANH:
                gelu_tanh(row)
            elif op == Code.MINIMUM:
                minimum(row)
            elif op == Code.MAXIMUM:
                maximum(row)
            elif op == Code.EQ:
                eq(row)
            elif op == Code.LT:
                lt(row)
            elif op == Code.LE:
                le(row)
            elif op == Code.WHERE:
                loops.where(row)
            elif op == Code.FILL:
                loops.fill(row)
            elif op == Code.SUM_ROWS:
                loops.sum_rows(row)
            elif op == Code.SUM_COLUMNS:
                loops.sum_columns(row)
            elif op == Code.AMAX_ROWS:
                loops.amax_rows(row)
            elif op == Code.SOFTMAX:
                loops.softmax(row)
            elif op == Code.RMS_NORM:
                loops.rms_norm(row)
            elif op == Code.ADAMW:
                loops.adamw(row)
            elif op == Code.CROSS_ENTROPY:
                fine = loops.cross_entropy(row)
            elif op == Code.CROSS_ENTROPY_BACKWARD:
                fine = loops.cross_entropy_backward(row)
            elif op == Code.ROPE:
                rope(row)
            elif op == Code.KV_APPEND:
                fine = kv_append(row)
            elif op == Code.KV_SCATTER:
                fine = kv_scatter(row)
            elif op >= Code.ROWS_F32:
                spread(row, team, scratch)
            elif op != Code.MORE:
                fine = False
            if not fine:
                return i
        return -1 if source else 0

    return machine


def _assistant(source: int) -> Any:
    """What a helper runs."""

    @njit("void(int64, int64)", cache=True, error_model="numpy", nogil=True)
    def assistant(team: Any, scratch: Any) -> None:
        if source:
            assist(team, scratch)

    return assistant


def _source() -> int:
    """A number that changes with any file of this folder: numba's cache looks at one file only."""
    text = b"".join(f.read_bytes() for f in sorted(Path(__file__).parent.glob("*.py")))
    return int.from_bytes(blake2b(text, digest_size=6).digest(), "little") | 1


def _stamp() -> Path:
    """A file beside numba's own that says that the machine was built for these sources, this numba and this CPU."""
    from llvmlite import binding
    from numba.core.caching import FunctionCache

    place = Path(FunctionCache(_dispatcher).cache_path)
    key = f"{_source()}-{numba.__version__}-{binding.get_host_cpu_name()}"
    return place / f"machine-{blake2b(key.encode(), digest_size=8).hexdigest()}.built"


@cache
def built() -> bool:
    """True if the machine lies on disk, so that getting it takes no compilation."""
    return _stamp().exists()


@cache
def assistant() -> Callable[[int, int], None]:
    """The code of helpers (`team.py`), compiled now if it was not before."""
    return _assistant(_source())


@cache
def build() -> Machine:
    """The machine, compiled now if it was not before: some 20 s, once per install."""
    start = perf_counter()
    machine = _dispatcher(_source())
    assistant()
    stamp = _stamp()
    if not stamp.exists():
        logging.getLogger(__name__).info("built the VM in %.1f s", perf_counter() - start)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
        built.cache_clear()
    return machine
