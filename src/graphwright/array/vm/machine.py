"""The VM's machine: one compiled function that interprets instructions. New plans, edits and shapes compile nothing.

It is compiled once per install. numba caches it on disk, and compiles it again when a file of this folder or of
`array.formulas` changes.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from numba import types
from numba.extending import intrinsic

from graphwright.array import formulas
from graphwright.array.vm import attention, optimizers, rows, sampling  # noqa: F401 (enter their loops)
from graphwright.array.vm import sharing as at
from graphwright.array.vm import vector as vec
from graphwright.array.vm.code import BYTES, Code
from graphwright.array.vm.elementwise import LOOPS, cell
from graphwright.builds import Part
from graphwright.native import cfunc, marker, source_hash


@intrinsic
def _run(typingctx: Any, op: Any, row: Any, turn: Any, scratch: Any) -> Any:
    """Run the loop of opcode `op` for the instruction at `row`; return how many further rows it read, or -1: failed."""
    names = {code: f.py_func.__code__.co_varnames[: f.py_func.__code__.co_argcount] for code, f in LOOPS.items()}
    kinds = {code: types.Dispatcher(f) for code, f in LOOPS.items()}
    typed = {code: kind.get_call_type(typingctx, (vec.i64,) * len(names[code]), {}) for code, kind in kinds.items()}

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        op, given = args[0], dict(zip(("row", "turn", "scratch"), args[1:], strict=True))
        done, unknown = builder.append_basic_block("done"), builder.append_basic_block("unknown")
        jump, ways = builder.switch(op, unknown), [(vec.I64(-1), unknown)]
        builder.position_at_end(unknown)
        builder.branch(done)
        for code, kind in kinds.items():
            block = builder.append_basic_block(Code(code).name)
            jump.add_case(vec.I64(int(code)), block)
            builder.position_at_end(block)
            more = context.get_function(kind, typed[code])(builder, [given[name] for name in names[code]])
            more = vec.I64(0) if typed[code].return_type == types.none else more
            ways.append((more, builder.block))
            builder.branch(done)
        builder.position_at_end(done)
        return vec.joined(builder, *ways)

    return vec.i64(*(vec.i64,) * 4), codegen


def _dispatcher(source: int) -> Any:
    """Return the interpreter. numba's cache key contains `source`, the hash of its files, as a closure variable."""

    @cfunc("int64(int64)", cache=True, error_model="numpy")
    def machine(me: Any) -> Any:
        context = vec.load_i64(me + at.PAYLOAD)
        row, stop, scratch = cell(context, at.CODE), cell(context, at.END), cell(context, at.SCRATCH)
        helper, team = cell(context, at.HELPER), cell(context, at.TEAM)
        loop, turn, turns, outer = 0, 0, 0, 0
        sharing, busy, after, final = helper > 0, False, row, stop
        result, guard, runs = cell(context, at.FINE), cell(context, at.GUARD), cell(context, at.RUNS)
        if guard and vec.load_i64(guard) != cell(context, at.SEEN):  # the segment is stale
            return at.asked(cell(context, at.ASK), cell(context, at.OTHERWISE))
        if runs:
            vec.store_i64(runs, vec.load_i64(runs) + 1)
        while True:
            if row >= stop:
                if loop:
                    turn += 1
                    row = loop
                    if turn == turns:
                        row, stop, loop, turn = stop, outer, 0, 0
                elif sharing:
                    if busy:
                        at.fetch_add(team + 8 * at.DONE, 1)
                    ticket = at.take(team) if helper <= at.read(team + 8 * at.ALLOWED) else -1
                    busy = ticket >= 0
                    if busy:
                        row = vec.load_i64(team + 8 * at.ROWS) + ticket * vec.load_i64(team + 8 * at.SIZE)
                        stop = row + vec.load_i64(team + 8 * at.SIZE)
                    elif helper:
                        at.wait(team, helper)
                    else:
                        wrong = at.finish(team, after)
                        row, stop, sharing = after + BYTES * (1 + cell(after, 1) * cell(after, 2)), final, False
                        if wrong:
                            vec.store_i64(context + 8 * at.WHERE, wrong)
                            result = cell(context, at.FAILED)
                            break
                else:
                    break
                continue
            op = vec.load_i64(row)
            if op == Code.LOOP:
                turns, outer, loop = cell(row, 2), stop, row + BYTES
                row, stop = loop, loop + BYTES * cell(row, 1)
            elif op == Code.SHARED:
                if at.share(team, row, cell(context, at.THREADS)):
                    sharing, after, final = True, row, stop
                    stop = row
                else:
                    row += BYTES
            else:
                more = _run(op, row, turn, scratch)  # pyright: ignore[reportCallIssue]
                if more >= 0:
                    row += BYTES * (1 + more)
                elif sharing:  # the thread that offered the tickets reports it
                    vec.store_i64(team + 8 * at.WRONG, row)
                    row += BYTES
                else:
                    vec.store_i64(context + 8 * at.WHERE, row)
                    result = cell(context, at.FAILED)
                    break
        if result == cell(context, at.FAILED) and cell(context, at.ASK):
            return at.asked(cell(context, at.ASK), cell(context, at.OTHERWISE))
        if cell(context, at.COUNTED):  # a reference to the object that is returned
            vec.store_i64(result, vec.load_i64(result) + 1)
        return result if source else 0

    return machine


def source() -> int:
    """Return a hash of all files that the VM is compiled from; numba's cache would check only one.

    All code in the folder of this file is compiled, so any change there makes the machine stale.
    """
    return source_hash(*_sources())


def _sources() -> tuple[Path, Path]:
    return Path(__file__).parent, Path(formulas.__file__).parent


@cache
def build() -> Any:
    """Return the VM's interpreter, a C function int64(int64) with an attribute `address`; if not cached, compile it."""
    return _dispatcher(source())


part = Part("the VM", f"{__name__}:part", build, lambda: marker("machine", _dispatcher, *_sources()))
