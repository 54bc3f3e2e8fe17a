"""Tensor: the class that users work with. Operators and methods over ops and the functions of this folder."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload
from weakref import ref

import numpy as np
import numpy.typing as npt

from graphwright.array import Device, DType, NDArray, bfloat16, dtype, float16, float32, float64, int64, names_device
from graphwright.array.layout import Shape
from graphwright.autograd import engine, functions, indexing
from graphwright.autograd.apply import NO_HOOKS, TensorBase, apply, result_class, scalar
from graphwright.autograd.function import ToDevice
from graphwright.autograd.modes import autocast_dtype
from graphwright.autograd.op_methods import OpMethods
from graphwright.autograd.recorder import Symbol
from graphwright.autograd.tape import Hook
from graphwright.errors import DTypeError, ShapeError, UsageError
from graphwright.ops import call, get
from graphwright.ops.axes import axes_of, axis_of

Axes = int | Shape | None
NEG = get("neg")


def _reduction(op: str, doc: str):  # the types of these factories are inferred: Callable would lose the keywords
    def reduce(self: Tensor, axis: Axes = None, keepdims: bool = False) -> Tensor:
        return call(op, self, axes=axes_of(axis, self.ndim), keepdims=keepdims)

    return _named(reduce, op, doc)


def _operators(op: str):
    """Return the operator methods of an op: with the tensor as the left and as the right operand."""
    row = get(op)

    def left(self: Tensor, other: Any) -> Tensor:
        return apply(row, (self, other), {})

    def right(self: Tensor, other: Any) -> Tensor:
        return apply(row, (other, self), {})

    return left, right


POWERS: dict[builtins.float, Callable[[Tensor], Tensor]] = {
    -1: lambda x: call("reciprocal", x),
    -0.5: lambda x: call("rsqrt", x),
    0.5: lambda x: call("sqrt", x),
    1: lambda x: x * 1.0,
    2: lambda x: x * x,
    3: lambda x: x * x * x,
}
"""Exponents that are numbers -> xᵖ of a floating x by other ops, as torch computes it; others use the op `pow`."""


def _logical(op: str):
    def combine(self: Tensor, *others: Any) -> Tensor:
        for operand in (self, *others):
            kind = operand.dtype.name if isinstance(operand, TensorBase) else type(operand).__name__
            if kind != "bool":
                fix = "compare first: (a > 0) & (b > 0)"
                raise DTypeError("an operand of &, |, ^ or ~ is not bool", expected="bool", got=kind, fix=fix)
        return call(op, self, *others)

    return combine


def _in_place(op: str):
    def write(self: Tensor, other: Any) -> Tensor:
        return call(op, self, other, out=self)

    return _named(write, f"{op}_", f"Run `{op}` with `other`, write the result to this tensor, and return it.")


def _cast_to(kind: DType):
    def cast(self: Tensor) -> Tensor:
        return self.to(kind)

    return _named(cast, kind.name, f"Cast to {kind.name}.")


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _named(method: _Method, name: str, doc: str) -> _Method:
    method.__name__, method.__qualname__, method.__doc__ = name, f"Tensor.{name}", doc
    return method


@result_class
class Tensor(TensorBase, OpMethods):
    """An n-dimensional array through which operations and gradients flow."""

    __slots__ = ()
    __hash__ = object.__hash__

    # -- gradients ---------------------------------------------------------------------------------------------------
    backward = engine.backward

    def detach(self) -> Tensor:
        """Return a tensor over the same memory that is not on the tape."""
        return Tensor(self.data.alias() if isinstance(self.data, Symbol) else self.data)

    def register_hook(self, call: Callable[[Tensor], Tensor | None]) -> Hook:
        """Call a function with the full gradient of this tensor, once in each backward; it may return a replacement.

        Hooks run in the order of registration. Hooks of a leaf run after all its gradients have been summed. In a trace
        the operations of hooks are recorded. Returns: a Hook, whose `remove()` unregisters the function.
        Raises: UsageError for a tensor that requires no gradient.
        """
        if not self.requires_grad:
            raise UsageError("cannot register a hook on a tensor that requires no gradient", got=self.spec)
        if self.node is not None:
            if self.node.hooks is None:
                self.node.hooks = {}
            return Hook(call, self.node.hooks.setdefault(self.port, []))
        if self.hooks is NO_HOOKS:
            self.hooks = []
        return Hook(call, self.hooks)

    def retain_grad(self) -> None:
        """Make backward store the gradient of this inner tensor in `grad`, as it does for leaves.

        Raises: UsageError for a tensor that requires no gradient.
        """
        if not self.requires_grad:
            raise UsageError("cannot retain the gradient of a tensor that requires no gradient", got=self.spec)
        if self.node is not None and all(r() is not self for r in self.node.retained or ()):
            self.node.retained = [*(self.node.retained or ()), ref(self)]

    # -- conversion to other types -----------------------------------------------------------------------------------
    def numpy(self, dtype: npt.DTypeLike | None = None) -> np.ndarray:
        """Return a numpy array, sharing memory where possible. Raises: DTypeError for bfloat16 without a dtype."""
        return self.concrete("numpy()").to_numpy(dtype)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        host = self.concrete("numpy").to_numpy(dtype)
        return host.copy() if copy else host

    def __dlpack__(
        self, *, stream: Any = None, max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None, copy: bool | None = None,
    ) -> Any:  # fmt: skip
        """Export the memory by DLPack. Raises: BufferError if the tensor requires a gradient."""
        if self.requires_grad:
            raise BufferError("DLPack cannot export a tensor that requires a gradient; call detach() first")
        array = self.concrete("DLPack")
        return array.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.concrete("DLPack").__dlpack_device__()

    def item(self) -> Any:
        """Return the only element as a Python number. Raises: ShapeError unless there is one element."""
        if self.size != 1:
            raise ShapeError("cannot convert this tensor to a number", expected="exactly one element", got=self.spec)
        return self.concrete("item()").item()

    def tolist(self) -> Any:
        """Return nested lists of Python numbers."""
        return self.concrete("tolist()").to_numpy("float32" if self.dtype.as_bits else None).tolist()

    def __float__(self) -> builtins.float:  # `float` is a method here
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __len__(self) -> int:
        if not self.shape:
            raise UsageError("cannot take the length of a 0-d tensor")
        return self.shape[0]

    def __repr__(self) -> str:
        if isinstance(self.data, Symbol):
            return f"Tensor({self.spec}, traced)"
        body = self.data.text("Tensor(")
        if body is None:
            body = f"{self.spec}, not yet read from its file"
        extra = "" if self.dtype is float32 else f", dtype={self.dtype.name}"
        return f"Tensor({body}{extra}{', requires_grad=True' if self.requires_grad else ''})"

    # -- dtype and device --------------------------------------------------------------------------------------------
    def to(self, to: object) -> Tensor:
        """Cast to a dtype or copy to a device (a Device or its name); return the tensor itself if nothing changes.

        Raises: DTypeError, DeviceUnavailable; TraceError for a traced tensor and a device.
        """
        if names_device(to):
            device = Device.parse(to)
            return self if self.device == device else ToDevice.apply(self, device)
        kind = dtype(to)
        return self if kind is self.dtype else call("cast", self, dtype=kind)

    double, float, half = _cast_to(float64), _cast_to(float32), _cast_to(float16)
    bfloat16, long = _cast_to(bfloat16), _cast_to(int64)

    # -- operators: numbers may stand on either side -----------------------------------------------------------------
    __add__, __radd__ = _operators("add")
    __sub__, __rsub__ = _operators("sub")
    __mul__, __rmul__ = _operators("mul")
    __truediv__, __rtruediv__ = _operators("div")
    __matmul__, __rmatmul__ = _operators("matmul")
    __floordiv__, __rfloordiv__ = _operators("floor_divide")
    __mod__, __rmod__ = _operators("remainder")
    __rpow__ = _operators("pow")[1]
    __lt__, __le__ = _operators("lt")[0], _operators("le")[0]
    __gt__, __ge__ = _operators("gt")[0], _operators("ge")[0]
    __and__, __or__, __xor__ = _logical("logical_and"), _logical("logical_or"), _logical("logical_xor")
    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__
    __invert__ = _logical("logical_not")

    def __neg__(self) -> Tensor:
        return apply(NEG, (self,), {})

    def __pow__(self, other: Any) -> Tensor:
        if isinstance(other, int) and other < 0 and not self.dtype.is_float:
            what = "cannot raise an integer tensor to a negative power"
            raise UsageError(what, got=f"{self.spec} ** {other}", fix="call float() on the tensor first")
        power = POWERS.get(other) if isinstance(other, int | builtins.float) and self.dtype.is_float else None
        if power is None:
            return call("pow", self, other)
        low = self.dtype.is_low and autocast_dtype() is not None  # as `pow`, whose operands autocast widens
        return power(self.float() if low else self)

    def __abs__(self) -> Tensor:
        return call("abs", self)

    def __eq__(self, other: object) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # elementwise, as in numpy and torch
        return call("eq", self, other)

    def __ne__(self, other: object) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # elementwise, as in numpy and torch
        return call("ne", self, other)

    # -- elementwise functions: see OpMethods for those that are one op ------------------------------------------------
    def pow(self, exponent: Any) -> Tensor:
        """xᵖ for a tensor or number p. Raises: UsageError for an integer tensor and a negative integer."""
        return self**exponent

    def clamp(self, min: builtins.float | None = None, max: builtins.float | None = None) -> Tensor:
        """min(max(x, min), max); one bound may be None."""
        return call("clamp", self, low=min, high=max)

    masked_fill = functions.masked_fill

    # -- reductions: over all axes by default ------------------------------------------------------------------------
    sum = _reduction("sum", "Σ over axes.")
    mean = _reduction("mean", "Mean over axes.")
    prod = _reduction("prod", "Π over axes.")
    amax = _reduction("amax", "Largest entry over axes; ties share the gradient.")
    amin = _reduction("amin", "Smallest entry over axes; ties share the gradient.")
    any = _reduction("any", "True if some entry is not 0.")
    all = _reduction("all", "True if no entry is 0.")
    logsumexp = _reduction("logsumexp", "ln Σ eˣ over axes.")
    var, std, norm = functions.var, functions.std, functions.norm

    @overload
    def max(self, axis: None = None, keepdims: bool = False) -> Tensor: ...
    @overload
    def max(self, axis: int, keepdims: bool = False) -> tuple[Tensor, Tensor]: ...
    def max(self, axis: int | None = None, keepdims: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the largest entry; with an axis (values, indices) of the first maxima, which get the gradient."""
        return self.amax(None, keepdims) if axis is None else self._extremum("argmax", axis, keepdims)

    @overload
    def min(self, axis: None = None, keepdims: bool = False) -> Tensor: ...
    @overload
    def min(self, axis: int, keepdims: bool = False) -> tuple[Tensor, Tensor]: ...
    def min(self, axis: int | None = None, keepdims: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the smallest entry; with an axis (values, indices) of the first minima, which get the gradient."""
        return self.amin(None, keepdims) if axis is None else self._extremum("argmin", axis, keepdims)

    def _extremum(self, op: str, axis: int, keepdims: bool) -> tuple[Tensor, Tensor]:
        index = call(op, self, axis=axis)
        at, shape = axis_of(axis, self.ndim), index.shape
        column = call("reshape", index, shape=(*shape[:at], 1, *shape[at:]))
        value = call("gather", self, column, axis=at)
        return (value, column) if keepdims else (call("reshape", value, shape=shape), index)

    def argmax(self, axis: int | None = None) -> Tensor:
        """Return the index of the largest entry along an axis, or in the flattened array, int64; the first on ties."""
        return call("argmax", self.reshape(-1) if axis is None else self, axis=axis or 0)

    def argmin(self, axis: int | None = None) -> Tensor:
        """Return the index of the smallest entry along an axis, or in the flattened array, int64; the first on ties."""
        return call("argmin", self.reshape(-1) if axis is None else self, axis=axis or 0)

    # -- along an axis -----------------------------------------------------------------------------------------------
    sort, argsort, topk = functions.sort, functions.argsort, functions.topk

    def cumsum(self, axis: int) -> Tensor:
        """Sum cumulatively along an axis; each sum includes its own entry."""
        return call("cumsum", self, axis=axis)

    def softmax(self, axis: int = -1, mask: Any = None) -> Tensor:
        """e^(x - max x) / Σ e^(x - max x) along an axis, over entries where the bool mask is true; the others are 0."""
        return call("softmax", self, *(() if mask is None else (mask,)), axis=axis)

    def log_softmax(self, axis: int = -1) -> Tensor:
        """ln softmax along an axis."""
        return call("log_softmax", self, axis=axis)

    # -- shape -------------------------------------------------------------------------------------------------------
    def __iter__(self) -> Iterator[Tensor]:
        """Iterate over the first axis, in traces too."""
        return (self[i] for i in range(len(self)))

    def reshape(self, *shape: Any) -> Tensor:
        """Return the same elements in a new shape; one size may be -1, and is then inferred."""
        sizes = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        if -1 in sizes:
            known = 1
            for s in sizes:
                known *= s if s != -1 else 1
            if sizes.count(-1) > 1 or known == 0 or self.size % known:
                expected = f"one -1, and sizes whose product divides {self.size}"
                raise ShapeError("cannot infer the size given as -1", expected=expected, got=tuple(sizes))
            sizes[sizes.index(-1)] = self.size // known
        return call("reshape", self, shape=tuple(sizes))

    def view(self, *shape: Any) -> Tensor:
        """Reshape without a copy; an eager result shares memory. Raises: ShapeError if that is impossible."""
        result = self.reshape(*shape)
        if isinstance(self.data, NDArray) and isinstance(result.data, NDArray):
            self.data.reshape(*result.shape, copy=False)
        return result

    def permute(self, *axes: Any) -> Tensor:
        """Reorder the axes."""
        return call("permute", self, axes=tuple(a % self.ndim for a in _ints(axes)))

    def transpose(self, a: int, b: int) -> Tensor:
        """Exchange two axes."""
        order = list(range(self.ndim))
        order[a], order[b] = order[b], order[a]
        return call("permute", self, axes=tuple(order))

    @property
    def T(self) -> Tensor:
        """A view with the axes in reverse order."""
        return call("permute", self, axes=tuple(reversed(range(self.ndim))))

    def expand(self, *shape: Any) -> Tensor:
        """Broadcast to a shape, sharing memory; -1 keeps the size of an axis that the tensor has."""
        sizes = _ints(shape)
        lead = len(sizes) - self.ndim
        return call("expand", self, shape=tuple(self.shape[i - lead] if n == -1 and i >= lead else n
                                                for i, n in enumerate(sizes)))  # fmt: skip

    def squeeze(self, axis: Axes = None) -> Tensor:
        """Remove axes of size 1: all of them, or the given ones; longer axes are kept, as in torch."""
        axes = tuple(a for a in axes_of(axis, self.ndim) if self.shape[a] == 1)
        return call("squeeze", self, axes=axes) if axes else self

    def unsqueeze(self, axis: int) -> Tensor:
        """Insert an axis of size 1 at this index of the result's shape."""
        return call("unsqueeze", self, axes=(axis,))

    def flatten(self, start: int = 0, end: int = -1) -> Tensor:
        """Merge axes `start` to `end`, inclusive, into one; a 0-d tensor becomes a vector of one entry."""
        return call("flatten", self, start=start, end=end) if self.ndim else self.unsqueeze(0)

    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
        """Return a view in which the entries (i, i + offset) of two axes, as a new last axis, replace both."""
        return call("diagonal", self, offset=offset, axes=(axis1, axis2))

    def narrow(self, axis: int, start: int, length: int) -> Tensor:
        """Return a view of `length` entries of an axis from `start`. Raises: ShapeError past the end."""
        return call("slice", self, axis=axis, start=start, size=length)

    def split(self, size: int | Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
        """Return views along an axis with `size` entries each (the last may have fewer), or with the given sizes.

        Raises: ShapeError unless the given sizes sum to the size of the axis.
        """
        total = self.shape[axis_of(axis, self.ndim)]
        if isinstance(size, int):
            if size < 1:
                raise ShapeError("the split size is not positive", expected=">= 1", got=size)
            sizes = [min(size, total - at) for at in range(0, total, size)] or [0]
        else:
            sizes = list(size)
        if sum(sizes) != total or min(sizes, default=0) < 0:
            raise ShapeError("the split sizes do not sum to the size of the axis", expected=total, got=tuple(sizes))
        return tuple(self.narrow(axis, sum(sizes[:i]), n) for i, n in enumerate(sizes))

    def chunk(self, count: int, axis: int = 0) -> tuple[Tensor, ...]:
        """Return at most `count` views of equal size along an axis; the last may be smaller."""
        if count < 1:
            raise ShapeError("the number of chunks is not positive", expected=">= 1", got=count)
        return self.split(max(-(-self.shape[axis_of(axis, self.ndim)] // count), 1), axis)

    # -- copies ------------------------------------------------------------------------------------------------------
    def contiguous(self) -> Tensor:
        """Return the tensor itself if it is row-major, else a row-major copy."""
        return self if isinstance(self.data, NDArray) and self.data.contiguous else call("copy", self)

    def clone(self) -> Tensor:
        """Return a copy, through which gradients flow."""
        return call("copy", self)

    def flip(self, *axes: Any) -> Tensor:
        """Reverse the order of entries along axes."""
        return call("flip", self, axes=_ints(axes))

    def roll(self, shifts: int | Shape, axes: Axes = None) -> Tensor:
        """Shift entries cyclically along axes, or in the flattened array without axes."""
        if axes is None:
            return self.flatten().roll(shifts, 0).reshape(self.shape)
        pairs = (tuple([v] if isinstance(v, int) else v) for v in (shifts, axes))
        return call("roll", self, **dict(zip(("shifts", "axes"), pairs, strict=True)))

    def tile(self, *repeats: Any) -> Tensor:
        """Repeat the tensor along each axis: a b -> a b a b; missing leading counts are 1, as in torch."""
        counts = _ints(repeats)
        return call("tile", self, repeats=(*(1,) * (self.ndim - len(counts)), *counts))

    def repeat(self, *repeats: Any) -> Tensor:
        """Like `tile`, but with at least one count per axis. Raises: ShapeError for fewer."""
        return call("tile", self, repeats=_ints(repeats))

    tril, triu, repeat_interleave = functions.tril, functions.triu, indexing.repeat_interleave

    # -- entries by index --------------------------------------------------------------------------------------------
    __getitem__, __setitem__ = indexing.get_item, indexing.set_item
    gather, scatter, scatter_add = indexing.gather, indexing.scatter, indexing.scatter_add
    index_select, index_add, nonzero = indexing.index_select, indexing.index_add, indexing.nonzero

    # -- in-place writes: see `autograd.inplace` -----------------------------------------------------------------------
    add_, sub_, mul_, div_ = _in_place("add"), _in_place("sub"), _in_place("mul"), _in_place("div")

    def copy_(self, other: Tensor) -> Tensor:
        """Overwrite with `other`, broadcast to this shape and cast to this dtype."""
        return call("copy", other.to(self.dtype).expand(*self.shape), out=self)

    def fill_(self, value: builtins.float) -> Tensor:
        """Set every entry to one value; no gradient flows to the old entries."""
        return self.copy_(scalar(repr(value), self.dtype))

    def zero_(self) -> Tensor:
        """Set every entry to 0."""
        return self.fill_(0)


def _ints(values: tuple[Any, ...]) -> Shape:
    """Return ints as a tuple; `values` is either the ints or a single sequence of them."""
    return tuple(values[0]) if len(values) == 1 and not isinstance(values[0], int) else values
