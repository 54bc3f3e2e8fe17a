"""Tensor factories: literals, constants and ranges.

Factories take `device`, and `out`, a tensor to write into. `out` must have exactly the shape and, if given, the
dtype and device of the result, which default to those of `out`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from graphwright.array import CPU, Device, DeviceMismatch, DType, NDArray, bool_, float32, int64
from graphwright.array import dtype as named
from graphwright.array import empty as _empty
from graphwright.array import from_numpy as _from_numpy
from graphwright.array.layout import Shape
from graphwright.array.spec import Spec
from graphwright.autograd.apply import as_symbol, as_tensor, device_of, host_array, speaks_dlpack
from graphwright.autograd.named_sizes import traced
from graphwright.autograd.names import METHOD
from graphwright.autograd.names import named as entered
from graphwright.autograd.shapes import ints
from graphwright.autograd.tensor import Tensor
from graphwright.errors import DTypeError, GraphwrightError, OutOfMemory, ShapeError, UsageError
from graphwright.ops import call


def tensor(
    data: Any, dtype: object = None, requires_grad: bool = False, *, device: Device | str | None = None
) -> Tensor:
    """Make a tensor from a copy of the value.

    Args:
        data: number, nested lists, numpy array, NDArray, Tensor, or an array of another library that supports DLPack.
            Python floats become float32, ints int64, bools bool; arrays keep their dtype.
        dtype: a DType or its name, to convert to.
        device: target device; by default that of `data` if it is a tensor, else the CPU.
        requires_grad: whether `backward` fills `.grad`; floating dtypes only.
    Raises: DTypeError, UsageError if the value is not an array of numbers.

    >>> tensor([[1.0, 2.0]]).shape
    (1, 2)
    """
    if traced(data):
        return data.tensor() if dtype is None else data.tensor(named(dtype))
    if isinstance(data, np.ndarray) or (
        dtype is not None and not isinstance(data, Tensor | NDArray) and not speaks_dlpack(data)
    ):
        made = _from_numpy(np.array(host_array(data)))  # with a dtype, a list is read at full precision
    else:
        made = as_tensor(data).concrete("a tensor")
        made = made.copy() if isinstance(data, Tensor) or speaks_dlpack(data) else made
    made = _converted(made, dtype)
    return Tensor(made if device is None else made.to(Device.parse(device)), requires_grad)


def _converted(data: NDArray, kind: object) -> NDArray:
    if kind is None or named(kind) is data.dtype:
        return data
    target = _empty(data.shape, named(kind), data.device)
    return target.copy_from(data)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def renamed(function: _Function, name: str, doc: str) -> _Function:
    """Set name and docstring of a generated function."""
    function.__name__, function.__qualname__, function.__doc__ = name, name, doc
    return function


def target(shape: Shape, dtype: object, device: Device | str | None, out: Tensor | None) -> tuple[DType, Device]:
    """Return (dtype, device) for a new tensor: as given, else as in `out`, else float32 and the CPU.

    Raises: ShapeError for invalid sizes; ShapeError or DeviceMismatch if `out` is not the requested tensor.
    """
    if any(not isinstance(n, int | np.integer) or n < 0 for n in shape):
        raise ShapeError("invalid sizes of a tensor", expected="integers >= 0", got=shape)
    if len(shape) > 64:
        raise ShapeError("a tensor has too many axes", expected="at most 64", got=len(shape))
    if out is None:
        return named(float32 if dtype is None else dtype), CPU if device is None else Device.parse(device)
    kind = out.dtype if dtype is None else named(dtype)
    there = device_of(out)
    if out.spec != Spec(shape, kind):
        raise ShapeError("out does not match the result's spec", expected=Spec(shape, kind), got=out.spec)
    if device is not None and Device.parse(device) != there:
        raise DeviceMismatch("out is not on the requested device", expected=Device.parse(device), got=there)
    return kind, there


@contextmanager
def _allocating(shape: object) -> Iterator[None]:
    """Turn numpy's errors for arrays that are too large into OutOfMemory."""
    try:
        yield
    except GraphwrightError:
        raise
    except (MemoryError, OverflowError, ValueError) as error:
        raise OutOfMemory("not enough memory for this tensor", expected="a tensor that fits in memory",
                          got=shape) from error  # fmt: skip


def _made(
    host: np.ndarray, dtype: object, device: Device | str | None, requires_grad: bool, out: Tensor | None
) -> Tensor:
    """Convert a numpy array to a tensor, or copy it to `out`; dtype: the given one, else that of `out` or the array."""
    kind, there = target(host.shape, dtype if out is not None or dtype is not None else host.dtype, device, out)
    made = Tensor(_converted(_from_numpy(host), kind).to(there), requires_grad and out is None)
    return made if out is None else out.copy_(made)


def full(
    size: Sequence[int], fill_value: float, dtype: object = None, requires_grad: bool = False, *,
    device: Device | str | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Make a tensor filled with one value; by default int64 for an int, bool for a bool, float32 for a float."""
    if dtype is None and out is None:
        kinds = ((bool | np.bool_, bool_), (int | np.integer, int64))
        dtype = next((kind for types, kind in kinds if isinstance(fill_value, types)), float32)
    shape, value = tuple(size), fill_value
    kind, _ = target(shape, dtype, device, out)
    stored = np.float32 if kind.as_bits else kind.numpy
    if traced(value):
        return _recorded(call("expand", as_tensor(value, kind), shape=shape), device, out)
    try:
        if kind.kind in ("int", "uint") and isinstance(value, float | np.floating):
            int(value)  # raises for infinities and NaN, which numpy casts to some integer
        np.full((), value, stored)
    except (OverflowError, ValueError) as error:
        raise DTypeError("the dtype cannot store this value", expected=f"a {kind.name} number", got=value) from error
    if any(map(traced, shape)):
        one = as_symbol(_made(np.full((), value, stored), kind, None, False, None))
        return _recorded(call("expand", one, shape=shape), device, out)
    with _allocating(shape):
        host = np.full(shape, value, stored)
    return _made(host, kind, device, requires_grad, out)


def _recorded(made: Tensor, device: Device | str | None, out: Tensor | None) -> Tensor:
    """Return a tensor of named size, which a run computes. Raises: UsageError if a device or `out` was given."""
    if out is not None or (device is not None and Device.parse(device) != CPU):
        raise UsageError("a tensor of named size is made in a run", expected="no out and no device", got=made.spec)
    return made


def empty(
    *shape: int | Sequence[int], size: Sequence[int] | None = None, dtype: object = None, requires_grad: bool = False,
    device: Device | str | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Make an uninitialised tensor, float32 by default; for debugging, `array.storage.poison()` fills it with NaN."""
    shape = ints(shape if size is None else size)
    kind, there = target(shape, dtype, device, out)
    if any(map(traced, shape)):
        return full(shape, 0, kind, requires_grad, device=device, out=out)
    return Tensor(_empty(shape, kind, there), requires_grad) if out is None else out


def _constant(name: str, value: int):  # the types of these factories are inferred: Callable would lose the keywords
    def filled(
        *shape: int | Sequence[int], size: Sequence[int] | None = None, dtype: object = None,
        requires_grad: bool = False, device: Device | str | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        given = ints(shape if size is None else size)
        kind, _ = target(given, dtype, device, out)
        return full(given, value, kind, requires_grad, device=device, out=out)

    return renamed(filled, name, f"Make a tensor of {name}, float32 by default.")


zeros, ones = _constant("zeros", 0), _constant("ones", 1)


def like(
    x: Tensor, dtype: object, device: Device | str | None, out: Tensor | None
) -> tuple[object, Device | str | None]:
    """Return the dtype and device of a tensor like `x`: those given, else those of `out`, else those of `x`."""
    if out is not None:
        return dtype, device
    return x.dtype if dtype is None else dtype, device_of(x) if device is None else device


def full_like(
    input: Tensor, fill_value: float, dtype: object = None, requires_grad: bool = False, *,
    device: Device | str | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Make a tensor filled with one value, with the shape of `input` and, unless given, its dtype and device."""
    kind, there = like(input, dtype, device, out)
    return full(input.shape, fill_value, kind, requires_grad, device=there, out=out)


def _like_factory(factory: Callable[..., Tensor]):
    def made_like(
        input: Tensor, dtype: object = None, requires_grad: bool = False, *, device: Device | str | None = None,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        kind, there = like(input, dtype, device, out)
        return factory(*input.shape, dtype=kind, requires_grad=requires_grad, device=there, out=out)

    doc = f"Call `{factory.__name__}` with the shape of `input` and, unless given, its dtype and device."
    return renamed(made_like, f"{factory.__name__}_like", doc)


zeros_like, ones_like, empty_like = _like_factory(zeros), _like_factory(ones), _like_factory(empty)


def eye(
    n: int, m: int | None = None, dtype: object = None, requires_grad: bool = False, *,
    device: Device | str | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Make a matrix [n, m] with ones on the diagonal and zeros elsewhere; square and float32 by default."""
    shape = (n, n if m is None else m)
    target(shape, None, None, None)
    if any(map(traced, shape)):
        rows, columns = (arange(size) for size in shape)
        return _recorded((rows.unsqueeze(1) == columns).to(float32 if dtype is None else dtype), device, out)
    with _allocating(shape):
        host = np.eye(*shape, dtype=np.float32)
    return _made(host, dtype, device, requires_grad, out)


def arange(
    start: float, end: float | None = None, step: float = 1, dtype: object = None, *, requires_grad: bool = False,
    device: Device | str | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Make a tensor of start, start + step, ... below end; int64 for ints, float32 for floats, as in torch.

    Raises: UsageError for a step of 0 or of the wrong sign.
    """
    low, high = (0, start) if end is None else (start, end)
    if any(map(traced, (low, high, step))):
        return _recorded(_counted(low, high, step, dtype), device, out)
    if dtype is not None and named(dtype) is int64:  # as torch, for this dtype alone
        low, high, step = int(low), int(high), int(step)
    if step == 0 or not 0 <= (high - low) / step < math.inf:
        expected = "finite bounds, and a nonzero step in the direction of end"
        raise UsageError(
            "arange cannot reach its end with this step", expected=expected, got=f"{low} to {high} by {step}"
        )
    if dtype is None and out is None:
        dtype = int64 if all(isinstance(v, int | np.integer) for v in (low, high, step)) else float32
    with _allocating(f"{low} to {high} by {step}"):
        host = np.arange(low, high, step)
    return _made(host, dtype, device, requires_grad, out)


def _counted(low: Any, high: Any, step: Any, dtype: object) -> Tensor:
    """Return `arange` with bounds that depend on named sizes."""
    if not all(isinstance(v, int) for v in (low, high, step)) or traced(step) or step == 0:
        what, expected = "arange of named sizes counts whole numbers", "int bounds, and a static int step other than 0"
        raise UsageError(what, expected=expected, got=f"{low} to {high} by {step}")
    count = (high - low + step - 1) // step if step > 0 else (low - high - step - 1) // -step
    one = as_symbol(_made(np.zeros((), np.int64), int64, None, False, None))
    made = call("iota", call("expand", one, shape=(count,)), axis=0)
    made = made if step == 1 else made * step
    made = made + low if traced(low) or low != 0 else made
    return made if dtype is None else made.to(dtype)


def linspace(
    start: float, end: float, steps: int, dtype: object = None, requires_grad: bool = False, *,
    device: Device | str | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`steps` equidistant numbers from start to end, both included; float32 by default.

    Raises: UsageError for a negative count.
    """
    if not isinstance(steps, int | np.integer) or steps < 0:
        raise UsageError("linspace got an invalid number of points", expected="an integer >= 0", got=steps)
    kind = float32 if dtype is None and out is None else dtype
    low, high = _ends("linspace", start, end, kind)
    with _allocating((steps,)):
        host = np.linspace(low, high, steps)
        if kind is not None and named(kind).kind in ("int", "uint") and steps > 1:  # torch steps from both ends
            step, i = (high - low) / (steps - 1), np.arange(steps)
            host = np.trunc(np.where(i < steps // 2, low + step * i, high - step * (steps - 1 - i)))
    return _made(host, kind, device, requires_grad, out)


def _ends(where: str, start: Any, end: Any, kind: Any) -> tuple[float, float]:
    """Return the ends of a range as numbers, ints for a dtype of integers. Raises: ShapeError for larger tensors."""
    for value in (start, end):
        if isinstance(value, Tensor) and value.ndim:
            raise ShapeError("an end of the range is not a number", where=where, expected="0-d", got=value.spec)
    whole = kind is not None and named(kind).kind in ("int", "uint")
    return (int(start), int(end)) if whole else (float(start), float(end))


def logspace(
    start: float, end: float, steps: int, base: float = 10.0, dtype: object = None, requires_grad: bool = False, *,
    device: Device | str | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`base` to the powers of `linspace`; float32 by default. Raises: UsageError for a negative count."""
    kind = float32 if dtype is None and out is None else dtype
    powers = linspace(*_ends("logspace", start, end, kind), steps, "float64").numpy()
    return _made(base**powers, kind, device, requires_grad, out)


def asarray(
    obj: Any, dtype: object = None, requires_grad: bool = False, *, device: Device | str | None = None,
    copy: bool | None = None,
) -> Tensor:  # fmt: skip
    """`tensor` if `copy`, else `as_tensor`."""
    if copy:
        return tensor(obj, dtype, requires_grad, device=device)
    made = as_tensor(obj, dtype, device)
    return made.requires_grad_() if requires_grad else made


def from_numpy(ndarray: np.ndarray) -> Tensor:
    """Make a tensor over the memory of a numpy array. Raises: UsageError for another object."""
    if not isinstance(ndarray, np.ndarray):
        raise UsageError("not a numpy array", where="from_numpy", got=type(ndarray).__name__, fix="use as_tensor()")
    return as_tensor(ndarray)


def scalar_tensor(
    s: float, dtype: object = None, requires_grad: bool = False, *, device: Device | str | None = None
) -> Tensor:
    """Make a 0-d tensor; float32 by default."""
    return full((), s, float32 if dtype is None else dtype, requires_grad, device=device)


def get_default_dtype() -> DType:
    """Return the dtype of tensors of Python floats: float32."""
    return float32


# -- methods that make tensors like another ----------------------------------------------------------------------------
def _new(name: str, factory: Callable[..., Tensor]) -> None:
    def new(
        input: Tensor, *size: Any, dtype: object = None, device: Device | str | None = None, requires_grad: bool = False
    ) -> Tensor:
        kind, there = like(input, dtype, device, None)
        return factory(*size, dtype=kind, device=there, requires_grad=requires_grad)

    doc = f"Call `{factory.__name__}` with the dtype and device of this tensor, unless given."
    entered(METHOD)(renamed(new, name, doc))


for _factory in (zeros, ones, empty):
    _new(f"new_{_factory.__name__}", _factory)
_new("new_full", full)
_new("new_tensor", tensor)
