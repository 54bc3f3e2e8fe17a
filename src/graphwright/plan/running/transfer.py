"""Functions that copy values into and out of planned memory."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import memmove
from sys import getrefcount
from typing import Any

import numpy as np

from graphwright.array import CPU, NDArray, Storage, backend, from_numpy
from graphwright.array.layout import row_major
from graphwright.autograd import Tensor

_LARGE = 1 << 16  # bytes of a result
_BLOCKS = 2  # the caller holds the last result while the next one is made
_UNHELD = 3  # references to a block that only `reader` knows

Given = NDArray | np.ndarray


def writer(target: NDArray) -> Callable[[Given], object]:
    """A function that copies arrays of the target's spec, from the host or the same device, into planned memory."""
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
    """A function that sets the address from which native code copies an array into planned memory.

    It returns True if that is the array's own memory, so later values are read too; else the present ones were copied.
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
    """A function that copies a value out of planned memory, on its device.

    A large copy reuses the memory of an earlier one that is no longer referenced: new pages cost more than the copy.
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
    """A feed as an array, sharing memory. Raises: DTypeError if it is not an array of numbers."""
    data = given.data if isinstance(given, Tensor) else given
    return data if isinstance(data, NDArray) else from_numpy(np.asarray(data))
