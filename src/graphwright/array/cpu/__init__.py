"""The CPU backend: ATen's `out=` calls on torch views of arrays. One file per kernel family, named as in `ops/`."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from graphwright.array.backend import Attrs, Call, Fresh, MissingKernel, Needs, torch_functions
from graphwright.array.cpu.kernel import KERNELS, TORCH_DTYPE, kernel_of
from graphwright.array.device import CPU, Device
from graphwright.array.dtype import DType
from graphwright.array.dtype import dtype as named
from graphwright.array.layout import row_major
from graphwright.array.ndarray import NDArray
from graphwright.array.spec import Spec
from graphwright.array.storage import Storage

if TYPE_CHECKING:
    from graphwright.array.triton.fused import Kernel

_FAMILIES = (
    "attention block_attention collective conv elementwise experts index linear loss norm optimize pool random "
    "reduce routed_attention sampling scan selected_attention"
)
for _family in _FAMILIES.split():
    import_module(f"{__name__}.{_family}")  # registers its kernels

_MANY, _LARGE = 1 << 20, 4 << 20
"""Least number of elements, then of bytes, for which large pages are requested; the latter as in numpy."""
_PAGE = 4096
_HUGEPAGE = 14  # MADV_HUGEPAGE
_first: Any = ctypes.c_char.from_buffer


@cache
def _advise() -> Any:
    """Return the C function madvise, or None if the system is not Linux."""
    if not sys.platform.startswith("linux"):
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call


def _in_large_pages(block: torch.Tensor) -> torch.Tensor:
    """Ask Linux for 2 MiB pages for a large block, for fewer page faults and TLB misses; return the block."""
    size = block.nbytes
    if size >= _LARGE and (advise := _advise()) is not None:
        start = -(-block.data_ptr() // _PAGE) * _PAGE
        advise(start, block.data_ptr() + size - start & -_PAGE, _HUGEPAGE)
    return block


class CpuBackend:
    """Memory from torch's CPU allocator (64-byte aligned), kernels from ATen."""

    device = CPU
    driver = None
    stream = 0
    fuses = False  # the VM fuses

    def allocate(self, nbytes: int) -> Storage:
        return Storage(_in_large_pages(torch.empty(nbytes, dtype=torch.uint8)), nbytes, CPU, kind="owned")

    def empty(self, shape: tuple[int, ...], dtype: DType) -> NDArray:
        strides = row_major(shape)
        tensor = torch.empty_strided(shape, strides, dtype=TORCH_DTYPE[dtype])
        if tensor.numel() >= _MANY:
            _in_large_pages(tensor)
        return NDArray.owning(tensor, Spec(shape, dtype), strides)

    def wrap(self, array: NDArray) -> torch.Tensor:
        """Return a torch view of the array; its strides must not be negative, because torch has no negative strides."""
        return torch.as_strided(self._typed(array), array.shape, array.strides, array.offset)

    def _typed(self, array: NDArray) -> torch.Tensor:
        """Return a tensor over the whole memory block of the array, in the array's dtype; its shape is arbitrary."""
        storage, kind = array.storage, array.dtype
        memory = storage.memory
        if isinstance(memory, torch.Tensor) and memory.dtype is TORCH_DTYPE[kind]:
            return memory
        if kind not in storage.views:
            flat = (memory if isinstance(memory, torch.Tensor) else _of_host(storage, kind)).reshape(-1)
            whole = flat.view(torch.uint8)[: flat.nbytes // kind.itemsize * kind.itemsize]
            storage.views[kind] = whole.view(TORCH_DTYPE[kind])
        return storage.views[kind]

    def copy(self, target: NDArray, source: NDArray) -> None:
        """Copy `source` into `target`, with conversion to its dtype (round to nearest even)."""
        memory, backwards = source.storage.memory, _backwards(target) or _backwards(source)
        single = isinstance(memory, np.ndarray) and memory.size == 1 and memory.dtype == target.dtype.numpy
        if single and not backwards and source.size == 1 and source.dtype is target.dtype and not target.dtype.as_bits:
            target.impl.fill_(memory.item())  # a number on the host: no tensor is made for it
        elif backwards:
            if source.dtype is not target.dtype:
                source = self.empty(source.shape, target.dtype).copy_from(source.copy())
            np.copyto(self.to_host(target), self.to_host(source))
        else:
            target.impl.copy_(source.impl)

    def to_host(self, array: NDArray) -> np.ndarray:
        tensor = self._typed(array).reshape(-1) if _backwards(array) else array.impl
        if array.dtype.as_bits:
            tensor = tensor.view(torch.uint16 if array.dtype.itemsize == 2 else torch.uint8)
        host = tensor.numpy()
        if not _backwards(array):
            return host
        strides = [s * host.itemsize for s in array.strides]
        return np.lib.stride_tricks.as_strided(host[array.offset :], array.shape, strides)

    def adopt(self, other: Any) -> NDArray:
        tensor = torch.from_dlpack(other)
        block = tensor.untyped_storage()
        storage = Storage(torch.empty(0, dtype=torch.uint8).set_(block), block.nbytes(), CPU)
        kind = named(str(tensor.dtype).removeprefix("torch."))
        return NDArray(storage, kind, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def address(self, array: NDArray) -> int:
        memory = array.storage.memory
        if isinstance(memory, np.ndarray):  # most feeds are used once, so no tensor is made for them
            try:
                start = ctypes.addressof(_first(memory))  # a sixth of the time of numpy's own attribute
            except (TypeError, ValueError):  # read-only, strided or empty
                start = memory.__array_interface__["data"][0]
            at = start + array.offset * array.dtype.itemsize
            if at % array.dtype.itemsize == 0:
                return at
        return array.impl.data_ptr()

    def workspace(self, name: str, outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        row = kernel_of(name)
        return row.work(outs, ins, attrs) if row is not None and row.work is not None else []

    def needs(self, name: str, outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> Needs:
        row = kernel_of(name)
        return row.needs(ins, attrs) if row is not None else Needs()

    def bind(
        self, name: str, outs: Sequence[NDArray], ins: Sequence[NDArray], attrs: Attrs, work: Sequence[NDArray] = ()
    ) -> list[Call]:
        row = kernel_of(name)
        if row is None:
            raise MissingKernel("the CPU backend has no kernel of this name", where=name)
        calls = row.bind([o.impl for o in outs], [i.impl for i in ins], attrs, [w.impl for w in work])
        return calls if isinstance(calls, list) else [calls]

    def bind_fused(self, kernel: Kernel, memory: Sequence[NDArray], written: Sequence[bool]) -> list[Call]:
        raise MissingKernel("the CPU runs no generated kernels", where=kernel.name)

    def fresh(self, name: str, ins: Sequence[NDArray], attrs: Attrs) -> Fresh | None:
        """Return an ATen call that allocates and computes the result, or None; it halves the time of small results."""
        row = kernel_of(name)
        return None if row is None or row.fresh is None else row.fresh([i.impl for i in ins], attrs)

    def has_kernel(self, name: str) -> bool:
        return name in KERNELS or name in torch_functions

    def kernels(self) -> frozenset[str]:
        return frozenset((*KERNELS, *torch_functions))


def _backwards(array: NDArray) -> bool:
    return min(array.strides, default=0) < 0


def _of_host(storage: Storage, kind: DType) -> torch.Tensor:
    """Return a uint8 tensor over the host memory of a block, or over a copy if that is not aligned for `kind`."""
    memory = storage.memory
    if storage.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    host = (
        memory.view(np.uint8) if isinstance(memory, np.ndarray) else np.frombuffer(memoryview(memory).cast("B"), "u1")
    )
    if host.ctypes.data % kind.itemsize:  # a file with an odd header length
        host = host.copy()
    return torch.from_numpy(host if host.flags.writeable else np.asarray(_WritableAlias(host)))


class _WritableAlias:
    """A writable numpy array interface to a read-only buffer, which it keeps alive, so that torch accepts the buffer.

    torch has no read-only tensors; writes are refused by `Storage.readonly` instead.
    """

    def __init__(self, host: np.ndarray) -> None:
        self.keep = host
        self.__array_interface__: dict[str, Any] = {**host.__array_interface__, "data": (host.ctypes.data, False)}


def make(device: Device) -> CpuBackend:
    """Return a new CPU backend."""
    return CpuBackend()


def kernel_location(name: str) -> str:
    """Return the file and line that define a kernel, or the name of its torch function, or "" without a kernel."""
    where = "" if (row := kernel_of(name)) is None else row.where
    return where if where.startswith("torch.") or not where else f"array/cpu/{where}"


get_num_threads, set_num_threads = torch.get_num_threads, torch.set_num_threads
"""Set the number of CPU threads of all kernels."""


def tensor_allocations(run: Call) -> list[int]:
    """Call `run` and return the bytes of each CPU tensor that torch allocates meanwhile, to test for allocations."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    assert seen.profiler is not None  # set once the context has exited
    assert seen.profiler.kineto_results is not None
    events: list[Any] = list(seen.profiler.kineto_results.events())  # torch's stubs lack `nbytes` of an event
    return [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0]
