"""A run of ops as code for the machine: encoded once, then one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from graphwright.array.vm import context as at
from graphwright.array.vm.call import Call, patient, quick
from graphwright.array.vm.code import BYTES, CELLS, LOCAL, SCRATCH, Code
from graphwright.array.vm.encode import Row
from graphwright.array.vm.scalars import pack_runs
from graphwright.array.vm.share import estimate, shared, units
from graphwright.array.vm.team import get_num_threads, team

_PATIENT = 50_000  # ns from which on a call lets go of the GIL


class BadIndex(IndexError):
    """A target lies outside the classes; `op` is its place among the ops of the segment."""

    def __init__(self, op: int) -> None:
        super().__init__("an index lies outside the classes it picks from")
        self.op = op


def new_scratch() -> np.ndarray:
    """Memory that code works in."""
    return np.zeros(SCRATCH + 64, np.uint8)


class VmSegment:
    """Code for the addresses it was encoded with; calling it runs all of it and allocates nothing.

    Args:
        ops: the rows of each op, in order.
        scratch: of `new_scratch()`, for segments that never run at the same time; its own by default.
        lead: rows before those of the ops.

    Attributes:
        run: the call itself: returns None, or something else if an index was out of range; `failure` then says which.
    """

    def __init__(
        self, ops: Sequence[Sequence[Row]], scratch: np.ndarray | None = None, lead: Sequence[Row] = ()
    ) -> None:
        self._scratch = new_scratch() if scratch is None else scratch
        place = -(-self._scratch.ctypes.data // 64) * 64
        whole = [(i, unit) for i, op in enumerate(ops) for unit in units(op)]
        cut = [(i, shared(unit)) for i, unit in pack_runs(whole, place)]
        self._owner = [-1] * len(lead) + [i for i, rows in cut for _ in rows]
        self._code = np.array([*lead, *(row for _, rows in cut for row in rows)], np.int64).reshape(-1, CELLS)
        context = self._context = np.zeros(at.CELLS, np.int64)
        context[at.CODE] = self._code.ctypes.data
        context[at.END] = self._code.ctypes.data + self._code.nbytes
        context[at.SCRATCH] = place
        memory = (self._code, self._scratch)
        shares = any(rows[0][0] == Code.SHARED for _, rows in cut)
        long = sum(map(estimate, ops)) > _PATIENT
        self._alone: Call = patient(context, memory) if long else quick(context, memory)
        self.run: Call = self._shared if shares else self._alone

    def _shared(self) -> object:
        threads = get_num_threads()
        self._context[at.THREADS], self._context[at.TEAM] = threads, team(threads)
        return self._alone()

    def source_of(self, lead: int) -> Callable[[int], None]:
        """What sets the address that a leading row copies from."""
        cells = self._code.reshape(-1)
        return partial(cells.__setitem__, CELLS * lead + 6)

    def failure(self) -> BadIndex:
        """What to raise after a run that did not return None."""
        return BadIndex(self._owner[(int(self._context[at.WHERE]) - self._code.ctypes.data) // BYTES])

    def __call__(self) -> None:
        """Run. Raises: BadIndex; what was computed before it stays computed."""
        if self.run() is not None:
            raise self.failure()


assert SCRATCH <= LOCAL
