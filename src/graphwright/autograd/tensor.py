"""Tensor: a value now (an array) or a value of a later run (a symbol), with the tape that made it."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from graphwright.array import DType, NDArray, Spec, dtype, float32
from graphwright.array.layout import Shape
from graphwright.autograd.apply import apply
from graphwright.autograd.recorder import Symbol, TraceError, active
from graphwright.errors import DTypeError, ShapeError, UsageError
from graphwright.ops import Op, call, compute, get, writable_over


class Tensor:
    """An n-dimensional value that operations and gradients flow through.

    Attributes:
        data: NDArray (eager) or Symbol (while tracing).
        requires_grad: whether gradients with respect to it are wanted; floating only.
        grad: gradient of a leaf after `backward`, or None.
        node, port: the tape entry that made it and which of its results it is; node is None for a leaf.
        name: dotted path of a parameter, else "".
    """

    __slots__ = ("__weakref__", "data", "grad", "name", "node", "port", "requires_grad")
    __hash__ = object.__hash__

    def __init__(self, data: NDArray | Symbol, requires_grad: bool = False, name: str = "") -> None:
        if requires_grad and not data.dtype.is_float:
            raise DTypeError("only floating tensors can require gradients", got=data.spec)
        self.data, self.requires_grad, self.name = data, requires_grad, name
        self.grad: Tensor | None = None
        self.node: Any = None
        self.port = 0

    @staticmethod
    def __gw_op__(row: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        return apply(row, operands, attrs)

    # -- what it is --------------------------------------------------------------------------------------------------
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
    def size(self) -> int:
        """Number of elements."""
        return self.data.spec.size

    @property
    def is_leaf(self) -> bool:
        """True if no operation made it."""
        return self.node is None

    @property
    def symbolic(self) -> bool:
        """True while tracing: it has a spec and no value."""
        return isinstance(self.data, Symbol)

    @property
    def grad_dtype(self) -> DType:
        """Dtype in which `backward` sums the gradient of a leaf."""
        return self.data.dtype

    # -- leaving tensor land -----------------------------------------------------------------------------------------
    def _array(self, wanted: str) -> NDArray:
        if isinstance(self.data, Symbol) or (isinstance(self, Variable) and active.get() is not None):
            raise TraceError(
                f"{wanted} needs a value, and a traced tensor has none",
                got=self.spec,
                fix="use tensor operations (gw.ops.call('where', ...)), or compute it outside the trace",
            )
        return self.data

    def numpy(self, dtype: npt.DTypeLike | None = None) -> np.ndarray:
        """The elements, sharing memory where possible. Raises: DTypeError for bfloat16 without a dtype."""
        return self._array("numpy()").to_numpy(dtype)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        host = self._array("numpy").to_numpy(dtype)
        return host.copy() if copy else host

    def item(self) -> Any:
        """The one element as a Python number. Raises: ShapeError for more than one."""
        if self.size != 1:
            raise ShapeError("only one element can become a number", got=self.spec)
        return self._array("item()").item()

    def tolist(self) -> Any:
        """Nested lists of Python numbers."""
        return self._array("tolist()").to_numpy("float32" if self.dtype.name == "bfloat16" else None).tolist()

    def __float__(self) -> builtins.float:  # `float` is a method here
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __len__(self) -> int:
        if not self.shape:
            raise UsageError("a scalar has no length")
        return self.shape[0]

    # -- gradient ----------------------------------------------------------------------------------------------------
    def backward(self, grad: Tensor | None = None, *, retain_graph: bool = False) -> None:
        """Add d self / d leaf to `grad` of every leaf that requires it.

        Args:
            grad: gradient of what follows, of this tensor's spec; needed unless it has one element.
            retain_graph: keep saved values for another backward.
        Raises: GradShapeRequired, GraphFreed, NoTape, ModifiedSinceForward.
        """
        from graphwright.autograd.engine import backward

        backward(self, grad, retain_graph=retain_graph)

    def detach(self) -> Tensor:
        """The same memory without the tape."""
        return Tensor(self.data)

    # -- operations --------------------------------------------------------------------------------------------------
    def __add__(self, other: Any) -> Tensor:
        return call("add", self, other)

    def __radd__(self, other: Any) -> Tensor:
        return call("add", other, self)

    def __sub__(self, other: Any) -> Tensor:
        return call("sub", self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return call("sub", other, self)

    def __mul__(self, other: Any) -> Tensor:
        return call("mul", self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return call("mul", other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return call("div", self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return call("div", other, self)

    def __matmul__(self, other: Any) -> Tensor:
        return call("matmul", self, other)

    def __neg__(self) -> Tensor:
        return call("neg", self)

    def __eq__(self, other: object) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # elementwise, as in numpy and torch
        return call("eq", self, other)

    def __lt__(self, other: Any) -> Tensor:
        return call("lt", self, other)

    def __le__(self, other: Any) -> Tensor:
        return call("le", self, other)

    def __gt__(self, other: Any) -> Tensor:
        return call("lt", other, self)

    def __ge__(self, other: Any) -> Tensor:
        return call("le", other, self)

    def __iter__(self) -> Iterator[Tensor]:
        """Along the first axis; traced tensors too, since their sizes are known."""
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> Tensor:
        """Ints, slices with positive step, `...` and None; results are views."""
        index = index if isinstance(index, tuple) else (index,)
        used = sum(1 for i in index if i is not None and i is not Ellipsis)
        if index.count(Ellipsis) > 1 or used > self.ndim:
            raise ShapeError("too many indices", expected=f"at most {self.ndim}", got=index)
        if Ellipsis in index:
            at = index.index(Ellipsis)
            index = (*index[:at], *[slice(None)] * (self.ndim - used), *index[at + 1 :])
        result, axis, kept = self, 0, []
        for i in index:
            if i is None:
                kept.append(1)
            elif isinstance(i, slice):
                start, stop, step = i.indices(result.shape[axis])
                size = len(range(start, stop, step))
                if step < 1:
                    raise ShapeError("a slice's step must be positive", got=i)
                if (start, size, step) != (0, result.shape[axis], 1):
                    result = call("slice", result, axis=axis, start=start, size=size, step=step)
                kept.append(size)
                axis += 1
            elif isinstance(i, int | np.integer):
                size = result.shape[axis]
                if not -size <= i < size:
                    raise ShapeError("index out of range", where=f"axis {axis}", expected=f"-{size}..{size - 1}", got=i)
                result = call("slice", result, axis=axis, start=int(i) % size, size=1)
                axis += 1
            else:
                raise UsageError("indices are ints, slices, ... and None", got=type(i).__name__)
        kept += result.shape[axis:]
        return result if tuple(kept) == result.shape else call("reshape", result, shape=tuple(kept))

    def sum(self, axis: int | Shape | None = None, keepdims: bool = False) -> Tensor:
        """Σ over axes (all by default)."""
        return call("sum", self, axes=_axes(axis, self.ndim), keepdims=keepdims)

    def mean(self, axis: int | Shape | None = None, keepdims: bool = False) -> Tensor:
        """Mean over axes (all by default)."""
        return call("mean", self, axes=_axes(axis, self.ndim), keepdims=keepdims)

    def amax(self, axis: int | Shape | None = None, keepdims: bool = False) -> Tensor:
        """Largest entry over axes (all by default)."""
        return call("amax", self, axes=_axes(axis, self.ndim), keepdims=keepdims)

    def argmax(self, axis: int = -1) -> Tensor:
        """Index of the largest entry, int64."""
        return call("argmax", self, axis=axis)

    def reshape(self, *shape: Any) -> Tensor:
        """The same elements under another shape; one size may be -1."""
        sizes = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        if -1 in sizes:
            known = 1
            for s in sizes:
                known *= s if s != -1 else 1
            if sizes.count(-1) > 1 or known == 0 or self.size % known:
                raise ShapeError("-1 cannot be worked out", expected=self.shape, got=tuple(sizes))
            sizes[sizes.index(-1)] = self.size // known
        return call("reshape", self, shape=tuple(sizes))

    view = reshape

    def permute(self, *axes: int) -> Tensor:
        """Axes in another order."""
        order = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        return call("permute", self, axes=tuple(a % self.ndim for a in order))

    def transpose(self, a: int, b: int) -> Tensor:
        """Two axes exchanged."""
        order = list(range(self.ndim))
        order[a], order[b] = order[b], order[a]
        return call("permute", self, axes=tuple(order))

    @property
    def T(self) -> Tensor:
        """Axes in reverse order."""
        return call("permute", self, axes=tuple(reversed(range(self.ndim))))

    def expand(self, *shape: int) -> Tensor:
        """Broadcast to a shape, sharing memory."""
        return call("expand", self, shape=tuple(shape))

    def contiguous(self) -> Tensor:
        """Row-major memory: itself if it is so already."""
        if isinstance(self.data, NDArray) and self.data.contiguous:
            return self
        return call("copy", self)

    def clone(self) -> Tensor:
        """A copy; the gradient flows through."""
        return call("copy", self)

    def to(self, to: object) -> Tensor:
        """Cast to a dtype; itself if it has it."""
        kind = dtype(to)
        return self if kind is self.dtype else call("cast", self, dtype=kind)

    def float(self) -> Tensor:
        """As float32."""
        return self.to(float32)

    def exp(self) -> Tensor:
        """eˣ."""
        return call("exp", self)

    def log(self) -> Tensor:
        """Ln x."""
        return call("log", self)

    def sqrt(self) -> Tensor:
        """√x."""
        return call("sqrt", self)

    def tanh(self) -> Tensor:
        """Tanh x."""
        return call("tanh", self)

    def sigmoid(self) -> Tensor:
        """1 / (1 + e⁻ˣ)."""
        return call("sigmoid", self)

    def relu(self) -> Tensor:
        """max(x, 0)."""
        return call("relu", self)

    def softmax(self, axis: int = -1) -> Tensor:
        """Softmax over the last axis."""
        if axis not in (-1, self.ndim - 1):
            return call("softmax", self.transpose(axis, -1)).transpose(axis, -1)
        return call("softmax", self)

    def __repr__(self) -> str:
        if isinstance(self.data, Symbol):
            return f"Tensor({self.spec}, traced)"
        body = self.data.text("Tensor(")
        if body is None:
            body = f"{self.spec}, not read from its file"
        extra = "" if self.dtype in (float32,) else f", dtype={self.dtype.name}"
        return f"Tensor({body}{extra}{', requires_grad=True' if self.requires_grad else ''})"


def _axes(axis: int | Shape | None, rank: int) -> Shape:
    from graphwright.ops.rules import axes_of

    return axes_of(axis, rank)


class Variable(Tensor):
    """A leaf that keeps its identity while its value changes: state of a model or an optimizer.

    Tracing turns it into a `param` or `state` node; assigning to it becomes a write at the end of the step. Its array
    is copied before the first write if it maps a file or `shared` says that somebody else holds it.
    """

    __slots__ = ("shared",)
    data: NDArray  # never a symbol

    def __init__(self, data: NDArray, requires_grad: bool = False, name: str = "") -> None:
        super().__init__(data, requires_grad, name)
        self.shared = False

    def own(self) -> NDArray:
        """The array, made private and writable first if it is not."""
        if self.shared or self.data.storage.readonly or not self.data.contiguous:
            self.data, self.shared = self.data.copy(), False
        return self.data

    def assign(self, value: Tensor) -> None:
        """Take the value of a tensor of the same spec. Raises: ShapeError."""
        if value.spec != self.spec:
            raise ShapeError("a variable keeps its spec", where=self.name or None, expected=self.spec, got=value.spec)
        recorder = active.get()
        if recorder is not None:
            recorder.assign(self, value)
        else:
            assert isinstance(value.data, NDArray)
            self.own().copy_from(value.data)


class Parameter(Variable):
    """A variable that is trained; the gradient of a 16-bit one is summed and kept in float32."""

    __slots__ = ()

    def __init__(self, data: NDArray, requires_grad: bool = True, name: str = "") -> None:
        super().__init__(data, requires_grad, name)

    @property
    def grad_dtype(self) -> DType:
        """As above: in 8 bits of significand, a sum of 300 ones is 256."""
        return float32 if self.data.dtype.is_low else self.data.dtype


def update(targets: Sequence[Variable], name: str, *operands: Tensor, **attrs: Any) -> None:
    """Run an op whose results replace the values of variables, in place where it can; keeps no tape.

    Args:
        targets: one variable per result of the op, in order.
        name: an op; results that its `inplace` trait pairs with an operand are written over it.
    """
    row = get(name)
    full = row.complete(attrs)
    recorder = active.get()
    if recorder is not None:
        for target, symbol in zip(
            targets, recorder.record(row, [recorder.resolve(o) for o in operands], full), strict=True
        ):
            recorder.assign(target, Tensor(symbol))
        return
    outs = [target.own() for target in targets]
    arrays = [o._array(f"an update by {name}") for o in operands]
    if writable_over(row, outs, arrays):
        compute(row, arrays, full, outs)
    else:  # an op that reads an operand after it wrote the result: made aside, then copied
        for out, result in zip(outs, compute(row, arrays, full), strict=True):
            out.copy_from(result)
