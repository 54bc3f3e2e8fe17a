"""The VM's machine: one compiled function that interprets rows of code. No plan, edit or shape compiles anything.

It is compiled once per install. numba caches it on disk, and compiles it again when a file of this folder or of
`array.formulas` changes.
"""

from __future__ import annotations

import logging
from functools import cache
from hashlib import blake2b
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numba

from graphwright.array import formulas
from graphwright.array.vm import attention, elementwise, gemm, gemv, math, move, noise, optimizers, rows, sampling
from graphwright.array.vm import context as at
from graphwright.array.vm import vector as v
from graphwright.array.vm.code import BYTES, Code
from graphwright.array.vm.elementwise import cell
from graphwright.array.vm.math import native
from graphwright.array.vm.narrow import rounded_bf16
from graphwright.array.vm.sharing import asked, fetch_add, finish, read, share, take, wait
from graphwright.array.vm.vector import WIDE, load_i64, store_i64
from graphwright.native import cfunc, source_hash

copy = elementwise.unary(native(lambda x: x))
neg = elementwise.unary(native(lambda x: -x))
absolute = elementwise.unary(native(lambda x: v.absolute(x)))
sign = elementwise.unary(math.formulas.sign)
floor = elementwise.unary(native(lambda x: v.floor(x)))
exp = elementwise.unary(math.exp)
log = elementwise.unary(math.log)
sqrt = elementwise.unary(native(lambda x: v.sqrt(x)))
rsqrt = elementwise.unary(math.rsqrt)
reciprocal = elementwise.unary(native(lambda x: 1.0 / x))
tanh = elementwise.unary(math.tanh)
sigmoid = elementwise.unary(math.formulas.sigmoid)
erf = elementwise.unary(math.erf)
relu = elementwise.unary(math.formulas.relu)
silu = elementwise.unary(math.formulas.silu)
gelu = elementwise.unary(math.formulas.gelu)
gelu_tanh = elementwise.unary(math.formulas.gelu_tanh)
rounded = elementwise.unary(native(lambda x: rounded_bf16(x)))
add = elementwise.binary(native(lambda x, y: x + y))
sub = elementwise.binary(native(lambda x, y: x - y))
mul = elementwise.binary(native(lambda x, y: x * y))
div = elementwise.binary(native(lambda x, y: x / y))
minimum = elementwise.binary(native(lambda x, y: v.minimum(x, y)))
maximum = elementwise.binary(native(lambda x, y: v.maximum(x, y)))
swiglu = elementwise.binary(native(lambda x, y: math.formulas.silu(x) * y))
add_silu = elementwise.binary(native(lambda x, y: math.formulas.silu(x + y)))
eq = elementwise.comparison(native(lambda x, y: x == y))
ne = elementwise.comparison(native(lambda x, y: x != y))
lt = elementwise.comparison(native(lambda x, y: x < y))
le = elementwise.comparison(native(lambda x, y: x <= y))


def _dispatcher(source: int) -> Any:
    """Define the interpreter; `source` is a closure variable because numba's cache key contains closures."""

    @cfunc("int64(int64)", cache=True, error_model="numpy")
    def machine(me: Any) -> Any:
        context = load_i64(me + at.PAYLOAD)
        row, stop, scratch = cell(context, at.CODE), cell(context, at.END), cell(context, at.SCRATCH)
        helper, team = cell(context, at.HELPER), cell(context, at.TEAM)
        loop, turn, turns, outer = 0, 0, 0, 0
        sharing, busy, after, final = helper > 0, False, row, stop
        result, guard, runs = cell(context, at.FINE), cell(context, at.GUARD), cell(context, at.RUNS)
        if guard and load_i64(guard) != cell(context, at.SEEN):  # the segment is stale
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
                        wrong = finish(team, cell(after, 1))
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
                elementwise.scalars(row)
                row += BYTES * ((cell(row, 1) + 3) // 4)
            elif op == Code.PRODUCT:
                gemm.product(row, scratch)
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
                attention.attend(row, scratch)
                row += BYTES
            elif op == Code.ATTEND_BACKWARD:
                attention.attend_backward(row, scratch)
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
                attention.attend_cached(row)
                row += BYTES
            elif op == Code.KV_APPEND:
                fine = attention.kv_append(row)
            elif op == Code.KV_SCATTER:
                fine = attention.kv_scatter(row)
            elif op == Code.SAMPLE_TOKEN:
                sampling.sample_token(row, scratch)
            elif Code.ADAM <= op <= Code.AVERAGE:
                optimizers.step(row, op, scratch)
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
            if not fine and sharing:  # the thread that shared the rows reports it
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
    """Hash the files that the machine is compiled from, and other folders; numba's cache checks a single file.

    The folder of this file holds nothing that runs only in Python, so that a change there is a change of native code.
    """
    return source_hash(Path(__file__).parent, Path(formulas.__file__).parent, *map(Path, others))


def _stamp() -> Path:
    """The marker file that exists once the machine is compiled for these sources, this numba and this CPU."""
    from llvmlite import binding
    from numba.core.caching import FunctionCache

    place = Path(FunctionCache(_dispatcher).cache_path)
    key = f"{source()}-{numba.__version__}-{binding.get_host_cpu_name()}"
    return place / f"machine-{blake2b(key.encode(), digest_size=8).hexdigest()}.built"


@cache
def built() -> bool:
    """Whether the compiled machine is in the cache on disk."""
    return _stamp().exists()


@cache
def wide_vectors() -> bool:
    """Whether the CPU has registers of 64 bytes, for which the tiles of matrix products are sized."""
    return WIDE


class Machine(NamedTuple):
    """The compiled function: the object that owns it, and its address. Its C signature is int64(int64)."""

    code: Any
    address: int


@cache
def build() -> Machine:
    """Return the machine, compiling it if it is not cached: about a minute, once per install."""
    began, stamp = perf_counter(), _stamp()
    code = _dispatcher(source())
    if not stamp.exists():
        logging.getLogger(__name__).info("built the VM in %.1f s", perf_counter() - began)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
        built.cache_clear()
    return Machine(code, code.address)
