"""Arenas, the memory that a plan's offsets point into, and functions that copy values into and out of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from ctypes import memmove
from dataclasses import dataclass, field
from sys import getrefcount
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet, ref

import numpy as np

from graphwright.array import CPU, NDArray, Storage, backend, from_numpy, uint8
from graphwright.array import storage as poison
from graphwright.array.layout import row_major
from graphwright.autograd import Tensor
from graphwright.errors import ComputeError

if TYPE_CHECKING:
    from graphwright.plan.running.kernels import BoundKernels


class StaleBorrow(ComputeError):
    """A borrowed result was read after the next run had started."""


class BorrowedStorage(Storage):
    """An arena chunk as the results of one run see it."""

    __slots__ = ()

    def __init__(self, chunk: Storage) -> None:
        super().__init__(chunk.memory, chunk.nbytes, CPU)

    @property
    def memory(self) -> Any:
        """The chunk. Raises: StaleBorrow once another run has started."""
        if self.closed:
            raise StaleBorrow("this result was borrowed, and its memory was reused", fix="copy() it, or borrow=False")
        return super().memory


@dataclass(slots=True)
class Arena:
    """Chunks that follow each other in a plan's offsets, but not in memory, so that growing moves no address.

    Attributes:
        chunks: their memory.
        ends: their ends in the plan's offsets.
    """

    chunks: list[Storage] = field(default_factory=list)
    ends: tuple[int, ...] = ()

    def grow(self, ends: tuple[int, ...], chunk: Callable[[int, int], Storage]) -> None:
        """Add chunks up to these ends, which begin with the present ones.

        Args:
            chunk: allocates the i-th chunk, of a number of bytes.
        """
        begin = self.ends[-1] if self.ends else 0
        for i, end in enumerate(ends[len(self.ends) :], len(self.ends)):
            self.chunks.append(chunk(i, end - begin))
            self.ends, begin = (*self.ends, end), end

    def fits(self, ends: tuple[int, ...]) -> bool:
        """True if a plan with these chunks can use the arena; further chunks are then released."""
        count = min(len(ends), len(self.ends))
        if self.ends[:count] != ends[:count]:
            return False
        self.ends = self.ends[:count]
        del self.chunks[count:]
        return True

    def at(self, offset: int) -> tuple[Storage, int]:
        """The chunk of an offset, and the offset in it."""
        i = min(bisect_right(self.ends, offset), len(self.chunks) - 1)
        return self.chunks[i], offset - (self.ends[i - 1] if i else 0)


class SharedArena:
    """Chunks that executables of a device use in turn, freed with the last of them.

    Invariant: only their present holder replaces a chunk by a larger one, so no run loses its memory.
    """

    def __init__(self, kernels: Any) -> None:
        self._allocate = kernels.allocate
        self._chunks: list[ref[Storage]] = []
        self._spaces: WeakSet[BoundKernels] = WeakSet()
        self._user: ref[BoundKernels] | None = None
        self._held = Lock()
        self._members = Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.nbytes for known in self._chunks if (chunk := known()) is not None)

    def hold(self) -> bool:
        """Keep others out until `leave`; False if a run holds it."""
        return self._held.acquire(blocking=False)

    def enter(self, space: BoundKernels) -> bool:
        """Hold it for a run, until `leave`; False if another run holds it."""
        if not self._held.acquire(False):  # not by `hold`: one call less in every run
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
        """Note that an executable uses an arena of its own from now on."""
        with self._members:
            self._spaces.discard(space)
            if self._user is space.handle:
                self._user = None

    def used_by(self, space: BoundKernels) -> bool:
        """True if this executable was the last to use it."""
        return self._user is space.handle

    def chunk(self, space: BoundKernels, i: int, nbytes: int) -> Storage:
        """The i-th chunk, with at least so many bytes; the caller holds the arena and asks in order.

        If it is replaced by a larger one, the other executables bind again.
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
        del found  # freed before the larger one is allocated
        made = self._allocate(nbytes)
        self._chunks[i : i + 1] = [ref(made)]
        return made


_arenas: WeakKeyDictionary[Any, SharedArena] = WeakKeyDictionary()


def shared_arena(kernels: Any) -> SharedArena:
    """The arena that plans on a backend share."""
    return _arenas.setdefault(kernels, SharedArena(kernels))


def fill(storage: Storage, offset: int, nbytes: int) -> None:
    """Fill bytes of a block with NaN."""
    target = NDArray(storage, uint8, (nbytes,), offset=offset)
    made = target.to_numpy() if storage.device == CPU else np.empty(nbytes, np.uint8)
    poison.fill(made)
    if storage.device != CPU:
        backend(storage.device).copy(target, from_numpy(made))


_LARGE = 1 << 16  # bytes of a result
_BLOCKS = 2  # the caller holds the last result while the next one is made
_UNHELD = 3  # references to a block that only `reader` knows

Given = NDArray | np.ndarray


def writer(target: NDArray) -> Callable[[Given], object]:
    """A function that copies arrays of the target's spec, from the host or the same device, into planned memory."""
    kernels = backend(target.device)
    if target.device != CPU:
        return lambda array: kernels.copy(target, as_array(array))
    size, address = target.nbytes, kernels.address(target)
    last: NDArray | None = None
    source = 0

    def write(given: Given) -> None:
        nonlocal last, source
        array = given if isinstance(given, NDArray) else from_numpy(given)
        if array is not last or array.closed:
            if array.device != CPU:
                backend(array.device).copy(target, array)
                return
            if not array.contiguous:
                kernels.copy(target, array)
                return
            last, source = array, kernels.address(array)
        memmove(address, source, size)

    return write


def pointer(target: NDArray, source: Callable[[int], None]) -> Callable[[Given], bool]:
    """A function that sets the address from which native code copies an array into planned memory.

    It returns True if that is the array's own memory, so later values are read too; else the present ones were copied.
    """
    kernels = backend(CPU)
    own, host = kernels.address(target), target.to_numpy(bits=True)

    def point(array: Given) -> bool:
        if not isinstance(array, NDArray):
            np.copyto(host, array)
            source(own)
            return False
        direct = array.contiguous
        if not direct:
            kernels.copy(target, array)
        source(kernels.address(array) if direct else own)
        return direct

    return point


def reader(source: NDArray) -> Callable[[], NDArray]:
    """A function that copies a value out of planned memory, on its device.

    A large copy reuses the memory of an earlier one that is no longer referenced: new pages cost more than the copy.
    """
    if source.device != CPU:
        return source.copy
    host, kind, shape, strides = source.to_numpy(bits=True), source.dtype, source.shape, row_major(source.shape)
    size, flat = source.nbytes, source.contiguous
    if flat:
        host = host.reshape(-1)

    def read() -> NDArray:
        copy = host.copy()
        return NDArray(Storage(copy if flat else copy.reshape(-1), size, CPU), kind, shape, strides)

    blocks: list[np.ndarray] = []

    def read_large() -> NDArray:
        for block in blocks:
            if getrefcount(block) == _UNHELD:
                break
        else:
            block = np.empty(host.size, host.dtype)
            if len(blocks) < _BLOCKS:
                blocks.append(block)
        np.copyto(block.reshape(host.shape), host)
        return NDArray(Storage(block, size, CPU), kind, shape, strides)

    return read if size < _LARGE else read_large


def as_array(given: Any) -> NDArray:
    """A feed as an array, sharing memory. Raises: DTypeError if it is not an array of numbers."""
    data = given.data if isinstance(given, Tensor) else given
    return data if isinstance(data, NDArray) else from_numpy(np.asarray(data))


def differences(
    ours: Mapping[str, NDArray], theirs: Mapping[str, NDArray], rtol: float, atol: float, scaled: bool = False
) -> list[str]:
    """The values that differ, each in a line; `atol` may be scaled by the largest of a value's elements above 1."""
    wrong = []
    for name, expected in theirs.items():
        a, b = (np.asarray(x.to_numpy("float64")) for x in (ours[name], expected))
        room = atol * max(1.0, float(np.nanmax(np.abs(b), initial=0.0))) if scaled else atol
        if not np.allclose(a, b, rtol, room, equal_nan=True):
            line = f"{name}: off by up to {np.nanmax(np.abs(a - b), initial=0):.3g}"
            lost = np.isnan(a).sum()
            wrong.append(line + (f", {lost} values are NaN or were not written" if lost != np.isnan(b).sum() else ""))
    return wrong
