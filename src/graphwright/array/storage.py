"""Storage: one block of memory with its owner and a count of writes.

Invariant: every array refers to a Storage, never to another array; a Storage outlives all its views.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from graphwright.array.device import Device
from graphwright.errors import ComputeError


class StorageClosed(ComputeError):
    """The memory of a closed block was accessed."""


class Changes:
    """A process-wide count of events that can make a plan stale; it only increases.

    The events: a variable gets a new array or is frozen, a program is edited, a watched block of memory is written.
    While the count is unchanged, earlier checks still hold, so a training loop compares one number, not every variable.

    Attributes:
        count: changes so far.
        address: where native code reads the count.
    """

    __slots__ = ("_cell", "address", "count")

    def __init__(self) -> None:
        self.count, self._cell = 0, array("q", [0])
        self.address = self._cell.buffer_info()[0]

    def rise(self) -> None:
        """Increment the count; executables that compare it then check whether their plan is stale."""
        self.count += 1
        self._cell[0] = self.count


changes = Changes()


class WriteCount:
    """A counter of the runs of a plan; it is added to the version of every block that the plan writes.

    Attributes:
        address: where native code increments it.
        retired: True once the plan's memory is freed and the count is final.
    """

    __slots__ = ("_cell", "address", "retired")

    def __init__(self) -> None:
        self._cell, self.retired = array("q", [0]), False
        self.address = self._cell.buffer_info()[0]

    @property
    def count(self) -> int:
        """Number of runs of the plan so far."""
        return self._cell[0]

    def rise(self) -> None:
        """Increment the count of runs by one."""
        self._cell[0] += 1

    def retire(self) -> None:
        """Mark the count as final: the plan runs no more."""
        self.retired = True


class Storage:
    """A block of bytes: owned, borrowed from a caller, or mapped from a file.

    Attributes:
        nbytes: length in bytes.
        device: where the memory is.
        kind: `owned`: freed with the last array; `borrowed`: the memory of another object, which is kept alive;
            `mapped`: the bytes of a file, never written.
        readonly: True if writes are refused (a mapped file, a borrowed read-only buffer).
        version: increases with every write, so that values computed from the block can be cached.
        shared: True if variables copy the memory before they write, because a fork or an undo entry reads it too.
        watched: True if a write must increment `changes`, because a plan relies on the content.
        views: typed flat views that a backend made of the block, by DType.
        closed: True once the memory was freed.
    """

    __slots__ = (
        "__weakref__", "_check", "_counts", "_memory", "_open", "_version", "closed", "device", "kind", "nbytes",
        "readonly", "shared", "views", "watched",
    )  # fmt: skip

    def __init__(
        self, memory: Any, nbytes: int, device: Device, *, readonly: bool = False, kind: str = "borrowed"
    ) -> None:
        self._memory, self._open, self._check = memory, None, None
        self.nbytes, self.device, self.readonly, self.kind = nbytes, device, readonly, kind
        self._version, self.closed, self.watched, self.shared = 0, False, False, False
        self._counts: tuple[WriteCount, ...] = ()
        self.views: dict[Any, Any] = {}

    @property
    def version(self) -> int:
        """Number of writes, by arrays and by plans."""
        return self._version + sum(c.count for c in self._counts) if self._counts else self._version

    @property
    def own_writes(self) -> int:
        """Number of writes by arrays, without the runs of plans; it also changes when another plan writes the block."""
        return self._version

    @version.setter
    def version(self, value: int) -> None:
        self._version += value - self.version
        if self.watched:
            changes.rise()

    def written(self) -> None:
        """Record a write: increment `version`, and also `changes` if the block is watched."""
        self._version += 1
        if self.watched:
            changes.rise()

    def counted_by(self, count: WriteCount) -> None:
        """From now on, add the runs in `count` to `version`. A plan calls this for each block that it writes."""
        if count not in self._counts:
            kept = tuple(c for c in self._counts if not c.retired)
            self._version += sum(c.count for c in self._counts if c.retired) - count.count
            self._counts = (*kept, count)
            if self.watched:
                changes.rise()

    @classmethod
    def mapped(
        cls, touch: Callable[[], memoryview], nbytes: int, device: Device, check: Callable[[], None] | None = None
    ) -> Storage:
        """Return a read-only file-backed block; `touch()` maps the bytes at first access and returns them, or raises.

        `check()` raises if the file has changed since it was opened.
        """
        storage = cls(None, nbytes, device, readonly=True, kind="mapped")
        storage._open, storage._check = touch, check
        return storage

    def check(self) -> None:
        """Raise if the mapped bytes are no longer those of the file that was opened."""
        if self.memory is not None and self._check is not None:
            self._check()

    @property
    def memory(self) -> Any:
        """The memory: a buffer or a backend's object; a file is mapped at first access. Raises: StorageClosed."""
        if self.closed:
            got = f"{self.nbytes} bytes on {self.device}"
            raise StorageClosed("close() has freed this memory", got=got, fix="copy() an array before close()")
        if self._open is not None:
            self._memory, self._open = self._open(), None
        return self._memory

    @property
    def touched(self) -> bool:
        """False for a file-backed block whose bytes have not been mapped yet (by a first access); else True."""
        return self._open is None

    def close(self) -> None:
        """Free the memory now, even if arrays still use it; idempotent. Borrowed memory stays with its owner."""
        self._memory = self._open = None
        self.views, self.closed = {}, True


class Writers:
    """The plans that write any of some watched blocks; `runs` says if one of them ran.

    While neither `runs` nor `changes.count` moves, no block was written, which is far quicker to see than by versions.
    """

    __slots__ = ("_counts",)

    def __init__(self, blocks: Iterable[Storage] = ()) -> None:
        self._counts = tuple({c for block in blocks for c in block._counts if not c.retired})

    def __bool__(self) -> bool:
        return bool(self._counts)

    @property
    def runs(self) -> int:
        """Number of runs of all these plans so far."""
        return sum([c.count for c in self._counts])


_POISON = 0x7FF8  # repeated, NaN in float16, bfloat16, float32 and float64

poisoning: ContextVar[bool] = ContextVar("graphwright_poisoning", default=False)
"""True if `empty` fills memory with NaN."""


@contextmanager
def poison() -> Iterator[None]:
    """While active, fill the arrays that `empty` returns with NaN (integers: bytes 7FF8 repeated; bools: True)."""
    token = poisoning.set(True)
    try:
        yield
    finally:
        poisoning.reset(token)


def fill(memory: Any) -> None:
    """Fill a byte buffer with the bit pattern 7FF8, which is NaN in floats of 16 bits and more."""
    host = np.asarray(memory)
    host[0::2], host[1::2] = _POISON & 0xFF, _POISON >> 8


def poisoned(shape: tuple[int, ...], kind: np.dtype) -> np.ndarray:
    """Return an array filled as by `poison`. For a float that numpy lacks, `kind` is the uint type of its bits."""
    if kind.itemsize == 1:
        return np.full(shape, 1 if kind.kind == "b" else _POISON >> 8, kind)  # 7F is NaN in both 8-bit floats
    made = np.empty(shape, kind)
    fill(made.reshape(-1).view(np.uint8))
    return made
