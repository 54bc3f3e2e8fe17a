"""DeviceBackend: memory and kernels of a device with queues, a GPU or the simulated one.

Arrays are blocks of a pool, seen by kernels as torch tensors over the same bytes; calls are queued on a stream by the
driver. Only `to_host` and kernels that the host waits for synchronise. A backend adds which kernel runs an op
(`choice`); where none does, the op runs on the host: operands are copied there, and results back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from math import prod
from typing import Any, NamedTuple, Never, Protocol

import numpy as np
import torch

from graphwright.array.backend import Attrs, Call, Needs, backend, queued_failure
from graphwright.array.cpu.kernel import TORCH_DTYPE, Kernel
from graphwright.array.device import CPU, Device, DeviceMismatch, DeviceUnavailable
from graphwright.array.dtype import DType
from graphwright.array.dtype import dtype as named
from graphwright.array.layout import Layout, span
from graphwright.array.memory_pool import Block, Driver, DriverError, MemoryPool, Range
from graphwright.array.ndarray import NDArray, empty, from_numpy
from graphwright.array.spec import Spec
from graphwright.array.storage import Storage
from graphwright.array.triton.fused import Kernel as Generated
from graphwright.errors import GraphwrightError

Specs = Sequence[Spec]


HOST = torch.device("cpu")
host_tensor = torch.from_numpy


class VisibleDriver(Driver, Protocol):
    """A driver whose memory torch can see, on the device of torch `torch_device`."""

    torch_device: torch.device

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """Return a uint8 tensor over allocated bytes."""
        ...

    def constants(self) -> AbstractContextManager[object]:
        """Return a context in which torch's functions that make tensors make them where kernels can read them."""
        ...


class Choice(NamedTuple):
    """How a backend runs an op on operands of given specs.

    Attributes:
        source: the table of the kernel: "triton", "torch" or "aten"; "host" for that of the CPU, run on the host.
        kernel: the kernel, or None if not even the CPU has one.
        why: why the op runs on the host, or "".
    """

    source: str
    kernel: Kernel | None
    why: str = ""


class DeviceStorage(Storage):
    """A block of a memory pool, and the stream that last wrote it; freed by `close()` or with the last array.

    Without a pool, the memory is that of another library, which frees it.
    """

    __slots__ = ("block", "pool", "written_on")

    def __init__(
        self, memory: torch.Tensor, device: Device, block: Block, stream: int, pool: MemoryPool | None
    ) -> None:
        super().__init__(memory, block.nbytes, device, kind="owned" if pool is not None else "borrowed")
        self.pool, self.block, self.written_on = pool, block, stream

    def close(self) -> None:
        """Free the block. Raises: UsageError if a captured graph uses it; then it is not freed."""
        if not self.closed:
            if self.pool is not None:
                self.pool.free(self.block)
            super().close()

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # a finalizer has no caller to report to
            with suppress(AttributeError):
                self.pool.failed += 1  # pyright: ignore[reportOptionalMemberAccess]


class DeviceBackend:
    """The backend of a device whose driver queues calls; work is queued on `stream`, see `on`.

    Attributes:
        stream: the driver's stream; 0 is torch's current stream when a call is queued.
        pool: the memory.
        fuses: whether plans give it fusion groups, which run as generated Triton kernels.
    """

    def __init__(self, device: Device, driver: VisibleDriver, fuses: bool = False) -> None:
        self.device, self.driver, self.fuses = device, driver, fuses
        self.pool = MemoryPool(driver)
        self.stream = 0
        self._cpu: Any = backend(CPU)

    def choice(self, name: str, outs: Specs, ins: Specs, attrs: Attrs) -> Choice:
        """Return which kernel runs the op `name` on operands of these specs."""
        raise NotImplementedError

    def has_kernel(self, name: str) -> bool:
        """Return True if a kernel of this name runs on the device."""
        raise NotImplementedError

    def kernels(self) -> frozenset[str]:
        """Return the names of all kernels, of the host too."""
        return self._cpu.kernels()

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Queue the work of the `with` block on another stream."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    # -- memory ------------------------------------------------------------------------------------------------------
    def allocate(self, nbytes: int) -> Storage:
        """Return a block of bytes from the pool. Raises: OutOfDeviceMemory."""
        stream, size = self.driver.current(self.stream), max(nbytes, 1)
        block = self.pool.alloc(size, stream)
        return DeviceStorage(self.driver.tensor(block.address, size), self.device, block, stream, self.pool)

    def empty(self, shape: tuple[int, ...], dtype: DType) -> NDArray:
        """Return an uninitialised array with its own memory."""
        return NDArray(self.allocate(prod(shape) * dtype.itemsize), dtype, shape)

    def wrap(self, array: NDArray) -> torch.Tensor:
        """Return a torch tensor over the memory of an array, whose strides must not be negative."""
        block = _typed(array.storage, array.dtype)
        return torch.as_strided(block, array.shape, array.strides, block.storage_offset() + array.offset)

    def adopt(self, other: Any) -> NDArray:
        """Return an array over the memory of an object that supports DLPack, which it keeps alive."""
        tensor = torch.from_dlpack(other)
        bytes_ = tensor.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(bytes_)
        stream = self.driver.current(self.stream)
        block = Block(bytes_.data_ptr(), bytes_.nbytes(), "borrowed", {stream}, -1, None)
        storage = DeviceStorage(flat, self.device, block, stream, None)
        kind = named(str(tensor.dtype).removeprefix("torch."))
        return NDArray(storage, kind, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def address(self, array: NDArray) -> Never:
        """Raise DeviceUnavailable: memory of a device has no host address."""
        raise DeviceUnavailable("memory of the device has no host address", where=str(self.device), got=array.spec)

    def pointer(self, array: NDArray) -> int:
        """Return the address of the first element as kernels of the device use it; see `PatternMirror`."""
        return array.impl.data_ptr()

    # -- copies ------------------------------------------------------------------------------------------------------
    def copy(self, target: NDArray, source: NDArray) -> None:
        """Queue a copy. A source in host memory is read at once, even during a capture; a copy to the host waits."""
        if target.device != self.device:
            self._cpu.copy(target, from_numpy(self.to_host(source), bits=source.dtype))
        elif source.device == CPU:
            self._send(target, source.copy() if self.driver.queues_host_reads or _backwards(source) else source)
        else:
            self._launch([_moved(target, source)], [target], [source])

    def _send(self, target: NDArray, source: NDArray) -> None:
        pinned = self.driver.torch_device.type == "cuda" and source.impl.is_pinned()  # other host memory is staged
        self._launch([_moved(target, source, blocking=pinned)], [target], [])

    def to_host(self, array: NDArray) -> np.ndarray:
        """Return the elements as numpy, after waiting for the stream that wrote them."""
        host, stream = empty(array.shape, array.dtype), self.driver.current(self.stream)
        written = _mine(array).written_on
        if written != stream:
            self.driver.wait(stream, self.driver.record(written))
        self._launch([_moved(host, array, blocking=True)], [], [array])
        self.driver.synchronize(stream)
        return host.to_numpy(bits=True)

    # -- kernels -----------------------------------------------------------------------------------------------------
    def workspace(self, name: str, outs: Specs, ins: Specs, attrs: Attrs) -> list[Spec]:
        """Return the specs of the scratch buffers that the kernel of an op needs on the device."""
        source, row, _ = self.choice(name, outs, ins, attrs)
        return row.work(outs, ins, attrs) if row is not None and row.work is not None and source != "host" else []

    def needs(self, name: str, outs: Specs, ins: Specs, attrs: Attrs) -> Needs:
        """Return what the kernel requires of the host, or the reason why the op runs on the host."""
        source, row, why = self.choice(name, outs, ins, attrs)
        asked = row.needs(ins, attrs) if row is not None else Needs()
        return Needs(asked.reads, fallback=why) if source == "host" else asked

    def bind(
        self, name: str, outs: Sequence[NDArray], ins: Sequence[NDArray], attrs: Attrs, work: Sequence[NDArray] = ()
    ) -> list[Call]:
        """Return a list of one call, which queues the kernel's calls; `work` are scratch buffers.

        Operands in host memory whose values the kernel needs when it is launched are copied at each call.
        """
        specs = [o.spec for o in outs], [i.spec for i in ins]
        source, row, _ = self.choice(name, *specs, attrs)
        asked = self.needs(name, *specs, attrs)
        seen = {i for i, a in enumerate(ins) if a.device == CPU and i in asked.reads}
        for array in (*outs, *(a for i, a in enumerate(ins) if i not in seen), *work):
            if array.device != self.device:
                raise DeviceMismatch("an operand is on a different device", where=name, expected=self.device,
                                     got=f"{array.spec} on {array.device}")  # fmt: skip
        if source == "host" or row is None:
            return [self._on_host(name, outs, ins, attrs, seen)]
        if row.reads_values:
            self.driver.synchronize(self.stream)
        kept = {i: ins[i].copy() for i in seen}
        given = [kept.get(i, a).impl for i, a in enumerate(ins)]
        with self.driver.constants():
            calls = _bound(row, [o.impl for o in outs], given, attrs, [w.impl for w in work])
        if not asked.answers:  # otherwise the caller sees a failure at once
            calls = [_guarded(calls, queued_failure.get() or partial(_failure, name, specs[1]))]
        there, written = [a for i, a in enumerate(ins) if i not in seen], [*outs, *work]
        if not seen and not asked.answers:
            return [self._launched(calls, written, there)]

        def run() -> None:
            if asked.answers:
                self.driver.synchronize(self.stream)  # results that the host reads must follow the queue's order
            steps = [partial(self._cpu.copy, copy, ins[i].copy()) for i, copy in kept.items()]
            self._launch([*steps, *calls], written, there)
            if asked.answers:
                self.driver.synchronize(self.stream)

        return [run]

    def _on_host(
        self, name: str, outs: Sequence[NDArray], ins: Sequence[NDArray], attrs: Attrs, seen: set[int]
    ) -> Call:
        """Return a call that runs the CPU's kernel on copies in host memory. Raises: MissingKernel."""
        host: dict[Any, NDArray] = {}

        def here(array: NDArray) -> NDArray:  # arrays of the same elements stay one array, for kernels that update
            key = id(array.storage), array.dtype, array.layout
            if key not in host:
                host[key] = empty(array.shape, array.dtype)
            return host[key]

        given = [a if i in seen else here(a) for i, a in enumerate(ins)]
        made = [here(o) for o in outs]
        work = [empty(s.sizes, s.dtype) for s in
                self._cpu.workspace(name, [o.spec for o in outs], [i.spec for i in ins], attrs)]  # fmt: skip
        calls, held = self._cpu.bind(name, made, given, attrs, work), [*given, *made, *work]

        def run() -> None:
            assert held  # code of the VM has the addresses of this memory, and does not keep it
            for i, (array, copy) in enumerate(zip(ins, given, strict=True)):
                if i not in seen:
                    self._cpu.copy(copy, from_numpy(self.to_host(array), bits=array.dtype))
            for call in calls:
                call()
            for out, copy in zip(outs, made, strict=True):
                self.copy(out, copy)

        return run

    def bind_fused(self, kernel: Generated, memory: Sequence[NDArray], written: Sequence[bool]) -> list[Call]:
        """Return a list of one call, which queues the generated kernel of a fusion group; see `Backend.bind_fused`."""
        from graphwright.array.triton import generated  # loads Triton

        call, specs = generated.bind(kernel, [a.impl for a in memory]), [a.spec for a in memory]
        guarded = _guarded([call], queued_failure.get() or partial(_failure, kernel.name, specs))
        return [self._launched([guarded], [a for a, there in zip(memory, written, strict=True) if there], memory)]

    def fresh(self, name: str, ins: Sequence[NDArray], attrs: Attrs) -> None:
        """Return None: this backend has no call that allocates and computes in one step."""

    # -- queues ------------------------------------------------------------------------------------------------------
    def _launch(self, calls: Sequence[Call], writes: Sequence[NDArray], reads: Sequence[NDArray]) -> None:
        self._launched(calls, writes, reads)()

    def _launched(self, calls: Sequence[Call], writes: Sequence[NDArray], reads: Sequence[NDArray]) -> Call:
        """Return the call that queues `calls`, which read and write the given arrays of the device.

        It keeps the arrays' memory; what is queued does not, as their blocks wait for the queue when they are freed.
        """
        written, used = [_mine(a) for a in writes], [_mine(a) for a in (*writes, *reads)]
        read_ranges, write_ranges = [_range(a) for a in reads], [_range(a) for a in writes]
        work = calls[0] if len(calls) == 1 else lambda: [call() for call in calls]
        driver = self.driver

        def launch() -> None:
            stream = driver.current(self.stream)
            for storage in used:
                storage.block.streams.add(stream)
            for storage in written:
                storage.written_on = stream
            driver.enqueue(stream, work, read_ranges, write_ranges)

        return launch


def _bound(
    row: Kernel, outs: list[torch.Tensor], ins: list[torch.Tensor], attrs: Attrs, work: list[torch.Tensor]
) -> list[Call]:
    """Bind a kernel; operands and results with a layout that it does not take are copied, row-major, around it."""
    before, after = list[Call](), list[Call]()
    if row.takes(outs, ins, attrs):
        packed: dict[int, torch.Tensor] = {}

        def straight(t: torch.Tensor, copies: list[Call], back: bool) -> torch.Tensor:
            if t.is_contiguous():
                return t
            copy = packed.setdefault(id(t), torch.empty(t.shape, dtype=t.dtype, device=t.device))
            copies.append(partial(t.copy_, copy) if back else partial(copy.copy_, t))
            return copy

        ins = [straight(t, before, False) for t in ins]
        outs = [straight(t, after, True) for t in outs]
    calls = row.bind(outs, ins, attrs, work)
    return [*before, *(calls if isinstance(calls, list) else [calls]), *after]


def _typed(storage: Storage, kind: DType) -> torch.Tensor:
    """Return a tensor over all bytes of a block, as elements of a dtype."""
    memory: torch.Tensor = storage.memory
    if kind not in storage.views:
        storage.views[kind] = memory[: len(memory) // kind.itemsize * kind.itemsize].view(TORCH_DTYPE[kind])
    return storage.views[kind]


def _backwards(array: NDArray) -> bool:
    return min(array.strides, default=0) < 0


def _ahead(array: NDArray) -> tuple[torch.Tensor, set[int]]:
    """Return a tensor of the elements along positive strides, and the axes along which it runs backwards."""
    if not _backwards(array):
        return array.impl, set()
    axes = {a for a, s in enumerate(array.strides) if s < 0}
    offset = array.offset + sum(array.strides[a] * (array.shape[a] - 1) for a in axes)
    strides = tuple(map(abs, array.strides))
    return array.view(Layout(array.shape, strides, offset)).impl, axes


def _moved(target: NDArray, source: NDArray, blocking: bool = False) -> Call:
    """Return a call that copies on the device, from the host or to it, and keeps no array alive.

    torch has no negative strides, so elements are flipped.
    """
    (to, to_axes), (of, of_axes) = _ahead(target), _ahead(source)
    if axes := sorted(to_axes ^ of_axes):
        return lambda: to.copy_(of.flip(axes), non_blocking=not blocking)
    return partial(to.copy_, of, non_blocking=not blocking)


def _guarded(calls: Sequence[Call], failure: Callable[[Exception], Exception]) -> Call:
    """Return one call that runs a kernel's calls in order, and replaces their exceptions by `failure(error)`."""

    def run() -> None:
        try:
            for call in calls:
                call()
        except Exception as error:
            raise failure(error) from error

    return run


def _failure(name: str, ins: Specs, error: Exception) -> Exception:
    """Convert an exception of a kernel that runs outside of a plan to the error to raise."""
    if isinstance(error, GraphwrightError):
        return error
    return DriverError(f"{name} failed on the device: {error}", where=name, got=", ".join(map(repr, ins)))


def _mine(array: NDArray) -> DeviceStorage:
    assert isinstance(array.storage, DeviceStorage), f"{array.spec} is on {array.device}"
    return array.storage


def _range(array: NDArray) -> Range:
    low, high = span(array.layout)
    base, size = _mine(array).block.address, array.dtype.itemsize
    return base + low * size, base + high * size
