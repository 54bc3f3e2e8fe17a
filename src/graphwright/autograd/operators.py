"""The arithmetic of tensors: operators, functions and reductions as methods, each one call of an op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast, overload

from graphwright.array.layout import Shape
from graphwright.autograd import functions
from graphwright.autograd.apply import apply
from graphwright.autograd.base import TensorBase
from graphwright.errors import DTypeError, UsageError
from graphwright.ops import call, get
from graphwright.ops.axes import axes_of, axis_of

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor

Axes = int | Shape | None
ADD, SUB, MUL, DIV, MATMUL, NEG = map(get, ("add", "sub", "mul", "div", "matmul", "neg"))


class Operators(TensorBase):
    """What `Tensor` computes. Numbers may stand on either side of an operator."""

    __slots__ = ()
    __hash__ = TensorBase.__hash__

    # -- operators ---------------------------------------------------------------------------------------------------
    def __add__(self, other: Any) -> Tensor:
        return apply(ADD, (self, other), {})

    def __radd__(self, other: Any) -> Tensor:
        return apply(ADD, (other, self), {})

    def __sub__(self, other: Any) -> Tensor:
        return apply(SUB, (self, other), {})

    def __rsub__(self, other: Any) -> Tensor:
        return apply(SUB, (other, self), {})

    def __mul__(self, other: Any) -> Tensor:
        return apply(MUL, (self, other), {})

    def __rmul__(self, other: Any) -> Tensor:
        return apply(MUL, (other, self), {})

    def __truediv__(self, other: Any) -> Tensor:
        return apply(DIV, (self, other), {})

    def __rtruediv__(self, other: Any) -> Tensor:
        return apply(DIV, (other, self), {})

    def __floordiv__(self, other: Any) -> Tensor:
        return call("floor_divide", self, other)

    def __rfloordiv__(self, other: Any) -> Tensor:
        return call("floor_divide", other, self)

    def __mod__(self, other: Any) -> Tensor:
        return call("remainder", self, other)

    def __rmod__(self, other: Any) -> Tensor:
        return call("remainder", other, self)

    def __pow__(self, other: Any) -> Tensor:
        if isinstance(other, int) and other < 0 and not self.dtype.is_float:
            raise UsageError(
                "integers have no negative powers among them", got=f"{self.spec} ** {other}", fix="float()"
            )
        return call("pow", self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return call("pow", other, self)

    def __matmul__(self, other: Any) -> Tensor:
        return apply(MATMUL, (self, other), {})

    def __rmatmul__(self, other: Any) -> Tensor:
        return apply(MATMUL, (other, self), {})

    def __neg__(self) -> Tensor:
        return apply(NEG, (self,), {})

    def __abs__(self) -> Tensor:
        return call("abs", self)

    def __eq__(self, other: object) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # elementwise, as in numpy and torch
        return call("eq", self, other)

    def __ne__(self, other: object) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # elementwise, as in numpy and torch
        return call("ne", self, other)

    def __lt__(self, other: Any) -> Tensor:
        return call("lt", self, other)

    def __le__(self, other: Any) -> Tensor:
        return call("le", self, other)

    def __gt__(self, other: Any) -> Tensor:
        return call("gt", self, other)

    def __ge__(self, other: Any) -> Tensor:
        return call("ge", self, other)

    def __and__(self, other: Any) -> Tensor:
        return call("logical_and", *self._bools(other))

    def __rand__(self, other: Any) -> Tensor:
        return call("logical_and", *self._bools(other))

    def __or__(self, other: Any) -> Tensor:
        return call("logical_or", *self._bools(other))

    def __ror__(self, other: Any) -> Tensor:
        return call("logical_or", *self._bools(other))

    def __xor__(self, other: Any) -> Tensor:
        return call("logical_xor", *self._bools(other))

    def __rxor__(self, other: Any) -> Tensor:
        return call("logical_xor", *self._bools(other))

    def __invert__(self) -> Tensor:
        return call("logical_not", *self._bools())

    def _bools(self, *others: Any) -> tuple[Any, ...]:
        """Itself and others, if all are bool: `&`, `|`, `^` and `~` are logic here, not bits."""
        for operand in (self, *others):
            kind = operand.dtype.name if isinstance(operand, TensorBase) else type(operand).__name__
            if kind != "bool":
                raise DTypeError("&, |, ^ and ~ take bools", got=kind, fix="compare first: (a > 0) & (b > 0)")
        return self, *others

    # -- functions ---------------------------------------------------------------------------------------------------
    def abs(self) -> Tensor:
        """|x|."""
        return call("abs", self)

    def sign(self) -> Tensor:
        """-1, 0 or 1."""
        return call("sign", self)

    def floor(self) -> Tensor:
        """The largest whole number that is not above x."""
        return call("floor", self)

    def ceil(self) -> Tensor:
        """The smallest whole number that is not below x."""
        return call("ceil", self)

    def round(self) -> Tensor:
        """The nearest whole number, of two the even one."""
        return call("round", self)

    def exp(self) -> Tensor:
        """eˣ."""
        return call("exp", self)

    def expm1(self) -> Tensor:
        """eˣ - 1."""
        return call("expm1", self)

    def log(self) -> Tensor:
        """Ln x."""
        return call("log", self)

    def log1p(self) -> Tensor:
        """Ln (1 + x)."""
        return call("log1p", self)

    def sqrt(self) -> Tensor:
        """√x."""
        return call("sqrt", self)

    def rsqrt(self) -> Tensor:
        """1/√x."""
        return call("rsqrt", self)

    def reciprocal(self) -> Tensor:
        """1/x."""
        return call("reciprocal", self)

    def sin(self) -> Tensor:
        """Sin x."""
        return call("sin", self)

    def cos(self) -> Tensor:
        """Cos x."""
        return call("cos", self)

    def tanh(self) -> Tensor:
        """Tanh x."""
        return call("tanh", self)

    def erf(self) -> Tensor:
        """Erf x."""
        return call("erf", self)

    def sigmoid(self) -> Tensor:
        """1 / (1 + e⁻ˣ)."""
        return call("sigmoid", self)

    def relu(self) -> Tensor:
        """max(x, 0)."""
        return call("relu", self)

    def pow(self, exponent: Any) -> Tensor:
        """xᵖ for a tensor or number p. Raises: UsageError for an integer tensor and a negative whole number."""
        return self**exponent

    def clamp(self, min: float | None = None, max: float | None = None) -> Tensor:
        """Between two bounds, one of which may be None."""
        return call("clamp", self, low=min, high=max)

    def maximum(self, other: Any) -> Tensor:
        """The larger of two, elementwise."""
        return call("maximum", self, other)

    def minimum(self, other: Any) -> Tensor:
        """The smaller of two, elementwise."""
        return call("minimum", self, other)

    def isnan(self) -> Tensor:
        """Where x is NaN."""
        return call("isnan", self)

    def isinf(self) -> Tensor:
        """Where x is an infinity."""
        return call("isinf", self)

    def isfinite(self) -> Tensor:
        """Where x is neither infinite nor NaN."""
        return call("isfinite", self)

    # -- reductions: over all axes by default ------------------------------------------------------------------------
    def sum(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Σ over axes."""
        return self._reduce("sum", axis, keepdims)

    def mean(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Mean over axes."""
        return self._reduce("mean", axis, keepdims)

    def prod(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Π over axes."""
        return self._reduce("prod", axis, keepdims)

    def amax(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Largest entry over axes; ties share the gradient."""
        return self._reduce("amax", axis, keepdims)

    def amin(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Smallest entry over axes; ties share the gradient."""
        return self._reduce("amin", axis, keepdims)

    def any(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Whether some entry is not 0."""
        return self._reduce("any", axis, keepdims)

    def all(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Whether no entry is 0."""
        return self._reduce("all", axis, keepdims)

    def logsumexp(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Ln Σ eˣ over axes."""
        return self._reduce("logsumexp", axis, keepdims)

    def var(self, axis: Axes = None, keepdims: bool = False, correction: int = 1) -> Tensor:
        """Variance over axes; see `autograd.var`."""
        return functions.var(cast("Tensor", self), axis, keepdims, correction)

    def std(self, axis: Axes = None, keepdims: bool = False, correction: int = 1) -> Tensor:
        """Standard deviation over axes, with gradient 0 where it is 0."""
        return functions.std(cast("Tensor", self), axis, keepdims, correction)

    def norm(self, p: float = 2, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """(Σ |x|ᵖ)^(1/p) over axes, with gradient 0 where it is 0."""
        return functions.norm(cast("Tensor", self), p, axis, keepdims)

    def _reduce(self, op: str, axis: Axes, keepdims: bool) -> Tensor:
        return call(op, self, axes=axes_of(axis, self.ndim), keepdims=keepdims)

    @overload
    def max(self, axis: None = None, keepdims: bool = False) -> Tensor: ...
    @overload
    def max(self, axis: int, keepdims: bool = False) -> tuple[Tensor, Tensor]: ...
    def max(self, axis: int | None = None, keepdims: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """The largest entry; along an axis with its index, the lowest on ties, to which the gradient goes alone."""
        return self.amax(None, keepdims) if axis is None else self._picked("argmax", axis, keepdims)

    @overload
    def min(self, axis: None = None, keepdims: bool = False) -> Tensor: ...
    @overload
    def min(self, axis: int, keepdims: bool = False) -> tuple[Tensor, Tensor]: ...
    def min(self, axis: int | None = None, keepdims: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """The smallest entry; along an axis with its index, the lowest on ties, to which the gradient goes alone."""
        return self.amin(None, keepdims) if axis is None else self._picked("argmin", axis, keepdims)

    def _picked(self, op: str, axis: int, keepdims: bool) -> tuple[Tensor, Tensor]:
        place = call(op, self, axis=axis)
        at, shape = axis_of(axis, self.ndim), place.shape
        column = call("reshape", place, shape=(*shape[:at], 1, *shape[at:]))
        value = call("gather", self, column, axis=at)
        return (value, column) if keepdims else (call("reshape", value, shape=shape), place)

    def _place(self, op: str, axis: int | None) -> Tensor:
        flat = call("reshape", self, shape=(self.size,)) if axis is None else self
        return call(op, flat, axis=0 if axis is None else axis)

    def argmax(self, axis: int | None = None) -> Tensor:
        """Index of the largest entry along an axis, or in the flat array, int64; the lowest on ties."""
        return self._place("argmax", axis)

    def argmin(self, axis: int | None = None) -> Tensor:
        """Index of the smallest entry along an axis, or in the flat array, int64; the lowest on ties."""
        return self._place("argmin", axis)

    # -- along an axis -----------------------------------------------------------------------------------------------
    def cumsum(self, axis: int) -> Tensor:
        """Sums of the entries up to each place."""
        return call("cumsum", self, axis=axis)

    def sort(self, axis: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
        """Values in order, and their indices; equal ones keep their order, NaN is the largest."""
        return call("sort", self, axis=axis, descending=descending)

    def argsort(self, axis: int = -1, descending: bool = False) -> Tensor:
        """Indices of the sorted values, int64; equal ones keep their order."""
        return self.sort(axis, descending)[1]

    def topk(self, k: int, axis: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
        """The k largest (or smallest) values in order, and their indices; of equal ones the lowest index first."""
        return call("topk", self, k=k, axis=axis, largest=largest)

    def softmax(self, axis: int = -1, mask: Any = None) -> Tensor:
        """e^(x - max) / Σ; entries where the bool mask is false are 0."""
        return call("softmax", self, *(() if mask is None else (mask,)), axis=axis)

    def log_softmax(self, axis: int = -1) -> Tensor:
        """Ln softmax."""
        return call("log_softmax", self, axis=axis)
