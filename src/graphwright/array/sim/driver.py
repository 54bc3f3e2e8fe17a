"""SimDriver: host bytes under the rules of a GPU. Work waits in queues, and what a GPU would get wrong raises here.

Invariant: work runs at `synchronize` (or `advance`) only, each stream in order and after the events it waits for.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from graphwright.array.device import Device
from graphwright.array.memory_pool import DeviceFull, DriverError, Place

Range = tuple[int, int]
_ALIGN = 512


class RuleBroken(DriverError):
    """What a GPU would let pass and compute wrongly: early reuse, a read before it is written, a sync in a capture."""


class InjectedFault(DriverError):
    """The fault that a test asked for."""


@dataclass(eq=False, slots=True)
class _Work:
    """One entry of a stream's queue."""

    call: Callable[[], object]
    reads: Sequence[Range]
    writes: Sequence[Range]
    stream: int
    at: int = 0


@dataclass(slots=True)
class _Stream:
    """A queue; `seen` says up to which entry of each other stream this one waits."""

    queue: deque[_Work] = field(default_factory=deque)
    issued: int = 0
    ran: int = 0
    seen: dict[int, int] = field(default_factory=dict)
    capture: list[_Work] | None = None
    invalid: bool = False


class SimDriver:
    """A device in host memory.

    Args:
        device: its name.
        capacity: bytes it has.
        fail_at: number of the call that raises InjectedFault, counted from 1.

    Attributes:
        calls, allocs, frees, syncs, launches, replays: how often each happened.
    """

    def __init__(self, device: Device | None = None, capacity: int = 2**33, fail_at: int | None = None) -> None:
        self.device, self.capacity, self.fail_at = device or Device("sim"), capacity, fail_at
        self.calls = self.allocs = self.frees = self.syncs = self.launches = self.replays = 0
        self._memory: dict[int, np.ndarray] = {}
        self._starts: list[int] = []
        self._used = 0
        self._next = (self.device.index + 1) << 44  # no address of one device is one of another
        self._streams: list[_Stream] = [_Stream()]
        self._events: list[tuple[int, int, dict[int, int]]] = []
        self._graphs: list[list[_Work]] = []
        self._ready: list[int] = []

    # -- memory ------------------------------------------------------------------------------------------------------
    def alloc(self, nbytes: int) -> int:
        """The address of new memory, filled with 0xff: NaN in every float."""
        self._tick("alloc", outside_capture=True)
        if nbytes <= 0 or self._used + nbytes > self.capacity:
            raise DeviceFull("the device is full", where=str(self.device), expected=nbytes, got=self.mem_info()[0])
        address = self._next
        self._next += -(-nbytes // _ALIGN) * _ALIGN + _ALIGN  # the gap catches what runs past the end
        self._memory[address] = _filled(nbytes)
        insort(self._starts, address)
        self._used += nbytes
        self.allocs += 1
        return address

    def free(self, address: int) -> None:
        """Give memory back."""
        self._tick("free", outside_capture=True)
        if address not in self._memory:
            raise DriverError("no memory of this device begins here", where=str(self.device), got=hex(address))
        whole = (address, address + len(self._memory[address]))
        for work in (w for s in self._streams for w in s.queue):
            if _meet([whole], [*work.reads, *work.writes]):
                raise RuleBroken("memory was freed while work that uses it is queued", got=hex(address))
        self._used -= len(self._memory.pop(address))
        self._starts.remove(address)
        self.frees += 1

    def copy(self, target: Place, source: Place, nbytes: int, stream: int = 0) -> None:
        """Queue a copy."""
        to, of = self._bytes(target, nbytes), self._bytes(source, nbytes)
        reads = [(source, source + nbytes)] if isinstance(source, int) else []
        writes = [(target, target + nbytes)] if isinstance(target, int) else []
        self.enqueue(stream, partial(np.copyto, to, of), reads, writes)

    def fill(self, address: int, value: int, nbytes: int, stream: int = 0) -> None:
        """Queue writing one byte value everywhere."""
        self.enqueue(stream, partial(self._bytes(address, nbytes).fill, value), [], [(address, address + nbytes)])

    def mem_info(self) -> tuple[int, int]:
        """(free, total) bytes."""
        return self.capacity - self._used, self.capacity

    def read(self, address: int, nbytes: int) -> np.ndarray:
        """Bytes as the host finds them. Raises: RuleBroken while a queued write would change them."""
        for work in (w for s in self._streams for w in s.queue):
            if _meet([(address, address + nbytes)], work.writes):
                raise RuleBroken("the host reads memory that queued work will write", got=hex(address))
        return self._bytes(address, nbytes)

    # -- streams -----------------------------------------------------------------------------------------------------
    def stream(self) -> int:
        """A new stream."""
        self._tick("stream")
        self._streams.append(_Stream())
        return len(self._streams) - 1

    def record(self, stream: int) -> int:
        """An event at the end of a stream's queue."""
        self._tick("record")
        s = self._streams[stream]
        self._events.append((stream, s.issued, {**s.seen, stream: s.issued}))
        return len(self._events) - 1

    def wait(self, stream: int, event: int) -> None:
        """What is queued on the stream from here on runs after the event."""
        self._tick("wait")
        other, at, seen = self._events[event]
        s = self._streams[stream]
        s.seen = {k: max(s.seen.get(k, 0), seen.get(k, 0)) for k in {*s.seen, *seen}}
        self._push(_Work(partial(self._run, other, at), [], [], stream))

    def done(self, event: int) -> bool:
        """Whether an event has happened."""
        stream, at, _ = self._events[event]
        return self._streams[stream].ran >= at

    def synchronize(self, stream: int | None = None) -> None:
        """Run what a stream holds, or all of them."""
        self._tick("synchronize", outside_capture=True)
        self.syncs += 1
        for i in range(len(self._streams)) if stream is None else [stream]:
            self._run(i, self._streams[i].issued)

    def advance(self, stream: int, count: int = 1) -> None:
        """Run the next entries of a stream, as a GPU may at any time."""
        self._run(stream, min(self._streams[stream].ran + count, self._streams[stream].issued))

    def enqueue(self, stream: int, call: Callable[[], object], reads: Sequence[Range], writes: Sequence[Range]) -> None:
        """Queue a kernel that touches these ranges. Raises: RuleBroken for memory not there, or another stream's."""
        self._tick("launch")
        kept = self._streams[stream].capture
        self._check(stream, reads, writes)
        work = _Work(call, reads, writes, stream)
        if kept is not None:
            kept.append(work)
            return
        self.launches += 1
        self._push(work)

    def _check(self, stream: int, reads: Sequence[Range], writes: Sequence[Range]) -> None:
        """Raises: RuleBroken for memory not there, or that another stream's queued work uses."""
        for low, high in (*reads, *writes):
            self._bytes(low, high - low)
        if self._streams[stream].capture is not None:
            return
        seen = self._streams[stream].seen
        for i, other in enumerate(self._streams):
            if i == stream:
                continue
            for w in other.queue:
                if w.at > seen.get(i, 0) and (_meet(writes, [*w.reads, *w.writes]) or _meet(reads, w.writes)):
                    raise RuleBroken(
                        "memory is used while another stream's queued work uses it: nothing orders the two",
                        got=f"stream {stream} beside stream {i}",
                        fix="wait(stream, record(other))",
                    )

    # -- graphs ------------------------------------------------------------------------------------------------------
    def begin_capture(self, stream: int) -> None:
        """Keep what is queued on the stream instead of running it."""
        self._tick("begin_capture", outside_capture=True)
        self._streams[stream].capture = []

    def end_capture(self, stream: int) -> int:
        """The graph of what was kept. Raises: RuleBroken if nothing was asked for, or the capture was invalidated."""
        s = self._streams[stream]
        (kept, s.capture), (invalid, s.invalid) = (s.capture, None), (s.invalid, False)
        self._tick("end_capture")
        if kept is None or invalid:
            raise RuleBroken("the capture was invalidated" if invalid else "this stream captures nothing", got=stream)
        self._graphs.append(kept)
        return len(self._graphs) - 1

    def invalidate(self, stream: int) -> None:
        """Spoil a stream's capture, as a call that a GPU forbids there does."""
        self._streams[stream].invalid = self._streams[stream].capture is not None

    def instantiate(self, graph: int) -> int:
        """The graph, ready to be replayed."""
        self._tick("instantiate")
        self._ready.append(graph)
        return len(self._ready) - 1

    def replay(self, ready: int, stream: int) -> None:
        """Queue a graph. Raises: RuleBroken if memory that it touches is gone; nothing is queued then."""
        self._tick("replay")
        works = self._graphs[self._ready[ready]]
        for work in works:
            self._check(stream, work.reads, work.writes)
        self.replays += 1
        for work in works:
            self._push(_Work(work.call, work.reads, work.writes, stream))

    @property
    def capturing(self) -> bool:
        """Whether a stream captures."""
        return any(s.capture is not None for s in self._streams)

    # -- inside ------------------------------------------------------------------------------------------------------
    def _tick(self, what: str, outside_capture: bool = False) -> None:
        self.calls += 1
        if self.calls == self.fail_at:
            raise InjectedFault(f"call {self.calls} failed", where=what)
        if outside_capture and self.capturing:
            raise RuleBroken(f"{what} while a stream captures", where=str(self.device))

    def _bytes(self, place: Place, nbytes: int) -> np.ndarray:
        if not isinstance(place, int):
            return place.reshape(-1).view(np.uint8)[:nbytes]
        at = bisect_right(self._starts, place) - 1
        start = self._starts[at] if at >= 0 else place
        block = self._memory.get(start)
        if block is None or place + nbytes > start + len(block):
            raise RuleBroken("no memory of this device", where=str(self.device), got=f"{nbytes} bytes at {hex(place)}")
        return block[place - start : place - start + nbytes]

    def _push(self, work: _Work) -> None:
        s = self._streams[work.stream]
        s.issued += 1
        work.at = s.issued
        s.queue.append(work)

    def _run(self, stream: int, until: int) -> None:
        s = self._streams[stream]
        while s.queue and s.queue[0].at <= until:
            work = s.queue.popleft()
            s.ran = work.at
            try:
                work.call()
            except Exception:
                s.queue.clear()  # what is behind a failed kernel never runs
                s.ran = s.issued
                raise


def _filled(nbytes: int) -> np.ndarray:
    """Bytes 0xff from an address that is a multiple of 64 on, as the CPU's own memory: kernels may go by that."""
    block = np.full(nbytes + 64, 0xFF, np.uint8)
    start = -block.ctypes.data % 64
    return block[start : start + nbytes]


def _meet(some: Sequence[Range], others: Sequence[Range]) -> bool:
    return any(a < d and c < b for a, b in some for c, d in others)
