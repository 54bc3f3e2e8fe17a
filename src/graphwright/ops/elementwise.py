"""Elementwise ops: arithmetic, functions, activations, comparisons, casts, and the junction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from graphwright.array.dtype import DType, dtype, float32
from graphwright.array.spec import Spec, broadcast_shapes
from graphwright.errors import DTypeError, ShapeError
from graphwright.ops.call import call
from graphwright.ops.registry import Saves, Traits, op
from graphwright.ops.rules import broadcast, comparison, floating, one_dtype, same

UNARY = Traits(inplace=((0, 0),), elementwise=True)
BINARY = Traits(inplace=((0, 0), (0, 1)), elementwise=True, amp="promote")


def _binary(*identity: tuple[int, float]) -> Traits:
    return replace(BINARY, identity=identity)


def unary_sample(low: float, high: float) -> Callable:
    """Operands uniform in [low, high]."""
    return lambda rng: ([rng.uniform(low, high, (3, 5))], {})


def away_from_zero(rng: np.random.Generator) -> tuple[list, dict]:
    """An operand of both signs, where a difference quotient does not step over the kink at 0."""
    return [rng.uniform(0.1, 2, (3, 5)) * rng.choice((-1.0, 1.0), (3, 5))], {}


def binary_sample(rng: np.random.Generator, low: float = -2, high: float = 2) -> tuple[list, dict]:
    """Two operands that broadcast."""
    return [rng.uniform(low, high, (3, 1, 4)), rng.uniform(low, high, (5, 4))], {}


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


@op("sign")
class Sign:
    """-1, 0 or 1; gradient 0."""

    arity, infer, traits, sample = 1, same, UNARY, away_from_zero
    vjp, why = None, {"vjp": "the gradient is zero everywhere it exists"}


@op("exp")
class Exp:
    """eˣ."""

    arity, infer, traits, saves, sample = 1, floating, UNARY, Saves(outputs=(0,)), unary_sample(-2, 2)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (g * outs[0],)


@op("log")
class Log:
    """ln x."""

    arity, infer, traits, saves, sample = 1, floating, UNARY, Saves(inputs=(0,)), unary_sample(0.2, 3)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (g / ins[0],)


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

    arity, infer, traits, saves, sample = 1, floating, UNARY, Saves(outputs=(0,)), unary_sample(0.2, 3)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        y = outs[0]
        return (g * (y * y * y) * -0.5,)


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


@op("sigmoid")
class Sigmoid:
    """1 / (1 + e⁻ˣ); gradient g·y(1 - y)."""

    arity, infer, traits, saves, sample = 1, floating, UNARY, Saves(outputs=(0,)), unary_sample(-4, 4)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (g * (outs[0] * (1.0 - outs[0])),)


@op("silu")
class Silu:
    """x·σ(x); gradient g·σ(1 + x(1 - σ))."""

    arity, infer, traits, saves, sample = 1, floating, UNARY, Saves(inputs=(0,)), unary_sample(-4, 4)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        s = call("sigmoid", ins[0])
        return (g * (s * (1.0 + ins[0] * (1.0 - s))),)


@op("relu")
class Relu:
    """max(x, 0); gradient 0 at 0."""

    arity, infer, traits, saves, sample = 1, floating, UNARY, Saves(outputs=(0,)), away_from_zero

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        zero = call("full_like", g, value=0.0)
        return (call("where", call("lt", call("full_like", outs[0], value=0.0), outs[0]), g, zero),)


@op("gelu")
class Gelu:
    """x·Φ(x) (`approximate="none"`), or ½x(1 + tanh(√(2/π)(x + 0.044715x³))) (`"tanh"`)."""

    arity, attrs, infer, traits, saves = 1, {"approximate": "none"}, floating, UNARY, Saves(inputs=(0,))

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        x = ins[0]
        if attrs["approximate"] == "none":
            cdf = 0.5 * (1.0 + call("erf", x * (0.5**0.5)))
            return (g * (cdf + x * call("exp", x * x * -0.5) * (2 * np.pi) ** -0.5),)
        k = (2 / np.pi) ** 0.5
        t = call("tanh", k * (x + 0.044715 * (x * x * x)))
        return (g * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * k * (1.0 + 0.134145 * (x * x))),)

    @staticmethod
    def sample(rng):
        return [rng.uniform(-3, 3, (4, 3))], {"approximate": "tanh" if rng.random() < 0.5 else "none"}


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

    arity, traits, saves = 2, _binary((1, 1.0)), Saves(inputs=(0, 1))

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


for _name, _doc in {"eq": "a = b.", "lt": "a < b.", "le": "a ≤ b."}.items():
    op(_name)(
        type(
            _name,
            (),
            {
                "__doc__": _doc,
                "arity": 2,
                "infer": comparison,
                "vjp": None,
                "why": {"vjp": "the result is bool"},
                "sample": binary_sample,
                "traits": Traits(elementwise=True, amp="promote"),
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


@op("cast")
class Cast:
    """x in another dtype, rounded to nearest even; the gradient comes back in the dtype of x."""

    arity, attrs, traits = 1, {"dtype": ...}, Traits(elementwise=True, convert=True)

    @staticmethod
    def infer(x, dtype: DType):
        return Spec(x.shape, dtype)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (call("cast", g, dtype=ins[0].dtype),)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(3, 4))], {"dtype": dtype("float64")}


@op("copy")
class Copy:
    """x in fresh, row-major memory."""

    arity, infer, traits, sample = 1, same, Traits(elementwise=True, convert=True), unary_sample(-1, 1)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (g,)


@op("full_like")
class FullLike:
    """One value in the operand's spec."""

    arity, attrs, infer, traits = 1, {"value": ...}, same, Traits(elementwise=True)
    vjp, why = None, {"vjp": "the result does not depend on the operand's values"}

    @staticmethod
    def sample(rng):
        return [rng.uniform(-1, 1, (3, 5))], {"value": 1.5}


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
