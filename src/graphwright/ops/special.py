"""Further functions of one or two operands: angles, hyperbolic functions, logarithms, gamma, remainders, bits."""

from __future__ import annotations

import math
from typing import Any

from graphwright.array.dtype import bool_
from graphwright.ops import rules
from graphwright.ops.call import call
from graphwright.ops.onnx import OnnxRow
from graphwright.ops.registry import Saves, Traits, op


class _OfOperand(rules.FloatFunction):
    """A function whose gradient reads its operand."""

    saves, sample = Saves(inputs=(0,)), rules.unary_sample(-0.9, 0.9)


def _one(x: Any) -> Any:
    return call("full_like", x, value=1.0)


# -- trigonometric and hyperbolic --------------------------------------------------------------------------------------
@op("tan")
class Tan(rules.FloatFunction):
    """tan x, elementwise; gradient g(1 + y²)."""

    saves, sample, traits = Saves(outputs=(0,)), rules.unary_sample(-1.2, 1.2), Traits(keeps_zero=True)
    emit, onnx, aten, method = "torch.tan({0})", "Tan", "tan", "tan"
    vjp = lambda g, ins, outs, attrs, needs: (g * (1.0 + outs[0] * outs[0]),)


@op("asin")
class Asin(_OfOperand):
    """arcsin x, elementwise; gradient g/√(1 - x²)."""

    traits = Traits(keeps_zero=True)
    emit, onnx, aten, method = "torch.asin({0})", "Asin", "asin", "asin"
    vjp = lambda g, ins, outs, attrs, needs: (g * call("rsqrt", 1.0 - ins[0] * ins[0]),)


@op("acos")
class Acos(_OfOperand):
    """arccos x, elementwise; gradient -g/√(1 - x²)."""

    emit, onnx, aten, method = "torch.acos({0})", "Acos", "acos", "acos"
    vjp = lambda g, ins, outs, attrs, needs: (-(g * call("rsqrt", 1.0 - ins[0] * ins[0])),)


@op("atan")
class Atan(_OfOperand):
    """arctan x, elementwise; gradient g/(1 + x²)."""

    traits = Traits(keeps_zero=True)
    emit, onnx, aten, method = "torch.atan({0})", "Atan", "atan", "atan"
    vjp = lambda g, ins, outs, attrs, needs: (g / (1.0 + ins[0] * ins[0]),)


@op("sinh")
class Sinh(_OfOperand):
    """sinh x, elementwise; gradient g·cosh x."""

    traits = Traits(keeps_zero=True)
    emit, onnx, aten, method = "torch.sinh({0})", "Sinh", "sinh", "sinh"
    vjp = lambda g, ins, outs, attrs, needs: (g * call("cosh", ins[0]),)


@op("cosh")
class Cosh(_OfOperand):
    """cosh x, elementwise; gradient g·sinh x."""

    emit, onnx, aten, method = "torch.cosh({0})", "Cosh", "cosh", "cosh"
    vjp = lambda g, ins, outs, attrs, needs: (g * call("sinh", ins[0]),)


@op("asinh")
class Asinh(_OfOperand):
    """arsinh x, elementwise; gradient g/√(1 + x²)."""

    traits = Traits(keeps_zero=True)
    emit, onnx, aten, method = "torch.asinh({0})", "Asinh", "asinh", "asinh"
    vjp = lambda g, ins, outs, attrs, needs: (g * call("rsqrt", 1.0 + ins[0] * ins[0]),)


@op("acosh")
class Acosh(_OfOperand):
    """arcosh x, elementwise; gradient g/√(x² - 1)."""

    sample = rules.unary_sample(1.2, 3)
    emit, onnx, aten, method = "torch.acosh({0})", "Acosh", "acosh", "acosh"
    # two roots, because the product overflows, and is positive below -1, where y is NaN
    vjp = lambda g, ins, outs, attrs, needs: (g * call("rsqrt", ins[0] - 1.0) * call("rsqrt", ins[0] + 1.0),)


@op("atanh")
class Atanh(_OfOperand):
    """artanh x, elementwise; gradient g/(1 - x²)."""

    traits = Traits(keeps_zero=True)
    emit, onnx, aten, method = "torch.atanh({0})", "Atanh", "atanh", "atanh"
    vjp = lambda g, ins, outs, attrs, needs: (g / (1.0 - ins[0] * ins[0]),)


@op("atan2")
class Atan2(rules.Binary):
    """The angle of the point (b, a), -π to π, elementwise; gradients g·b/(a² + b²) and -g·a/(a² + b²).

    At a = b = 0 both gradients are 0.
    """

    saves, emit, aten, method = Saves(inputs=(0, 1)), "torch.atan2({0}, {1})", "atan2", "atan2"
    infer, traits = lambda a, b: rules.floating(rules.broadcast(a, b)), Traits(promotes=True)
    onnx, why = None, {"onnx": "ONNX has no arctangent of two operands"}
    sample = lambda rng: ([rng.uniform(0.3, 2, (3, 1, 4)), rng.uniform(-2, 2, (5, 4))], {})

    def vjp(g, ins, outs, attrs, needs):
        a, b = ins
        square = a * a + b * b
        none = call("eq", square, 0.0)
        share = call("where", none, call("full_like", square, value=0.0), g / call("where", none, _one(square), square))
        return share * b if needs[0] else None, -(share * a) if needs[1] else None


# -- exponentials and logarithms ---------------------------------------------------------------------------------------
class _Logarithm(rules.FloatFunction):
    saves, sample, traits = Saves(inputs=(0,)), rules.unary_sample(0.2, 3), Traits(amp="f32")


@op("log2")
class Log2(_Logarithm):
    """log₂ x, elementwise; gradient g/(x·ln 2)."""

    emit, aten, method = "torch.log2({0})", "log2", "log2"
    vjp = lambda g, ins, outs, attrs, needs: (g / (ins[0] * math.log(2.0)),)
    onnx = lambda u: u("Div", u("Log", u.names[0]), u.scalar(math.log(2.0)))


@op("log10")
class Log10(_Logarithm):
    """log₁₀ x, elementwise; gradient g/(x·ln 10)."""

    emit, aten, method = "torch.log10({0})", "log10", "log10"
    vjp = lambda g, ins, outs, attrs, needs: (g / (ins[0] * math.log(10.0)),)
    onnx = lambda u: u("Div", u("Log", u.names[0]), u.scalar(math.log(10.0)))


@op("exp2")
class Exp2(rules.FloatFunction):
    """2ˣ, elementwise; gradient g·y·ln 2."""

    saves, sample, traits = Saves(outputs=(0,)), rules.unary_sample(-2, 2), Traits(amp="f32")
    emit, aten, method = "torch.exp2({0})", "exp2", "exp2"
    vjp = lambda g, ins, outs, attrs, needs: (g * outs[0] * math.log(2.0),)
    onnx = lambda u: u("Pow", u.scalar(2.0), u.names[0])


# -- error function and gamma ------------------------------------------------------------------------------------------
@op("erfc")
class Erfc(_OfOperand):
    """1 - erf x, elementwise, accurate for large x; gradient -g·2/√π·exp(-x²)."""

    emit, aten, method = "torch.erfc({0})", "erfc", "erfc"
    vjp = lambda g, ins, outs, attrs, needs: (g * call("exp", -(ins[0] * ins[0])) * (-2.0 / math.pi**0.5),)
    onnx = lambda u: u("Sub", u.scalar(1.0), u("Erf", u.names[0]))


@op("erfinv")
class Erfinv(rules.FloatFunction):
    """The y with erf y = x, elementwise; gradient g·√π/2·exp(y²)."""

    saves, sample, traits = Saves(outputs=(0,)), rules.unary_sample(-0.9, 0.9), Traits(keeps_zero=True)
    emit, aten, method = "torch.erfinv({0})", "erfinv", "erfinv"
    vjp = lambda g, ins, outs, attrs, needs: (g * call("exp", outs[0] * outs[0]) * (math.pi**0.5 / 2.0),)
    onnx, why = None, {"onnx": "ONNX has no inverse error function"}


@op("lgamma")
class Lgamma(_OfOperand):
    """ln |Γ(x)|, elementwise; gradient g·digamma x."""

    sample, traits = rules.unary_sample(0.4, 4), Traits(amp="f32")
    emit, aten, method = "torch.lgamma({0})", "lgamma", "lgamma"
    vjp = lambda g, ins, outs, attrs, needs: (g * call("digamma", ins[0]),)
    onnx, why = None, {"onnx": "ONNX has no gamma function"}


_BERNOULLI = 7 / 6, -691 / 2730, 5 / 66, -1 / 30, 1 / 42, -1 / 30, 1 / 6
"""B₁₄, B₁₂, ..., B₂."""


def _trigamma_from_8(z: Any) -> Any:
    """ψ'(z) ≈ 1/z + 1/(2z²) + Σ B₂ₖ/z²ᵏ⁺¹, with a relative error below 1e-14 for z ≥ 8.5 (Abramowitz-Stegun 6.4.12)."""
    r = call("reciprocal", z)
    s, tail = r * r, 0.0
    for b in _BERNOULLI:
        tail = (tail + b) * s
    return r + s * 0.5 + r * tail


@op("digamma")
class Digamma(_OfOperand):
    """d ln Γ(x)/dx, elementwise; gradient g·trigamma x."""

    sample, traits = rules.unary_sample(0.4, 4), Traits(amp="f32")
    emit, aten, method = "torch.digamma({0})", "digamma", "digamma"
    onnx, why = None, {"onnx": "ONNX has no gamma function"}

    def vjp(g, ins, outs, attrs, needs):  # by the recurrence ψ'(x) = ψ'(x + 1) + 1/x² up to the asymptotic series
        x, total = ins[0], None
        negative = call("lt", x, 0.5)  # ψ'(1 - x) + ψ'(x) = π²/sin²(πx)
        z = call("where", negative, 1.0 - x, x)
        for _ in range(8):
            term = call("reciprocal", z * z)
            total = term if total is None else total + term
            z = z + 1.0
        total = total + _trigamma_from_8(z)
        sine = call("sin", call("where", negative, x, call("full_like", x, value=0.5)) * math.pi)
        return (g * call("where", negative, math.pi**2 / (sine * sine) - total, total),)


# -- rounding and remainders -------------------------------------------------------------------------------------------
@op("trunc")
class Trunc(rules.Flat, rules.Unary):
    """x rounded towards 0, elementwise; gradient 0."""

    sample, traits = rules.between_integers, Traits(keeps_zero=True)
    emit, aten, method = "torch.trunc({0})", "trunc", "trunc"
    onnx = lambda u: u("Mul", u("Sign", u.names[0]), u("Floor", u("Abs", u.names[0])))


@op("fmod")
class Fmod(rules.Binary):
    """a - b·trunc(a / b), elementwise, with the sign of a; gradients g and -g·trunc(a / b)."""

    saves, emit, aten, method = Saves(inputs=(0, 1)), "torch.fmod({0}, {1})", "fmod", "fmod"
    vjp = lambda g, ins, outs, attrs, needs: (g, -(g * call("trunc", ins[0] / ins[1])) if needs[1] else None)
    onnx = lambda u: u("Mod", *u.names, fmod=1)

    def sample(rng):
        b = rng.uniform(0.5, 2, (5, 4)) * rng.choice((-1.0, 1.0), (5, 4))
        return [b[:3, None] * 0 + b * (rng.integers(-3, 4, (3, 5, 4)) + rng.uniform(0.2, 0.8, (3, 5, 4))), b], {}


# -- bits of integers --------------------------------------------------------------------------------------------------
class _Bits(rules.Binary):
    """An op on the bits of integers or bools."""

    vjp, why = None, {"vjp": "the result is an integer"}

    def infer(a, b):
        return rules.integral(rules.broadcast(a, b))

    def sample(rng):
        operands = [rng.integers(-9, 9, shape) for shape in ((3, 1, 4), (5, 4))]
        return [a < 0 for a in operands] if rng.random() < 0.5 else operands, {}


def _onnx_of_bits(kind: str) -> OnnxRow:
    """Return an `onnx` function for an operator on bits, which has a node of another type for bools."""
    return lambda u: u(kind if u.ins[0].dtype is bool_ else f"Bitwise{kind}", *u.names)


@op("bitwise_and")
class BitwiseAnd(_Bits):
    """Bitwise and of integers or bools, elementwise."""

    emit, onnx, aten, method = "torch.bitwise_and({0}, {1})", _onnx_of_bits("And"), "bitwise_and", "bitwise_and"


@op("bitwise_or")
class BitwiseOr(_Bits):
    """Bitwise or of integers or bools, elementwise."""

    emit, onnx, aten, method = "torch.bitwise_or({0}, {1})", _onnx_of_bits("Or"), "bitwise_or", "bitwise_or"


@op("bitwise_xor")
class BitwiseXor(_Bits):
    """Bitwise exclusive or of integers or bools, elementwise."""

    emit, onnx, aten, method = "torch.bitwise_xor({0}, {1})", _onnx_of_bits("Xor"), "bitwise_xor", "bitwise_xor"


class _Shift(_Bits):
    why = {"onnx": "ONNX shifts unsigned integers only"}
    onnx, sample = None, lambda rng: ([rng.integers(-9, 9, (3, 1, 4)), rng.integers(0, 5, (5, 4))], {})


@op("bitwise_left_shift")
class LeftShift(_Shift):
    """a·2ᵇ of integers, elementwise."""

    emit, aten, method = "torch.bitwise_left_shift({0}, {1})", "bitwise_left_shift", "bitwise_left_shift"


@op("bitwise_right_shift")
class RightShift(_Shift):
    """⌊a / 2ᵇ⌋ of integers, elementwise."""

    emit, aten, method = "torch.bitwise_right_shift({0}, {1})", "bitwise_right_shift", "bitwise_right_shift"
