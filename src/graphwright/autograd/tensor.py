"""Tensor: the class that users work with. Operators and methods over ops and the functions of this folder."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import numpy as np
import numpy.typing as npt

from graphwright.array import Device, NDArray, float32, names_device
from graphwright.array import dtype as as_dtype
from graphwright.autograd import engine, functions, indexing
from graphwright.autograd.apply import NO_HOOKS, TensorBase, apply, result_class, scalar
from graphwright.autograd.errors import TraceError, TraceMutation, ViewModified
from graphwright.autograd.function import ToDevice
from graphwright.autograd.modes import autocast_dtype
from graphwright.autograd.named_sizes import traced
from graphwright.autograd.op_methods import OpMethods
from graphwright.autograd.recorder import Symbol, active_recorder
from graphwright.autograd.tape import Hook
from graphwright.errors import AliasError, DTypeError, ShapeError, UsageError
from graphwright.ops import Op, call, get

NEG = get("neg")


def _operators(op: str):
    """Return the operator methods of an op: with the tensor as the left and as the right operand."""
    row = get(op)

    def left(self: Tensor, other: Any) -> Tensor:
        return apply(row, (self, other), {})

    def right(self: Tensor, other: Any) -> Tensor:
        return apply(row, (other, self), {})

    return left, right


def _updating(method: str):
    """Return the operator method that updates a tensor in place, such as `__iadd__` for `add_`."""

    def update(self: Tensor, other: Any) -> Tensor:
        try:
            return getattr(self, method)(other)
        except AliasError:  # `x[0] += x[1]`: another part of the same memory
            return self.copy_(getattr(self, method.rstrip("_"))(other))
        except (ViewModified, TraceMutation):  # `x[0] += y` reads a view, and then writes the sum to x
            return getattr(self, method.rstrip("_"))(other)

    return update


POWERS: dict[builtins.float, Callable[[Tensor], Tensor]] = {
    -1: lambda x: call("reciprocal", x),
    -0.5: lambda x: call("rsqrt", x),
    0.5: lambda x: call("sqrt", x),
    1: lambda x: x * 1.0,
    2: lambda x: x * x,
    3: lambda x: x * x * x,
}
"""Exponents that are numbers -> xᵖ of a floating x by other ops, as torch computes it; others use the op `pow`."""


def _bits(name: str):
    """Return the operator methods of a logical op for bools, of the bitwise op for integers."""
    logical, bitwise = get(f"logical_{name}"), get(f"bitwise_{name}")

    def row(*operands: Any) -> Op:
        kinds = [x.dtype.kind if isinstance(x, TensorBase) else type(x).__name__ for x in operands]
        if not {"int", "uint", "bool"}.issuperset(kinds):
            fix = "compare first: (a > 0) & (b > 0)"
            raise DTypeError("an operand of &, |, ^ or ~ is neither bool nor an integer", expected="bool or integers",
                             got=", ".join(kinds), fix=fix)  # fmt: skip
        return logical if set(kinds) == {"bool"} else bitwise

    def left(self: Tensor, other: Any) -> Tensor:
        return apply(row(self, other), (self, other), {})

    def right(self: Tensor, other: Any) -> Tensor:
        return apply(row(self, other), (other, self), {})

    return left, right


@result_class
class Tensor(TensorBase, OpMethods):
    """An n-dimensional array through which operations and gradients flow."""

    __slots__ = ()
    __hash__ = object.__hash__
    __array_priority__ = 1000  # an operator between numpy and a tensor gives a tensor, on the tape

    # -- gradients ---------------------------------------------------------------------------------------------------
    backward = engine.backward

    @property
    def grad_fn(self) -> Any:
        """The tape node that computed the tensor; None for a leaf."""
        return self.node

    def detach(self) -> Tensor:
        """Return a tensor over the same memory that is not on the tape."""
        recorder = active_recorder.get()
        if recorder is not None and (self.symbolic or self.is_variable):
            return Tensor(recorder.detached(recorder.resolve(self)))
        return Tensor(self.data.alias() if isinstance(self.data, Symbol) else self.data)

    def detach_(self) -> Tensor:
        """Take this tensor off the tape, and return it."""
        self.node, self.requires_grad = None, False
        return self

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

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Set `requires_grad` of a leaf, and return the tensor. Raises: UsageError for the result of an operation."""
        if not self.is_leaf and not requires_grad:
            what = "requires_grad of an operation's result cannot be unset"
            raise UsageError(what, got=self.spec, fix="call detach()")
        if requires_grad and not self.dtype.is_float:
            raise DTypeError("a tensor that is not floating cannot require a gradient", got=self.spec)
        self.requires_grad = requires_grad
        return self

    def retain_grad(self) -> None:
        """Make backward store the gradient of this inner tensor in `grad`, as it does for leaves.

        Raises: UsageError for a tensor that requires no gradient.
        """
        if not self.requires_grad:
            raise UsageError("cannot retain the gradient of a tensor that requires no gradient", got=self.spec)
        if self.node is not None and all(r() is not self for r in self.node.retained or ()):
            self.node.retained = [*(self.node.retained or ()), ref(self)]

    # -- conversion to other types -----------------------------------------------------------------------------------
    def numpy(self, dtype: npt.DTypeLike | None = None, *, force: builtins.bool = False) -> np.ndarray:
        """Return a numpy array, sharing memory where possible; bfloat16 and 8-bit floats become float32.

        `force` is accepted as in torch: a tensor that requires a gradient, or is on a device, is converted anyway.
        """
        return self.concrete("numpy()").to_numpy(dtype)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return self.concrete("numpy").__array__(dtype, copy)

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
        if self.numel() != 1:
            raise ShapeError("cannot convert this tensor to a number", expected="exactly one element", got=self.spec)
        return self.concrete("item()").item()

    def tolist(self) -> Any:
        """Return nested lists of Python numbers."""
        return self.concrete("tolist()").to_numpy().tolist()

    def __float__(self) -> builtins.float:  # `float` is a method here
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __len__(self) -> int:
        if not self.shape:
            raise UsageError("cannot take the length of a 0-d tensor")
        if traced(self.shape[0]):
            what = f"len() needs a Python number, but the first axis has the named size {self.shape[0]}"
            raise TraceError(what, fix="use x.shape[0]")
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
    def to(
        self, to: object = None, kind: object = None, non_blocking: builtins.bool = False, copy: builtins.bool = False,
        *, dtype: object = None, device: object = None,
    ) -> Tensor:  # fmt: skip
        """Cast to a dtype or copy to a device (a Device or its name); return the tensor itself if nothing changes.

        Args:
            to: a dtype, a device, or a tensor with the wanted dtype and device.
            kind: a dtype after a device.
            non_blocking: accepted as in torch, without an effect.
            copy: return a new tensor even if nothing changes.
        Raises: DTypeError, DeviceUnavailable; TraceError for a traced tensor and a device.
        """
        if copy:
            made = self if to is kind is dtype is device is None else self.to(to, kind, dtype=dtype, device=device)
            return made.clone() if made is self else made
        if isinstance(to, TensorBase):
            return self.to(dtype=to.dtype, device=None if to.symbolic else to.device)
        if kind is not None or dtype is not None or device is not None:
            there = device if device is not None else to if names_device(to) else None
            wanted = dtype if dtype is not None else kind if kind is not None else None if names_device(to) else to
            made = self if there is None else self.to(there)
            return made if wanted is None else made.to(wanted)
        if names_device(to):
            target = Device.parse(to)
            return self if self.device == target else ToDevice.apply(self, target)
        found = as_dtype(to)
        return self if found is self.dtype else call("cast", self, dtype=found)

    def cpu(self) -> Tensor:
        """Copy to the CPU; the tensor itself if it is there."""
        return self.to("cpu")

    def cuda(self, device: int | str | Device | None = None, non_blocking: builtins.bool = False) -> Tensor:
        """Copy to a GPU, by default the first. Raises: DeviceUnavailable without one."""
        return self.to(Device("cuda", device or 0) if isinstance(device, int | None) else device)

    @property
    def is_cuda(self) -> builtins.bool:
        """True for a tensor on a GPU."""
        return self.device.kind == "cuda"

    @property
    def is_cpu(self) -> builtins.bool:
        """True for a tensor on the CPU."""
        return self.device.kind == "cpu"

    @property
    def retains_grad(self) -> builtins.bool:
        """True for an inner tensor whose gradient backward stores; see `retain_grad`."""
        return self.node is not None and any(r() is self for r in self.node.retained or ())

    def type(self, dtype: object = None) -> Any:
        """Cast to a dtype; without one, return the name of the tensor's dtype."""
        return self.dtype.name if dtype is None else self.to(dtype)

    def type_as(self, other: Tensor) -> Tensor:
        """Cast to the dtype of `other`."""
        return self.to(other.dtype)

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
    __and__, __rand__ = _bits("and")
    __or__, __ror__ = _bits("or")
    __xor__, __rxor__ = _bits("xor")
    __lshift__, __rlshift__ = _operators("bitwise_left_shift")
    __rshift__, __rrshift__ = _operators("bitwise_right_shift")

    # `x += y` writes into the memory of x, as in torch and numpy
    __iadd__, __isub__, __imul__, __itruediv__ = map(_updating, ("add_", "sub_", "mul_", "div_"))
    __ifloordiv__, __imod__, __ipow__ = map(_updating, ("floor_divide_", "remainder_", "pow_"))
    __iand__, __ior__, __ixor__ = map(_updating, ("bitwise_and_", "bitwise_or_", "bitwise_xor_"))
    __ilshift__, __irshift__ = map(_updating, ("bitwise_left_shift_", "bitwise_right_shift_"))

    def __invert__(self) -> Tensor:
        return self.bitwise_not()

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

    # -- functions as methods: see OpMethods -------------------------------------------------------------------------
    __getitem__, __setitem__ = indexing.get_item, indexing.set_item

    def where(self, condition: Any, other: Any) -> Tensor:
        """Return the entries of this tensor where the condition is true, else those of `other`."""
        return functions.where(condition, self, other)

    # -- shape -------------------------------------------------------------------------------------------------------
    def __iter__(self) -> Iterator[Tensor]:
        """Iterate over the first axis, in traces too."""
        return (self[i] for i in range(len(self)))

    @property
    def T(self) -> Tensor:
        """A view with the axes in reverse order."""
        return call("permute", self, axes=tuple(reversed(range(self.ndim))))

    @property
    def nbytes(self) -> int:
        """Number of bytes of all entries."""
        return self.numel() * self.dtype.itemsize

    @property
    def itemsize(self) -> int:
        """Number of bytes of an entry."""
        return self.dtype.itemsize

    @property
    def H(self) -> Tensor:
        """A view of a matrix with its axes exchanged. Raises: ShapeError for other numbers of axes."""
        if self.ndim not in (0, 2):
            raise ShapeError("not a matrix", where="H", expected="2 axes", got=self.spec, fix="use mT")
        return self.T

    @property
    def mT(self) -> Tensor:
        """A view with the last two axes exchanged."""
        return self.transpose(-2, -1)

    # -- copies ------------------------------------------------------------------------------------------------------
    def contiguous(self) -> Tensor:
        """Return the tensor itself if it is row-major, else a row-major copy."""
        return self if isinstance(self.data, NDArray) and self.data.contiguous else call("copy", self)

    def clone(self) -> Tensor:
        """Return a copy, through which gradients flow."""
        return call("copy", self)

    # -- in-place writes: see `autograd.inplace` -----------------------------------------------------------------------
    def add_(self, other: Any, *, alpha: Any = 1) -> Tensor:
        """Add alpha·`other`, and return the tensor."""
        return call("add", self, other if alpha == 1 else other * alpha, out=self)

    def sub_(self, other: Any, *, alpha: Any = 1) -> Tensor:
        """Subtract alpha·`other`, and return the tensor."""
        return call("sub", self, other if alpha == 1 else other * alpha, out=self)

    def mul_(self, other: Any) -> Tensor:
        """Multiply by `other`, and return the tensor."""
        return call("mul", self, other, out=self)

    def div_(self, other: Any) -> Tensor:
        """Divide by `other`, and return the tensor."""
        return call("div", self, other, out=self)

    def copy_(self, other: Tensor) -> Tensor:
        """Overwrite with `other`, broadcast to this shape and cast to this dtype."""
        return call("copy", other.to(self.dtype).expand(*self.shape), out=self)

    def fill_(self, value: builtins.float) -> Tensor:
        """Set every entry to one value; no gradient flows to the old entries."""
        return self.copy_(scalar(repr(value), self.dtype))

    def zero_(self) -> Tensor:
        """Set every entry to 0."""
        return self.fill_(0)
