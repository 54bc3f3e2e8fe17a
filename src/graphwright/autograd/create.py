"""Tensors from numbers: literals, fills and ranges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphwright.array import DType, NDArray, bfloat16, float32, from_numpy, int64
from graphwright.array import dtype as named
from graphwright.array import empty as _empty
from graphwright.autograd.apply import as_tensor, speaks_dlpack
from graphwright.autograd.tensor import Tensor
from graphwright.errors import UsageError


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
    target = _empty(data.shape, named(kind), data.device)
    return target.copy_from(data)


def full(shape: Sequence[int], value: float, dtype: object = float32, requires_grad: bool = False) -> Tensor:
    """A tensor of one value."""
    return Tensor(_filled(tuple(shape), value, dtype), requires_grad)


def _filled(shape: tuple[int, ...], value: float, kind: object) -> NDArray:
    wanted: DType = named(kind)
    if wanted is bfloat16:
        return _converted(from_numpy(np.full(shape, value, np.float32)), wanted)
    return from_numpy(np.full(shape, value, wanted.numpy))


def empty(*shape: int, dtype: object = float32, requires_grad: bool = False) -> Tensor:
    """A tensor whose elements are whatever lay there."""
    return Tensor(_empty(shape, named(dtype)), requires_grad)


def zeros(*shape: int, dtype: object = float32, requires_grad: bool = False) -> Tensor:
    """A tensor of zeros."""
    return full(shape, 0, dtype, requires_grad)


def ones(*shape: int, dtype: object = float32, requires_grad: bool = False) -> Tensor:
    """A tensor of ones."""
    return full(shape, 1, dtype, requires_grad)


def full_like(x: Tensor, value: float, dtype: object = None, requires_grad: bool = False) -> Tensor:
    """One value in the shape of another tensor, and in its dtype by default."""
    return full(x.shape, value, x.dtype if dtype is None else dtype, requires_grad)


def zeros_like(x: Tensor, dtype: object = None, requires_grad: bool = False) -> Tensor:
    """Zeros in the shape of another tensor, and in its dtype by default."""
    return full_like(x, 0, dtype, requires_grad)


def ones_like(x: Tensor, dtype: object = None, requires_grad: bool = False) -> Tensor:
    """Ones in the shape of another tensor, and in its dtype by default."""
    return full_like(x, 1, dtype, requires_grad)


def empty_like(x: Tensor, dtype: object = None, requires_grad: bool = False) -> Tensor:
    """Whatever lay there, in the shape of another tensor, and in its dtype by default."""
    return empty(*x.shape, dtype=x.dtype if dtype is None else dtype, requires_grad=requires_grad)


def eye(rows: int, columns: int | None = None, dtype: object = float32, requires_grad: bool = False) -> Tensor:
    """Ones on the diagonal of a matrix, square by default, zeros beside it."""
    host = np.eye(rows, rows if columns is None else columns, dtype=np.float32)
    return Tensor(_converted(from_numpy(host), dtype), requires_grad)


def arange(
    start: float, stop: float | None = None, step: float = 1, dtype: object = None, *, requires_grad: bool = False
) -> Tensor:
    """start, start + step, ... below stop; int64 for ints, float32 for floats, as in torch.

    Raises: UsageError for a step of 0, or one that leads away from stop.
    """
    low, high = (0, start) if stop is None else (start, stop)
    if step == 0 or (high - low) / step < 0:
        raise UsageError("the step must lead from start to stop", expected=f"{low}..{high}", got=step)
    whole = all(isinstance(v, int) for v in (low, high, step))
    kind = dtype if dtype is not None else (int64 if whole else float32)
    return tensor(np.arange(low, high, step), kind, requires_grad)


def linspace(start: float, stop: float, count: int, dtype: object = float32, requires_grad: bool = False) -> Tensor:
    """`count` numbers from start to stop, both included, at equal distances. Raises: UsageError for a count below 0."""
    if count < 0:
        raise UsageError("a number of points", expected="at least 0", got=count)
    return tensor(np.linspace(start, stop, count), dtype, requires_grad)
