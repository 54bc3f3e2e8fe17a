"""Elementwise operators, comparisons and casts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import inf, nan
from typing import Any

from graphwright.array import DType, bool_, float32
from graphwright.autograd import Tensor, top
from graphwright.models.importing.onnx_operators.table import NotExpressible, dtype_of, equal, operator, text
from graphwright.nn import functional

equal("""
    Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor IsNaN Log Neg Reciprocal Round Sigmoid Sign Sin
    Sinh Sqrt Tan Tanh Not:logical_not BitwiseNot:bitwise_not
""", top)  # fmt: skip
equal("""
    Add Sub Mul And:logical_and Or:logical_or Xor:logical_xor BitwiseAnd:bitwise_and BitwiseOr:bitwise_or
    BitwiseXor:bitwise_xor Equal:eq Greater:gt GreaterOrEqual:ge Less:lt LessOrEqual:le Where
""", top, numbers=True)  # fmt: skip
equal("Relu HardSwish Mish", functional)


@operator("Identity")
def identity(x: Any) -> Any:
    """Return the operand."""
    return x


@operator("Div", numbers=True)
def div(a: Any, b: Any) -> Tensor:
    """a / b; the quotient of integers is rounded towards 0."""
    whole = not any(_is_float(v) for v in (a, b))
    return top.div(a, b, rounding_mode="trunc") if whole else top.div(a, b)


def _is_float(value: Any) -> bool:
    return value.dtype.is_float if isinstance(value, Tensor) else isinstance(value, float)


@operator("Mod", numbers=True)
def mod(a: Any, b: Any, *, fmod: int = 0) -> Tensor:
    """The rest of a / b, with the sign of b; with `fmod` that of a."""
    return top.fmod(a, b) if fmod else top.remainder(a, b)


@operator("Pow", numbers=True)
def power(a: Any, b: Any) -> Tensor:
    """aᵇ in the dtype of a."""
    kind = a.dtype if isinstance(a, Tensor) else float32
    return top.pow(a, b).to(kind)


@operator("BitShift")
def bit_shift(a: Tensor, b: Tensor, *, direction: Any) -> Tensor:
    """a·2ᵇ, or ⌊a / 2ᵇ⌋."""
    return (top.bitwise_left_shift if text(direction) == "LEFT" else top.bitwise_right_shift)(a, b)


@operator("Max", numbers=True)
def largest(*operands: Any) -> Tensor:
    """The largest operand."""
    return reduce(top.maximum, _tensors_first(operands))


@operator("Min", numbers=True)
def smallest(*operands: Any) -> Tensor:
    """The smallest operand."""
    return reduce(top.minimum, _tensors_first(operands))


def _tensors_first(operands: Sequence[Any]) -> list[Any]:
    return sorted(operands, key=lambda v: not isinstance(v, Tensor))


@operator("Sum")
def total(*operands: Tensor) -> Tensor:
    """The sum of the operands."""
    return reduce(lambda a, b: a + b, operands)


@operator("Mean")
def mean(*operands: Tensor) -> Tensor:
    """The mean of the operands."""
    return total(*operands) / float(len(operands))


@operator("Clip", numbers=True)
def clip(x: Tensor, low: Any = None, high: Any = None, *, min: Any = None, max: Any = None) -> Tensor:
    """min(max(x, low), high)."""
    low, high = min if low is None else low, max if high is None else high
    if type(low) is float and type(high) is float and (low, high) == (0.0, 6.0) and x.dtype.is_float:
        return functional.relu6(x)
    if low is None and high is None:
        return x
    return top.clamp(x, low, high)


@operator("Cast")
def cast(x: Tensor, *, to: int, saturate: int = 1, round_mode: Any = "up") -> Tensor:
    """Return x in a dtype; floats that 8 bits cannot hold become the largest finite number if `saturate`."""
    return converted(x, dtype_of(to), bool(saturate))


@operator("CastLike")
def cast_like(x: Tensor, other: Tensor, *, saturate: int = 1, round_mode: Any = "up") -> Tensor:
    """Return x in the dtype of another tensor."""
    return converted(x, other.dtype, bool(saturate))


def converted(x: Tensor, kind: DType, saturate: bool = True) -> Tensor:
    """Return x in a dtype, as ONNX converts."""
    if kind.kind == "float8" and saturate:
        most = 448.0 if kind.name == "float8_e4m3fn" else 57344.0
        x = x.to(float32).clamp(-most, most)
    elif kind.name == "float8_e4m3fn":  # without infinities: what rounds to more than 448 is NaN
        x = top.where(top.abs(x.to(float32)) > 464.0, nan, x.to(float32))
    return x if x.dtype is kind else x != 0 if kind is bool_ else x.to(kind)


@operator("IsInf")
def is_inf(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    """True where x is infinite, of the wanted signs."""
    if detect_negative and detect_positive:
        return top.isinf(x)
    if detect_negative or detect_positive:
        return x == (-inf if detect_negative else inf)
    return top.isinf(x) & False


# -- activations -------------------------------------------------------------------------------------------------------
operator("Elu")(lambda x, *, alpha=1.0: functional.elu(x, alpha))
operator("Celu")(lambda x, *, alpha=1.0: functional.celu(x, alpha))
operator("LeakyRelu")(lambda x, *, alpha=0.01: functional.leaky_relu(x, alpha))
operator("ThresholdedRelu")(lambda x, *, alpha=1.0: functional.threshold(x, alpha, 0.0))
operator("Gelu")(lambda x, *, approximate="none": functional.gelu(x, "tanh" if text(approximate) == "tanh" else "none"))
operator("Softplus")(lambda x: functional.softplus(x))
operator("Softsign")(lambda x: functional.softsign(x))
operator("Swish")(lambda x, *, alpha=1.0: functional.silu(x) if alpha == 1.0 else x * top.sigmoid(x * alpha))


@operator("Selu")
def selu(x: Tensor, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875) -> Tensor:
    """gamma·(x if x > 0 else alpha·(eˣ - 1))."""
    return functional.elu(x, alpha) * gamma


@operator("HardSigmoid")
def hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    """min(max(alpha·x + beta, 0), 1)."""
    if abs(alpha - 1 / 6) < 1e-7 and beta == 0.5:
        return functional.hardsigmoid(x)
    return top.clamp(x * alpha + beta, 0.0, 1.0)


@operator("PRelu")
def prelu(x: Tensor, slope: Tensor) -> Tensor:
    """x if x ≥ 0 else slope·x."""
    return top.where(x < 0, x * slope, x)


@operator("Shrink")
def shrink(x: Tensor, *, bias: float = 0.0, lambd: float = 0.5) -> Tensor:
    """x + bias below -lambd, x - bias above lambd, else 0."""
    wide = x if x.dtype.is_float else x.to(float32)
    return top.where(wide < -lambd, wide + bias, top.where(wide > lambd, wide - bias, wide * 0.0)).to(x.dtype)


@operator("Dropout", known=(2,))
def dropout(
    x: Tensor, ratio: Any = None, training: Any = None, *, seed: int = 0, outputs: int
) -> Any:  # fmt: skip
    """Return the operand, and a mask of ones: files are imported for inference."""
    if training is not None and bool(training):
        raise NotExpressible("Dropout in training mode draws random numbers", fix="export the network for inference")
    return (x, top.eq(x, x) | True) if outputs > 1 else x
