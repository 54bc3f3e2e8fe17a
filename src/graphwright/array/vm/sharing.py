"""Threads that run the tickets of one stretch of rows: whoever is free takes the next.

The thread that shares can do all tickets itself, so a helper that gets no core costs nothing; it waits only for
tickets that a helper has begun. Helpers look for work a while, then sleep.
"""

from __future__ import annotations

from typing import Any

from graphwright.array.vm import context as at
from graphwright.array.vm.code import BYTES
from graphwright.array.vm.elementwise import cell
from graphwright.array.vm.math import native
from graphwright.array.vm.sync import called, exchange, fetch_add, read, write
from graphwright.array.vm.vector import load_i64, store_i64

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
    """Offer the tickets behind a row; False if another thread has its rows shared now."""
    if team == 0 or threads < 2 or exchange(team + 8 * at.OWNER, 1):
        return False
    store_i64(team + 8 * at.ROWS, row + BYTES)
    store_i64(team + 8 * at.SIZE, BYTES * cell(row, 2))
    store_i64(team + 8 * at.WRONG, 0)
    write(team + 8 * at.ALLOWED, threads - 1)
    write(team + 8 * at.DONE, 0)
    write(team + 8 * at.WORD, cell(row, 1) << 32)
    for _ in range(exchange(team + 8 * at.ASLEEP, 0)):
        called(load_i64(team + 8 * at.SEM_POST), team + 8 * at.SEMAPHORE)
    return True


@native
def settle(team: Any, tickets: Any) -> Any:
    """Wait for tickets that helpers have begun; the row that failed, or 0."""
    looks = 0
    while read(team + 8 * at.DONE) < tickets:
        looks += 1
        if looks > _LOOKS:
            called(load_i64(team + 8 * at.YIELD), 0)
    write(team + 8 * at.WORD, 0)
    wrong = load_i64(team + 8 * at.WRONG)
    write(team + 8 * at.OWNER, 0)
    return wrong


@native
def wait(team: Any, helper: Any) -> None:
    """Return when there may be work."""
    for _ in range(_LOOKS):
        if _open(team) and helper <= read(team + 8 * at.ALLOWED):
            return
    fetch_add(team + 8 * at.ASLEEP, 1)
    if not (_open(team) and helper <= read(team + 8 * at.ALLOWED)):
        called(load_i64(team + 8 * at.SEM_WAIT), team + 8 * at.SEMAPHORE)
