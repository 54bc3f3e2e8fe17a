"""Several threads on one row of code: its parts are handed out by a counter, to whoever asks.

The thread that runs the code offers a row and takes parts itself until none is left; helpers take what they can. So a
helper that the system does not run costs nothing but its help, and no thread waits for more than one part.

Shared words, a cache line each: the ticket (number of the offer, its parts, parts taken), parts done, the row, the
parts a helper may still see before it leaves. Invariant: a part was taken by whoever raised the count over it, and the
row stays in place until all taken parts are done.
"""

from __future__ import annotations

import os
from threading import Lock, Thread
from typing import Any

import numpy as np

from graphwright.array.vm.attend import attend_head
from graphwright.array.vm.code import Code
from graphwright.array.vm.gemm import SCRATCH
from graphwright.array.vm.gemv import bfloat16_rows, float32_rows, int8_rows, panels
from graphwright.array.vm.math import native
from graphwright.array.vm.narrow import fetch_add, give_way, pause, read_word, write_word
from graphwright.array.vm.vector import load_i64

_DONE, _ROW, _LEAVE, BYTES = 64, 128, 192, 256
_TAKEN = (1 << 20) - 1
_PARTS = 20  # bits of either count in a ticket
_SPINS = 1 << 10  # looks in a loop, some 30 µs
_PATIENCE = 1 << 14  # looks at the ticket without finding a part, most of them after giving way


@native
def part(row: Any, number: Any, scratch: Any) -> None:
    """Run one part of a row."""
    op = load_i64(row)
    if op == Code.ROWS_BF16:
        bfloat16_rows(row, number)
    elif op == Code.ROWS_F32:
        float32_rows(row, number)
    elif op == Code.ROWS_I8:
        int8_rows(row, number)
    elif op == Code.PANELS_BF16 or op == Code.PANELS_I8:
        panels(row, number, scratch, op == Code.PANELS_I8)
    else:
        attend_head(row, number)


@native
def _wait(looks: Any) -> None:
    """A moment; after some of them let others have the core: on a busy machine the one waited for may be among them."""
    if looks < _SPINS:
        pause()
    else:
        give_way()


@native
def _take(team: Any, scratch: Any) -> Any:
    """Run one part of what is offered, if there is one: True if there was."""
    ticket = fetch_add(team, 1)
    number = ticket & _TAKEN
    if number >= (ticket >> _PARTS) & _TAKEN:
        return False
    part(load_i64(team + _ROW), number, scratch)
    fetch_add(team + _DONE, 1)
    return True


@native
def spread(row: Any, team: Any, scratch: Any) -> None:
    """Run all parts of a row (cell 15 says how many), with the team's help; 0 is no team."""
    parts = load_i64(row + 8 * 15)
    if team == 0 or parts == 1:
        for number in range(parts):
            part(row, number, scratch)
        return
    write_word(team + _ROW, row)
    write_word(team + _DONE, 0)
    offer = (read_word(team) >> (2 * _PARTS)) + 1
    write_word(team, ((offer & _TAKEN) << (2 * _PARTS)) | (parts << _PARTS))
    while _take(team, scratch):
        pass
    looks = 0
    while read_word(team + _DONE) < parts:
        looks += 1
        _wait(looks)


@native
def assist(team: Any, scratch: Any) -> None:
    """A helper's time in compiled code: take parts until told to leave, or until there were none for long."""
    looks = 0
    while looks < _PATIENCE and read_word(team + _LEAVE) == 0:
        ticket = read_word(team)
        if ticket & _TAKEN < (ticket >> _PARTS) & _TAKEN and _take(team, scratch):
            looks = 0
        else:
            looks += 1
            _wait(looks)


class Team:
    """Helpers for one caller at a time; they sleep while nobody has entered.

    Args:
        helpers: threads beside the caller's.
        assistant: `assist`, compiled.
    """

    def __init__(self, helpers: int, assistant: Any) -> None:
        self._memory = np.zeros(BYTES // 8 + 8, np.int64)
        address = self._memory.ctypes.data
        self.address = address + -address % 64
        self._leave = self._memory[(self.address - address) // 8 + _LEAVE // 8 :]
        self._assistant, self._entered = assistant, Lock()
        self._state, self._active = Lock(), False
        self._asleep: list[Lock] = []
        self.helpers = helpers
        for _ in range(helpers):
            Thread(target=self._help, name="graphwright helper", daemon=True).start()

    def enter(self) -> int:
        """Wake the helpers: the address of the shared words, or 0 if the team is with another caller."""
        if not self._entered.acquire(blocking=False):
            return 0
        with self._state:
            self._active = True
            self._leave[0] = 0
            asleep, self._asleep = self._asleep, []
        for bed in asleep:
            bed.release()
        return self.address

    def leave(self) -> None:
        """Let the helpers sleep."""
        with self._state:
            self._active = False
            self._leave[0] = 1
        self._entered.release()

    def _help(self) -> None:
        bed = Lock()
        bed.acquire()
        scratch = np.zeros(SCRATCH, np.uint8)
        while True:
            with self._state:
                active = self._active
                if not active:
                    self._asleep.append(bed)
            if not active:
                bed.acquire()
            self._assistant(self.address, scratch.ctypes.data)


_teams: dict[tuple[int, int], Team] = {}


def team_of(threads: int) -> Team | None:
    """The team for so many threads in all; None for one. A forked process gets one of its own."""
    if threads < 2:
        return None
    key = (os.getpid(), threads)
    if key not in _teams:
        from graphwright.array.vm.machine import assistant

        _teams[key] = Team(threads - 1, assistant())
    return _teams[key]
