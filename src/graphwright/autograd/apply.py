"""One operation on tensors: casts made visible, then run or recorded, then taped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import DType, NDArray, bool_, float32, float64, from_numpy, int64, result_type
from graphwright.autograd.modes import autocast_dtype, grad_enabled
from graphwright.autograd.recorder import Symbol, active
from graphwright.errors import UsageError
from graphwright.ops import Op, compute, get

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor

_sequence = count()


class TapeNode:
    """What backward needs of one operation.

    Attributes:
        op, attrs: the row and its attributes.
        edges: per operand the (node, port) that made it, the leaf itself, or None if it wants no gradient.
        ins, outs: saved values, or specs of those the row does not save; None after they were freed.
        versions: storage versions of the saved arrays at the time of saving.
        specs: specs of operands and of results.
        path: name of the recorded node, while tracing.
        seq: creation number; backward runs from high to low.
    """

    __slots__ = (
        "__weakref__",
        "attrs",
        "edges",
        "in_specs",
        "ins",
        "op",
        "out_specs",
        "outs",
        "path",
        "seq",
        "versions",
    )

    def __init__(
        self, op: Op, attrs: Mapping[str, Any], inputs: Sequence[Tensor], data: Sequence[Any], outputs: Sequence[Tensor]
    ) -> None:
        self.op, self.attrs, self.seq = op, attrs, next(_sequence)
        self.edges: list[Any] = [
            None if not t.requires_grad else t if t.node is None else (t.node, t.port) for t in inputs
        ]
        self.in_specs, self.out_specs = [t.spec for t in inputs], [t.spec for t in outputs]
        first = outputs[0].data
        self.path = first.recorder.path(first) if isinstance(first, Symbol) else ""
        keep = op.saves
        self.ins: list[Any] | None = [d if i in keep.inputs else None for i, d in enumerate(data)]
        self.outs: list[Any] | None = [t.data if i in keep.outputs else None for i, t in enumerate(outputs)]
        self.versions = [d.storage.version if isinstance(d, NDArray) else None for d in (*self.ins, *self.outs)]


@lru_cache(4096)
def _scalar(text: str, dtype: DType) -> Any:
    """A constant 0-d tensor; `text` is the number's repr, as 0.0 and -0.0 are equal and differ."""
    from graphwright.autograd.tensor import Tensor

    number = {"True": True, "False": False}.get(text)
    number = (float(text) if dtype.is_float else int(text)) if number is None else number
    value = np.asarray(number)
    if dtype.name == "bfloat16":
        return Tensor(compute(get("cast"), [from_numpy(value.astype(np.float32))], {"dtype": dtype})[0])
    return Tensor(from_numpy(value.astype(dtype.numpy)))


def as_tensor(value: Any) -> Tensor:
    """A tensor of numbers, arrays or nested lists; itself if it is one."""
    from graphwright.autograd.tensor import Tensor

    if isinstance(value, Tensor):
        return value
    if isinstance(value, NDArray):
        return Tensor(value)
    host = np.asarray(value)
    if host.dtype == object:
        raise UsageError("not an array of numbers", got=type(value).__name__)
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


def _common_dtype(row: Op, free: Sequence[Any]) -> DType | None:
    """The dtype that operands are cast to by the op's casting class, or None to leave them."""
    first = next((t.dtype for t in free if _python_kind(t) is None), float32)
    low, rule = autocast_dtype(), row.traits.amp
    if rule == "low":
        return low if first.is_float else None
    if rule == "f32" and low is not None and first.is_low:
        return float32
    if rule == "inner":
        return first
    if rule in ("promote", "f32") and len(free) > 1:
        return result_type(
            [
                (kind, "python")
                if (kind := _python_kind(t)) is not None
                else (t.dtype, "array" if t.shape else "scalar0d")
                for t in free
            ]
        )
    return None


def _operands(row: Op, operands: Sequence[Any]) -> list[Tensor]:
    """Tensors of the dtypes that the op wants, casts applied as operations of their own."""
    given = [o if _python_kind(o) is not None else as_tensor(o) for o in operands]
    target = _common_dtype(row, [o for i, o in enumerate(given) if i not in row.traits.fixed])
    result: list[Tensor] = []
    for place, operand in enumerate(given):
        kind = _python_kind(operand)
        if kind is not None:
            result.append(_scalar(repr(operand), target or (float32 if kind is float64 else kind)))
        elif target in (None, operand.dtype) or place in row.traits.fixed:
            result.append(operand)
        elif operand.dtype.is_float or row.traits.amp in ("promote", "f32"):
            result.append(apply(get("cast"), (operand,), {"dtype": target}))
        else:
            result.append(operand)
    return result


def apply(row: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Run or record an op on tensors and numbers; one tensor, or a tuple of them."""
    from graphwright.autograd.tensor import Tensor

    inputs = _operands(row, operands)
    recorder = active.get()
    data: list[Any] = [t.data for t in inputs]
    if recorder is not None and any(isinstance(t.data, Symbol) or t.carried for t in inputs):
        data = [recorder.resolve(t) for t in inputs]  # a variable's value at this point of the step
        results: Sequence[Any] = recorder.record(row, data, attrs)
    else:
        results = compute(row, data, attrs)
    outputs = [Tensor(r) for r in results]
    taped = row.vjp is not None or row.traits.opaque
    if taped and grad_enabled() and any(t.requires_grad for t in inputs):
        node = TapeNode(row, attrs, inputs, data, outputs)
        for port, out in enumerate(outputs):
            if out.dtype.is_float:
                out.node, out.port, out.requires_grad = node, port, True
    return outputs[0] if len(outputs) == 1 else tuple(outputs)
