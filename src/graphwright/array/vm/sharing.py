"""The memory that the VM's interpreter is called with, in words of 8 bytes; sharing long instructions among threads.

A long instruction is split into tickets. A ticket is a share of the instruction's elements that one thread claims and
computes. The thread that offers tickets can do all of them itself, so a helper thread that gets no core costs nothing:
the offering thread waits only for tickets that a helper has begun. All threads look for a while, then sleep, so that a
helper whose core another process has taken can go to the core of the thread that waits for it. After such a wait the
next instructions, unless they are much longer than it, are not shared, so that waits take a bounded part of the time.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from graphwright.array.vm import vector as vec
from graphwright.array.vm.code import BYTES
from graphwright.array.vm.elementwise import cell
from graphwright.array.vm.math import native
from graphwright.array.vm.vector import I8, I64, define, effect, i64, pointer, void

# a context: the arguments of a call
HELPER = 0  # 1-based number of the helper thread that this call serves; 0 to run code
CODE = 1  # address of the first instruction
END = 2  # end of the last
SCRATCH = 3
FINE = 4  # address of the object to return after success
COUNTED = 5  # 1 if references to that object are counted
FAILED = 6  # address of the object to return if an index is out of range
WHERE = 7  # address of that instruction, or 0
TEAM = 8  # address of the team
THREADS = 9  # including this one
GUARD = 10  # address of a number that must equal SEEN for the code to run; 0 to run always
SEEN = 11
RUNS = 12  # address of a counter to increment, or 0
ASK = 13  # address of a C function called if GUARD or an instruction fails, or 0
OTHERWISE = 14  # its argument
TABLE = 15  # address of the machine's table
CELLS = 16

# a team: the helper threads and the tickets that are offered now
WORD = 0  # tickets·2³² + the next ticket, in one word, so that both change atomically
ROWS = 1  # address of the first ticket's first row
SIZE = 2  # bytes per ticket
DONE = 3  # tickets done
WRONG = 4  # address of an instruction that failed, or 0
ASLEEP = 5  # helpers that wait on the semaphore
OWNER = 6  # 1 while a thread offers tickets
ALLOWED = 7  # number of helpers that may take tickets
SEM_WAIT, SEM_POST, USLEEP = 8, 9, 10  # addresses of functions
ALONE = 11  # nanoseconds of coming instructions that are not offered
SEMAPHORE = 12  # 4 words
TEAM_CELLS = 16

PAYLOAD = 32
"""Offset of the data in a CPython bytes object; the machine's argument is such an object or has its layout."""

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


LOOKS = 20_000  # some 20 us
_NAP = 20  # us; Linux adds 50
_PATIENCE = 10  # naps; a time slice of another process takes twice as long or more
_ALONE = 400_000  # ns for each nap
_MOST_ALONE = 256 * 100_000
_LOW = 0xFFFFFFFF


@native
def _open(team: Any) -> Any:
    word = read(team + 8 * WORD)
    return word & _LOW < word >> 32


@native
def take(team: Any) -> Any:
    """Claim the next ticket (a share of one long instruction); return its index, or -1 if none is left."""
    if _open(team):
        word = fetch_add(team + 8 * WORD, 1)
        if word & _LOW < word >> 32:
            return word & _LOW
    return -1


@native
def share(team: Any, row: Any, threads: Any) -> Any:
    """Offer the tickets after the SHARED instruction at `row` to helper threads; return False if none can help."""
    if team == 0 or threads < 2 or exchange(team + 8 * OWNER, 1):
        return False
    alone = vec.load_i64(team + 8 * ALONE) - cell(row, 1) * cell(row, 3)
    if alone > 0:
        vec.store_i64(team + 8 * ALONE, alone)
        write(team + 8 * OWNER, 0)
        return False
    vec.store_i64(team + 8 * ALONE, 0)
    vec.store_i64(team + 8 * ROWS, row + BYTES)
    vec.store_i64(team + 8 * SIZE, BYTES * cell(row, 2))
    vec.store_i64(team + 8 * WRONG, 0)
    write(team + 8 * ALLOWED, threads - 1)
    write(team + 8 * DONE, 0)
    write(team + 8 * WORD, cell(row, 1) << 32)
    for _ in range(exchange(team + 8 * ASLEEP, 0)):
        called(vec.load_i64(team + 8 * SEM_POST), team + 8 * SEMAPHORE)
    return True


@native
def nap(team: Any, naps: Any, expected: Any) -> Any:
    """Sleep for a moment in a wait for a task of `expected` nanoseconds; return how often the wait has slept.

    After a wait much longer than that, instructions that together take some five times as long are not offered next.
    """
    called(vec.load_i64(team + 8 * USLEEP), _NAP)
    if naps >= _PATIENCE + expected // 20_000:
        vec.store_i64(team + 8 * ALONE, min(_ALONE * naps, _MOST_ALONE))
    return naps + 1


@native
def finish(team: Any, row: Any) -> Any:
    """Wait for the tickets that helper threads have begun; return the address of an instruction that failed, or 0."""
    looks, naps = 0, 0
    while read(team + 8 * DONE) < cell(row, 1):
        if looks < LOOKS:
            looks += 1
        else:
            naps = nap(team, naps, cell(row, 3))
    write(team + 8 * WORD, 0)
    wrong = vec.load_i64(team + 8 * WRONG)
    write(team + 8 * OWNER, 0)
    return wrong


@native
def wait(team: Any, helper: Any) -> None:
    """Block helper thread number `helper` until there may be a ticket for it: spin, then wait on the semaphore."""
    for _ in range(LOOKS):
        if _open(team) and helper <= read(team + 8 * ALLOWED):
            return
    fetch_add(team + 8 * ASLEEP, 1)
    if not (_open(team) and helper <= read(team + 8 * ALLOWED)):
        called(vec.load_i64(team + 8 * SEM_WAIT), team + 8 * SEMAPHORE)
