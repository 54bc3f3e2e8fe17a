"""The memory that a plan's offsets point into: chunks, of which more are added behind, so that no address moves."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet, ref

import numpy as np

from graphwright.array import CPU, NDArray, backend, from_numpy, uint8
from graphwright.array import storage as poison

if TYPE_CHECKING:
    from graphwright.array import Storage
    from graphwright.plan.running.kernels import BoundKernels


class Arena:
    """Chunks, one behind the other in a plan's offsets, anywhere in memory.

    Attributes:
        chunks: their memory.
        ends: where each ends in the plan's offsets.
    """

    __slots__ = ("chunks", "ends")

    def __init__(self) -> None:
        self.chunks: list[Storage] = []
        self.ends: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Of all chunks."""
        return sum(chunk.nbytes for chunk in self.chunks)

    def grow(self, ends: tuple[int, ...], chunk: Callable[[int, int], Storage]) -> None:
        """Add chunks up to these ends, of which those that it has are the first.

        Args:
            chunk: the memory of the i-th chunk, of so many bytes.
        """
        begin = self.ends[-1] if self.ends else 0
        for i, end in enumerate(ends[len(self.ends) :], len(self.ends)):
            self.chunks.append(chunk(i, end - begin))
            self.ends, begin = (*self.ends, end), end

    def holds(self, ends: tuple[int, ...]) -> bool:
        """True if a plan with these chunks can go on in it; what it has beyond them is let go."""
        count = min(len(ends), len(self.ends))
        if self.ends[:count] != ends[:count]:
            return False
        self.ends = self.ends[:count]
        del self.chunks[count:]
        return True

    def at(self, offset: int) -> tuple[Storage, int]:
        """The chunk that an offset lies in, and the place in it; the end of all lies in the last."""
        i = min(bisect_right(self.ends, offset), len(self.chunks) - 1)
        return self.chunks[i], offset - (self.ends[i - 1] if i else 0)


class SharedArena:
    """Chunks that workspaces use one after another; they go with the last of them.

    Invariant: one is replaced by a larger one only by who holds them, so by nobody else's run.
    """

    def __init__(self, kernels: Any) -> None:
        self._allocate = kernels.allocate
        self._chunks: list[ref[Storage]] = []
        self._spaces: WeakSet[BoundKernels] = WeakSet()
        self._user: ref[BoundKernels] | None = None
        self._held = Lock()
        self._members = Lock()  # nobody leaves while others are told to let go

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks now."""
        return sum(chunk.nbytes for known in self._chunks if (chunk := known()) is not None)

    def hold(self) -> bool:
        """Keep others out, until `leave`; False if a run has it."""
        return self._held.acquire(blocking=False)

    def enter(self, space: BoundKernels) -> bool:
        """Hold it for a run, until `leave`; False if somebody else's run has it."""
        if not self._held.acquire(False):  # not by `hold`: a call less in every run
            return False
        if self._user is not space.handle:
            last = self._user() if self._user is not None else None
            if last is not None:
                last.end_borrow()
            self._user = space.handle
        return True

    def leave(self) -> None:
        """Let others use it."""
        self._held.release()

    def forget(self, space: BoundKernels) -> None:
        """It has an arena of its own from now on."""
        with self._members:
            self._spaces.discard(space)
            if self._user is space.handle:
                self._user = None

    def used_by(self, space: BoundKernels) -> bool:
        """True if nobody used it since this workspace did."""
        return self._user is space.handle

    def chunk(self, space: BoundKernels, i: int, nbytes: int) -> Storage:
        """The i-th chunk, at least so large; to be asked for in turn, by who holds them.

        For a larger one the others bind again.
        """
        with self._members:
            self._spaces.add(space)
            found = self._chunks[i]() if i < len(self._chunks) else None
            if found is not None and found.nbytes >= nbytes:
                return found
            if found is not None:
                for other in self._spaces:
                    if other is not space:
                        other.forget_arena()
        del found  # given back before the larger one is asked for
        made = self._allocate(nbytes)
        self._chunks[i : i + 1] = [ref(made)]
        return made


_arenas: WeakKeyDictionary[Any, SharedArena] = WeakKeyDictionary()


def shared_arena(kernels: Any) -> SharedArena:
    """The arena that plans on a backend share."""
    found = _arenas.get(kernels)
    if found is None:
        found = _arenas[kernels] = SharedArena(kernels)
    return found


class PoisonCall:
    """A call that fills dead bytes with NaN."""

    def __init__(self, storage: Storage, offset: int, nbytes: int) -> None:
        self.target = NDArray(storage, uint8, (nbytes,), offset=offset)
        made = np.empty(nbytes, np.uint8)
        poison.fill(made)
        self.source = from_numpy(made)

    def __call__(self) -> None:  # noqa: D102  # a bound call, as its class says
        device = self.target.device
        if device == CPU:
            np.copyto(self.target.to_numpy(), self.source.to_numpy())
        else:
            backend(device).copy(self.target, self.source)


def fill(storage: Storage) -> None:
    """Fill a block with NaN."""
    if storage.device == CPU:
        poison.fill(storage.memory)
    else:
        PoisonCall(storage, 0, storage.nbytes)()
