"""Memory of cached rows, on whatever device it lies and in whatever dtype."""

from __future__ import annotations

import numpy as np

from graphwright.array import CPU, Device, NDArray, Spec, empty, from_numpy

_ALIGNED = 64


def fill(array: NDArray, value: float) -> None:
    """Write one number everywhere."""
    if array.size:
        array.copy_from(from_numpy(np.float32(value)).expand(*array.shape))


def filled(spec: Spec, value: float, device: Device) -> NDArray:
    """A new array of one number. Raises: MemoryError."""
    if device == CPU and not value:  # pages that nobody writes take no memory; where it begins decides on last bits
        block = np.zeros(spec.nbytes + _ALIGNED, np.uint8)
        start = -block.ctypes.data % _ALIGNED
        host = block[start : start + spec.nbytes].view(spec.dtype.numpy).reshape(spec.sizes)
        return from_numpy(host, bits=spec.dtype)
    made = empty(spec.sizes, spec.dtype, device)
    fill(made, value)
    return made


def numbers(array: NDArray) -> np.ndarray:
    """Elements as numpy, shared where it knows the dtype and the memory is the host's; others widened to float32."""
    return array.to_numpy("float32" if array.dtype.as_bits else None)
