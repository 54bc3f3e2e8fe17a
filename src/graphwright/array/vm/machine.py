"""The machine: one compiled function that runs rows of code over memory. No plan, edit or shape compiles anything.

It is built once per install; numba keeps it on disk, and makes it again when a file beside this one changes.
"""

from __future__ import annotations

import logging
from functools import cache
from hashlib import blake2b
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numba
import numpy as np

from graphwright.array.vm import (
    attend,
    decode,
    elementwise,
    gemv,
    move,
    noise,
    optimize,
    rows,
    sampling,
    scalars,
    update,
)
from graphwright.array.vm import context as at
from graphwright.array.vm import math as functions
from graphwright.array.vm import vector as v
from graphwright.array.vm.code import BYTES, Code
from graphwright.array.vm.elementwise import cell
from graphwright.array.vm.llvm import WIDE
from graphwright.array.vm.math import native
from graphwright.array.vm.narrow import rounded_bf16
from graphwright.array.vm.sharing import settle, share, take, wait
from graphwright.array.vm.sync import asked, fetch_add, read
from graphwright.array.vm.vector import load_i64, store_i64
from graphwright.native import cfunc

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)

copy = elementwise.unary(native(lambda x: x))
neg = elementwise.unary(native(lambda x: v.neg(x)))
absolute = elementwise.unary(native(lambda x: v.absolute(x)))
sign = elementwise.unary(functions.sign)
floor = elementwise.unary(native(lambda x: v.floor(x)))
exp = elementwise.unary(functions.exp)
log = elementwise.unary(functions.log)
sqrt = elementwise.unary(native(lambda x: v.sqrt(x)))
rsqrt = elementwise.unary(functions.rsqrt)
reciprocal = elementwise.unary(native(lambda x: v.div(v.splat(_ONE), x)))
tanh = elementwise.unary(functions.tanh)
sigmoid = elementwise.unary(functions.sigmoid)
erf = elementwise.unary(functions.erf)
relu = elementwise.unary(native(lambda x: v.most(x, v.splat(_ZERO))))  # of NaN and -0 itself, as ATen has it
silu = elementwise.unary(functions.silu)
gelu = elementwise.unary(functions.gelu)
gelu_tanh = elementwise.unary(functions.gelu_tanh)
rounded = elementwise.unary(native(lambda x: rounded_bf16(x)))
add = elementwise.binary(native(lambda x, y: v.add(x, y)))
sub = elementwise.binary(native(lambda x, y: v.sub(x, y)))
mul = elementwise.binary(native(lambda x, y: v.mul(x, y)))
div = elementwise.binary(native(lambda x, y: v.div(x, y)))
minimum = elementwise.binary(native(lambda x, y: v.minimum(x, y)))
maximum = elementwise.binary(native(lambda x, y: v.maximum(x, y)))
swiglu = elementwise.binary(native(lambda x, y: v.mul(functions.silu(x), y)))
add_silu = elementwise.binary(native(lambda x, y: functions.silu(v.add(x, y))))
eq = elementwise.comparison(native(lambda x, y: v.eq(x, y)))
ne = elementwise.comparison(native(lambda x, y: v.ne(x, y)))
lt = elementwise.comparison(native(lambda x, y: v.lt(x, y)))
le = elementwise.comparison(native(lambda x, y: v.le(x, y)))


def _dispatcher(source: int) -> Any:
    """The interpreter; `source` is part of what numba knows it by."""

    @cfunc("int64(int64)", cache=True, error_model="numpy")
    def machine(me: Any) -> Any:
        context = load_i64(me + at.PAYLOAD)
        row, stop, scratch = cell(context, at.CODE), cell(context, at.END), cell(context, at.SCRATCH)
        helper, team = cell(context, at.HELPER), cell(context, at.TEAM)
        loop, turn, turns, outer = 0, 0, 0, 0
        sharing, busy, after, final = helper > 0, False, row, stop
        result, guard, runs = cell(context, at.FINE), cell(context, at.GUARD), cell(context, at.RUNS)
        if guard and load_i64(guard) != cell(context, at.SEEN):  # what the code was made for is no more
            return asked(cell(context, at.ASK), cell(context, at.OTHERWISE))
        if runs:
            store_i64(runs, load_i64(runs) + 1)
        while True:
            if row >= stop:
                if loop:
                    turn += 1
                    row = loop
                    if turn == turns:
                        row, stop, loop, turn = stop, outer, 0, 0
                elif sharing:
                    if busy:
                        fetch_add(team + 8 * at.DONE, 1)
                    ticket = take(team) if helper <= read(team + 8 * at.ALLOWED) else -1
                    busy = ticket >= 0
                    if busy:
                        row = load_i64(team + 8 * at.ROWS) + ticket * load_i64(team + 8 * at.SIZE)
                        stop = row + load_i64(team + 8 * at.SIZE)
                    elif helper:
                        wait(team, helper)
                    else:
                        wrong = settle(team, cell(after, 1))
                        row, stop, sharing = after + BYTES * (1 + cell(after, 1) * cell(after, 2)), final, False
                        if wrong:
                            store_i64(context + 8 * at.WHERE, wrong)
                            result = cell(context, at.FAILED)
                            break
                else:
                    break
                continue
            op, fine = load_i64(row), True
            if op == Code.ADD:
                add(row, turn, scratch)
            elif op == Code.MUL:
                mul(row, turn, scratch)
            elif op == Code.SUB:
                sub(row, turn, scratch)
            elif op == Code.DIV:
                div(row, turn, scratch)
            elif op == Code.SCALARS:
                scalars.run(row)
                row += BYTES * ((cell(row, 1) + 3) // 4)
            elif op == Code.PRODUCT:
                update.product(row, scratch)
            elif op == Code.COPY:
                copy(row, turn, scratch)
            elif op == Code.NEG:
                neg(row, turn, scratch)
            elif op == Code.ABS:
                absolute(row, turn, scratch)
            elif op == Code.SIGN:
                sign(row, turn, scratch)
            elif op == Code.FLOOR:
                floor(row, turn, scratch)
            elif op == Code.EXP:
                exp(row, turn, scratch)
            elif op == Code.LOG:
                log(row, turn, scratch)
            elif op == Code.SQRT:
                sqrt(row, turn, scratch)
            elif op == Code.RSQRT:
                rsqrt(row, turn, scratch)
            elif op == Code.RECIPROCAL:
                reciprocal(row, turn, scratch)
            elif op == Code.TANH:
                tanh(row, turn, scratch)
            elif op == Code.SIGMOID:
                sigmoid(row, turn, scratch)
            elif op == Code.ERF:
                erf(row, turn, scratch)
            elif op == Code.RELU:
                relu(row, turn, scratch)
            elif op == Code.SILU:
                silu(row, turn, scratch)
            elif op == Code.GELU:
                gelu(row, turn, scratch)
            elif op == Code.GELU_TANH:
                gelu_tanh(row, turn, scratch)
            elif op == Code.ROUND:
                rounded(row, turn, scratch)
            elif op == Code.MINIMUM:
                minimum(row, turn, scratch)
            elif op == Code.MAXIMUM:
                maximum(row, turn, scratch)
            elif op == Code.SWIGLU:
                swiglu(row, turn, scratch)
            elif op == Code.ADD_SILU:
                add_silu(row, turn, scratch)
            elif op == Code.EQ:
                eq(row, turn, scratch)
            elif op == Code.LT:
                lt(row, turn, scratch)
            elif op == Code.LE:
                le(row, turn, scratch)
            elif op == Code.NE:
                ne(row, turn, scratch)
            elif op == Code.ADD_I64:
                elementwise.add_i64(row)
            elif op == Code.PUT_I64:
                store_i64(cell(row, 1), cell(row, 2))
            elif op == Code.WIDEN:
                elementwise.widen(row, turn, scratch)
            elif op == Code.NARROW:
                elementwise.narrow(row, turn, scratch)
            elif op == Code.WHERE:
                elementwise.where(row, turn, scratch)
            elif op == Code.FILL:
                elementwise.fill(row, turn, scratch)
            elif op == Code.SUM_ROWS:
                rows.sum_rows(row)
            elif op == Code.SUM_COLUMNS:
                rows.sum_columns(row)
            elif op == Code.AMAX_ROWS:
                rows.amax_rows(row)
            elif op == Code.SOFTMAX:
                rows.softmax(row, turn, scratch)
            elif op == Code.RMS_NORM:
                rows.rms_norm(row, turn, scratch)
            elif op == Code.LAYER_NORM:
                rows.layer_norm(row)
            elif op == Code.NOISE:
                noise.noise(row, scratch)
            elif op == Code.CROSS_ENTROPY:
                fine = rows.cross_entropy(row)
            elif op == Code.CROSS_ENTROPY_BACKWARD:
                fine = rows.cross_entropy_backward(row)
            elif op == Code.COPY_AXES:
                move.copy_axes(row)
            elif op == Code.ROPE:
                move.rope(row)
            elif op == Code.ROPE_TABLE:
                move.rope_table(row)
            elif op == Code.GATHER_ROWS:
                fine = move.gather_rows(row)
            elif op == Code.ADD_ROWS:
                fine = move.add_rows(row)
            elif op == Code.ATTEND:
                attend.attend(row, scratch)
                row += BYTES
            elif op == Code.ATTEND_BACKWARD:
                attend.attend_backward(row, scratch)
                row += 2 * BYTES
            elif op == Code.ROWS_F32:
                gemv.float32_rows(row, scratch)
            elif op == Code.ROWS_BF16:
                gemv.bfloat16_rows(row, scratch)
            elif op == Code.ROWS_I8:
                gemv.int8_rows(row, scratch)
            elif op == Code.PANELS_BF16 or op == Code.PANELS_I8:
                gemv.panels(row, scratch, op == Code.PANELS_I8)
            elif op == Code.ATTEND_CACHED:
                decode.attend_cached(row)
                row += BYTES
            elif op == Code.KV_APPEND:
                fine = decode.kv_append(row)
            elif op == Code.KV_SCATTER:
                fine = decode.kv_scatter(row)
            elif op == Code.SAMPLE_TOKEN:
                sampling.sample_token(row, scratch)
            elif Code.ADAM <= op <= Code.AVERAGE:
                optimize.step(row, op, scratch)
                row += BYTES * ((cell(row, 1) + 1) // 2)
            elif op == Code.LOOP:
                turns, outer, loop = cell(row, 2), stop, row + BYTES
                stop = loop + BYTES * cell(row, 1)
            elif op == Code.SHARED:
                if share(team, row, cell(context, at.THREADS)):
                    sharing, after, final = True, row, stop
                    stop = row
                    continue
            else:
                fine = False
            if not fine and sharing:  # whoever shared the rows will say so
                store_i64(team + 8 * at.WRONG, row)
            elif not fine:
                store_i64(context + 8 * at.WHERE, row)
                result = cell(context, at.FAILED)
                break
            row += BYTES
        if result == cell(context, at.FAILED) and cell(context, at.ASK):
            return asked(cell(context, at.ASK), cell(context, at.OTHERWISE))
        if cell(context, at.COUNTED):  # a reference to the object that is returned
            store_i64(result, load_i64(result) + 1)
        return result if source else 0

    return machine


def source(*others: str | Path) -> int:
    """A number that changes with a file beside this one, or of other folders: numba's cache looks at one file only."""
    folders = (Path(__file__).parent, *map(Path, others))
    text = b"".join(f.read_bytes() for folder in folders for f in sorted(folder.glob("*.py")))
    return int.from_bytes(blake2b(text, digest_size=6).digest(), "little") | 1


def _stamp() -> Path:
    """A file beside numba's own that says that the machine was built for these sources, this numba and this CPU."""
    from llvmlite import binding
    from numba.core.caching import FunctionCache

    place = Path(FunctionCache(_dispatcher).cache_path)
    key = f"{source()}-{numba.__version__}-{binding.get_host_cpu_name()}"
    return place / f"machine-{blake2b(key.encode(), digest_size=8).hexdigest()}.built"


@cache
def built() -> bool:
    """True if the machine lies on disk, so that getting it takes no compilation."""
    return _stamp().exists()


@cache
def wide_vectors() -> bool:
    """True on a CPU with vectors of 64 bytes, which the tiles of products are made for."""
    return WIDE


class Machine(NamedTuple):
    """The compiled function: an object that keeps it alive, and its address. Its C form is int64(int64)."""

    code: Any
    address: int


@cache
def build() -> Machine:
    """The machine, compiled now if it was not before: about a minute, once per install."""
    began, stamp = perf_counter(), _stamp()
    code = _dispatcher(source())
    if not stamp.exists():
        logging.getLogger(__name__).info("built the VM in %.1f s", perf_counter() - began)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
        built.cache_clear()
    return Machine(code, code.address)
