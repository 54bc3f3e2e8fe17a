"""Storage: one block of memory, who owns it, and how often it was written.

Invariant: every array refers to a Storage, never to another array; a Storage outlives all its views.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from graphwright.array.changes import changes
from graphwright.array.device import Device
from graphwright.errors import ComputeError


class StorageClosed(ComputeError):
    """The memory of a closed block was asked for."""


class WriteCount:
    """How often a plan has run: one number to raise instead of the version of every block that it writes.

    Attributes:
        address: where native code raises it.
        retired: True once the plan's memory is gone, so that the count stays.
    """

    __slots__ = ("_cell", "address", "retired")

    def __init__(self) -> None:
        self._cell, self.retired = array("q", [0]), False
        self.address = self._cell.buffer_info()[0]

    @property
    def count(self) -> int:
        """Runs so far."""
        return self._cell[0]

    def rise(self) -> None:
        """Count a run."""
        self._cell[0] += 1

    def retire(self) -> None:
        """Nobody will count on."""
        self.retired = True


class Storage:
    """A block of bytes: owned, borrowed from a caller, or mapped from a file.

    Attributes:
        nbytes: length in bytes.
        device: where it lies.
        kind: `owned`: given back when the last array goes; `borrowed`: the owner is kept alive, and sees the writes;
            `mapped`: the bytes of a file, never written.
        readonly: writes are refused (a mapped file, a borrowed read-only buffer).
        version: rises with every write; caches of what was computed from the block compare it.
        watched: a write raises `changes`: a plan relies on what the block holds.
        views: typed flat views that a backend made of the block, by DType; the backend's own cache.
        closed: True once the memory was let go.
    """

    __slots__ = (
        "__weakref__",
        "_check",
        "_counts",
        "_memory",
        "_open",
        "_version",
        "closed",
        "device",
        "kind",
        "nbytes",
        "readonly",
        "views",
        "watched",
    )

    def __init__(
        self, memory: Any, nbytes: int, device: Device, *, readonly: bool = False, kind: str = "borrowed"
    ) -> None:
        self._memory, self._open, self._check = memory, None, None
        self.nbytes, self.device, self.readonly, self.kind = nbytes, device, readonly, kind
        self._version, self.closed, self.watched = 0, False, False
        self._counts: tuple[WriteCount, ...] = ()
        self.views: dict[Any, Any] = {}

    @property
    def version(self) -> int:
        """How often the block was written, by hand and by plans."""
        return self._version + sum(c.count for c in self._counts) if self._counts else self._version

    @version.setter
    def version(self, value: int) -> None:
        self._version += value - self.version
        if self.watched:
            changes.rise()

    def written(self) -> None:
        """Count a write."""
        self._version += 1
        if self.watched:
            changes.rise()

    def counted_by(self, count: WriteCount) -> None:
        """From now on a rise of `count` is a write."""
        if count not in self._counts:
            kept = tuple(c for c in self._counts if not c.retired)
            self._version += sum(c.count for c in self._counts if c.retired) - count.count
            self._counts = (*kept, count)
            if self.watched:
                changes.rise()

    @property
    def counted(self) -> bool:
        """True if plans write the block."""
        return bool(self._counts)

    @classmethod
    def mapped(
        cls, touch: Callable[[], memoryview], nbytes: int, device: Device, check: Callable[[], None] | None = None
    ) -> Storage:
        """A read-only block whose bytes are asked for at the first use: `touch()` maps them or raises.

        `check()` raises if what was mapped has been written to since.
        """
        storage = cls(None, nbytes, device, readonly=True, kind="mapped")
        storage._open, storage._check = touch, check
        return storage

    def check(self) -> None:
        """Raises what says that the bytes are not those of the file that was opened: for who relies on old values."""
        if self.memory is not None and self._check is not None:
            self._check()

    @property
    def memory(self) -> Any:
        """The block itself: a buffer, or what the backend allocated. A mapped one is opened here.

        Raises: StorageClosed.
        """
        if self.closed:
            raise StorageClosed("this memory was closed", got=f"{self.nbytes} bytes on {self.device}")
        if self._open is not None:
            self._memory, self._open = self._open(), None
        return self._memory

    @property
    def touched(self) -> bool:
        """False while a mapped block has not been opened."""
        return self._open is None

    def close(self) -> None:
        """Let go of the memory now, whoever still looks at it; again is no harm. What it borrowed stays the owner's."""
        self._memory = self._open = None
        self.views, self.closed = {}, True


_POISON = 0x7FF8  # NaN in float16, bfloat16, float32 and float64 alike when repeated

poisoning: ContextVar[bool] = ContextVar("graphwright_poisoning", default=False)
"""Whether `empty` fills what it gives."""


@contextmanager
def poison() -> Iterator[None]:
    """Arrays that are made empty inside hold NaN (integers: 7FF8, as often as it fits; bools: True)."""
    token = poisoning.set(True)
    try:
        yield
    finally:
        poisoning.reset(token)


def fill(memory: Any) -> None:
    """Fill bytes with NaN."""
    host = np.asarray(memory)
    host[0::2], host[1::2] = _POISON & 0xFF, _POISON >> 8


def poisoned(shape: tuple[int, ...], kind: np.dtype) -> np.ndarray:
    """Elements of a dtype (floats that numpy lacks: their bits) that read NaN."""
    if kind.itemsize == 1:
        return np.full(shape, 1 if kind.kind == "b" else _POISON >> 8, kind)  # 7F is NaN in both floats of 8 bits
    made = np.empty(shape, kind)
    fill(made.reshape(-1).view(np.uint8))
    return made
