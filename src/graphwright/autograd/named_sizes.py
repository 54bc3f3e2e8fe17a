"""Named sizes while code is traced: ints that know how they follow from the sizes of the inputs.

Traced code reads them from shapes and computes with them. Where they enter a tensor operation they are a value of the
program; where code compares them, the comparison is noted, so that the tracer can try its other outcome; where code
needs a Python number, they raise TraceError. So no number of the trace itself can get into the program.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from graphwright.array.dtype import DType, float32, float64, int64
from graphwright.array.sizes import Dim, Size, folded
from graphwright.array.spec import Spec
from graphwright.autograd.errors import TraceError
from graphwright.ops import call

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor

_FOREIGN = (str(Path(__file__).parents[1]), str(Path(np.__file__).parent), "<__array_function__")


class Comparison(NamedTuple):
    """A comparison of sizes in traced code: `rest` < 0, or `rest` == 0 if `equal`."""

    rest: Dim
    equal: bool
    where: str  # the line of the code outside this package

    def holds(self, dims: Mapping[str, int]) -> bool:
        """Return the outcome for these sizes."""
        value = Size.of(self.rest).value(dims)
        return value == 0 if self.equal else value < 0

    def __str__(self) -> str:
        return f"{self.rest} {'==' if self.equal else '<'} 0 ({self.where})"


class NamedSizes:
    """The named sizes of one trace.

    Attributes:
        values: the size of each name in this trace.
        inputs: for each name a tensor of that size and its axis.
        comparisons: those that the code made and that other sizes may decide otherwise.
    """

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.inputs: dict[str, tuple[Tensor, int]] = {}
        self.comparisons: dict[tuple[Dim, bool], Comparison] = {}

    def shape(self, dims: Sequence[Dim]) -> tuple[int, ...]:
        """Return the sizes of a shape as ints, where named as `TracedSize`."""
        return tuple([self.size(Size.of(d)) if isinstance(d, str) else d for d in dims])

    def spec(self, spec: Spec) -> Spec:
        """Return a spec whose named sizes are ints of traced code."""
        return Spec(self.shape(spec.shape), spec.dtype) if spec.symbolic else spec

    def size(self, size: Size) -> Any:
        """Return a size as an int: a `TracedSize` if it depends on a name."""
        return dim if isinstance(dim := size.dim, int) else TracedSize(size, self)

    def compare(self, rest: Size, *, equal: bool) -> bool:
        """Return whether `rest` is below 0, or 0 if `equal`, in this trace; note it unless it holds for all sizes."""
        least, most = rest.least, (-rest).least
        if (least is not None and least > 0) or (not equal and least == 0):
            return False
        if most is not None and most > 0:
            return not equal
        made = Comparison(rest.dim, equal, _line())
        if any(rest.terms):
            self.comparisons.setdefault((made.rest, equal), made)
        return made.holds(self.values)

    def tensor(self, dim: Dim) -> Any:
        """Record the value of a size, an int64 scalar."""

        def leaf(part: Dim) -> Any:
            return part if isinstance(part, int) else call("size", self.inputs[part][0], axis=self.inputs[part][1])

        return folded(dim, leaf, lambda kind, a, b: _FOLDED[kind](a, b))


_FOLDED: dict[str, Callable[[Any, Any], Any]] = {
    "Add": lambda a, b: a + b, "Mul": lambda a, b: a * b, "Div": lambda a, b: a // b
}  # fmt: skip


def _ufunc(self: Any, ufunc: np.ufunc, method: str, *given: Any, **_: Any) -> Any:
    """Compute a numpy function of a number: arithmetic with numpy's scalars, and the square root."""
    values = [v.item() if isinstance(v, np.generic) else v for v in given]
    run = _UFUNCS.get(ufunc)
    refused = run is None or method != "__call__" or any(isinstance(v, np.ndarray) for v in values)
    return self._refuse() if refused or run is None else run(*values)


_UFUNCS: dict[np.ufunc, Callable[..., Any]] = {
    np.add: operator.add, np.subtract: operator.sub, np.multiply: operator.mul, np.true_divide: operator.truediv,
    np.floor_divide: operator.floordiv, np.sqrt: lambda x: x**0.5,
}  # fmt: skip


class TracedNumber:
    """A number that follows from named sizes, such as 1 / T: a float, but known only in a run.

    Its `value` is a float64 scalar of the program. In tensor operations it acts like a Python float.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def tensor(self, dtype: DType = float32) -> Tensor:
        """Return the number as a scalar of the program."""
        return call("cast", self.value, dtype=dtype)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]  # C code asks __float__
        return float

    def _refuse(self, *_: Any) -> NoReturn:
        raise _taken("a number computed from named sizes")

    __array_ufunc__ = _ufunc
    __round__ = __rpow__ = __float__ = __int__ = __bool__ = __hash__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = (
        _refuse
    )

    def __repr__(self) -> str:
        return "TracedNumber"


class TracedSize(Size):
    """A size that depends on names, as an int of traced code. `isinstance(size, int)` holds."""

    __slots__ = ("sizes",)

    def __init__(self, size: Size, sizes: NamedSizes) -> None:
        Size.__init__(self, size.terms)  # no super(): `__class__` is a property
        self.sizes = sizes

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]  # C code asks __index__
        return int

    @property
    def here(self) -> int:
        """The size in this trace, for decisions that a run checks again."""
        return _plain(self).value(self.sizes.values)

    def tensor(self, dtype: DType = int64) -> Tensor:
        """Return the size as a scalar of the program."""
        found = self.sizes.tensor(self.dim)
        return found if dtype is int64 else call("cast", found, dtype=dtype)

    def number(self) -> TracedNumber:
        """Return the size as a float."""
        return TracedNumber(self.tensor(float64))

    def _refuse(self, *_: Any) -> NoReturn:
        raise _taken(f"the named size {self.dim}")

    __array_ufunc__ = _ufunc
    __index__ = __int__ = __float__ = __rpow__ = __hash__ = __round__ = __trunc__ = _refuse

    def __repr__(self) -> str:
        return str(self.dim)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(str(self.dim), spec)

    def __neg__(self) -> Any:
        return self.sizes.size(-_plain(self))

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return -self if self.sizes.compare(_plain(self), equal=False) else self

    def __bool__(self) -> bool:
        return not self.sizes.compare(self, equal=True)

    def __mod__(self, other: Any) -> Any:
        return self - self // other * other if _whole(other) else NotImplemented

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __pow__(self, other: Any) -> Any:
        if not _whole(other) or isinstance(other, TracedSize) or other < 0:
            return _numbers("__pow__", self, other)
        return self.sizes.size(prod([_plain(self)] * int(other), start=Size.of(1)))


def _whole(value: Any) -> bool:
    return isinstance(value, int | np.integer)


def _plain(value: Any) -> Size:
    """Return an int or a traced size as a `Size`."""
    return Size(value.terms) if isinstance(value, Size) else Size.of(value)


def _numbers(name: str, a: Any, b: Any) -> Any:
    """Compute with floats: a `TracedNumber`; NotImplemented for a tensor, whose operator then runs."""
    if isinstance(a, TracedSize):
        a = a.number()
    if isinstance(b, TracedSize):
        b = b.number()
    elif not isinstance(b, int | float | np.number):
        return NotImplemented
    return TracedNumber(getattr(a.value, name)(b.value if isinstance(b, TracedNumber) else float(b)))


def _enter(name: str) -> None:
    """Give both classes an operator and its reflection; sums, products and floor divisions of sizes are sizes."""
    whole = getattr(Size, name, None)

    def run(self: Any, other: Any) -> Any:
        if whole is not None and _whole(other):
            return self.sizes.size(whole(_plain(self), _plain(other)))
        return _numbers(name, self, other)

    setattr(TracedSize, name, run)
    setattr(TracedNumber, name, lambda self, other: _numbers(name, self, other))


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv"):
    _enter(f"__{_name}__")
for _name in ("__pow__", "__neg__"):
    setattr(
        TracedNumber, _name, (lambda n: lambda self, *other: _numbers(n, self, *other) if other else self * -1)(_name)
    )


def _comparison(name: str, decide: Callable[[NamedSizes, Size], bool]) -> None:
    def run(self: TracedSize, other: Any) -> Any:
        if not _whole(other):
            return self._refuse() if isinstance(other, float) else NotImplemented
        return decide(self.sizes, _plain(self) - _plain(other))

    setattr(TracedSize, name, run)


_comparison("__eq__", lambda sizes, rest: sizes.compare(rest, equal=True))
_comparison("__ne__", lambda sizes, rest: not sizes.compare(rest, equal=True))
_comparison("__lt__", lambda sizes, rest: sizes.compare(rest, equal=False))
_comparison("__ge__", lambda sizes, rest: not sizes.compare(rest, equal=False))
_comparison("__gt__", lambda sizes, rest: sizes.compare(-rest, equal=False))
_comparison("__le__", lambda sizes, rest: not sizes.compare(-rest, equal=False))


def traced(value: Any) -> bool:
    """Return True for a number that depends on named sizes."""
    return type(value) is TracedSize or type(value) is TracedNumber


def _taken(what: str) -> TraceError:
    fix = "compute with it (n - 1, n // 2, 1 / n, x / n), pass it to functions of gw (gw.arange(n), gw.zeros(n)), "
    fix += "or leave the size fixed"
    return TraceError(f"the traced code takes {what} as a Python number", where=_line(), fix=fix,
                      expected="no range(), float(), math or numpy of it, and no use as a key")  # fmt: skip


def _line() -> str:
    """Return file and line of the innermost caller outside of this package and numpy."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_FOREIGN):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
