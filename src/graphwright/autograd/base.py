"""TensorBase: a value now (an array) or a value of a later run (a symbol), with the tape that made it."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import ref

import numpy as np
import numpy.typing as npt

from graphwright.array import Device, DType, NDArray, Spec, float32
from graphwright.autograd.apply import apply
from graphwright.autograd.hooks import Hook
from graphwright.autograd.recorder import Symbol, TraceError, active
from graphwright.errors import DTypeError, ShapeError, UsageError

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor


_NO_HOOKS: list[Hook] = []
"""Of every tensor without hooks: shared, never added to."""


class TensorBase:
    """What a tensor is without its operations.

    Attributes:
        data: NDArray (eager) or Symbol (while tracing).
        requires_grad: whether gradients with respect to it are wanted; floating only.
        grad: gradient of a leaf after `backward`, or None.
        hooks: what `backward` calls with the full gradient of a leaf.
        node, port: the tape entry that made it and which of its results it is; node is None for a leaf.
        name: dotted path of a parameter, else "".
    """

    __slots__ = ("__weakref__", "data", "grad", "hooks", "name", "node", "port", "requires_grad")
    __hash__ = object.__hash__
    carried: ClassVar[bool] = False
    """True for a variable: inside a trace it has no value of its own."""

    def __init__(self, data: NDArray | Symbol, requires_grad: bool = False, name: str = "") -> None:
        if requires_grad and not data.dtype.is_float:
            raise DTypeError("only floating tensors can require gradients", got=data.spec)
        self.data, self.requires_grad, self.name = data, requires_grad, name
        self.grad: Tensor | None = None
        self.hooks: list[Hook] = _NO_HOOKS
        self.node: Any = None
        self.port = 0

    __gw_op__ = staticmethod(apply)

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
    def device(self) -> Device:
        """Where its memory lies, of a variable in a trace too. Raises: TraceError for a symbol."""
        return self.data.device if isinstance(self.data, NDArray) else self._array("device").device

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

    # -- gradient, looked at -----------------------------------------------------------------------------------------
    def register_hook(self, call: Callable[[Tensor], Tensor | None]) -> Hook:
        """Call a function with the full gradient of this tensor, once in each backward; it may give another one.

        Hooks run in the order of registration; those of a leaf when all gradients have arrived. In a trace what they
        compute is recorded. Returns: a Hook, whose `remove()` takes it off.
        Raises: UsageError for a tensor that requires no gradient.
        """
        if not self.requires_grad:
            raise UsageError("a tensor that requires no gradient will never have one to hook", got=self.spec)
        if self.node is not None:
            if self.node.hooks is None:
                self.node.hooks = {}
            return Hook(call, self.node.hooks.setdefault(self.port, []))
        if self.hooks is _NO_HOOKS:
            self.hooks = []
        return Hook(call, self.hooks)

    def retain_grad(self) -> None:
        """Keep the gradient of an inner tensor in `grad` as well; a leaf's is kept anyway.

        Raises: UsageError for a tensor that requires no gradient.
        """
        if not self.requires_grad:
            raise UsageError("a tensor that requires no gradient will never have one to keep", got=self.spec)
        if self.node is not None and all(r() is not self for r in self.node.retained or ()):
            self.node.retained = [*(self.node.retained or ()), ref(self)]

    # -- leaving tensor land -----------------------------------------------------------------------------------------
    def own(self) -> NDArray:
        """The array, to be written to. Raises: TraceError for a symbol."""
        return self._array("a write")

    def _array(self, wanted: str) -> NDArray:
        if isinstance(self.data, Symbol) or (self.carried and active.get() is not None):
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

    def __dlpack__(self, **options: Any) -> Any:
        """Its memory for another library. Raises: BufferError if it requires a gradient."""
        if self.requires_grad:
            raise BufferError("this tensor requires a gradient, which another library would not see: detach() it")
        return self._array("DLPack").__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array("DLPack").__dlpack_device__()

    def item(self) -> Any:
        """The one element as a Python number. Raises: ShapeError for more than one."""
        if self.size != 1:
            raise ShapeError("only one element can become a number", got=self.spec)
        return self._array("item()").item()

    def tolist(self) -> Any:
        """Nested lists of Python numbers."""
        return self._array("tolist()").to_numpy("float32" if self.dtype.as_bits else None).tolist()

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

    def __repr__(self) -> str:
        if isinstance(self.data, Symbol):
            return f"Tensor({self.spec}, traced)"
        body = self.data.text("Tensor(")
        if body is None:
            body = f"{self.spec}, not read from its file"
        extra = "" if self.dtype in (float32,) else f", dtype={self.dtype.name}"
        return f"Tensor({body}{extra}{', requires_grad=True' if self.requires_grad else ''})"
