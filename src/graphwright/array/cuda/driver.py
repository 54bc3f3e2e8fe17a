"""TorchDriver: memory, streams, events and graphs of a GPU by torch's CUDA runtime.

Memory is taken from torch's allocator in whole segments, so torch's libraries (cuBLAS, cuDNN) and other users of torch
share one budget and one context with this package. Stream 0 is torch's current stream of the device, read whenever
work is queued: inside `with torch.cuda.stream(s)` arrays are computed on s.
"""

from __future__ import annotations

import gc
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch

from graphwright.array.device import Device
from graphwright.array.memory_pool import Address, DeviceFull, DriverError, Range

Method = TypeVar("Method", bound=Callable[..., Any])


def _typed_errors(method: Method) -> Method:
    """Return a method of TorchDriver that raises DriverError for errors of torch's runtime."""

    @wraps(method)
    def run(self: TorchDriver, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise DeviceFull("the device is full", where=str(self.device), got=_line(error)) from error
        except (RuntimeError, torch.AcceleratorError) as error:
            if isinstance(error, DriverError):
                raise
            raise DriverError(f"{method.__name__} failed: {_line(error)}", where=str(self.device)) from error

    return cast("Method", run)


class _Handle(int):
    """A number of an event or graph that keeps torch's object alive, and no longer than itself."""

    held: Any

    def __new__(cls, number: int, held: Any) -> _Handle:
        """Return a handle that is equal to its number."""
        made = super().__new__(cls, number)
        made.held = held
        return made


class _Capture(NamedTuple):
    """A capture: its graph, the context in which `side` is torch's current stream, and the stream that it is for.

    Attributes:
        known: the number that `side` had before, if any.
        collects: whether Python's garbage collection was on.
    """

    graph: Any
    inside: Any
    side: Any
    number: int
    known: int | None
    collects: bool


class TorchDriver:
    """The driver of one GPU.

    Args:
        device: the device.
        cuda: torch.cuda, or an object with the functions of it that are used here, for tests.
        torch_device: torch's device of the memory; by default the GPU of the index of `device`.
    """

    queues_host_reads = False

    def __init__(self, device: Device, cuda: Any = torch.cuda, torch_device: torch.device | None = None) -> None:
        self.device, self.cuda = device, cuda
        self.torch_device = torch_device or torch.device("cuda", device.index)
        self._segments: dict[int, torch.Tensor] = {}
        self._starts: list[int] = []
        self._streams: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self._events = self._graphs = 0
        self._capture: _Capture | None = None
        self._side: Any = None
        self._late: list[tuple[Any, Any]] = []

    # -- memory ------------------------------------------------------------------------------------------------------
    @_typed_errors
    def alloc(self, nbytes: int) -> int:
        """Allocate memory and return its address. Raises: DeviceFull."""
        if nbytes <= 0:
            raise DeviceFull("cannot allocate less than one byte", where=str(self.device), got=nbytes)
        if self._capture is not None:
            raise DriverError("memory was allocated while a stream captures", where=str(self.device), got=nbytes)
        segment = torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        address = segment.data_ptr()
        self._segments[address] = segment
        insort(self._starts, address)
        return address

    def free(self, address: int) -> None:
        """Return an allocation to torch's allocator. Raises: DriverError if none begins at the address."""
        if address not in self._segments:
            raise DriverError("no allocation begins at this address", where=str(self.device), got=hex(address))
        del self._segments[address]
        self._starts.remove(address)

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """Return a uint8 tensor over allocated bytes. Raises: DriverError if they are not this device's."""
        at = bisect_right(self._starts, address) - 1
        start = self._starts[at] if at >= 0 else address
        segment = self._segments.get(start)
        if segment is None or address + nbytes > start + len(segment):
            raise DriverError("the address range is not allocated on the device", where=str(self.device),
                              got=f"{nbytes} bytes at {hex(address)}")  # fmt: skip
        return segment[address - start : address - start + nbytes]

    def constants(self) -> AbstractContextManager[object]:
        """Return a context in which torch makes tensors on the device."""
        return torch.device(self.torch_device)

    @_typed_errors
    def copy(self, target: Address, source: Address, nbytes: int, stream: int = 0) -> None:
        """Queue a copy; a copy to the host has run when this returns."""
        to, of = self._bytes(target, nbytes), self._bytes(source, nbytes)
        with self._on(stream):
            to.copy_(of, non_blocking=isinstance(target, int))

    @_typed_errors
    def fill(self, address: int, value: int, nbytes: int, stream: int = 0) -> None:
        """Queue a fill with one byte value."""
        with self._on(stream):
            self.tensor(address, nbytes).fill_(value)

    def mem_info(self) -> tuple[int, int]:
        """Return (free, total) bytes; memory that torch's allocator caches counts as free."""
        free, total = self.cuda.mem_get_info(self.device.index)
        cached = self.cuda.memory_reserved(self.device.index) - self.cuda.memory_allocated(self.device.index)
        return free + cached, total

    def _bytes(self, address: Address, nbytes: int) -> torch.Tensor:
        if isinstance(address, int):
            return self.tensor(address, nbytes)
        return torch.from_numpy(address.reshape(-1).view("u1")[:nbytes])

    # -- streams -----------------------------------------------------------------------------------------------------
    def stream(self) -> int:
        """Return a new stream."""
        return self._number(self.cuda.Stream(device=self.device.index))

    def current(self, stream: int) -> int:
        """Return `stream`, or for stream 0 the number of torch's current stream."""
        return stream or self._number(self.cuda.current_stream(self.device.index))

    def enqueue(self, stream: int, call: Callable[[], object], reads: Sequence[Range], writes: Sequence[Range]) -> None:
        """Run `call`, whose kernels are queued on the stream, with this device as torch's current one."""
        if stream == self.current(0) and self.cuda.current_device() == self.device.index:
            call()
        else:
            with self._on(stream):
                call()

    @_typed_errors
    def record(self, stream: int) -> int:
        """Return an event that completes when all work queued on the stream so far has run.

        During a capture it is recorded only when that has ended: an event of captured work cannot be asked for.
        """
        self._events += 1
        event, there = self.cuda.Event(), self._streams[self.current(stream)]
        if self._capture is None:
            event.record(there)
        else:
            self._late.append((event, there))
        return _Handle(self._events, event)

    @_typed_errors
    def wait(self, stream: int, event: int) -> None:
        """Make later work on the stream wait for the event."""
        self._of(stream).wait_event(_held(event))

    @_typed_errors
    def done(self, event: int) -> bool:
        """Return True if an event has completed."""
        held = _held(event)
        return all(held is not late for late, _ in self._late) and held.query()

    @_typed_errors
    def synchronize(self, stream: int | None = None) -> None:
        """Wait for a stream, or for all work on the device."""
        if stream is None:
            self.cuda.synchronize(self.device.index)
        else:
            self._of(stream).synchronize()

    def _number(self, stream: Any) -> int:
        """Return the number of a stream of torch, which is at least 1."""
        known = self._numbers.setdefault(stream.cuda_stream, len(self._numbers) + 1)
        self._streams.setdefault(known, stream)
        return known

    def _of(self, stream: int) -> Any:
        """Return torch's stream for work on `stream`: during a capture, the side stream for the one that captures."""
        number, capture = self.current(stream), self._capture
        return capture.side if capture is not None and capture.number == number else self._streams[number]

    @contextmanager
    def _on(self, stream: int) -> Iterator[None]:
        with self.cuda.stream(self._of(stream)):
            yield

    # -- graphs ------------------------------------------------------------------------------------------------------
    @_typed_errors
    def begin_capture(self, stream: int) -> None:
        """Begin to capture on a side stream that waits for `stream` and is torch's current one until `end_capture`."""
        if self._capture is not None:
            raise DriverError("a stream captures already", where=str(self.device))
        number, graph = self.current(stream), self.cuda.CUDAGraph()
        if self._side is None:
            self._side = self.cuda.Stream(device=self.device.index)
        side = self._side
        side.wait_stream(self._streams[number])
        inside = self.cuda.stream(side)
        inside.__enter__()
        try:
            graph.capture_begin(capture_error_mode="relaxed")  # kernels that are new after an edit may be loaded
        except BaseException:
            inside.__exit__(None, None, None)
            raise
        known = self._numbers.get(side.cuda_stream)
        self._numbers[side.cuda_stream] = number  # what is captured runs on the stream that replays it
        self._capture = _Capture(graph, inside, side, number, known, gc.isenabled())
        gc.disable()  # it might destroy another graph, which a capture forbids

    @_typed_errors
    def end_capture(self, stream: int) -> int:
        """End the capture and return its graph. torch's current stream is the one before, even if this raises."""
        if self._capture is None:
            raise DriverError("no capture was begun", where=str(self.device))
        (graph, inside, side, number, known, collects), self._capture = self._capture, None
        try:
            graph.capture_end()
        finally:
            if collects:
                gc.enable()
            if known is None:
                del self._numbers[side.cuda_stream]
            else:
                self._numbers[side.cuda_stream] = known
            inside.__exit__(None, None, None)
            with suppress(RuntimeError):  # the error of the capture matters more
                self._streams[number].wait_stream(side)
            late, self._late = self._late, []
            for event, there in late:
                event.record(there)
        self._graphs += 1
        return _Handle(self._graphs, graph)

    def instantiate(self, graph: int) -> int:
        """Return the graph, which torch instantiates when the capture ends."""
        return graph

    @_typed_errors
    def replay(self, ready: int, stream: int) -> None:
        """Queue all work of a graph on the stream."""
        with self._on(stream):
            _held(ready).replay()


def _held(handle: int) -> Any:
    assert isinstance(handle, _Handle), "a number that no driver call returned"
    return handle.held


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]
