"""Arrays that undo needs and the weights do not have: in memory up to `program.history_bytes`, beyond it in a file.

Invariant: nothing is dropped. What was moved out reads the same bytes, checked against their digest; what the disk does
not take stays in memory, and the log says so. The file has no name and goes with the program.
"""

from __future__ import annotations

import logging
import mmap
import tempfile
import weakref
from dataclasses import replace
from typing import IO, TYPE_CHECKING

import numpy as np

from graphwright.array import CPU, NDArray, Storage
from graphwright.program.editing.edits import holding, payloads
from graphwright.program.editing.journal import Undo
from graphwright.program.errors import NotUndoable
from graphwright.program.weights import Promise, digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from graphwright.program.program import Program

_log = logging.getLogger("graphwright.program")
ALIGNMENT = 64


class Spill:
    """Keeps what the undo of a program's entries holds in memory below a limit.

    Attributes:
        moved: bytes in the file.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._counted = self._since = 0  # bytes at the last count, and of entries that came since
        self._file: IO[bytes] | None = None
        self._map: mmap.mmap | None = None
        self.moved = 0

    def entered(self, undo: Undo | None) -> None:
        """An entry was made, undone or redone, so that undo alone may hold its arrays now: count, and make room."""
        if undo is not None:
            self._since += sum({id(a): a.nbytes for a in _arrays(undo) if not a.storage.readonly}.values())
        if self._counted + self._since > self._program.history_bytes:
            self._make_room()

    def _make_room(self) -> None:
        p = self._program
        live = {id(v.data.storage) for v in p.weights.values() if isinstance(v.data, NDArray)}
        held = {
            id(array): array
            for entry in p.journal
            if entry.undo is not None
            for array in _arrays(entry.undo)
            if array.size and not array.storage.readonly and id(array.storage) not in live
        }
        total = sum(array.nbytes for array in held.values())
        moved: dict[int, NDArray] = {}
        if total > p.history_bytes:
            try:
                for number, array in held.items():  # the oldest first: the last edits are undone most
                    if total <= p.history_bytes // 2:
                        break
                    moved[number] = self._move(array)
                    total -= array.nbytes
            except OSError as error:
                _log.warning("undo keeps more than history_bytes in memory: no temporary file takes it: %s", error)
        if moved:
            self._replace(moved)
        self._counted, self._since = total, 0

    def _move(self, array: NDArray) -> NDArray:
        """Write an array to the file; returns one that maps it at its first use."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="graphwright-undo-")  # noqa: SIM115  # open as long as this is
            weakref.finalize(self, self._file.close)
        start = -(-self.moved // ALIGNMENT) * ALIGNMENT
        content = np.ascontiguousarray(array.to_numpy(bits=True)).reshape(-1)
        digest = digest_of(array.spec, content)
        known = self._program.weights.promise_of(array)
        reference = None if known is None else known.reference
        self._file.seek(start)
        self._file.write(content.data)
        self._file.flush()
        self.moved = start + content.nbytes
        twin = NDArray(
            Storage.mapped(self._reader(array, start, digest), content.nbytes, CPU), array.dtype, array.shape
        )
        self._program.weights.promises[twin] = Promise(digest, reference)
        return twin

    def _reader(self, array: NDArray, start: int, digest: str) -> Callable[[], memoryview]:
        spec, size = array.spec, array.nbytes

        def read() -> memoryview:
            assert self._file is not None
            if self._map is None or len(self._map) < start + size:
                self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            content = memoryview(self._map)[start : start + size]
            if digest_of(spec, content) != digest:
                raise NotUndoable("the temporary file that holds what undo needs was damaged", where=self._program.name)
            return content

        return read

    def _replace(self, moved: dict[int, NDArray]) -> None:
        """Let the entries hold other arrays for those moved out."""
        h, journal = self._program.history, self._program.journal
        for entry in journal:
            if entry.undo is not None and any(id(array) in moved for array in _arrays(entry.undo)):
                forward, inverse = (
                    tuple(holding(edit, moved) for edit in side) for side in (entry.undo.forward, entry.undo.inverse)
                )
                journal.put(replace(entry, undo=replace(entry.undo, forward=forward, inverse=inverse)))
        h.undoable, h.redoable = ([journal[e.seq] for e in stack] for stack in (h.undoable, h.redoable))


def _arrays(undo: Undo) -> Iterator[NDArray]:
    return (array for edit in (*undo.inverse, *undo.forward) for array in payloads(edit))
