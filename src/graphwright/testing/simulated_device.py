"""A simulated device for tests: the CPU's kernels on host memory, under the rules of a GPU.

Importing this module makes the device kind `sim` available. It computes what the CPU computes, bit for bit. Work is
queued and runs only when the host waits (`synchronize`, `advance`), each stream in order and after the events that it
waits for; an error that a GPU would not detect, such as a missing wait between streams, raises.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Never

import numpy as np

from graphwright.array.backend import Attrs, Call, Needs, register_backend
from graphwright.array.cpu.kernel import kernel_of
from graphwright.array.device import Device, DeviceUnavailable
from graphwright.array.device_backend import HOST, Choice, DeviceBackend, host_tensor
from graphwright.array.dtype import DType
from graphwright.array.memory_pool import Address, DeviceFull, DriverError, Range
from graphwright.array.ndarray import NDArray
from graphwright.array.spec import Spec
from graphwright.ops import OPS
from graphwright.patterns.table import KIND

_ALIGN = 512


class RuleBroken(DriverError):
    """An operation that a GPU would run and compute wrongly: a missing wait, use after free, a sync in a capture."""


class InjectedFault(DriverError):
    """The fault that a test injected."""


@dataclass(eq=False, slots=True)
class _Work:
    """One entry of a stream's queue: a call, the address ranges that it reads and writes, and its number `at`."""

    call: Callable[[], object]
    reads: Sequence[Range]
    writes: Sequence[Range]
    stream: int
    at: int = 0


@dataclass(slots=True)
class _Stream:
    """A queue of work; `seen` maps another stream to the number of its last entry that this stream has waited for."""

    queue: deque[_Work] = field(default_factory=deque)
    issued: int = 0
    ran: int = 0
    seen: dict[int, int] = field(default_factory=dict)
    capture: list[_Work] | None = None
    invalid: bool = False


class SimDriver:
    """The driver of a device of `capacity` bytes in host memory; it counts its calls by kind.

    Call number `fail_at`, counted from 1, raises InjectedFault.
    """

    queues_host_reads = True
    torch_device = HOST

    def __init__(self, device: Device | None = None, capacity: int = 2**33, fail_at: int | None = None) -> None:
        self.device, self.capacity, self.fail_at = device or Device("sim"), capacity, fail_at
        self.calls = self.allocs = self.frees = self.syncs = self.launches = self.replays = 0
        self._memory: dict[int, np.ndarray] = {}
        self._starts: list[int] = []
        self._used = 0
        self._next = (self.device.index + 1) << 44  # so that addresses of two devices never coincide
        self._streams: list[_Stream] = [_Stream()]
        self._events: list[tuple[int, int, dict[int, int]]] = []
        self._graphs: list[list[_Work]] = []

    # -- memory ------------------------------------------------------------------------------------------------------
    def alloc(self, nbytes: int) -> int:
        """Allocate memory filled with 0xff, NaN in every float dtype; return its address. Raises: DeviceFull."""
        self._tick("alloc", outside_capture=True)
        if nbytes <= 0 or self._used + nbytes > self.capacity:
            expected, got = f"{nbytes} free bytes", f"{self.mem_info()[0]} free bytes"
            what = "the device is full" if nbytes > 0 else "cannot allocate less than one byte"
            raise DeviceFull(what, where=str(self.device), expected=expected, got=got)
        address = self._next
        self._next += -(-nbytes // _ALIGN) * _ALIGN + _ALIGN  # the gap detects writes past the end
        block = np.full(nbytes + 64, 0xFF, np.uint8)  # aligned to 64, as kernels of the CPU may rely on
        start = -block.ctypes.data % 64
        self._memory[address] = block[start : start + nbytes]
        insort(self._starts, address)
        self._used += nbytes
        self.allocs += 1
        return address

    def free(self, address: int) -> None:
        """Free an allocation. Raises: DriverError if none begins at `address`; RuleBroken if queued work uses it."""
        self._tick("free", outside_capture=True)
        if address not in self._memory:
            raise DriverError("no allocation begins at this address", where=str(self.device), got=hex(address))
        whole = (address, address + len(self._memory[address]))
        if any(_meet([whole], [*w.reads, *w.writes]) for s in self._streams for w in s.queue):
            raise RuleBroken("memory was freed while queued work uses it", got=hex(address), fix="call synchronize()")
        self._used -= len(self._memory.pop(address))
        self._starts.remove(address)
        self.frees += 1

    def copy(self, target: Address, source: Address, nbytes: int, stream: int = 0) -> None:
        """Queue a copy of `nbytes` bytes; `target` and `source` are device addresses or host arrays."""
        to, of = self._bytes(target, nbytes), self._bytes(source, nbytes)
        reads = [(source, source + nbytes)] if isinstance(source, int) else []
        writes = [(target, target + nbytes)] if isinstance(target, int) else []
        self.enqueue(stream, partial(np.copyto, to, of), reads, writes)

    def fill(self, address: int, value: int, nbytes: int, stream: int = 0) -> None:
        """Queue work that sets `nbytes` bytes to `value`."""
        self.enqueue(stream, partial(self._bytes(address, nbytes).fill, value), [], [(address, address + nbytes)])

    def mem_info(self) -> tuple[int, int]:
        """Return (free, total) bytes."""
        return self.capacity - self._used, self.capacity

    def read(self, address: int, nbytes: int) -> np.ndarray:
        """Return bytes of the device, without waiting. Raises: RuleBroken while a queued write would change them."""
        if any(_meet([(address, address + nbytes)], work.writes) for s in self._streams for work in s.queue):
            what = "the host reads memory that queued work will write"
            raise RuleBroken(what, got=hex(address), fix="call synchronize()")
        return self._bytes(address, nbytes)

    def tensor(self, address: int, nbytes: int) -> Any:
        """Return a uint8 tensor over allocated bytes, as kernels that are run from the queue need it."""
        return host_tensor(self._bytes(address, nbytes))

    def constants(self) -> AbstractContextManager[object]:
        """Return a context that changes nothing: kernels read the constants that torch makes on the CPU."""
        return nullcontext()

    # -- streams -----------------------------------------------------------------------------------------------------
    def current(self, stream: int) -> int:
        """Return the stream itself: there is no other library."""
        return stream

    def stream(self) -> int:
        """Create a stream; return its handle."""
        self._tick("stream")
        self._streams.append(_Stream())
        return len(self._streams) - 1

    def record(self, stream: int) -> int:
        """Record an event at the end of a stream's queue; return its handle."""
        self._tick("record")
        s = self._streams[stream]
        self._events.append((stream, s.issued, {**s.seen, stream: s.issued}))
        return len(self._events) - 1

    def wait(self, stream: int, event: int) -> None:
        """Make later work on the stream wait for the event."""
        self._tick("wait")
        other, at, seen = self._events[event]
        s = self._streams[stream]
        s.seen = {k: max(s.seen.get(k, 0), seen.get(k, 0)) for k in {*s.seen, *seen}}
        self._push(_Work(partial(self._run, other, at), [], [], stream))

    def done(self, event: int) -> bool:
        """Return True if an event has completed."""
        stream, at, _ = self._events[event]
        return self._streams[stream].ran >= at

    def synchronize(self, stream: int | None = None) -> None:
        """Run the queued work of a stream, or of all streams."""
        self._tick("synchronize", outside_capture=True)
        self.syncs += 1
        for i in range(len(self._streams)) if stream is None else [stream]:
            self._run(i, self._streams[i].issued)

    def advance(self, stream: int, count: int = 1) -> None:
        """Run the next `count` entries of a stream's queue, as a GPU may at any time."""
        self._run(stream, min(self._streams[stream].ran + count, self._streams[stream].issued))

    def enqueue(self, stream: int, call: Callable[[], object], reads: Sequence[Range], writes: Sequence[Range]) -> None:
        """Queue `call`, a kernel that reads and writes these ranges (start address, end address).

        Raises: RuleBroken if a range is not allocated, or another stream's queued work uses it.
        """
        self._tick("launch")
        captured = self._streams[stream].capture
        self._check(stream, reads, writes)
        work = _Work(call, reads, writes, stream)
        if captured is not None:
            captured.append(work)
        else:
            self.launches += 1
            self._push(work)

    def _check(self, stream: int, reads: Sequence[Range], writes: Sequence[Range]) -> None:
        """Check that ranges are allocated and not used by other streams' queued work. Raises: RuleBroken if not."""
        for low, high in (*reads, *writes):
            self._bytes(low, high - low)
        s = self._streams[stream]
        others = enumerate(self._streams) if s.capture is None else ()
        for i, w in ((i, w) for i, o in others if i != stream for w in o.queue if w.at > s.seen.get(i, 0)):
            if _meet(writes, [*w.reads, *w.writes]) or _meet(reads, w.writes):
                raise RuleBroken("two streams use the same memory without a wait between them",
                                 got=f"streams {stream} and {i}", fix="call wait(stream, record(other))")  # fmt: skip

    # -- graphs ------------------------------------------------------------------------------------------------------
    def begin_capture(self, stream: int) -> None:
        """Begin to record the work queued on the stream instead of running it."""
        self._tick("begin_capture", outside_capture=True)
        self._streams[stream].capture = []

    def end_capture(self, stream: int) -> int:
        """End the capture; return the graph's handle. Raises: RuleBroken if none was begun, or it was invalidated."""
        s = self._streams[stream]
        (kept, s.capture), (invalid, s.invalid) = (s.capture, None), (s.invalid, False)
        self._tick("end_capture")
        if kept is None or invalid:
            what = "the capture was invalidated" if invalid else "no capture was begun on this stream"
            raise RuleBroken(what, where=f"stream {stream}")
        self._graphs.append(kept)
        return len(self._graphs) - 1

    def invalidate(self, stream: int) -> None:
        """Invalidate a stream's capture, as a forbidden call does on a GPU."""
        self._streams[stream].invalid = self._streams[stream].capture is not None

    def instantiate(self, graph: int) -> int:
        """Prepare a captured graph; return a handle for `replay`."""
        self._tick("instantiate")
        return graph

    def replay(self, ready: int, stream: int) -> None:
        """Queue a prepared graph. Raises: RuleBroken if its memory was freed or is in use by another stream's work."""
        self._tick("replay")
        for work in self._graphs[ready]:
            self._check(stream, work.reads, work.writes)
        self.replays += 1
        for work in self._graphs[ready]:
            self._push(replace(work, stream=stream))

    @property
    def capturing(self) -> bool:
        """True while a stream captures."""
        return any(s.capture is not None for s in self._streams)

    # -- inside ------------------------------------------------------------------------------------------------------
    def _tick(self, what: str, outside_capture: bool = False) -> None:
        self.calls += 1
        if self.calls == self.fail_at:
            raise InjectedFault(f"driver call {self.calls} failed, as the test requested", where=what)
        if outside_capture and self.capturing:
            raise RuleBroken(f"{what} was called while a stream captures", where=str(self.device))

    def _bytes(self, address: Address, nbytes: int) -> np.ndarray:
        if not isinstance(address, int):
            return address.reshape(-1).view(np.uint8)[:nbytes]
        at = bisect_right(self._starts, address) - 1
        start = self._starts[at] if at >= 0 else address
        block = self._memory.get(start)
        if block is None or address + nbytes > start + len(block):
            got = f"{nbytes} bytes at {hex(address)}"
            raise RuleBroken("the address range is not allocated on the device", where=str(self.device), got=got)
        return block[address - start : address - start + nbytes]

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
                s.queue.clear()  # work after a failed kernel never runs
                s.ran = s.issued
                raise


def _meet(some: Sequence[Range], others: Sequence[Range]) -> bool:
    return any(a < d and c < b for a, b in some for c, d in others)


class SimBackend(DeviceBackend):
    """The backend of the simulated device: all kernels of the CPU, with its bits.

    `without` maps the name of a kernel to dtypes that it lacks on this device; for these it runs on the host. With
    `fuses` fusion groups run as generated kernels in Triton's interpreter, which needs TRITON_INTERPRET=1.
    """

    driver: SimDriver

    def __init__(
        self, device: Device, driver: SimDriver | None = None, without: Mapping[str, frozenset[DType]] | None = None,
        fuses: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(device, driver or SimDriver(device), fuses)
        self.without, self.has_kernel = without or {}, self._cpu.has_kernel

    def choice(self, name: str, outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> Choice:
        """Return the CPU's kernel, which runs on the host for dtypes that this device lacks."""
        missing = {s.dtype for s in (*outs, *ins)} & self.without.get(name, frozenset())
        if missing:
            why = f"no kernel for {', '.join(sorted(d.name for d in missing))} on {self.device}"
            return Choice("host", kernel_of(name), why)
        return Choice("aten", kernel_of(name))

    def needs(self, name: str, outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> Needs:
        """Return what the CPU's kernel requires of the host, or the reason why the op runs on the host."""
        asked = super().needs(name, outs, ins, attrs)
        by_table = name in OPS and OPS[name].traits.table is not None
        return Needs() if by_table and not asked.fallback else asked  # a GPU reads the table there: `PatternMirror`

    def adopt(self, other: Any) -> Never:
        """Raise DeviceUnavailable: other libraries do not know this device."""
        what = "the simulated device cannot share memory with another library"
        raise DeviceUnavailable(what, got=type(other).__name__)

    def word_kernel(self, table: NDArray, memory: NDArray, queue: NDArray) -> Call:
        """Return the call that queues a kernel which applies words to the arrays of a `PatternMirror`."""
        cells, numbers, words = (array.impl.numpy() for array in (memory, table, queue))
        base = self.pointer(memory)

        def apply() -> None:
            count, words[0] = int(words[0]), 0
            for at, index, value in words[1 : 1 + 3 * count].reshape(-1, 3).tolist():
                if at == 0:
                    numbers[index] = value
                elif at == KIND:
                    cells.view(np.uint8)[numbers[at] - base + index] = value
                else:
                    cells[(numbers[at] - base) // 4 + index] = value

        return self._launched([apply], [memory, queue], [queue])


register_backend("sim", SimBackend)
