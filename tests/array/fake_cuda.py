"""What `TorchDriver` calls of torch.cuda, over memory of the CPU: work runs at once, captured work when replayed.

While a stream captures, operators of ATen are noted and not run, and what a GPU forbids then raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphwright.array import Device
from graphwright.array.cuda.driver import TorchDriver
from graphwright.array.memory_pool import DeviceFull

HOST = torch.device("cpu")
OTHER = Device("sim:2")
"""The name of a device over fakes."""


class Stream:
    def __init__(self, cuda: FakeCuda, number: int) -> None:
        self.cuda, self.cuda_stream = cuda, number

    def wait_event(self, event: Event) -> None:
        self.cuda.note("wait", self, event.number)

    def wait_stream(self, other: Stream) -> None:
        self.cuda.note("wait_stream", self, other.cuda_stream)

    def synchronize(self) -> None:
        self.cuda.allowed("synchronize")
        self.cuda.note("synchronize", self)


class Event:
    def __init__(self, cuda: FakeCuda) -> None:
        cuda.events += 1
        self.cuda, self.number, self.recorded = cuda, cuda.events, False

    def record(self, stream: Stream) -> None:
        self.recorded = True
        self.cuda.note("record", stream, self.number)

    def query(self) -> bool:
        self.cuda.allowed("query of an event")
        return self.recorded


class _Recording(TorchDispatchMode):
    """Notes operators that write memory instead of running them; results of others are made, and again at replay."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], object]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(function)
        if name in ("aten._local_scalar_dense.default", "aten.nonzero.default"):
            raise RuntimeError("operation not permitted when stream is capturing")
        if function._schema.is_mutable:
            self.steps.append(lambda: function(*args, **kwargs))
            written = [kwargs[a.name] if a.name in kwargs else args[i]
                       for i, a in enumerate(function._schema.arguments)
                       if a.alias_info is not None and a.alias_info.is_write]  # fmt: skip
            count = len(function._schema.returns)
            return written[0] if count == 1 else tuple(written[:count]) or None
        made = function(*args, **kwargs)
        if any(r.alias_info is not None for r in function._schema.returns):
            return made  # a view

        def again() -> None:
            for kept, new in zip(tree_leaves(made), tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(kept, torch.Tensor):
                    kept.copy_(new)

        self.steps.append(again)
        return made


class CUDAGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.recording = cuda, _Recording()

    def capture_begin(self, capture_error_mode: str = "global") -> None:
        self.cuda.note("capture_begin", self.cuda.now, capture_error_mode)
        if self.cuda.now.cuda_stream == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        self.cuda.capturing = self
        self.recording.__enter__()

    def capture_end(self) -> None:
        self.cuda.note("capture_end", self.cuda.now)
        self.cuda.capturing = None
        self.recording.__exit__(None, None, None)
        if self.cuda.invalid:
            self.cuda.invalid = False
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture\nmore lines")

    def replay(self) -> None:
        self.cuda.note("replay", self.cuda.now)
        for step in self.recording.steps:
            step()


class FakeCuda:
    """torch.cuda of one device of `total` bytes; `log` has (call, stream, facts) in order."""

    def __init__(self, index: int = 0, total: int = 2**28) -> None:
        self.index, self.total, self.events, self.streams = index, total, 0, 0
        self.log: list[tuple[Any, ...]] = []
        self.active = index
        self.capturing: CUDAGraph | None = None
        self.invalid = False
        self.default = self.now = Stream(self, 0)
        self.used: Callable[[], int] = lambda: 0

    def note(self, what: str, stream: Stream, *facts: Any) -> None:
        self.log.append((what, stream.cuda_stream, *facts))

    def allowed(self, what: str) -> None:
        if self.capturing is not None:
            self.invalid = True
            raise RuntimeError(f"CUDA error: {what} is not permitted when stream is capturing")

    def _on(self, device: Any) -> None:
        assert device == self.index, f"asked for device {device}, not {self.index}"

    def Stream(self, device: int) -> Stream:  # as in torch
        self._on(device)
        self.streams += 1
        return Stream(self, self.streams)

    def Event(self) -> Event:
        return Event(self)

    def CUDAGraph(self) -> CUDAGraph:
        return CUDAGraph(self)

    def current_stream(self, device: int) -> Stream:
        self._on(device)
        return self.now

    def current_device(self) -> int:
        return self.active

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now, self.active = (self.now, self.active), stream, self.index
        try:
            yield
        finally:
            self.now, self.active = before

    def synchronize(self, device: int) -> None:
        self._on(device)
        self.allowed("synchronize")
        self.note("synchronize all", self.now)

    def mem_get_info(self, device: int) -> tuple[int, int]:
        self._on(device)
        return self.total - self.used(), self.total

    def memory_reserved(self, device: int) -> int:
        self._on(device)
        return 0

    def memory_allocated(self, device: int) -> int:
        self._on(device)
        return 0


class LimitedDriver(TorchDriver):
    """A driver that is full after the bytes of its fake device, as torch's allocator says."""

    def __init__(self, device: Device = OTHER, index: int = 2, total: int = 2**28) -> None:
        super().__init__(device, FakeCuda(index, total), HOST)
        self.cuda.used = lambda: sum(map(len, self._segments.values()))

    def alloc(self, nbytes: int) -> int:
        if nbytes > self.mem_info()[0]:
            raise DeviceFull("the device is full", got=nbytes)
        return super().alloc(nbytes)
