"""One operation on tensors: casts made visible, then run or recorded, then taped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

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
from graphwright.autograd.modes import autocast, grad_mode, no_grad
from graphwright.autograd.recorder import active, share
from graphwright.autograd.tape import TapeNode
from graphwright.errors import UsageError
from graphwright.ops import Op, compute, get
from graphwright.ops.casting import Kind, is_cast, target_dtype


@lru_cache(4096)
def scalar(text: str, dtype: DType) -> Any:
    """A constant 0-d tensor; `text` is the number's repr, as 0.0 and -0.0 are equal and differ."""
    number = {"True": True, "False": False}.get(text)
    number = (float(text) if dtype.is_float else int(text)) if number is None else number
    value = np.asarray(number)
    if dtype.name == "bfloat16":
        return Tensor(compute(_CAST, [from_numpy(value.astype(np.float32))], {"dtype": dtype})[0])
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


_NUMBERS: dict[type, DType] = {bool: bool_, int: int64, float: float64}


def _number(value: Any) -> DType | None:
    """The dtype of a Python number, or None for what is none."""
    kind = _NUMBERS.get(type(value))
    if kind is None and isinstance(value, int | float | np.bool_) and not isinstance(value, np.number):
        return bool_ if isinstance(value, np.bool_) else int64 if isinstance(value, int) else float64
    return kind


def _operands(row: Op, operands: Sequence[Any]) -> Sequence[Tensor]:
    """Tensors of the dtypes that the op wants, casts applied as operations of their own."""
    given: list[Any] = []
    kinds: list[Kind] = []
    for o in operands:
        number = None if isinstance(o, Tensor) else _number(o)
        if number is None:
            o = as_tensor(o)
            data = o.data
            kinds.append((data.dtype, "array" if data.shape else "scalar0d"))
        else:
            kinds.append((number, "python"))
        given.append(o)
    for place, kind in enumerate(_casts(row, tuple(kinds), autocast.get())):
        if kind is not None:
            o = given[place]
            given[place] = apply(_CAST, (o,), {"dtype": kind}) if isinstance(o, Tensor) else scalar(repr(o), kind)
    if any([t.requires_grad and not t.data.shape for t in given]):
        return _joined(given)
    return given


_CAST = get("cast")


@lru_cache(4096)
def _casts(row: Op, kinds: tuple[Kind, ...], low: DType | None) -> tuple[DType | None, ...]:
    """Per operand the dtype that it is cast to, or made in if it is a number; None to leave it."""
    target = target_dtype(row, kinds, low)
    result: list[DType | None] = []
    for place, (kind, how) in enumerate(kinds):
        if how == "python":
            result.append(target or (float32 if kind is float64 else kind))
        else:
            result.append(target if is_cast(row, place, kind, target) else None)
    return tuple(result)


def _joined(operands: Sequence[Tensor]) -> Sequence[Tensor]:
    """Numbers (tensors of no axes) on the CPU that want a gradient, moved to the others as an operation of its own."""
    there = next((t.data.device for t in operands if isinstance(t.data, NDArray) and t.data.device != CPU), None)
    if there is None:
        return operands
    return [t.to(there) if t.requires_grad and not t.shape and t.device == CPU else t for t in operands]


def expanded(row: Op, data: Sequence[NDArray], attrs: Mapping[str, Any]) -> tuple[NDArray, ...]:
    """The results of an op by simpler ones, for a backend that has no kernel of its name."""
    assert row.expand is not None
    with no_grad():
        found = row.expand([Tensor(d) for d in data], attrs)
    return tuple(t.own() for t in (found if isinstance(found, tuple) else (found,)))


def _plain(operands: Sequence[Any]) -> bool:
    """True for tensors of axes and of one dtype outside autocast, which no casting class changes."""
    if autocast.get() is not None:
        return False
    kind = None
    for o in operands:
        if not isinstance(o, Tensor):
            return False
        data = o.data
        if (data.dtype is not kind and kind is not None) or not data.shape:
            return False
        kind = data.dtype
    return True


def apply(row: Op, operands: Sequence[Any], attrs: Mapping[str, Any], outs: Sequence[Tensor] | None = None) -> Any:
    """Run or record an op on tensors and numbers; one tensor, or a tuple of them.

    Args:
        outs: tensors that become the results, under the rules of `autograd.inplace`.
    """
    inputs = operands if _plain(operands) else _operands(row, operands)
    recorder = active.get()
    data: list[Any] = []
    wanted = False
    for t in inputs:
        data.append(t.data)
        wanted = wanted or t.requires_grad
    taped = wanted and (row.vjp is not None or row.traits.opaque) and grad_mode.get()
    if taped and row.traits.opaque and row.expand is not None and outs is None:
        return row.expand(inputs, attrs)  # in ops that have gradients
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
        outputs = (Tensor(results[0]),) if len(results) == 1 else [Tensor(r) for r in results]
    else:
        data = write_over(row, data, attrs, outs, taped)
        outputs = outs
    node = TapeNode(row, attrs, inputs, data, outputs) if taped else None
    if outs is not None and outputs is outs and grad_mode.get():
        for out in outs:
            out.node, out.requires_grad = None, False
    if node is not None:
        node.take(outputs)
    if outs is not None and outputs is not outs:
        rebind(outs, outputs)
        outputs = outs
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


from graphwright.autograd.tensor import Tensor  # noqa: E402  # at the end, and this module first: tensors call `apply`
