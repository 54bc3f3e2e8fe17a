"""The simulated device: kernels of the CPU over memory of a SimDriver, queued, and run when the host waits for them.

It computes what the CPU computes, to the bit, and refuses what a GPU would get wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import prod
from typing import Any, Never

import numpy as np

from graphwright.array.backend import Attrs, Call, Needs, backend, queued_failure
from graphwright.array.device import CPU, Device, DeviceMismatch, DeviceUnavailable
from graphwright.array.dtype import DType
from graphwright.array.layout import span
from graphwright.array.memory_pool import Block, DriverError, MemoryPool
from graphwright.array.ndarray import NDArray, from_numpy
from graphwright.array.sim.driver import Range, SimDriver
from graphwright.array.spec import Spec
from graphwright.array.storage import Storage
from graphwright.errors import GraphwrightError


class SimStorage(Storage):
    """A block of a pool; it goes back once: at `close()`, or with the last array.

    Attributes:
        block: the pool's.
        written_on: the stream that wrote it last.
    """

    __slots__ = ("block", "pool", "written_on")

    def __init__(self, memory: np.ndarray, pool: MemoryPool, block: Block, stream: int) -> None:
        super().__init__(memory, block.nbytes, pool.driver.device, kind="owned")
        self.pool, self.block, self.written_on = pool, block, stream

    def close(self) -> None:
        """Give the block back. Raises: UsageError for one that a captured graph holds; it stays open."""
        if not self.closed:
            self.pool.free(self.block)
            super().close()

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # a finalizer has nobody to tell
            with suppress(AttributeError):
                self.pool.failed += 1


class SimBackend:
    """Arrays on a SimDriver.

    Attributes:
        driver, pool: its memory.
        stream: the one that work is queued on; see `on`.

    Args:
        without: dtypes that a kernel is not there for, by its name: the host runs it then.
    """

    def __init__(
        self, device: Device, driver: SimDriver | None = None, without: Mapping[str, frozenset[DType]] | None = None
    ) -> None:
        self.device, self.driver, self.without = device, driver or SimDriver(device), without or {}
        self.pool = MemoryPool(self.driver)
        self.stream = 0
        self._cpu: Any = backend(CPU)

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Queue what is asked for inside on another stream."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def allocate(self, nbytes: int) -> Storage:
        """A block of bytes from the pool. Raises: OutOfDeviceMemory."""
        block = self.pool.alloc(max(nbytes, 1), self.stream)
        return SimStorage(self.driver._bytes(block.address, max(nbytes, 1)), self.pool, block, self.stream)

    def empty(self, shape: tuple[int, ...], dtype: DType) -> NDArray:
        """An uninitialised array with memory of its own."""
        return NDArray(self.allocate(prod(shape) * dtype.itemsize), dtype, shape)

    def wrap(self, array: NDArray) -> NDArray:
        """The array as the CPU's kernels see it."""
        host = array.storage.views.get("host")
        if host is None:
            host = array.storage.views["host"] = Storage(array.storage.memory, array.storage.nbytes, CPU)
        return NDArray(host, array.dtype, array.shape, array.strides, array.offset)

    def copy(self, target: NDArray, source: NDArray) -> None:
        """Queue a copy; what lies on the host is taken as it is now, also inside a capture. Copies to the host wait."""
        if target.device != self.device:
            host = self.to_host(source)
            self._cpu.copy(target, from_numpy(host, bits=source.dtype))
            return
        staged = source.copy() if source.device == CPU else source.impl
        call = partial(self._cpu.copy, target.impl, staged)
        self._launch([call], [target], [source] if source.device == self.device else [])

    def to_host(self, array: NDArray) -> np.ndarray:
        """The elements as numpy, after the stream that wrote them."""
        host = np.empty(array.shape, array.dtype.numpy)
        storage = _mine(array)
        if storage.written_on != self.stream:
            self.driver.wait(self.stream, self.driver.record(storage.written_on))
        self._launch([lambda: np.copyto(host, self._cpu.to_host(array.impl))], [], [array])
        self.driver.synchronize(self.stream)
        return host

    def adopt(self, other: Any) -> Never:
        """Raises: DeviceUnavailable: no other library knows this device."""
        raise DeviceUnavailable("nothing outside shares memory of the simulated device", got=type(other).__name__)

    def address(self, array: NDArray) -> Never:
        """Raises: DeviceUnavailable: it lies nowhere that the host may read."""
        raise DeviceUnavailable("memory of the simulated device has no address on the host", got=array.spec)

    def workspace(self, name: str, outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        """Scratch that a kernel wants beside its outputs."""
        return self._cpu.workspace(name, outs, ins, attrs)

    def needs(self, name: str, outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> Needs:
        """What the CPU's kernel looks at; and where there is none for a dtype, that."""
        missing = {s.dtype for s in (*outs, *ins)} & self.without.get(name, frozenset())
        if missing:
            return Needs(fallback=f"no kernel for {', '.join(sorted(d.name for d in missing))} on {self.device}")
        return self._cpu.needs(name, outs, ins, attrs)

    def bind(
        self, name: str, outs: Sequence[NDArray], ins: Sequence[NDArray], attrs: Attrs, work: Sequence[NDArray] = ()
    ) -> list[Call]:
        """One call, which queues the CPU's; what the host must know it takes as it is when the call is made."""
        needs = self.needs(name, [o.spec for o in outs], [i.spec for i in ins], attrs)
        given = {i: a for i, a in enumerate(ins) if a.device == CPU and i in needs.reads}
        seen = {i: a.copy() for i, a in given.items()}
        there = [a for i, a in enumerate(ins) if i not in given]
        inputs = [seen[i] if i in seen else self._here(name, a) for i, a in enumerate(ins)]
        calls = self._cpu.bind(name, [self._here(name, o) for o in outs], inputs, attrs, [w.impl for w in work])
        waits = bool(needs.fallback) or needs.answers  # what is read of the device is read in the queue's order
        if not waits:  # else its caller learns of a failure at once
            calls = [_Kernel(calls, queued_failure.get() or partial(_failure, name, [i.spec for i in ins]))]
        pairs = [(seen[i], a) for i, a in given.items()]

        def launch() -> None:
            if waits:
                self.driver.synchronize(self.stream)
            staged = [(buffer, source.copy()) for buffer, source in pairs]
            steps = [partial(self._cpu.copy, buffer, value) for buffer, value in staged]
            self._launch([*steps, *calls], [*outs, *work], there)
            if needs.answers or needs.fallback:
                self.driver.synchronize(self.stream)

        return [launch if waits or pairs else partial(self._launch, calls, [*outs, *work], there)]

    def _here(self, name: str, array: NDArray) -> NDArray:
        """An operand as the CPU's kernels see it. Raises: DeviceMismatch for one that lies elsewhere."""
        if array.device != self.device:
            raise DeviceMismatch(
                "an operand lies on another device",
                where=name,
                expected=self.device,
                got=f"{array.spec} on {array.device}",
            )
        return array.impl

    def fresh(self, name: str, ins: Sequence[NDArray], attrs: Attrs) -> None:
        """Memory comes from here alone."""

    def has_kernel(self, name: str) -> bool:
        """True if the CPU has a kernel of this name."""
        return self._cpu.has_kernel(name)

    def kernels(self) -> frozenset[str]:
        """The CPU's."""
        return self._cpu.kernels()

    def _launch(self, calls: Sequence[Call], writes: Sequence[NDArray], reads: Sequence[NDArray]) -> None:
        for array in (*writes, *reads):
            _mine(array).block.streams.add(self.stream)
        for array in writes:
            _mine(array).written_on = self.stream
        self.driver.enqueue(self.stream, partial(_all, calls), [_range(a) for a in reads], [_range(a) for a in writes])


class _Kernel:
    """The CPU's calls of one kernel; they run when the host waits, and a failure is told as who bound it wants."""

    __slots__ = ("calls", "failure")

    def __init__(self, calls: Sequence[Call], failure: Callable[[Exception], Exception]) -> None:
        self.calls, self.failure = calls, failure

    def __call__(self) -> None:
        try:
            for call in self.calls:
                call()
        except Exception as error:
            raise self.failure(error) from error


def _failure(name: str, ins: Sequence[Spec], error: Exception) -> Exception:
    """A failure of a kernel that nobody but its caller knows."""
    if isinstance(error, GraphwrightError):
        return error
    return DriverError(f"{name} failed on the device: {error}", where=name, got=", ".join(map(repr, ins)))


def _all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _mine(array: NDArray) -> SimStorage:
    assert isinstance(array.storage, SimStorage), f"{array.spec} lies on {array.device}"
    return array.storage


def _range(array: NDArray) -> Range:
    low, high = span(array.layout)
    base, size = _mine(array).block.address, array.dtype.itemsize
    return base + low * size, base + high * size


make = SimBackend
