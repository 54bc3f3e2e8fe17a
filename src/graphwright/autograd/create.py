"""Tensors from numbers: literals, fills and ranges."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array import DType, NDArray, bfloat16, empty, float32, from_numpy, int64
from graphwright.array import dtype as named
from graphwright.autograd.apply import as_tensor, speaks_dlpack
from graphwright.autograd.tensor import Tensor


def tensor(value: Any, dtype: object = None, requires_grad: bool = False) -> Tensor:
    """A tensor with memory of its own.

    Args:
        value: number, nested lists, numpy array, NDArray, Tensor, or an array of another library that speaks DLPack.
            Python floats become float32, ints int64, bools bool; arrays keep their dtype.
        dtype: a DType or its name, to convert to.
        requires_grad: whether `backward` fills `.grad`; floating dtypes only.
    Raises: DTypeError, UsageError for what is no array of numbers.

    >>> tensor([[1.0, 2.0]]).shape
    (1, 2)
    """
    made = as_tensor(np.array(value) if isinstance(value, np.ndarray) else value)
    data = made.data
    assert isinstance(data, NDArray)
    if isinstance(value, Tensor) or speaks_dlpack(value):
        data = data.copy()
    return Tensor(_converted(data, dtype), requires_grad)


def _converted(data: NDArray, kind: object) -> NDArray:
    if kind is None or named(kind) is data.dtype:
        return data
    target = empty(data.shape, named(kind), data.device)
    return target.copy_from(data)


def full(shape: tuple[int, ...], value: float, dtype: object = float32, requires_grad: bool = False) -> Tensor:
    """A tensor of one value."""
    return Tensor(_filled(shape, value, dtype), requires_grad)


def _filled(shape: tuple[int, ...], value: float, kind: object) -> NDArray:
    wanted: DType = named(kind)
    if wanted is bfloat16:
        return _converted(from_numpy(np.full(shape, value, np.float32)), wanted)
    return from_numpy(np.full(shape, value, wanted.numpy))


def zeros(*shape: int, dtype: object = float32, requires_grad: bool = False) -> Tensor:
    """A tensor of zeros."""
    return full(shape, 0, dtype, requires_grad)


def ones(*shape: int, dtype: object = float32, requires_grad: bool = False) -> Tensor:
    """A tensor of ones."""
    return full(shape, 1, dtype, requires_grad)


def arange(start: float, stop: float | None = None, step: float = 1, dtype: object = None) -> Tensor:
    """start, start + step, ... below stop; int64 for ints, float32 for floats, as in torch."""
    low, high = (0, start) if stop is None else (start, stop)
    whole = all(isinstance(v, int) for v in (low, high, step))
    return tensor(np.arange(low, high, step), dtype if dtype is not None else (int64 if whole else float32))
