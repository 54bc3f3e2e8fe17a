"""`apply`: cast the operands of an op, run or record it, and tape it. The lowest layer of tensors, without methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from graphwright.array import CPU, Device, NDArray, Spec, from_dlpack, from_numpy
from graphwright.array.dtype import DType, bool_, float32, float64, int64
from graphwright.array.ndarray import OneElement
from graphwright.autograd.errors import TraceError
from graphwright.autograd.inplace import rebind, write_over
from graphwright.autograd.modes import autocast, grad_mode
from graphwright.autograd.named_sizes import traced
from graphwright.autograd.recorder import Symbol, active_recorder, mark_alias
from graphwright.autograd.tape import Hook, TapeNode
from graphwright.errors import DTypeError, UsageError
from graphwright.ops import Op, compute, get
from graphwright.ops.casting import OperandKind, is_cast, target_dtype

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor

NO_HOOKS: list[Hook] = []
"""The `hooks` of every tensor without hooks; shared, so never appended to."""


def apply(row: Op, operands: Sequence[Any], attrs: Mapping[str, Any], outs: Sequence[Tensor] | None = None) -> Any:
    """Run or record an op on tensors and numbers; return a tensor, or a tuple of tensors for several results.

    Args:
        outs: tensors to write the results into, in place; on a tape or in a trace, the write is recorded.
    """
    inputs = operands if _plain(row, operands) else _cast_operands(row, operands)
    recorder = active_recorder.get()
    data: list[Any] = []
    wanted = False
    for t in inputs:
        data.append(t.data)
        wanted = wanted or t.requires_grad
    taped = wanted and (row.vjp is not None or row.traits.opaque) and grad_mode.get()
    if taped and row.traits.opaque and row.expand is not None and outs is None:
        return row.expand(inputs, attrs)  # run as ops that have gradients
    if recorder is not None and (
        row.traits.collective  # of constants too: all ranks run it in each step, and none while tracing
        or any(t.symbolic or t.is_variable for t in (*inputs, *(outs or ())))
        or (recorder.named is not None and row.names_sizes(attrs))
    ):
        data = [recorder.resolve(t) for t in inputs]  # for a variable its current value in the trace
        results: Sequence[Any] = recorder.record(row, data, attrs)
        if row.view is not None:
            mark_alias(results[0], data[0])
        outputs: Sequence[Tensor] = [_Tensor(r) for r in results]
    elif outs is None:
        results = compute(row, data, attrs)
        outputs = (_Tensor(results[0]),) if len(results) == 1 else [_Tensor(r) for r in results]
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


class TensorBase(OneElement):
    """A value and the tape node that computed it; `Tensor` adds the methods.

    Attributes:
        data: NDArray (eager) or Symbol (while tracing).
        requires_grad: whether gradients with respect to it are computed; floating dtypes only.
        grad: gradient of a leaf after `backward`, or None.
        hooks: functions that `backward` calls with the full gradient of a leaf.
        node, port: the tape node that computed the value (None for a leaf), and the index of the value in its results.
        name: dotted path of a parameter, else "".
    """

    __slots__ = ("__weakref__", "data", "grad", "hooks", "name", "node", "port", "requires_grad")
    is_variable: ClassVar[bool] = False
    """True for a Variable, which a trace turns into a param or state node."""
    __gw_op__ = staticmethod(apply)

    def __init__(self, data: NDArray | Symbol, requires_grad: bool = False, name: str = "") -> None:
        if type(data) is not NDArray and not isinstance(data, NDArray | Symbol):  # a quick test first
            fix, got = "gw.tensor(data) converts numbers and lists", type(data).__name__
            raise UsageError("the data of a Tensor are not an array", expected="NDArray", got=got, fix=fix)
        if requires_grad and not data.dtype.is_float:
            raise DTypeError("a tensor that is not floating cannot require a gradient", got=data.spec)
        self.data, self.requires_grad, self.name = data, requires_grad, name
        self.grad: Tensor | None = None
        self.hooks: list[Hook] = NO_HOOKS
        self.node: Any = None
        self.port = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return self.data.shape

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.data.dtype

    @property
    def spec(self) -> Spec:
        """Shape and dtype."""
        return self.data.spec

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.data.shape)

    @property
    def device(self) -> Device:
        """Device of the memory, also of a variable in a trace. Raises: TraceError for a traced value."""
        return self.data.device if isinstance(self.data, NDArray) else self.concrete("device").device

    @property
    def is_leaf(self) -> bool:
        """True if no taped operation computed this tensor."""
        return self.node is None

    @property
    def symbolic(self) -> bool:
        """True for a traced value, which has a spec and no elements."""
        return isinstance(self.data, Symbol)

    @property
    def grad_dtype(self) -> DType:
        """Dtype in which `backward` sums the gradient of a leaf."""
        return self.data.dtype

    def own(self) -> NDArray:
        """Return the array for a write in place. Raises: TraceError for a traced value."""
        return self.concrete("a write")

    def concrete(self, wanted: str) -> NDArray:
        """Return the array. Raises: TraceError for a traced value or variable; `wanted` says what needs the array.

        A variable may change between runs of a traced program, so a trace must not read its current array.
        """
        if not isinstance(self.data, NDArray) or _of_trace(self):
            what = f"{wanted} needs the tensor's value, which is not known in a trace"
            fix = "use tensor operations (gw.ops.call('where', ...)), or compute it outside the trace"
            raise TraceError(what, got=self.spec, fix=fix)
        return self.data


_Class = TypeVar("_Class", bound=type[TensorBase])
_Tensor: type[Tensor]


def result_class(cls: _Class) -> _Class:
    """Class decorator: make `apply` return instances of this class."""
    global _Tensor
    _Tensor = cls  # pyright: ignore[reportAssignmentType]
    return cls


# -- tensors from other values -----------------------------------------------------------------------------------------
def as_tensor(data: Any, dtype: object = None, device: Device | str | None = None) -> Tensor:
    """Convert numbers or an array, whose memory is shared if possible; return a tensor unchanged.

    Args:
        dtype, device: to which the result is cast and copied.
    """
    made: Any = data
    if not isinstance(data, TensorBase):
        if isinstance(data, NDArray | Symbol):
            made = _Tensor(data)
        elif traced(data):
            made = data.tensor()
        elif speaks_dlpack(data):
            made = _Tensor(from_dlpack(data))
        else:
            host = host_array(data)
            if dtype is None and not isinstance(data, np.ndarray | np.generic) and host.dtype == np.float64:
                host = host.astype(np.float32)
            made = _Tensor(from_numpy(host))
    return made if dtype is None and device is None else made.to(dtype=dtype, device=device)


def device_of(x: TensorBase) -> Device:
    """Return the device of a tensor; in a trace, of its values and variables, the CPU, where programs are built."""
    return x.data.device if isinstance(x.data, NDArray) and not _of_trace(x) else CPU


def _of_trace(x: TensorBase) -> bool:
    """Return whether x is a variable that the running trace reads again in each run."""
    return x.is_variable and active_recorder.get() is not None


def as_symbol(tensor: Tensor) -> Tensor:
    """Return a tensor as a value of the running trace, in which what is computed from it is recorded."""
    recorder = active_recorder.get()
    assert recorder is not None, "no trace is running"
    return _Tensor(recorder.resolve(tensor))


def speaks_dlpack(value: Any) -> bool:
    """Return True if an object supports DLPack, except numpy arrays: they are read directly, as some are read-only."""
    return hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray | np.generic)


def host_array(value: Any) -> np.ndarray:
    """Convert numbers or nested lists to a numpy array. Raises: UsageError for any other value."""
    try:
        host = np.asarray(value)
    except ValueError:  # lists of different lengths
        host = None
    if host is not None and host.dtype == object and any(map(traced, host.flat)):
        raise TraceError("a tensor is made of numbers that depend on named sizes", got=value,
                         fix="make a tensor of each, and join them: gw.stack([gw.tensor(n), ...])")  # fmt: skip
    if host is None or host.dtype.kind not in "biuf":
        got = type(value).__name__ if host is None else host.dtype
        expected = "numbers, or nested lists of equal lengths"
        raise UsageError("cannot make a tensor: not an array of numbers", expected=expected, got=got)
    return host


@lru_cache(4096)
def scalar(text: str, dtype: DType) -> Any:
    """Return a cached 0-d tensor of a number, whose memory nothing may write.

    `text` is the repr of the number, because 0.0 and -0.0 would be the same cache key.
    """
    number = {"True": True, "False": False}.get(text)
    number = (float(text) if dtype.is_float else int(text)) if number is None else number
    value = np.asarray(number)
    if value.dtype == object:
        raise UsageError("a Python int is too large for the dtype", expected=f"a {dtype.name} number", got=number)
    if dtype.name == "bfloat16":
        array = compute(_CAST, [from_numpy(value.astype(np.float32))], {"dtype": dtype})[0]
    else:
        array = from_numpy(value.astype(dtype.numpy))
    array.storage.shared = True
    return _Tensor(array)


# -- operands ----------------------------------------------------------------------------------------------------------
_CAST = get("cast")
NUMBERS: dict[type, DType] = {bool: bool_, int: int64, float: float64}
"""Type of a Python number -> its dtype."""


def _plain(row: Op, operands: Sequence[Any]) -> bool:
    """Return True if no operand needs a cast: outside autocast, for tensors of one dtype that are not 0-d."""
    if autocast.get() is not None:
        return False
    kind = None
    for o in operands:
        if not isinstance(o, TensorBase):
            return False
        data = o.data
        if (data.dtype is not kind and kind is not None) or not data.shape:
            return False
        kind = data.dtype
    return kind is None or kind.is_float or not row.traits.promotes


def _cast_operands(row: Op, operands: Sequence[Any]) -> Sequence[Tensor]:
    """Return the operands as tensors of the dtypes that the op needs; each cast is a separate taped operation."""
    given: list[Any] = []
    kinds: list[OperandKind] = []
    for o in operands:
        if isinstance(o, np.generic):  # a number too, as in torch
            o = o.item()
        number = None if isinstance(o, TensorBase) else _number_dtype(o)
        if number is None:
            o = as_tensor(o)
            data = o.data
            kinds.append((data.dtype, "array" if data.shape else "scalar0d"))
        else:
            kinds.append((number, "python"))
        given.append(o)
    for i, kind in enumerate(_casts(row, tuple(kinds), autocast.get())):
        if kind is not None:
            o = given[i]
            tensor = isinstance(o, TensorBase)
            given[i] = (
                apply(_CAST, (o,), {"dtype": kind})
                if tensor
                else o.tensor(kind)
                if traced(o)
                else scalar(repr(o), kind)
            )
    if any([t.requires_grad and not t.data.shape for t in given]):
        return _on_one_device(given)
    return given


def _number_dtype(value: Any) -> DType | None:
    kind = NUMBERS.get(type(value))
    if kind is None and isinstance(value, int | float):
        return int64 if isinstance(value, int) else float64
    return kind


@lru_cache(4096)
def _casts(row: Op, kinds: tuple[OperandKind, ...], low: DType | None) -> tuple[DType | None, ...]:
    """Return for each operand the dtype to cast it to, or None for no cast; Python numbers always get a dtype."""
    target = target_dtype(row, kinds, low)
    result: list[DType | None] = []
    for i, (kind, how) in enumerate(kinds):
        if how == "python":
            result.append(target or (float32 if kind is float64 else kind))
        else:
            result.append(target if is_cast(row, i, kind, target) else None)
    return tuple(result)


def _on_one_device(operands: Sequence[Tensor]) -> Sequence[Tensor]:
    """Move 0-d CPU tensors that require a gradient to the device of the other operands, as a taped operation."""
    device = next((t.data.device for t in operands if isinstance(t.data, NDArray) and t.data.device != CPU), None)
    if device is None:
        return operands
    return [t.to(device) if t.requires_grad and not t.shape and t.device == CPU else t for t in operands]
