"""Sharing rows among threads: each free thread takes the next ticket. Atomic words, and calls of C functions.

The thread that shares can do all tickets itself, so a helper that gets no core costs nothing: the thread waits only for
tickets that a helper has begun. Helpers look for work for a while, then sleep on a semaphore.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from graphwright.array.vm import context as at
from graphwright.array.vm import vector as vec
from graphwright.array.vm.code import BYTES
from graphwright.array.vm.elementwise import cell
from graphwright.array.vm.math import native
from graphwright.array.vm.vector import I8, I64, define, effect, pointer

i64, void = types.int64, types.void
_FUNCTION = ir.FunctionType(vec.I32, [I8.as_pointer()])
_QUESTION = ir.FunctionType(I8.as_pointer(), [I8.as_pointer()])


def _called(builder: Any, function: Any, argument: Any) -> None:
    builder.call(builder.inttoptr(function, _FUNCTION.as_pointer()), [pointer(builder, argument, I8)])


def _asked(builder: Any, function: Any, argument: Any) -> Any:
    answer = builder.call(builder.inttoptr(function, _QUESTION.as_pointer()), [pointer(builder, argument, I8)])
    return builder.ptrtoint(answer, I64)


read = define("read", i64, (i64,), lambda b, p: b.load_atomic(pointer(b, p, I64), "seq_cst", 8))
write = define("write", void, (i64, i64), effect(lambda b, p, x: b.store_atomic(x, pointer(b, p, I64), "seq_cst", 8)))
fetch_add = define("fetch_add", i64, (i64, i64), lambda b, p, x: b.atomic_rmw("add", pointer(b, p, I64), x, "seq_cst"))
"""Add atomically; returns the previous value."""
exchange = define("exchange", i64, (i64, i64), lambda b, p, x: b.atomic_rmw("xchg", pointer(b, p, I64), x, "seq_cst"))
called = define("called", void, (i64, i64), effect(_called))
"""Call int(void *) at an address."""
asked = define("asked", i64, (i64, i64), _asked)
"""Call void *(void *) at an address."""


_LOOKS = 20_000  # some 20 us
_LOW = 0xFFFFFFFF


@native
def _open(team: Any) -> Any:
    word = read(team + 8 * at.WORD)
    return word & _LOW < word >> 32


@native
def take(team: Any) -> Any:
    """The next ticket, or -1."""
    if _open(team):
        word = fetch_add(team + 8 * at.WORD, 1)
        if word & _LOW < word >> 32:
            return word & _LOW
    return -1


@native
def share(team: Any, row: Any, threads: Any) -> Any:
    """Offer the tickets after a row to the helpers; returns False if another thread is sharing."""
    if team == 0 or threads < 2 or exchange(team + 8 * at.OWNER, 1):
        return False
    vec.store_i64(team + 8 * at.ROWS, row + BYTES)
    vec.store_i64(team + 8 * at.SIZE, BYTES * cell(row, 2))
    vec.store_i64(team + 8 * at.WRONG, 0)
    write(team + 8 * at.ALLOWED, threads - 1)
    write(team + 8 * at.DONE, 0)
    write(team + 8 * at.WORD, cell(row, 1) << 32)
    for _ in range(exchange(team + 8 * at.ASLEEP, 0)):
        called(vec.load_i64(team + 8 * at.SEM_POST), team + 8 * at.SEMAPHORE)
    return True


@native
def finish(team: Any, tickets: Any) -> Any:
    """Wait for the tickets that helpers have begun; returns the address of a row that failed, or 0."""
    looks = 0
    while read(team + 8 * at.DONE) < tickets:
        looks += 1
        if looks > _LOOKS:
            called(vec.load_i64(team + 8 * at.YIELD), 0)
    write(team + 8 * at.WORD, 0)
    wrong = vec.load_i64(team + 8 * at.WRONG)
    write(team + 8 * at.OWNER, 0)
    return wrong


@native
def wait(team: Any, helper: Any) -> None:
    """Wait until there may be work."""
    for _ in range(_LOOKS):
        if _open(team) and helper <= read(team + 8 * at.ALLOWED):
            return
    fetch_add(team + 8 * at.ASLEEP, 1)
    if not (_open(team) and helper <= read(team + 8 * at.ALLOWED)):
        called(vec.load_i64(team + 8 * at.SEM_WAIT), team + 8 * at.SEMAPHORE)
