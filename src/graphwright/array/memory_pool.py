"""MemoryPool: a caching allocator for device memory, so that steps make no allocation calls to the driver.

Sizes are rounded up to one of eight classes per power of two, so less than an eighth is wasted. A block is cut from the
smallest free piece that holds it, and a freed piece is merged with free neighbours. Blocks up to 1 MiB share
no segment with larger ones; a block above 1 GiB fills a segment. A freed piece stores one event per stream that used
it, and the stream for which the piece is allocated next waits for these events.

Invariant: the pieces of a segment cover it without gaps, and no two neighbouring pieces are both free.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import inf
from numbers import Integral, Real
from typing import NamedTuple, Protocol, Unpack

import numpy as np

from graphwright.array.device import Device
from graphwright.array.dtype import uint8
from graphwright.array.ndarray import NDArray, empty, from_numpy
from graphwright.errors import ComputeError, Facts, OutOfMemory, UsageError

Address = int | np.ndarray
"""An address on the device, or bytes of the host (uint8)."""
Range = tuple[int, int]
"""First address, and the address after the last."""


class DriverError(ComputeError):
    """A driver call failed, or violated a rule of the device."""


class DeviceFull(DriverError):
    """The device does not have enough free memory."""


class OutOfDeviceMemory(OutOfMemory):
    """A pool could not allocate, even after returning its cached segments to the driver.

    Attributes:
        asked: bytes requested by the failed allocation.
        live, reserved: bytes in use, and bytes that the pool took from the driver.
        largest_free: the largest free piece.
        owners: (bytes, name) of the largest live blocks.
        room: bytes of the largest block that could be allocated.
    """

    def __init__(
        self, what: str, *, asked: int = 0, live: int = 0, reserved: int = 0, largest_free: int = 0,
        owners: tuple[tuple[int, str], ...] = (), room: int = 0, **facts: Unpack[Facts],
    ) -> None:  # fmt: skip
        super().__init__(what, **facts)
        self.asked, self.live, self.reserved, self.room = asked, live, reserved, room
        self.largest_free, self.owners = largest_free, owners


_owner: ContextVar[str] = ContextVar("graphwright_owner", default="")


@contextmanager
def owner(name: str) -> Iterator[None]:
    """Name the blocks that are allocated while active: errors and summaries show what holds memory."""
    token = _owner.set(name)
    try:
        yield
    finally:
        _owner.reset(token)


class Driver(Protocol):
    """The interface to memory, streams and events of one device. Work on a stream runs in order, asynchronously.

    Every method can raise DriverError; a failed call has no effect. Numbers of events rise with time.

    Attributes:
        queues_host_reads: True if host memory that queued work reads must stay unchanged until the work has run.
    """

    device: Device
    queues_host_reads: bool

    def alloc(self, nbytes: int) -> int:
        """Allocate memory and return its address. Raises: DeviceFull."""
        ...

    def free(self, address: int) -> None:
        """Free the memory at an address; no queued work may use it."""

    def copy(self, target: Address, source: Address, nbytes: int, stream: int = 0) -> None:
        """Queue a copy; host bytes must stay alive and unchanged until the copy has run."""

    def enqueue(self, stream: int, call: Callable[[], object], reads: Sequence[Range], writes: Sequence[Range]) -> None:
        """Queue what `call` does to the device, a kernel that reads and writes these ranges of addresses."""

    def fill(self, address: int, value: int, nbytes: int, stream: int = 0) -> None:
        """Queue a fill with one byte value."""

    def stream(self) -> int:
        """Return a new stream; stream 0 always exists."""
        ...

    def current(self, stream: int) -> int:
        """Return the stream on which work for `stream` is queued now: stream 0 may stand for another library's."""
        ...

    def record(self, stream: int) -> int:
        """Record and return an event that completes when all work queued on the stream so far has run."""
        ...

    def wait(self, stream: int, event: int) -> None:
        """Make later work on the stream wait for the event."""

    def done(self, event: int) -> bool:
        """Return True if an event has completed."""
        ...

    def synchronize(self, stream: int | None = None) -> None:
        """Wait for a stream, or for all of them."""

    def begin_capture(self, stream: int) -> None:
        """Begin to capture the work queued on the stream; it is not run."""

    def end_capture(self, stream: int) -> int:
        """End the capture and return its graph. The stream no longer captures, even if this raises."""
        ...

    def instantiate(self, graph: int) -> int:
        """Return an executable form of a captured graph, for `replay`."""
        ...

    def replay(self, ready: int, stream: int) -> None:
        """Queue all work of a graph that `instantiate` returned; if this raises, nothing is queued."""

    def mem_info(self) -> tuple[int, int]:
        """Return (free, total) bytes of device memory."""
        ...


SMALLEST = 256
SMALL = 2**20
SLAB = 2**21
DIRECT = 2**30
LIMIT = "GRAPHWRIGHT_CUDA_LIMIT"
_OWNERS = 5  # listed in an error


def size_class(nbytes: int) -> int:
    """Round a request up to one of eight sizes per power of two, at least 256 bytes."""
    if nbytes <= SMALLEST:
        return SMALLEST
    step = 1 << ((nbytes - 1).bit_length() - 4)
    return -(-nbytes // step) * step


class Stats(NamedTuple):
    """Totals of a pool, in bytes and counts.

    Attributes:
        live: bytes allocated and not freed; `peak` is its maximum.
        waste: bytes by which sizes were rounded up.
        cached: free bytes held by the pool; reserved = live + waste + cached.
        reserved: bytes taken from the driver.
        allocs, frees: number of blocks allocated and freed.
        stale: number of ignored frees of blocks that were freed already, or allocated before the pool was reset.
        failed: number of finalizers of arrays that raised while they freed a block.
    """

    live: int
    peak: int
    waste: int
    cached: int
    reserved: int
    allocs: int
    frees: int
    stale: int
    failed: int


@dataclass(eq=False, slots=True)
class _Piece:
    """A contiguous part of a segment (the memory of one driver allocation), linked to its neighbours."""

    address: int
    size: int
    small: bool
    before: _Piece | None = None
    after: _Piece | None = None
    free: bool = True
    events: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Block:
    """A block of device memory that is in use.

    Attributes:
        streams: streams that used it; freeing records an event on each.
        pins: number of captured graphs that hold its address; a pinned block cannot be freed.
    """

    address: int
    nbytes: int
    owner: str
    streams: set[int]
    epoch: int
    piece: _Piece | None
    pins: int = 0


class MemoryPool:
    """A caching allocator of device memory; the module docstring describes it.

    Args:
        driver: the source of memory.
        limit: maximum bytes to take from the driver, or a fraction of the device memory; by default
            GRAPHWRIGHT_CUDA_LIMIT if it is set, else all.
    Raises: UsageError for an invalid limit.
    """

    def __init__(self, driver: Driver, limit: float | None = None) -> None:
        self.driver, self.limit = driver, None
        self.epoch = 0
        self.failed = 0
        self._stale = self._allocs = self._frees = 0
        self._clear()
        given = _environment_limit() if limit is None else limit
        if given is not None:
            self.set_limit(given)

    def _clear(self) -> None:
        self._free: dict[bool, list[tuple[int, int, _Piece]]] = {True: [], False: []}
        self._blocks: dict[int, Block] = {}
        self._reserved = self._live = self._taken = self._peak = 0

    def alloc(self, nbytes: int, stream: int = 0, owner: str = "") -> Block:
        """Allocate a block for a stream, by default for the present `owner`.

        Raises: OutOfDeviceMemory, after returning the free segments to the driver.
        """
        owner = owner or _owner.get()
        size = size_class(nbytes)
        piece = self._fitting(size) or self._segment(size)
        if piece is None:
            self.empty_cache()
            piece = self._segment(size)
        if piece is None:
            raise self._full(nbytes)
        for other, event in piece.events.items():
            if other != stream and not self.driver.done(event):
                self.driver.wait(stream, event)
        self._unlist(piece)
        if piece.size - size >= SMALLEST and piece.size <= DIRECT:
            self._split(piece, size)
        piece.free, piece.events = False, {}
        block = self._blocks[piece.address] = Block(piece.address, nbytes, owner, {stream}, self.epoch, piece)
        self._allocs += 1
        self._live += nbytes
        self._taken += piece.size
        self._peak = max(self._peak, self._live)
        return block

    def free(self, block: Block) -> None:
        """Free a block. A block that was freed before, or allocated before a `reset`, is ignored and counted as stale.

        Raises: UsageError if a captured graph uses the block.
        """
        piece = block.piece
        if block.pins:
            raise _pinned(block)
        if block.epoch != self.epoch or piece is None:
            self._stale += 1
            return
        events = {stream: self.driver.record(stream) for stream in sorted(block.streams)}
        block.piece = None
        del self._blocks[block.address]
        self._frees += 1
        self._live -= block.nbytes
        self._taken -= piece.size
        piece.free, piece.events = True, events
        for other in (piece.after, piece.before):
            if other is not None and other.free:
                self._unlist(other)
                piece = _merged(*sorted((piece, other), key=lambda p: p.address))
        self._list(piece)

    def empty_cache(self) -> int:
        """Wait for the work that used free segments, return these to the driver, and return their total bytes."""
        whole = [p for pieces in self._free.values() for _, _, p in pieces if p.before is None and p.after is None]
        if any(not self.driver.done(e) for p in whole for e in p.events.values()):
            self.driver.synchronize()
        for piece in whole:
            self.driver.free(piece.address)
            self._unlist(piece)
            self._reserved -= piece.size
        return sum(p.size for p in whole)

    def set_limit(self, limit: float | None) -> None:
        """Limit the memory taken from the driver: bytes, a fraction (float <= 1), or None. Raises: UsageError."""
        if limit is None:
            self.limit = None
            return
        if not isinstance(limit, Real) or not 0 <= limit < inf:
            raise _wrong_limit(repr(limit))
        fraction = not isinstance(limit, Integral) and limit <= 1
        self.limit = int(limit * self.driver.mem_info()[1]) if fraction else int(limit)

    def reset_peak(self) -> None:
        """Reset the peak to the current live bytes."""
        self._peak = self._live

    def reset(self) -> None:
        """Forget all blocks and segments, for example after the device was lost; later frees of the blocks are ignored.

        Raises: UsageError while a captured graph uses a block.
        """
        for block in self._blocks.values():
            if block.pins:
                raise _pinned(block)
        self.epoch += 1
        self._clear()

    def stats(self) -> Stats:
        """Return the current totals of the pool."""
        waste, cached = self._taken - self._live, self._reserved - self._taken
        counts = (self._allocs, self._frees, self._stale, self.failed)
        return Stats(self._live, self._peak, waste, cached, self._reserved, *counts)

    def summary(self) -> str:
        """Return `stats` and the largest live blocks as a table."""
        rows = [f"{name:<9}{value:>16,}" for name, value in self.stats()._asdict().items()]
        return "\n".join([*rows, *(f"{'':<9}{size:>16,}  {name or 'unnamed'}" for size, name in self._largest())])

    def pieces(self) -> Iterable[tuple[int, int, bool]]:
        """Return (address, size, free) of every piece, sorted by address."""
        live = ((b.address, b.piece.size, False) for b in self._blocks.values() if b.piece is not None)
        return sorted([*live, *((a, s, True) for pieces in self._free.values() for s, a, _ in pieces)])

    # -- pieces ------------------------------------------------------------------------------------------------------
    def _fitting(self, size: int) -> _Piece | None:
        pieces = self._free[size <= SMALL]
        at = bisect_left(pieces, (size, 0), key=lambda t: t[:2])
        if at == len(pieces) or (pieces[at][0] > DIRECT and pieces[at][0] != size):
            return None
        return pieces[at][2]

    def _segment(self, size: int) -> _Piece | None:
        """Allocate driver memory for `size` as one free piece; None if the device is full or the limit is reached."""
        nbytes = SLAB if size <= SMALL else size if size > DIRECT else -(-size // SLAB) * SLAB
        if self.limit is not None and self._reserved + nbytes > self.limit:
            return None
        try:
            address = self.driver.alloc(nbytes)
        except DeviceFull:
            return None
        self._reserved += nbytes
        piece = _Piece(address, nbytes, size <= SMALL)
        self._list(piece)
        return piece

    def _list(self, piece: _Piece) -> None:
        insort(self._free[piece.small], (piece.size, piece.address, piece), key=lambda t: t[:2])

    def _unlist(self, piece: _Piece) -> None:
        pieces = self._free[piece.small]
        del pieces[bisect_left(pieces, (piece.size, piece.address), key=lambda t: t[:2])]

    def _split(self, piece: _Piece, size: int) -> None:
        rest = _Piece(
            piece.address + size, piece.size - size, piece.small, piece, piece.after, True, dict(piece.events)
        )
        if piece.after is not None:
            piece.after.before = rest
        piece.after, piece.size = rest, size
        self._list(rest)

    def _largest(self) -> list[tuple[int, str]]:
        """Return (bytes, owner) of the largest live blocks."""
        return sorted(((b.nbytes, b.owner) for b in self._blocks.values()), reverse=True)[:_OWNERS]

    def _full(self, nbytes: int) -> OutOfDeviceMemory:
        largest = max((pieces[-1][0] for pieces in self._free.values() if pieces), default=0)
        owners = self._largest()
        live, reserved, (free, _) = self._live, self._reserved, self.driver.mem_info()
        room = max(largest, free if self.limit is None else min(free, self.limit - reserved)) // SLAB * SLAB
        top = ", ".join(f"{name or 'unnamed'} {size:,}" for size, name in owners)
        return OutOfDeviceMemory(
            "out of device memory", asked=nbytes, live=live, reserved=reserved, largest_free=largest,
            owners=tuple(owners), room=room, where=str(self.driver.device), expected=f"{nbytes:,} bytes",
            got=f"{live:,} live, {reserved:,} reserved, {largest:,} in the largest free piece; {top}",
            fix="use smaller batches, or free arrays that are no longer needed",
        )  # fmt: skip


def _environment_limit() -> float | None:
    """Return GRAPHWRIGHT_CUDA_LIMIT as bytes (`8589934592`) or a fraction (`0.5`); None if it is not set."""
    text = os.environ.get(LIMIT)
    if not text:
        return None
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError as error:
        raise _wrong_limit(repr(text), LIMIT) from error


def _wrong_limit(got: object, where: str | None = None) -> UsageError:
    return UsageError("invalid memory limit", where=where, expected="bytes >= 0, or a fraction of all memory", got=got)


def _pinned(block: Block) -> UsageError:
    where, size = block.owner or None, f"{block.nbytes:,} bytes"
    what = "cannot free memory that a captured graph uses"
    return UsageError(what, where=where, got=size, fix="release() or delete the executable that captured it")


def _merged(first: _Piece, second: _Piece) -> _Piece:
    """Merge two neighbouring free pieces; of two events of one stream, keep the later one."""
    events = {s: max(first.events.get(s, -1), second.events.get(s, -1)) for s in {*first.events, *second.events}}
    first.size, first.after, first.events = first.size + second.size, second.after, events
    if second.after is not None:
        second.after.before = first
    return first


MOST_BYTES = 64 * 2**20
MOST_ARRAYS = 4096
_ALIGN = 64  # bytes, the alignment of single arrays


def chunks(sizes: Sequence[int]) -> Iterator[range]:
    """Split arrays of `sizes` bytes into index ranges of at most 4096 arrays and 64 MiB; larger ones are alone."""
    start, used = 0, 0
    for at, size in enumerate(sizes):
        room = _aligned(size)
        if at > start and (used + room > MOST_BYTES or at - start == MOST_ARRAYS):
            yield range(start, at)
            start, used = at, 0
        used += room
    if start < len(sizes):
        yield range(start, len(sizes))


def upload(arrays: Sequence[NDArray], device: Device) -> list[NDArray]:
    """Copy arrays to a device in chunks of up to 64 MiB; arrays already there are returned unchanged.

    Arrays of one chunk share a block, which is freed with the last of them. Raises: DeviceUnavailable.
    """
    moving = [index for index, array in enumerate(arrays) if array.device != device]
    result = list(arrays)
    for part in chunks([arrays[index].nbytes for index in moving]):
        indices = [moving[at] for at in part]
        ends = np.cumsum([_aligned(arrays[index].nbytes) for index in indices])
        host = np.zeros(int(ends[-1]), np.uint8)
        starts = [0, *map(int, ends[:-1])]
        for index, start in zip(indices, starts, strict=True):
            host[start : start + arrays[index].nbytes] = np.frombuffer(arrays[index].tobytes(), np.uint8)
        block = empty(host.shape, uint8, device).copy_from(from_numpy(host))
        for index, start in zip(indices, starts, strict=True):
            array = arrays[index]
            result[index] = NDArray(block.storage, array.dtype, array.shape, offset=start // array.dtype.itemsize)
    return result


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
