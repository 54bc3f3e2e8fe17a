"""Arenas, the memory to which a plan's offsets refer, and functions that copy values into and out of it."""

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
    """The storage of results that are views of an arena chunk; it is closed when the next run starts."""

    __slots__ = ()

    def __init__(self, chunk: Storage) -> None:
        super().__init__(chunk.memory, chunk.nbytes, CPU)

    @property
    def memory(self) -> Any:
        """The memory of the chunk. Raises: StaleBorrow once the next run has started."""
        if self.closed:
            raise StaleBorrow("a later run reused the memory of this borrowed result",
                              fix="result.copy() before the next run, or run(..., borrow=False)")  # fmt: skip
        return super().memory


@dataclass(slots=True)
class Arena:
    """The memory of a plan: blocks (chunks) for consecutive ranges of offsets, so that growing changes no address.

    Attributes:
        chunks: memory of each chunk.
        ends: offset at which each chunk ends.
    """

    chunks: list[Storage] = field(default_factory=list)
    ends: tuple[int, ...] = ()

    def grow(self, ends: tuple[int, ...], chunk: Callable[[int, int], Storage]) -> None:
        """Add chunks until the arena's chunk ends equal `ends`, which must begin with the current ends.

        `chunk(i, nbytes)` allocates the i-th chunk.
        """
        begin = self.ends[-1] if self.ends else 0
        for i, end in enumerate(ends[len(self.ends) :], len(self.ends)):
            self.chunks.append(chunk(i, end - begin))
            self.ends, begin = (*self.ends, end), end

    def fits(self, ends: tuple[int, ...]) -> bool:
        """Return True if a plan with these chunk ends can use the arena; if so, release the arena's surplus chunks."""
        count = min(len(ends), len(self.ends))
        if self.ends[:count] != ends[:count]:
            return False
        self.ends = self.ends[:count]
        del self.chunks[count:]
        return True

    def at(self, offset: int) -> tuple[Storage, int]:
        """Return the chunk that contains a plan offset, and the offset inside the chunk."""
        i = min(bisect_right(self.ends, offset), len(self.chunks) - 1)
        return self.chunks[i], offset - (self.ends[i - 1] if i else 0)


class SharedArena:
    """Memory (chunks) that the executables of a device use in turn; it is freed with the last executable.

    Invariant: only the executable that holds the arena replaces a chunk by a larger one, so no run loses its memory.
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
        """The total bytes of all chunks."""
        return sum(chunk.nbytes for known in self._chunks if (chunk := known()) is not None)

    def hold(self) -> bool:
        """Lock the arena until `leave`; return False if a run has locked it."""
        return self._held.acquire(blocking=False)

    def enter(self, space: BoundKernels) -> bool:
        """Lock the arena until `leave`, for the executable with memory `space`; return False if it is locked."""
        if not self._held.acquire(False):  # not by `hold`, to save a call in every run
            return False
        if self._user is not space.handle:
            last = self._user() if self._user is not None else None
            if last is not None:
                last.end_borrow()
            self._user = space.handle
        return True

    def leave(self) -> None:
        """Unlock the arena."""
        self._held.release()

    def forget(self, space: BoundKernels) -> None:
        """Remove the executable with memory `space`, which uses an arena of its own from now on."""
        with self._members:
            self._spaces.discard(space)
            if self._user is space.handle:
                self._user = None

    def used_by(self, space: BoundKernels) -> bool:
        """Return True if the executable with memory `space` was the last one to use the arena."""
        return self._user is space.handle

    def chunk(self, space: BoundKernels, i: int, nbytes: int) -> Storage:
        """Return the i-th chunk, with at least `nbytes` bytes, to the executable with memory `space`, which has locked
        the arena. If the chunk is replaced by a larger one, the other executables bind again.
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
    """Return the arena that all plans of a backend share."""
    return _arenas.setdefault(kernels, SharedArena(kernels))


def fill(storage: Storage, offset: int, nbytes: int) -> None:
    """Fill `nbytes` bytes of a memory block with NaN, starting at `offset`."""
    target = NDArray(storage, uint8, (nbytes,), offset=offset)
    made = target.to_numpy() if storage.device == CPU else np.empty(nbytes, np.uint8)
    poison.fill(made)
    if storage.device != CPU:
        backend(storage.device).copy(target, from_numpy(made))


_LARGE = 1 << 16  # bytes from which a result is copied into a reused block
_BLOCKS = 2  # two: the caller holds the last result while the next one is made
_UNHELD = 3  # reference count of a block that only `reader` refers to

Given = NDArray | np.ndarray


def writer(target: NDArray) -> Callable[[Given], object]:
    """Return a function that copies an array of the target's spec, on the host or the same device, into the target."""
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
    """Return a function that makes the next native run copy a given array into the target.

    The function calls `source` with the address to copy from. It returns True if native code reads the array itself,
    so that it sees later values too, and False if the current values were copied to the target at once.
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
    """Return a function that copies a value out of the plan's memory, on the same device.

    A large copy reuses the memory of an earlier copy that is no longer referenced: allocating new pages would take
    longer than copying.
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
    """Return a feed as an array that shares its memory. Raises: DTypeError if it is not an array of numbers."""
    data = given.data if isinstance(given, Tensor) else given
    return data if isinstance(data, NDArray) else from_numpy(np.asarray(data))


def differences(
    ours: Mapping[str, NDArray], theirs: Mapping[str, NDArray], rtol: float, atol: float, scaled: bool = False
) -> list[str]:
    """Return a line of text for each value of `ours` that differs from `theirs` by more than the tolerances.

    `scaled` multiplies `atol` by max(1, the largest absolute element of the value in `theirs`).
    """
    wrong = []
    for name, expected in theirs.items():
        a, b = (np.asarray(x.to_numpy("float64")) for x in (ours[name], expected))
        room = atol * max(1.0, float(np.nanmax(np.abs(b), initial=0.0))) if scaled else atol
        if not np.allclose(a, b, rtol, room, equal_nan=True):
            line = f"{name}: off by up to {np.nanmax(np.abs(a - b), initial=0):.3g}"
            lost = np.isnan(a).sum()
            wrong.append(line + (f", {lost} values are NaN or were not written" if lost != np.isnan(b).sum() else ""))
    return wrong
