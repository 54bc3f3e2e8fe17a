"""The VM's machine: one compiled function that interprets instructions. New plans, edits and shapes compile nothing.

Loops of elementwise instructions are compiled into the machine; those of each other module are one function, which the
machine calls by its address, so that several processes compile at the same time; loops that need products call that of
`products` (`other_products`). numba caches all of them on disk, and compiles them again when a file of this folder or
of `array.formulas` changes.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import intrinsic

from graphwright import native
from graphwright.array import formulas
from graphwright.array.vm import (  # noqa: F401 (enter their loops)
    attention,
    block_attention,
    block_measures,
    experts,
    optimizers,
    other_products,
    products,
    rows,
    sampling,
    selected_attention,
)
from graphwright.array.vm import sharing as at
from graphwright.array.vm import vector as vec
from graphwright.array.vm.code import BYTES, Code
from graphwright.array.vm.elementwise import LOOPS, cell
from graphwright.builds import Part
from graphwright.native import cfunc, marker, source_hash
from graphwright.patterns import table as words

GROUPS = (
    "attention", "block_attention", "block_measures", "elementwise", "experts", "selected_attention", "optimizers",
    "products", "rows", "sampling",
)  # fmt: skip
"""The modules of the loops, those that take longest to compile first."""
INSIDE = GROUPS.index("elementwise")  # its loops are part of the machine


@intrinsic(prefer_literal=True)
def _run(typingctx: Any, group: Any, table: Any, op: Any, row: Any, turn: Any, scratch: Any) -> Any:
    """Run the loop of opcode `op` for the instruction at `row`; return how many further rows it read, or -1: failed.

    Loops of `group` are called directly, others by the addresses of their groups at address `table`, if it is not 0.
    """
    near = {code: f for code, f in LOOPS.items() if _group(f) == group.literal_value}
    names = {code: f.py_func.__code__.co_varnames[: f.py_func.__code__.co_argcount] for code, f in near.items()}
    kinds = {code: types.Dispatcher(f) for code, f in near.items()}
    typed = {code: kind.get_call_type(typingctx, (vec.i64,) * len(names[code]), {}) for code, kind in kinds.items()}

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        table, op, given = args[1], args[2], dict(zip(("row", "turn", "scratch"), args[3:], strict=True))
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
        for other in range(len(GROUPS)) if group.literal_value == INSIDE else ():
            block = builder.append_basic_block(GROUPS[other])
            for code in [code for code, f in LOOPS.items() if _group(f) == other != INSIDE]:
                jump.add_case(vec.I64(int(code)), block)
            builder.position_at_end(block)
            slot = builder.inttoptr(builder.add(table, vec.I64(8 * other)), vec.I64.as_pointer())
            far = builder.inttoptr(builder.load(slot), other_products.LOOPS_OF_GROUP.as_pointer())
            ways.append((builder.call(far, [op, *given.values()]), builder.block))
            builder.branch(done)
        builder.position_at_end(done)
        return vec.joined(builder, *ways)

    return vec.i64(group, *(vec.i64,) * 5), codegen


def _group(loop: Any) -> int:
    return GROUPS.index(loop.py_func.__module__.rpartition(".")[2])


def _loops(group: int, source: int) -> Any:
    """Return the function that runs the loops of a group; for `source` see `_dispatcher`."""

    def loops(op: Any, row: Any, turn: Any, scratch: Any) -> Any:
        done = _run(group, 0, op, row, turn, scratch)  # pyright: ignore[reportCallIssue]
        return done if source else 0

    loops.__qualname__ = GROUPS[group]  # numba has an index file per name, which only one process may write at a time
    return cfunc("int64(int64, int64, int64, int64)", cache=True, error_model="numpy")(loops)


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
                table = cell(context, at.TABLE)
                more = _run(INSIDE, table, op, row, turn, scratch)  # pyright: ignore[reportCallIssue]
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


def _sources() -> tuple[Path, ...]:
    return Path(__file__).parent, Path(formulas.__file__).parent, Path(native.__file__), Path(words.__file__)


class Machine(NamedTuple):
    """The compiled machine.

    Attributes:
        address: of the interpreter, a C function int64(int64).
        table: int64 addresses of the functions of `GROUPS`; 0 for the group inside the interpreter.
        code: what numba compiled, which keeps the functions alive.
    """

    address: int
    table: np.ndarray
    code: tuple[Any, ...]


@cache
def build() -> Machine:
    """Return the VM's machine; compile what numba has not cached."""
    code = tuple(map(_compiled, range(len(GROUPS))))
    table = np.array([0 if k == INSIDE else made.address for k, made in enumerate(code)], np.int64)
    return Machine(code[INSIDE].address, table, code)


@cache
def _compiled(group: int) -> Any:
    made = _dispatcher(source()) if group == INSIDE else _loops(group, source())
    if GROUPS[group] == "products":
        other_products.ADDRESS[0] = made.address
    return made


def loops_of(module: str) -> Any:
    """Return the C function int64(opcode, row, turn, scratch) of the loops of a module; compile it if not cached."""
    return _compiled(GROUPS.index(module)).ctypes


part = Part(
    "the VM", f"{__name__}:part", build, lambda: marker("machine", _dispatcher, *_sources()),
    pieces=[partial(_compiled, group) for group in range(len(GROUPS))],
)  # fmt: skip
