"""Values in and out of planned memory, and what is made of weights once for all workspaces: conversions and copies."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import memmove
from sys import getrefcount
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import numpy as np

from graphwright.array import CPU, NDArray, Storage, backend, empty, from_numpy
from graphwright.array.layout import row_major
from graphwright.autograd import Tensor

if TYPE_CHECKING:
    from graphwright.array import Device, DType

_LARGE = 1 << 16  # bytes of a result
_KEPT = 2  # a caller holds the last result while the next one is made
_UNHELD = 3  # references to a block that none but `reader` knows, when it asks

_made: WeakKeyDictionary[NDArray, dict[tuple[DType, Device], tuple[int, ref[Storage]]]] = WeakKeyDictionary()


def made_of(source: NDArray, dtype: DType, device: Device) -> NDArray:
    """A weight in another dtype or on another device, made once per version for all workspaces that need it at a time.

    On another device a new version is written over the old one, since graphs there hold its address.
    """
    if dtype is source.dtype and device == source.device:
        return source
    known = _made.setdefault(source, {})
    version, found = known.get((dtype, device), (-1, None))
    storage = found() if found is not None else None
    if storage is not None and version == source.storage.version:
        return NDArray(storage, dtype, source.shape)
    if storage is not None and device != source.device:
        known[dtype, device] = (source.storage.version, ref(storage))
        return NDArray(storage, dtype, source.shape).copy_from(source.to(device))
    result = source.to(device) if device != source.device else source
    if dtype is not source.dtype:
        result = empty(source.shape, dtype, device).copy_from(result)
    known[dtype, device] = (source.storage.version, ref(result.storage))
    return result


Given = NDArray | np.ndarray


def writer(target: NDArray) -> Callable[[Given], object]:
    """What copies an array of its spec, from the host or the same device, into planned memory."""
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
    """What tells native code where an array lies that it will copy into planned memory.

    True if the array is read where it lies, so that its next values are, too; else these values were copied.
    """
    kernels = backend(CPU)
    own, host = kernels.address(target), target.to_numpy(bits=True)

    def point(array: Given) -> bool:
        if not isinstance(array, NDArray):
            np.copyto(host, array)
            source(own)
            return False
        lies = array.contiguous
        if not lies:
            kernels.copy(target, array)
        source(kernels.address(array) if lies else own)
        return lies

    return point


def reader(source: NDArray) -> Callable[[], NDArray]:
    """What copies a value out of planned memory; it stays on its device.

    A large copy is made where an earlier one lay that nobody holds any more: fresh pages cost more than the copy.
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
            if len(blocks) < _KEPT:
                blocks.append(block)
        np.copyto(block.reshape(host.shape), host)
        return NDArray(Storage(block, size, CPU), kind, shape, strides)

    return read if size < _LARGE else read_large


def as_array(given: Any) -> NDArray:
    """A feed as an array, sharing memory. Raises: DTypeError for what is no array of numbers."""
    data = given.data if isinstance(given, Tensor) else given
    return data if isinstance(data, NDArray) else from_numpy(np.asarray(data))
