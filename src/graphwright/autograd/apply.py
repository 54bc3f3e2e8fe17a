"""One operation on tensors: casts made visible, then run or recorded, then taped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import (
    CPU,
    DType,
    MissingKernel,
    NDArray,
    bool_,
    float32,
    float64,
    from_dlpack,
    from_numpy,
    int64,
)
from graphwright.autograd.inplace import rebind, write_over
from graphwright.autograd.modes import autocast_dtype, grad_enabled, no_grad
from graphwright.autograd.recorder import active, share
from graphwright.autograd.tape import TapeNode
from graphwright.errors import UsageError
from graphwright.ops import Op, compute, get
from graphwright.ops.casting import is_cast, target_dtype

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor


@lru_cache(4096)
def scalar(text: str, dtype: DType) -> Any:
    """A constant 0-d tensor; `text` is the number's repr, as 0.0 and -0.0 are equal and differ."""
    from graphwright.autograd.tensor import Tensor

    number = {"True": True, "False": False}.get(text)
    number = (float(text) if dtype.is_float else int(text)) if number is None else number
    value = np.asarray(number)
    if dtype.name == "bfloat16":
        return Tensor(compute(get("cast"), [from_numpy(value.astype(np.float32))], {"dtype": dtype})[0])
    return Tensor(from_numpy(value.astype(dtype.numpy)))


def speaks_dlpack(value: Any) -> bool:
    """True for an array of ours or another library's; numpy has a way of its own, which takes read-only memory too."""
    return hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray | np.generic)


def host_array(value: Any) -> np.ndarray:
    """Numbers, nested lists or numpy's arrays as numpy's. Raises: UsageError for what is no array of numbers."""
    try:
        host = np.asarray(value)
    except ValueError:  # lists of different lengths
        host = None
    if host is None or host.dtype.kind not in "biuf":
        raise UsageError("not an array of numbers", got=type(value).__name__ if host is None else host.dtype)
    return host


def as_tensor(value: Any) -> Tensor:
    """A tensor of numbers, nested lists or arrays, whose memory it shares (torch's by DLPack); itself if it is one."""
    from graphwright.autograd.tensor import Tensor

    if isinstance(value, Tensor):
        return value
    if isinstance(value, NDArray):
        return Tensor(value)
    if speaks_dlpack(value):
        return Tensor(from_dlpack(value))
    host = host_array(value)
    if not isinstance(value, np.ndarray | np.generic) and host.dtype == np.float64:
        host = host.astype(np.float32)
    return Tensor(from_numpy(host))


def _python_kind(value: Any) -> DType | None:
    if isinstance(value, bool | np.bool_):
        return bool_
    if isinstance(value, int) and not isinstance(value, np.generic):
        return int64
    if isinstance(value, float) and not isinstance(value, np.generic):
        return float64
    return None


def _operands(row: Op, operands: Sequence[Any]) -> list[Tensor]:
    """Tensors of the dtypes that the op wants, casts applied as operations of their own."""
    from graphwright.autograd.tensor import Tensor

    low = autocast_dtype()
    if low is None and all(isinstance(o, Tensor) for o in operands):
        kind = operands[0].data.dtype if operands else None
        if all(o.data.dtype is kind for o in operands):  # no casting class changes these
            return _joined(list(operands)) if any(not o.data.shape for o in operands) else list(operands)
    given = [o if _python_kind(o) is not None else as_tensor(o) for o in operands]
    numbers = [_python_kind(o) for o in given]
    kinds = [
        (number, "python") if number is not None else (o.dtype, "array" if o.shape else "scalar0d")
        for o, number in zip(given, numbers, strict=True)
    ]
    target = target_dtype(row, kinds, low)
    result: list[Tensor] = []
    for place, (operand, number) in enumerate(zip(given, numbers, strict=True)):
        if number is not None:
            result.append(scalar(repr(operand), target or (float32 if number is float64 else number)))
        elif is_cast(row, place, operand.dtype, target):
            result.append(apply(get("cast"), (operand,), {"dtype": target}))
        else:
            result.append(operand)
    if any(t.requires_grad and not t.shape for t in result):
        return _joined(result)
    return result


def _joined(operands: list[Tensor]) -> list[Tensor]:
    """Numbers (tensors of no axes) on the CPU that want a gradient, moved to the others as an operation of its own."""
    there = next((t.data.device for t in operands if isinstance(t.data, NDArray) and t.data.device != CPU), None)
    if there is None:
        return operands
    return [t.to(there) if t.requires_grad and not t.shape and t.device == CPU else t for t in operands]


def expanded(row: Op, data: Sequence[NDArray], attrs: Mapping[str, Any]) -> tuple[NDArray, ...]:
    """The results of an op by simpler ones, for a backend that has no kernel of its name."""
    from graphwright.autograd.tensor import Tensor

    assert row.expand is not None
    with no_grad():
        found = row.expand([Tensor(d) for d in data], attrs)
    return tuple(t.own() for t in (found if isinstance(found, tuple) else (found,)))


def apply(row: Op, operands: Sequence[Any], attrs: Mapping[str, Any], outs: Sequence[Tensor] | None = None) -> Any:
    """Run or record an op on tensors and numbers; one tensor, or a tuple of them.

    Args:
        outs: tensors that become the results, under the rules of `autograd.inplace`.
    """
    from graphwright.autograd.tensor import Tensor

    inputs = _operands(row, operands)
    recorder = active.get()
    taped = (row.vjp is not None or row.traits.opaque) and grad_enabled() and any(t.requires_grad for t in inputs)
    if taped and row.traits.opaque and row.expand is not None and outs is None:
        return row.expand(inputs, attrs)  # in ops that have gradients
    data: list[Any] = [t.data for t in inputs]
    if recorder is not None and any(t.symbolic or t.carried for t in (*inputs, *(outs or ()))):
        data = [recorder.resolve(t) for t in inputs]  # a variable's value at this point of the step
        results: Sequence[Any] = recorder.record(row, data, attrs)
        if row.view is not None:
            share(results[0], data[0])
        outputs: Sequence[Tensor] = [Tensor(r) for r in results]
    elif outs is None:
        try:
            results = compute(row, data, attrs)
        except MissingKernel:
            if row.expand is None:
                raise
            results = expanded(row, data, attrs)
        outputs = [Tensor(r) for r in results]
    else:
        data = write_over(row, data, attrs, outs, taped)
        outputs = outs
    node = TapeNode(row, attrs, inputs, data, outputs) if taped else None
    if outs is not None and outputs is outs and grad_enabled():
        for out in outs:
            out.node, out.requires_grad = None, False
    if node is not None:
        node.take(outputs)
    if outs is not None and outputs is not outs:
        rebind(outs, outputs)
        outputs = outs
    return outputs[0] if len(outputs) == 1 else tuple(outputs)
