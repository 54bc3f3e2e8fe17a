"""A sequence of ops as VM code: encoded once, then run by one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from itertools import compress, count, groupby
from operator import is_not

import numpy as np

from graphwright.array.vm import sharing as at
from graphwright.array.vm.code import BYTES, CELLS, LOCAL, SCRATCH
from graphwright.array.vm.encode.operands import Row
from graphwright.array.vm.encode.share import Cut, cut, pack_runs
from graphwright.array.vm.running.call import Call, get_num_threads, guarded, patient, quick, team

_PATIENT = 50_000  # ns above which a call releases the GIL


class BadIndex(IndexError):
    """An index is out of range; `op` is the index of the op in its segment."""

    def __init__(self, op: int) -> None:
        super().__init__("an index is out of range")
        self.op = op


def new_scratch() -> np.ndarray:
    """Allocate scratch memory for a `VmSegment`."""
    return np.zeros(SCRATCH + 64, np.uint8)


def _blocks(ops: Sequence[Cut], scratch: int) -> list[np.ndarray]:
    """Return the code of each op. Runs of scalar instructions become one instruction, in the code of their first op."""
    blocks = [op.code for op in ops]
    numbered = [(i, op) for i, op in enumerate(ops) if op.parts]
    for scalar, run in groupby(numbered, lambda one: one[1].scalar):
        if scalar:
            single = list(run)
            made: dict[int, list[Row]] = {i: [] for i, _ in single}
            for i, rows in pack_runs([(i, part) for i, op in single for part in op.parts], scratch):
                made[i] += rows
            for i, rows in made.items():
                blocks[i] = np.array(rows, np.int64).reshape(-1, CELLS)
    return blocks


def _shared_ends(ops: Sequence[Cut], others: Sequence[Cut]) -> tuple[int, int]:
    """Return the lengths of the common prefix and suffix, shortened so that no run of packed scalar ops is split."""
    head, tail = _first_other(ops, others), _first_other(ops[::-1], others[::-1])
    tail = min(tail, len(ops) - head, len(others) - head)
    while head and (ops[head - 1].scalar or not ops[head - 1].parts):
        head -= 1
    while tail and (ops[-tail].scalar or not ops[-tail].parts):
        tail -= 1
    return head, tail


def _first_other(ops: Sequence[Cut], others: Sequence[Cut]) -> int:
    differs = map(is_not, ops, others)
    return next(compress(count(), differs), min(len(ops), len(others)))


class VmSegment:
    """The VM code of a sequence of ops for fixed addresses; a call of it runs all ops and allocates nothing.

    Args:
        ops: the code of each op in order, as rows or as a `Cut`.
        scratch: from `new_scratch()`, shared by segments that never run at the same time; None allocates one.
        before: a segment with the same scratch; code of identical ops at the start and the end is reused from it.

    Attributes:
        run: a function that runs the code and returns None, or another object if an index was out of range.
    """

    def __init__(
        self, ops: Sequence[Sequence[Row] | Cut], scratch: np.ndarray | None = None, before: VmSegment | None = None
    ) -> None:
        self._scratch = new_scratch() if scratch is None else scratch
        self._base = -(-self._scratch.ctypes.data // 64) * 64
        done = self._ops = [op if isinstance(op, Cut) else cut(op) for op in ops]
        head, tail = _shared_ends(done, before._ops) if before is not None and before._base == self._base else (0, 0)
        fresh = done[head : len(done) - tail]
        blocks, owner = _blocks(fresh, self._base), np.arange(head, len(done) - tail)
        owner = np.repeat(owner, list(map(len, blocks)))
        self._shares, self._long = any(op.shares for op in done), sum([op.ns for op in done]) > _PATIENT
        if before is not None and (head or tail):
            top, bottom = np.searchsorted(before._owner, (head, len(before._ops) - tail))
            blocks = [before._code[:top], *blocks, before._code[bottom:]]
            shift = len(done) - len(before._ops)
            owner = np.concatenate([before._owner[:top], owner, before._owner[bottom:] + shift])
        self._hold(blocks, owner, 0)

    def _hold(self, blocks: Sequence[np.ndarray], owner: np.ndarray, runs: int) -> None:
        """Store the code and the op index of each row and create the call, which counts at address `runs`."""
        self._code, self._owner = np.concatenate([np.zeros((0, CELLS), np.int64), *blocks]), owner
        context = self._context = np.zeros(at.CELLS, np.int64)
        context[at.CODE] = self._code.ctypes.data
        context[at.END] = self._code.ctypes.data + self._code.nbytes
        context[at.SCRATCH], context[at.RUNS] = self._base, runs
        memory = (self._code, self._scratch)
        self._alone: Call = (not self._long and quick(context, memory)) or patient(context, memory)
        self.run: Call = self._shared if self._shares else self._alone

    def after(self, lead: Sequence[Row], runs: int) -> VmSegment:
        """Return a copy that runs the instructions `lead` first; each call increments a counter at address `runs`."""
        other, first = copy(self), np.array(lead, np.int64).reshape(-1, CELLS)
        other._hold([first, self._code], np.concatenate([np.full(len(lead), -1), self._owner]), runs)
        return other

    def _shared(self) -> object:
        threads = get_num_threads()
        self._context[at.THREADS], self._context[at.TEAM] = threads, team(threads)
        return self._alone()

    def source_of(self, lead: int) -> Callable[[int], None]:
        """Return a setter of the source address of a COPY instruction: number `lead` of those passed to `after`."""
        cells = self._code.reshape(-1)
        return partial(cells.__setitem__, CELLS * lead + 6)

    @property
    def short(self) -> bool:
        """True if the call holds the GIL and needs no helper threads."""
        return not self._long and self.run is self._alone

    def failure(self, where: int | None = None) -> BadIndex:
        """Return the exception to raise after a failed run; `where`, if given, is the address from `Guarded.failed`."""
        row = int(self._context[at.WHERE]) if where is None else where
        return BadIndex(int(self._owner[(row - self._code.ctypes.data) // BYTES]))

    def __call__(self) -> None:
        """Run the code. Raises: BadIndex; results computed before the failed instruction remain."""
        if self.run() is not None:
            raise self.failure()


class Guarded:
    """A call of a VM segment that remains valid when the segment is replaced; native code checks if it is stale."""

    def __init__(self) -> None:
        self._context = np.zeros(at.CELLS, np.int64)
        self._segments: list[VmSegment] = []

    def call(self, otherwise: Callable[[], None]) -> Call:
        """Return the call, which runs the segment and returns None, or returns the result of `otherwise`.

        It calls `otherwise` if there is no segment, if the guard changed, or after a failed instruction (see `failed`).
        """
        return guarded(self._context, (self._context, self._segments), otherwise)

    def aim(self, segment: VmSegment, guard: int, seen: int, runs: int) -> None:
        """Make the call run a short `segment` while the word at address `guard` is `seen`; count runs at `runs`."""
        cells = slice(at.CODE, at.SCRATCH + 1)
        self._segments[:] = [segment]
        self._context[cells] = segment._context[cells]
        self._context[at.RUNS], self._context[at.GUARD], self._context[at.SEEN] = runs, guard, seen

    def rest(self) -> None:
        """Make the call run `otherwise` until the next `aim`."""
        self._context[at.SEEN] = -1

    def failed(self) -> int:
        """Return the address of the instruction that failed in the last call, or 0; reset it to 0."""
        where, self._context[at.WHERE] = int(self._context[at.WHERE]), 0
        return where


assert SCRATCH <= LOCAL
