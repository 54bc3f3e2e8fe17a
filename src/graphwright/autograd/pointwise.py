"""Elementwise functions of tensors under torch's names: arithmetic, comparisons, casts. One-op ones come from `ops`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import (
    DType,
    bfloat16,
    bool_,
    finfo,
    float16,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    result_type,
    uint8,
)
from graphwright.autograd.apply import TensorBase, apply, as_tensor, device_of
from graphwright.autograd.functions import cast_like, stack
from graphwright.autograd.names import METHOD, NAMES, TOP, named
from graphwright.autograd.shapes import broadcast_tensors
from graphwright.errors import DTypeError, UsageError
from graphwright.ops import call, get

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor


# -- arithmetic --------------------------------------------------------------------------------------------------------
def _of_two(op: str, name: str = "", also: str = "", in_place: bool = True) -> None:
    """Enter a function of two operands, tensors or numbers, that is one op."""
    row = get(op)

    def combine(input: Any, other: Any) -> Tensor:
        return apply(row, (input, other), {})

    combine.__name__, combine.__doc__ = name or op, row.doc.strip()
    named(also=also, in_place=in_place)(combine)


_of_two("floor_divide")
_of_two("remainder")
_of_two("eq")
for _op, _also in (("ne", "not_equal"), ("lt", "less"), ("le", "less_equal"), ("gt", "greater")):
    _of_two(_op, also=_also)
_of_two("ge", also="greater_equal")
_of_two("logical_and")
_of_two("logical_or")
_of_two("logical_xor")


@named(in_place=True)
def logical_not(input: Any) -> Tensor:
    """¬x, elementwise: true where x is 0 or false."""
    return call("logical_not", as_tensor(input))


def _common(*operands: Any) -> DType:
    """Return the dtype to which tensors and numbers are promoted."""
    kinds = [("python" if isinstance(x, int | float) else "scalar0d", as_tensor(x)) for x in operands]
    return result_type([(x.dtype, "array" if x.ndim else kind) for kind, x in kinds])


def _floats(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Return two operands as tensors of their common dtype, of float32 if that is not floating."""
    kind = _common(a, b)
    kind = kind if kind.is_float else float32
    return as_tensor(a, kind), as_tensor(b, kind)


def _scaled(other: Any, alpha: float) -> Any:
    return other if alpha == 1 else other * alpha


@named()
def add(input: Any, other: Any, *, alpha: Any = 1) -> Tensor:
    """a + alpha·b, elementwise."""
    return call("add", as_tensor(input), _scaled(other, alpha))


@named(also="subtract", in_place=True)
def sub(input: Any, other: Any, *, alpha: Any = 1) -> Tensor:
    """a - alpha·b, elementwise."""
    return call("sub", as_tensor(input), _scaled(other, alpha))


@named(TOP)
def rsub(input: Any, other: Any, *, alpha: Any = 1) -> Tensor:
    """b - alpha·a, elementwise."""
    return call("sub", other, _scaled(as_tensor(input), alpha))


@named(also="multiply", in_place=True)
def mul(input: Any, other: Any) -> Tensor:
    """a · b, elementwise."""
    return call("mul", as_tensor(input), other)


@named(also="divide true_divide", in_place=True)
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Tensor:
    """a / b, elementwise; `rounding_mode` `floor` rounds down, `trunc` towards 0. Raises: UsageError for another."""
    x = as_tensor(input)
    if rounding_mode is None:
        return call("div", x, other)
    if rounding_mode == "floor":
        return call("floor_divide", x, other)
    if rounding_mode != "trunc":
        raise UsageError("unknown rounding mode", where="div", expected="None, floor or trunc", got=rounding_mode)
    if x.dtype.is_float or as_tensor(other).dtype.is_float:
        return call("trunc", call("div", x, other))
    return call("floor_divide", call("sub", x, call("fmod", x, other)), other)


@named(also="negative", in_place=True)
def neg(input: Any) -> Tensor:
    """-x, elementwise."""
    return call("neg", as_tensor(input))


@named()
def positive(input: Tensor) -> Tensor:
    """x itself."""
    return input


@named(in_place=True)
def square(input: Any) -> Tensor:
    """x², elementwise."""
    x = as_tensor(input)
    x = x.to(int64) if x.dtype.kind == "bool" else x
    return x * x


@named(in_place=True)
def pow_(input: Any, exponent: Any) -> Tensor:
    """xᵖ, elementwise, for a tensor or number p. Raises: UsageError for an integer tensor and a negative integer."""
    return as_tensor(input) ** exponent


@named(in_place=True)
def float_power(input: Any, exponent: Any) -> Tensor:
    """xᵖ in float64, elementwise."""
    power = exponent.to(float64) if isinstance(exponent, TensorBase) else exponent  # pyright: ignore[reportAttributeAccessIssue]  # a Tensor
    return as_tensor(input).to(float64) ** power


@named(in_place=True)
def round_(input: Any, *, decimals: int = 0) -> Tensor:
    """The nearest number with `decimals` decimals, ties to even; gradient 0."""
    x = as_tensor(input)
    if not decimals:
        return call("round", x)
    scale = 10.0 ** abs(decimals)
    return call("round", x * scale) / scale if decimals > 0 else call("round", x / scale) * scale


@named(in_place=True, also="fix")
def trunc(input: Any) -> Tensor:
    """x rounded towards 0, elementwise; gradient 0."""
    return call("trunc", as_tensor(input))


@named(in_place=True)
def frac(input: Any) -> Tensor:
    """x - trunc x, elementwise."""
    x = as_tensor(input)
    return x - call("trunc", x)


@named(also="absolute", in_place=True)
def abs_(input: Any) -> Tensor:
    """|x|, elementwise; gradient sign(x), 0 at 0."""
    return call("abs", as_tensor(input))


for _alias, _name in (
    ("arccos", "acos"), ("arccosh", "acosh"), ("arcsin", "asin"), ("arcsinh", "asinh"), ("arctan", "atan"),
    ("arctan2", "atan2"), ("arctanh", "atanh"),
):  # fmt: skip
    NAMES[_alias] = replace(NAMES[_name], name=_alias)


# -- bounds ------------------------------------------------------------------------------------------------------------
@named(also="clip", in_place=True)
def clamp(input: Any, min: Any = None, max: Any = None) -> Tensor:
    """min(max(x, min), max), elementwise; bounds are numbers or tensors, and one may be None."""
    x = as_tensor(input)
    if not isinstance(min, TensorBase) and not isinstance(max, TensorBase):
        x = x.to(float32) if not x.dtype.is_float and (isinstance(min, float) or isinstance(max, float)) else x
        return call("clamp", x, low=min, high=max)
    if min is not None:  # an entry at its bound gets the whole gradient
        x = call("where", x >= min, x, call("maximum", x, min))
    return x if max is None else call("where", x <= max, x, call("minimum", x, max))


@named(in_place=True)
def clamp_min(input: Any, min: Any) -> Tensor:
    """max(x, min), elementwise."""
    return clamp(input, min=min)


@named(in_place=True)
def clamp_max(input: Any, max: Any) -> Tensor:
    """min(x, max), elementwise."""
    return clamp(input, max=max)


@named()
def fmax(input: Any, other: Any) -> Tensor:
    """max(a, b), elementwise; of a NaN and a number the number. On a tie a gets the gradient."""
    a, b = as_tensor(input), as_tensor(other)
    return call("where", (a >= b) | b.isnan(), a, b)


@named()
def fmin(input: Any, other: Any) -> Tensor:
    """min(a, b), elementwise; of a NaN and a number the number. On a tie a gets the gradient."""
    a, b = as_tensor(input), as_tensor(other)
    return call("where", (a <= b) | b.isnan(), a, b)


@named(in_place=True)
def nan_to_num(input: Any, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Tensor:
    """NaN, ∞ and -∞ replaced by numbers; by default 0 and the largest finite numbers."""
    x = as_tensor(input)
    if not x.dtype.is_float:
        return x
    most = finfo(x.dtype).max
    x = call("where", x.isnan(), cast_like(0.0 if nan is None else nan, x), x)
    x = call("where", isposinf(x), cast_like(most if posinf is None else posinf, x), x)
    return call("where", isneginf(x), cast_like(-most if neginf is None else neginf, x), x)


# -- functions ---------------------------------------------------------------------------------------------------------
@named(in_place=True)
def lerp(input: Any, end: Any, weight: Any) -> Tensor:
    """a + weight·(b - a), elementwise: linear interpolation, exact at the weights 0 and 1."""
    a = as_tensor(input)
    gap = end - a
    if not isinstance(weight, TensorBase):
        return a + gap * weight if abs(weight) < 0.5 else end - gap * (1 - weight)
    w = as_tensor(weight)
    return call("where", w.abs() < 0.5, a + gap * w, end - gap * (1 - w))


@named(in_place=True)
def addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Tensor:
    """x + value·a·b, elementwise."""
    return as_tensor(input) + _scaled(as_tensor(tensor1) * tensor2, value)


@named(in_place=True)
def addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Tensor:
    """x + value·a/b, elementwise."""
    return as_tensor(input) + _scaled(as_tensor(tensor1) / tensor2, value)


@named(in_place=True)
def logit(input: Any, eps: float | None = None) -> Tensor:
    """ln(p / (1 - p)), elementwise; with `eps`, p is first clamped to [eps, 1 - eps]."""
    x = as_tensor(input)
    x = x if x.dtype.is_float else x.to(float32)
    x = x if eps is None else clamp(x, eps, 1.0 - eps)
    return x.log() - (-x).log1p()


@named(in_place=True)
def sinc(input: Any) -> Tensor:
    """sin(πx) / (πx), elementwise, 1 at 0."""
    x = as_tensor(input)
    zero = x == 0.0
    angle = call("where", zero, cast_like(1.0, x), x) * math.pi
    return call("where", zero, cast_like(1.0, x), angle.sin() / angle)


@named(in_place=True)
def deg2rad(input: Any) -> Tensor:
    """x·π/180, elementwise."""
    return as_tensor(input) * (math.pi / 180.0)


@named(in_place=True)
def rad2deg(input: Any) -> Tensor:
    """x·180/π, elementwise."""
    return as_tensor(input) * (180.0 / math.pi)


@named(in_place=True)
def hypot(input: Any, other: Any) -> Tensor:
    """√(a² + b²), elementwise, without overflow; gradient 0 at 0."""
    a, b = _floats(input, other)
    size = call("stop_gradient", call("maximum", a.abs(), b.abs()))
    size = call("where", a.isinf() | b.isinf(), cast_like(math.inf, size), size)  # also if the other one is NaN
    none = (size == 0.0) | size.isinf()
    safe = call("where", none, cast_like(1.0, size), size)
    scaled = (a / safe) * (a / safe) + (b / safe) * (b / safe)
    return call("where", none, size, call("where", none, cast_like(1.0, scaled), scaled).sqrt() * safe)


@named(in_place=True)
def copysign(input: Any, other: Any) -> Tensor:
    """|a| with the sign of b, elementwise; the sign of -0 counts."""
    a, b = _floats(input, other)
    size = a.abs()
    return call("where", signbit(b), -size, size)


@named(in_place=True)
def xlogy(input: Any, other: Any) -> Tensor:
    """a·ln b, elementwise; 0 where a is 0 and b is not NaN. Gradients ln b and a/b; both are 0 at a = 0 ≥ b."""
    a, b = _floats(input, other)
    none = (a == 0) & ((b <= 0) | (b == math.inf))
    return a * call("where", none, cast_like(1, b), b).log()


@named()
def logaddexp(input: Any, other: Any) -> Tensor:
    """ln(eᵃ + eᵇ), elementwise, without overflow."""
    return call("logsumexp", stack(broadcast_tensors(*_floats(input, other))), axes=(0,), keepdims=False)


@named()
def logaddexp2(input: Any, other: Any) -> Tensor:
    """log₂(2ᵃ + 2ᵇ), elementwise, without overflow."""
    ln2 = math.log(2.0)
    return logaddexp(as_tensor(input) * ln2, as_tensor(other) * ln2) / ln2


@named(in_place=True)
def heaviside(input: Any, values: Any) -> Tensor:
    """0 where x < 0, `values` where x = 0, 1 where x > 0."""
    x = as_tensor(input)
    return call("where", x == 0.0, as_tensor(values).to(x.dtype), (x > 0.0).to(x.dtype))


@named(in_place=True)
def sgn(input: Any) -> Tensor:
    """-1, 0 or 1, the sign of x, elementwise; gradient 0."""
    return call("sign", as_tensor(input))


@named()
def angle(input: Any) -> Tensor:
    """The angle of a real number in the complex plane: π below 0, else 0; NaN of NaN."""
    x = as_tensor(input)
    x = x if x.dtype.is_float else x.to(float32)
    none = call("full_like", x, value=0.0)
    return call("where", x.isnan(), x, call("where", x < 0.0, none + math.pi, none))


@named(in_place=True)
def ldexp(input: Any, other: Any) -> Tensor:
    """x·2ⁿ, elementwise."""
    x, n = _floats(input, other)
    return x * n.exp2()


@named(in_place=True)
def mvlgamma(input: Any, p: int) -> Tensor:
    """ln of the multivariate gamma function of dimension p ≥ 1: p(p - 1)/4·ln π + Σ lnΓ(x - j/2) over j < p.

    Raises: UsageError for another p.
    """
    if p < 1:
        raise UsageError("the dimension is not positive", where="mvlgamma", expected=">= 1", got=p)
    x = as_tensor(input)
    x = x if x.dtype.is_float else x.to(float32)
    total = x.lgamma() + p * (p - 1) / 4 * math.log(math.pi)
    for j in range(1, p):
        total = total + (x - 0.5 * j).lgamma()
    return total


@named()
def signbit(input: Any) -> Tensor:
    """True where x is below 0 or -0, elementwise."""
    x = as_tensor(input)
    return (x < 0) | ((x == 0) & (call("reciprocal", x) < 0)) if x.dtype.is_float else x < 0


@named()
def isposinf(input: Any) -> Tensor:
    """True where x is +∞, elementwise."""
    return call("eq", as_tensor(input), math.inf)


@named()
def isneginf(input: Any) -> Tensor:
    """True where x is -∞, elementwise."""
    return call("eq", as_tensor(input), -math.inf)


@named()
def dist(input: Any, other: Any, p: float = 2) -> Tensor:
    """The p-norm of a - b."""
    return (as_tensor(input) - other).norm(p)


@named(in_place=True)
def bitwise_not(input: Any) -> Tensor:
    """Bitwise complement of integers, or ¬x of bools, elementwise. Raises: DTypeError for floats."""
    x = as_tensor(input)
    if x.dtype.kind == "bool":
        return call("logical_not", x)
    return call("bitwise_xor", x, -1 if x.dtype.kind == "int" else 255)


# -- functions of numpy, on the host: outside traces, without gradients ------------------------------------------------
def _on_host(name: str, doc: str, floats: bool) -> None:
    """Enter a function of two tensors of integers, or of floats, that numpy computes; a trace raises TraceError."""

    def run(input: Any, other: Any) -> Tensor:
        a, b = as_tensor(input), as_tensor(other)
        kind = _common(input, other)
        if kind.is_float is not floats or kind is bool_ or kind.is_low:
            expected = "float32 or float64" if floats else "integers"
            raise DTypeError("unsupported dtypes", where=name, expected=expected, got=f"{a.spec}, {b.spec}")
        made = np.asarray(getattr(np, name)(*(x.detach().to(kind).numpy() for x in (a, b))))
        return as_tensor(made, device=device_of(a))

    run.__name__ = name
    run.__doc__ = f"{doc} On the host: outside traces, without a gradient. Raises: DTypeError."
    named(differs="outside traces only, without a gradient", in_place=True)(run)


_on_host("gcd", "Greatest common divisor of integers, elementwise.", floats=False)
_on_host("lcm", "Least common multiple of integers, elementwise.", floats=False)
_on_host("nextafter", "The float after a in the direction of b, elementwise.", floats=True)


@named(differs="outside traces only, without a gradient", in_place=True)
def i0(input: Any) -> Tensor:
    """The modified Bessel function of order 0, elementwise. On the host: outside traces, without a gradient."""
    x = as_tensor(input)
    x = x if x.dtype.is_float else x.to(float32)
    return as_tensor(np.asarray(np.i0(x.numpy())), x.dtype, device_of(x))


# -- comparison of tensors ---------------------------------------------------------------------------------------------
@named()
def isclose(input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Tensor:
    """True where |a - b| ≤ atol + rtol·|b|, or both are equal infinities; with `equal_nan`, also where both are NaN.

    Raises: UsageError for a negative tolerance.
    """
    if rtol < 0 or atol < 0:
        raise UsageError("a tolerance is negative", where="isclose", expected=">= 0", got=f"{rtol}, {atol}")
    a, b = as_tensor(input), as_tensor(other)
    if not a.dtype.is_float:
        a, b = a.to(float64), b.to(float64)
    near = ((a - b).abs() <= b.abs() * rtol + atol) & b.isfinite()
    near = near | (a == b)
    return near | (a.isnan() & b.isnan()) if equal_nan else near


@named()
def allclose(input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """Whether `isclose` holds for all entries. Raises: TraceError in a trace."""
    return bool(isclose(input, other, rtol, atol, equal_nan).all().item())


@named()
def equal(input: Any, other: Any) -> bool:
    """Whether shapes and all entries are equal. Raises: TraceError in a trace."""
    a, b = as_tensor(input), as_tensor(other)
    return a.shape == b.shape and bool((a == b).all().item())


# -- casts -------------------------------------------------------------------------------------------------------------
def _cast(name: str, kind: DType) -> None:
    def cast(input: Tensor) -> Tensor:
        return input.to(kind)

    cast.__name__, cast.__doc__ = name, f"Cast to {kind.name}."
    named(METHOD)(cast)


CASTS = {
    "double": float64, "float": float32, "half": float16, "bfloat16": bfloat16, "long": int64, "int": int32,
    "short": int16, "char": int8, "byte": uint8, "bool": bool_,
}  # fmt: skip
"""Method -> the dtype to which it casts."""
for _name, _kind in CASTS.items():
    _cast(_name, _kind)
