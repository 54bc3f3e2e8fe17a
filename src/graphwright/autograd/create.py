"""Tensors from numbers: literals, fills and ranges.

What makes a tensor of no other takes `device`, where it shall lie, and `out`, a tensor that is written instead: of
exactly the shape and, where they are said, the dtype and device asked for. Without being said they are those of `out`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphwright.array import CPU, Device, DeviceMismatch, DType, NDArray, bool_, float32, from_numpy, int64
from graphwright.array import dtype as named
from graphwright.array import empty as _empty
from graphwright.array.layout import Shape
from graphwright.array.spec import Spec
from graphwright.autograd.apply import as_tensor, host_array, speaks_dlpack
from graphwright.autograd.tensor import Tensor
from graphwright.errors import ShapeError, UsageError


def tensor(
    value: Any, dtype: object = None, requires_grad: bool = False, *, device: Device | str | None = None
) -> Tensor:
    """A tensor with memory of its own.

    Args:
        value: number, nested lists, numpy array, NDArray, Tensor, or an array of another library that speaks DLPack.
            Python floats become float32, ints int64, bools bool; arrays keep their dtype.
        dtype: a DType or its name, to convert to.
        device: where it shall lie; a tensor stays where it is by default, everything else comes to the CPU.
        requires_grad: whether `backward` fills `.grad`; floating dtypes only.
    Raises: DTypeError, UsageError for what is no array of numbers.

    >>> tensor([[1.0, 2.0]]).shape
    (1, 2)
    """
    # a list whose dtype is said is read with all its digits
    plain = dtype is not None and not isinstance(value, Tensor | NDArray) and not speaks_dlpack(value)
    made = as_tensor(np.array(host_array(value)) if plain or isinstance(value, np.ndarray) else value)
    data = made.data
    assert isinstance(data, NDArray)
    if isinstance(value, Tensor) or speaks_dlpack(value):
        data = data.copy()
    data = _converted(data, dtype)
    return Tensor(data if device is None else data.to(Device.parse(device)), requires_grad)


def _converted(data: NDArray, kind: object) -> NDArray:
    if kind is None or named(kind) is data.dtype:
        return data
    target = _empty(data.shape, named(kind), data.device)
    return target.copy_from(data)


def target(shape: Shape, dtype: object, device: Device | str | None, out: Tensor | None) -> tuple[DType, Device]:
    """Dtype (float32 by default) and device (the CPU) of a tensor to be made, or those of `out`, which must agree.

    Raises: ShapeError for sizes that cannot be; that or DeviceMismatch where `out` is not the tensor asked for.
    """
    if any(not isinstance(n, int | np.integer) or n < 0 for n in shape):
        raise ShapeError("sizes are whole numbers from 0 up", got=shape)
    if out is None:
        return named(float32 if dtype is None else dtype), CPU if device is None else Device.parse(device)
    kind = out.dtype if dtype is None else named(dtype)
    there = lies(out)
    if out.spec != Spec(shape, kind):
        raise ShapeError("out must have exactly the spec of the result", expected=Spec(shape, kind), got=out.spec)
    if device is not None and Device.parse(device) != there:
        raise DeviceMismatch("out lies elsewhere", expected=Device.parse(device), got=there)
    return kind, there


def sizes(given: Sequence[Any]) -> Shape:
    """Sizes given one by one, or as one tuple or list."""
    one = len(given) == 1 and isinstance(given[0], tuple | list)
    return tuple(given[0]) if one else tuple(given)


def lies(x: Tensor) -> Device:
    """Where a tensor lies; in a trace the CPU, where programs are made."""
    return x.data.device if isinstance(x.data, NDArray) else CPU


def _made(
    host: np.ndarray, dtype: object, device: Device | str | None, requires_grad: bool, out: Tensor | None
) -> Tensor:
    """Numbers of the host as a tensor: the dtype said, else that of `out`, else that of the numbers."""
    kind, there = target(host.shape, dtype if out is not None or dtype is not None else host.dtype, device, out)
    made = Tensor(_converted(from_numpy(host), kind).to(there), requires_grad and out is None)
    return made if out is None else out.copy_(made)


def full(
    shape: Sequence[int],
    value: float,
    dtype: object = None,
    requires_grad: bool = False,
    *,
    device: Device | str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """A tensor of one value; int64 for an int, bool for a bool, float32 for a float unless a dtype is said."""
    if dtype is None and out is None:
        dtype = (
            bool_ if isinstance(value, bool | np.bool_) else int64 if isinstance(value, int | np.integer) else float32
        )
    kind, _ = target(tuple(shape), dtype, device, out)
    host = np.full(tuple(shape), value, np.float32 if kind.as_bits else kind.numpy)
    return _made(host, kind, device, requires_grad, out)


def empty(
    *shape: int | Sequence[int],
    dtype: object = None,
    requires_grad: bool = False,
    device: Device | str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """A tensor (float32 by default) whose elements are whatever lay there; NaN under `array.poison.poison()`."""
    shape = sizes(shape)
    kind, there = target(shape, dtype, device, out)
    return Tensor(_empty(shape, kind, there), requires_grad) if out is None else out


def zeros(
    *shape: int | Sequence[int],
    dtype: object = None,
    requires_grad: bool = False,
    device: Device | str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """A tensor of zeros, float32 by default."""
    shape = sizes(shape)
    kind, _ = target(shape, dtype, device, out)
    return full(shape, 0, kind, requires_grad, device=device, out=out)


def ones(
    *shape: int | Sequence[int],
    dtype: object = None,
    requires_grad: bool = False,
    device: Device | str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """A tensor of ones, float32 by default."""
    shape = sizes(shape)
    kind, _ = target(shape, dtype, device, out)
    return full(shape, 1, kind, requires_grad, device=device, out=out)


def like(x: Tensor, dtype: object, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a tensor in the shape of another one is made of: its dtype and device, unless others are said."""
    own = {} if given.get("out") is not None else {"dtype": x.dtype, "device": lies(x)}
    said = {"dtype": dtype, **given}
    return {**own, **{name: value for name, value in said.items() if value is not None}}


def full_like(x: Tensor, value: float, dtype: object = None, **options: Any) -> Tensor:
    """One value in the shape of another tensor, and in its dtype and on its device unless `options` say others."""
    return full(x.shape, value, **like(x, dtype, options))


def zeros_like(x: Tensor, dtype: object = None, **options: Any) -> Tensor:
    """Zeros in the shape of another tensor, and in its dtype and on its device unless `options` say others."""
    return zeros(*x.shape, **like(x, dtype, options))


def ones_like(x: Tensor, dtype: object = None, **options: Any) -> Tensor:
    """Ones in the shape of another tensor, and in its dtype and on its device unless `options` say others."""
    return ones(*x.shape, **like(x, dtype, options))


def empty_like(x: Tensor, dtype: object = None, **options: Any) -> Tensor:
    """Whatever lay there, in the shape of another tensor, its dtype and on its device unless `options` say others."""
    return empty(*x.shape, **like(x, dtype, options))


def eye(
    rows: int,
    columns: int | None = None,
    dtype: object = None,
    requires_grad: bool = False,
    *,
    device: Device | str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Ones on the diagonal of a matrix, square by default, zeros beside it; float32 by default."""
    target((rows, rows if columns is None else columns), None, None, None)
    return _made(np.eye(rows, columns, dtype=np.float32), dtype, device, requires_grad, out)


def arange(
    start: float,
    stop: float | None = None,
    step: float = 1,
    dtype: object = None,
    *,
    requires_grad: bool = False,
    device: Device | str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """start, start + step, ... below stop; int64 for ints, float32 for floats, as in torch.

    Raises: UsageError for a step of 0, or one that leads away from stop.
    """
    low, high = (0, start) if stop is None else (start, stop)
    if step == 0 or (high - low) / step < 0:
        raise UsageError("the step must lead from start to stop", expected=f"{low}..{high}", got=step)
    if dtype is None and out is None:
        dtype = int64 if all(isinstance(v, int) for v in (low, high, step)) else float32
    return _made(np.arange(low, high, step), dtype, device, requires_grad, out)


def linspace(
    start: float,
    stop: float,
    count: int,
    dtype: object = None,
    requires_grad: bool = False,
    *,
    device: Device | str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`count` numbers from start to stop, both included, at equal distances; float32 by default.

    Raises: UsageError for a count below 0.
    """
    if not isinstance(count, int) or count < 0:
        raise UsageError("a number of points", expected="at least 0", got=count)
    kind = float32 if dtype is None and out is None else dtype
    return _made(np.linspace(start, stop, count), kind, device, requires_grad, out)
