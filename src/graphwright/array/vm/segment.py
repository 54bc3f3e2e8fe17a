"""A run of ops as code for the machine: encoded once, then one call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphwright.array.cpu import num_threads
from graphwright.array.vm.code import CELLS, SHARED, Code
from graphwright.array.vm.encode import Row
from graphwright.array.vm.gemm import SCRATCH
from graphwright.array.vm.machine import build
from graphwright.array.vm.team import team_of

_WORTH = 16
"""Parts of weights that threads share, from which on waking them pays: some 2 MiB."""


class BadIndex(IndexError):
    """A target lies outside the classes; `op` is its place among the ops of the segment."""

    def __init__(self, op: int) -> None:
        super().__init__("an index lies outside the classes it picks from")
        self.op = op


class VmSegment:
    """Code for the addresses it was encoded with; calling it runs all of it and allocates nothing.

    Args:
        ops: the rows of each op, in order.
    """

    def __init__(self, ops: Sequence[Sequence[Row]]) -> None:
        rows = [row for op in ops for row in op]
        self._owner = [i for i, op in enumerate(ops) for _ in op]
        self._code = np.array(rows, np.int64).reshape(-1, CELLS)
        self._scratch = np.zeros(SCRATCH, np.uint8)
        self._machine = build()
        self._args = (self._code.ctypes.data, len(self._code), self._scratch.ctypes.data)
        weights = SHARED - {Code.ATTEND}  # how long attention takes depends on the length, which is not known here
        self._shared = sum(row[-1] for row in rows if row[0] in weights and row[-1] > 1) >= _WORTH

    def __call__(self) -> None:
        """Run. Raises: BadIndex; what was computed before it stays computed."""
        team = team_of(num_threads()) if self._shared else None
        address = team.enter() if team is not None else 0
        try:
            failed = self._machine(*self._args, address)
        finally:
            if team is not None and address:
                team.leave()
        if failed >= 0:
            raise BadIndex(self._owner[failed])
