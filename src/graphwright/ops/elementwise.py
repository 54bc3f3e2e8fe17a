"""Arithmetic: signs, rounding, sums and products of two operands, powers, extrema, and the junction."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from graphwright.array.dtype import bool_, float32
from graphwright.array.spec import Spec, broadcast_shapes
from graphwright.errors import DTypeError, ShapeError, UsageError
from graphwright.ops.call import call
from graphwright.ops.registry import Saves, Traits, op
from graphwright.ops.rules import (
    BINARY,
    UNARY,
    away_from_zero,
    between_integers,
    binary_sample,
    broadcast,
    floating,
    one_dtype,
    same,
    unary_sample,
)


def _binary(*identity: tuple[int, float]) -> Traits:
    return replace(BINARY, identity=identity)


@op("neg")
class Neg:
    """-x."""

    arity, infer, traits, sample = 1, same, UNARY, unary_sample(-2, 2)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (-g,)


@op("abs")
class Abs:
    """|x|; gradient sign(x), 0 at 0."""

    arity, infer, traits, saves, sample = 1, same, UNARY, Saves(inputs=(0,)), away_from_zero

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (g * call("sign", ins[0]),)


for _name, (_doc, _sample) in {
    "sign": ("-1, 0 or 1; gradient 0.", away_from_zero),
    "step": ("1 where x > 0, else 0; gradient 0.", away_from_zero),
    "floor": ("The largest whole number that is not above x; gradient 0.", between_integers),
    "ceil": ("The smallest whole number that is not below x; gradient 0.", between_integers),
    "round": ("The nearest whole number, of two the even one; gradient 0.", between_integers),
}.items():
    op(_name)(
        type(
            _name,
            (),
            {
                "__doc__": _doc,
                "arity": 1,
                "infer": same,
                "traits": UNARY,
                "sample": _sample,
                "vjp": None,
                "why": {"vjp": "the gradient is zero everywhere it exists"},
            },
        )
    )


@op("add")
class Add:
    """a + b."""

    arity, infer, sample = 2, broadcast, binary_sample
    traits = replace(_binary((0, -0.0), (1, -0.0)), sums=True)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return g, g


@op("sub")
class Sub:
    """a - b."""

    arity, infer, traits, sample = 2, broadcast, _binary((1, 0.0)), binary_sample

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return g, -g if needs[1] else None


@op("mul")
class Mul:
    """a · b."""

    arity, infer, saves, sample = 2, broadcast, Saves(inputs=(0, 1)), binary_sample
    traits = _binary((0, 1.0), (1, 1.0))

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return g * ins[1] if needs[0] else None, g * ins[0] if needs[1] else None


@op("div")
class Div:
    """a / b, of integers in float32; gradients g/b, -g·a/b²."""

    arity, traits, saves = 2, replace(_binary((1, 1.0)), divides=True), Saves(inputs=(0, 1))

    @staticmethod
    def infer(a, b):
        spec = broadcast(a, b)
        return spec if spec.dtype.is_float else Spec(spec.shape, float32)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        a, b = ins
        by_b = g / b
        return by_b if needs[0] else None, -(by_b * (a / b)) if needs[1] else None

    @staticmethod
    def sample(rng):
        return binary_sample(rng, 0.5, 2)


@op("floor_divide")
class FloorDivide:
    """⌊a / b⌋; integers stay integers, and a zero divisor of theirs raises."""

    arity, infer, traits = 2, broadcast, BINARY
    vjp, why = None, {"vjp": "the gradient is zero everywhere it exists"}

    @staticmethod
    def sample(rng):
        return [rng.uniform(1, 9, (3, 1, 4)), rng.uniform(0.5, 2, (5, 4))], {}


@op("remainder")
class Remainder:
    """a - b·⌊a / b⌋, of the sign of b; gradients g, -g·⌊a / b⌋."""

    arity, infer, traits, saves = 2, broadcast, BINARY, Saves(inputs=(0, 1))

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return g, -(g * call("floor_divide", *ins)) if needs[1] else None

    @staticmethod
    def sample(rng):
        b = rng.uniform(0.5, 2, (5, 4)) * rng.choice((-1.0, 1.0), (5, 4))
        return [b[:3, None] * 0 + b * (rng.integers(-3, 4, (3, 5, 4)) + rng.uniform(0.2, 0.8, (3, 5, 4))), b], {}


@op("pow")
class Pow:
    """xᵖ; whole p of a negative x too. Gradients g·p·xᵖ⁻¹ (0 where p = 0) and g·y·ln x (0 where x = 0 ≤ p)."""

    arity, infer, saves, traits = 2, broadcast, Saves(inputs=(0, 1), outputs=(0,)), replace(BINARY, amp="f32")

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        x, p = ins
        dx = dp = None
        if needs[0]:  # 0⁰ instead of 0⁻¹ where p = 0: the factor p is 0 there
            constant = call("logical_and", call("eq", x, 0.0), call("eq", p, 0.0))
            dx = g * p * call("pow", x, call("where", constant, 0.0, p - 1.0))
        if needs[1]:  # ln 1 where 0ᵖ does not change with p
            still = call("logical_and", call("eq", x, 0.0), call("le", 0.0, p))
            dp = g * outs[0] * call("log", call("where", still, 1.0, x))
        return dx, dp

    @staticmethod
    def sample(rng):
        return [rng.uniform(0.3, 2, (3, 1, 4)), rng.choice((-1.5, 0.0, 1.0, 2.0, 2.5), (5, 4))], {}


@op("minimum")
class Minimum:
    """The smaller of a and b; a tie gives each half of the gradient."""

    arity, infer, traits, saves, sample = 2, broadcast, BINARY, Saves(inputs=(0, 1)), binary_sample

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return _extremum(g, ins[1], ins[0], needs)


@op("maximum")
class Maximum:
    """The larger of a and b; a tie gives each half of the gradient."""

    arity, infer, traits, saves, sample = 2, broadcast, BINARY, Saves(inputs=(0, 1)), binary_sample

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return _extremum(g, ins[0], ins[1], needs)


def _extremum(g: Any, first: Any, second: Any, needs: tuple[bool, ...]) -> tuple:
    # the first operand is chosen where it is the larger; by choice, not by a factor: inf · 0 must not reach the other
    zero, tie = call("full_like", g, value=0.0), call("eq", first, second)
    shared = call("where", tie, g * 0.5, zero)
    return (
        call("where", call("lt", second, first), g, shared) if needs[0] else None,
        call("where", call("lt", first, second), g, shared) if needs[1] else None,
    )


@op("clamp")
class Clamp:
    """min(max(x, low), high), where None is no bound; g passes where low ≤ x ≤ high, the bounds included."""

    arity, attrs, traits, saves = 1, {"low": None, "high": None}, UNARY, Saves(inputs=(0,))

    @staticmethod
    def infer(x, low, high):
        if low is None and high is None:
            raise UsageError("a bound is missing", expected="low, high or both")
        if not x.dtype.is_float and any(isinstance(bound, float) for bound in (low, high)):
            raise DTypeError("bounds of whole numbers are whole", expected=x.dtype.name, got=f"{low}, {high}")
        return x

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        x, low, high = ins[0], attrs["low"], attrs["high"]
        zero = call("full_like", g, value=0.0)
        if low is not None:
            g = call("where", call("le", call("full_like", x, value=low), x), g, zero)
        if high is not None:
            g = call("where", call("le", x, call("full_like", x, value=high)), g, zero)
        return (g,)

    @staticmethod
    def sample(rng):
        bounds = [(-1.0, 1.0), (None, 0.5), (-0.5, None)][rng.integers(3)]
        return [rng.uniform(-2, 2, (3, 5))], dict(zip(("low", "high"), bounds, strict=True))


@op("junction")
class Junction:
    """Sum of any number of equal-shaped operands, in port order; without one, zeros of its spec."""

    arity = (0, None)
    traits = Traits(nary=True, inplace=((0, 0),), amp="promote")

    @staticmethod
    def infer(*ins, **attrs):
        if not ins:
            raise ShapeError("a junction without edges has the spec it had before", fix="e.add(..., like=node)")
        one_dtype(*ins)
        for port, other in enumerate(ins):
            if other.shape != ins[0].shape:
                raise ShapeError(
                    "edges into a junction must have equal shapes",
                    where=f"port {port}",
                    expected=ins[0],
                    got=other,
                    fix="put a linear or a reshape on the edge",
                )
        return ins[0]

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return tuple(g if need else None for need in needs)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(3, 4)) for _ in range(3)], {}


WIDE = replace(UNARY, amp="f32")
"""Functions whose results leave the range or the digits of 16 bits early."""


@op("exp")
class Exp:
    """eˣ."""

    arity, infer, traits, saves, sample = 1, floating, WIDE, Saves(outputs=(0,)), unary_sample(-2, 2)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (g * outs[0],)


@op("expm1")
class Expm1:
    """eˣ - 1, with all its digits near 0; gradient g(y + 1)."""

    arity, infer, traits, saves, sample = 1, floating, WIDE, Saves(outputs=(0,)), unary_sample(-2, 2)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (g * (outs[0] + 1.0),)


@op("log")
class Log:
    """ln x."""

    arity, infer, traits, saves, sample = 1, floating, WIDE, Saves(inputs=(0,)), unary_sample(0.2, 3)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (g / ins[0],)


@op("log1p")
class Log1p:
    """ln(1 + x), with all its digits near 0; gradient g / (1 + x)."""

    arity, infer, traits, saves, sample = 1, floating, WIDE, Saves(inputs=(0,)), unary_sample(-0.7, 3)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (g / (1.0 + ins[0]),)


@op("sqrt")
class Sqrt:
    """√x; gradient g / 2y."""

    arity, infer, traits, saves, sample = 1, floating, UNARY, Saves(outputs=(0,)), unary_sample(0.2, 3)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (g / (outs[0] + outs[0]),)


@op("rsqrt")
class Rsqrt:
    """1/√x; gradient -g·y³/2."""

    arity, infer, traits, saves, sample = 1, floating, WIDE, Saves(outputs=(0,)), unary_sample(0.2, 3)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        y = outs[0]
        return (g * (y * y * y) * -0.5,)


@op("reciprocal")
class Reciprocal:
    """1/x; gradient -g·y²."""

    arity, infer, traits, saves, sample = 1, floating, WIDE, Saves(outputs=(0,)), unary_sample(0.3, 3)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (-(g * (outs[0] * outs[0])),)


@op("sin")
class Sin:
    """sin x."""

    arity, infer, traits, saves, sample = 1, floating, UNARY, Saves(inputs=(0,)), unary_sample(-3, 3)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (g * call("cos", ins[0]),)


@op("cos")
class Cos:
    """cos x."""

    arity, infer, traits, saves, sample = 1, floating, UNARY, Saves(inputs=(0,)), unary_sample(-3, 3)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (-(g * call("sin", ins[0])),)


@op("tanh")
class Tanh:
    """tanh x; gradient g(1 - y²)."""

    arity, infer, traits, saves, sample = 1, floating, UNARY, Saves(outputs=(0,)), unary_sample(-3, 3)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (g * (1.0 - outs[0] * outs[0]),)


@op("erf")
class Erf:
    """erf x; gradient g·2/√π·exp(-x²)."""

    arity, infer, traits, saves, sample = 1, floating, UNARY, Saves(inputs=(0,)), unary_sample(-2, 2)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (g * call("exp", -(ins[0] * ins[0])) * (2.0 / np.pi**0.5),)


def _comparison(*ins: Spec) -> Spec:
    """Operands of one dtype, broadcast together, to bool."""
    return Spec(broadcast(*ins).shape, bool_)


def _pair(rng: np.random.Generator) -> tuple[list, dict]:
    """Two operands that broadcast, with ties, zeros and both signs."""
    return [rng.integers(-1, 2, (3, 1, 4)).astype(float), rng.integers(-1, 2, (5, 4)).astype(float)], {}


def _special(rng: np.random.Generator) -> tuple[list, dict]:
    return [rng.choice((0.0, -0.0, 1.5, np.inf, -np.inf, np.nan), (3, 5))], {}


for _compare_name, (_arity, _compare_doc) in {
    "eq": (2, "a = b."),
    "ne": (2, "a ≠ b."),
    "lt": (2, "a < b."),
    "le": (2, "a ≤ b."),
    "gt": (2, "a > b."),
    "ge": (2, "a ≥ b."),
    "logical_and": (2, "Both are true; a number is true unless it is 0."),
    "logical_or": (2, "One of them or both are true."),
    "logical_xor": (2, "Exactly one of them is true."),
    "logical_not": (1, "x is 0 or false."),
    "isnan": (1, "x is not a number."),
    "isinf": (1, "x is an infinity of either sign."),
    "isfinite": (1, "x is neither infinite nor NaN."),
}.items():
    op(_compare_name)(
        type(
            _compare_name,
            (),
            {
                "__doc__": _compare_doc,
                "arity": _arity,
                "infer": _comparison,
                "vjp": None,
                "why": {"vjp": "the result is bool"},
                "sample": _pair if _arity == 2 else _special,
                "traits": Traits(elementwise=True, amp="promote" if _arity == 2 else "keep"),
            },
        )
    )


@op("where")
class Where:
    """a where the condition holds, else b; the condition is bool and gets no gradient."""

    arity, saves, traits = 3, Saves(inputs=(0,)), Traits(elementwise=True, amp="promote", fixed=(0,))

    @staticmethod
    def infer(c, a, b):
        if c.dtype.kind != "bool":
            raise DTypeError("the condition must be bool", got=c)
        one_dtype(a, b)
        return Spec(broadcast_shapes(c.shape, a.shape, b.shape), a.dtype)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        zero = call("full_like", g, value=0.0)  # not 0 · g: an inf in the branch not taken must not reach the other
        return (
            None,
            call("where", ins[0], g, zero) if needs[1] else None,
            call("where", ins[0], zero, g) if needs[2] else None,
        )

    @staticmethod
    def sample(rng):
        return [rng.random((3, 4)) < 0.5, rng.normal(size=(3, 4)), rng.normal(size=(4,))], {}
