"""Hollow arrays: a spec and no bytes. What fits on a program of these, a `fork.hollow`, fits without a weight read."""

from __future__ import annotations

from weakref import WeakSet

from graphwright.array import CPU, DType, NDArray, Storage

_HOLLOW: WeakSet[Storage] = WeakSet()


def hollow_array(shape: tuple[int, ...], dtype: DType) -> NDArray:
    """An array that has a spec and must not be read."""
    storage = Storage.mapped(_no_bytes, 0, CPU)
    _HOLLOW.add(storage)
    return NDArray(storage, dtype, shape)


def is_hollow(array: NDArray) -> bool:
    """True for an array without bytes."""
    return array.storage in _HOLLOW


def _no_bytes() -> memoryview:
    raise AssertionError("a hollow array has no bytes")
