"""A run of ops as code for the machine: encoded once, then one call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphwright.array.vm import context as at
from graphwright.array.vm.call import Call, patient, quick
from graphwright.array.vm.code import BYTES, CELLS, LOCAL, SCRATCH
from graphwright.array.vm.encode import Row
from graphwright.array.vm.machine import build
from graphwright.array.vm.share import estimate, shared
from graphwright.array.vm.team import get_num_threads, parallel

_PATIENT = 50_000  # ns from which on a call lets go of the GIL


class BadIndex(IndexError):
    """A target lies outside the classes; `op` is its place among the ops of the segment."""

    def __init__(self, op: int) -> None:
        super().__init__("an index lies outside the classes it picks from")
        self.op = op


class VmSegment:
    """Code for the addresses it was encoded with; calling it runs all of it and allocates nothing.

    Args:
        ops: the rows of each op, in order.

    Attributes:
        run: the call itself: returns None, or something else if an index was out of range; `failure` then says which.
    """

    def __init__(self, ops: Sequence[Sequence[Row]]) -> None:
        split = [shared(op) for op in ops]
        self._owner = [i for i, op in enumerate(split) for _ in op]
        self._code = np.array([row for op in split for row in op], np.int64).reshape(-1, CELLS)
        self._share = any(len(a) != len(b) for a, b in zip(ops, split, strict=True)) and parallel() != 0
        threads = max(get_num_threads(), 1) if self._share else 1
        self._scratch = np.zeros(SCRATCH * (threads + 1), np.uint8)
        self._cells = np.zeros(3 * at.CELLS, np.int64)
        context, team, head = np.split(self._cells, 3)
        first = -(-self._scratch.ctypes.data // 64) * 64
        context[at.CODE] = self._code.ctypes.data
        context[at.END] = self._code.ctypes.data + self._code.nbytes
        context[at.SCRATCH] = team[at.SCRATCH] = first
        team[at.SHARED], team[at.FAILED] = 1, 1
        head[at.PAYLOAD // 8] = team.ctypes.data
        context[at.TEAM], context[at.MACHINE] = head.ctypes.data, build().address
        context[at.PARALLEL], context[at.THREADS] = parallel() if self._share else 0, 1
        self._most, self._context = threads, context
        long = sum(map(estimate, ops)) > _PATIENT
        memory = (self._code, self._scratch, self._cells)
        self._alone: Call = patient(context, memory) if long else quick(context, memory)
        self.run: Call = self._shared if self._share else self._alone

    def _shared(self) -> object:
        self._context[at.THREADS] = min(get_num_threads(), self._most)
        return self._alone()

    def failure(self) -> BadIndex:
        """What to raise after a run that did not return None."""
        return BadIndex(self._owner[(int(self._context[at.WHERE]) - self._code.ctypes.data) // BYTES])

    def __call__(self) -> None:
        """Run. Raises: BadIndex; what was computed before it stays computed."""
        if self.run() is not None:
            raise self.failure()


assert SCRATCH <= LOCAL
