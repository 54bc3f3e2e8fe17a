"""Storage: one block of memory, who owns it, and how often it was written.

Invariant: every array refers to a Storage, never to another array; a Storage outlives all its views.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphwright.array.device import Device
from graphwright.errors import ComputeError


class StorageClosed(ComputeError):
    """The memory of a closed block was asked for."""


class Storage:
    """A block of bytes: owned, borrowed from a caller, or mapped from a file.

    Attributes:
        nbytes: length in bytes.
        device: where it lies.
        kind: `owned`: given back when the last array goes; `borrowed`: the owner is kept alive, and sees the writes;
            `mapped`: the bytes of a file, never written.
        readonly: writes are refused (a mapped file, a borrowed read-only buffer).
        version: rises with every write; caches of what was computed from the block compare it.
        views: typed flat views that a backend made of the block, by DType; the backend's own cache.
        closed: True once the memory was let go.
    """

    __slots__ = (
        "__weakref__",
        "_memory",
        "_open",
        "closed",
        "device",
        "kind",
        "nbytes",
        "readonly",
        "version",
        "views",
    )

    def __init__(
        self, memory: Any, nbytes: int, device: Device, *, readonly: bool = False, kind: str = "borrowed"
    ) -> None:
        self._memory, self._open = memory, None
        self.nbytes, self.device, self.readonly, self.kind = nbytes, device, readonly, kind
        self.version, self.closed = 0, False
        self.views: dict[Any, Any] = {}

    @classmethod
    def mapped(cls, touch: Callable[[], memoryview], nbytes: int, device: Device) -> Storage:
        """A read-only block whose bytes are asked for at the first use: `touch()` maps them or raises."""
        storage = cls(None, nbytes, device, readonly=True, kind="mapped")
        storage._open = touch
        return storage

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
