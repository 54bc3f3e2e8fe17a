"""Activations: elementwise nonlinearities of networks. Each is safe for operands of any size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from graphwright.ops.call import call
from graphwright.ops.registry import Cost, Saves, op
from graphwright.ops.rules import BINARY, UNARY, away_from_zero, binary_sample, broadcast, floating, unary_sample


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

    @staticmethod
    def expand(ins, attrs):
        return ins[0] * call("sigmoid", ins[0])


@op("swiglu")
class SwiGlu:
    """silu(a)·b, the gated unit of Shazeer 2020, eq. 6; gradients g·b·σ(1 + a(1 - σ)) and g·silu(a)."""

    arity, traits, saves, sample = 2, replace(BINARY, inplace=((0, 0),)), Saves(inputs=(0, 1)), binary_sample

    @staticmethod
    def infer(a, b):
        return floating(broadcast(a, b))

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        a, b = ins
        s = call("sigmoid", a)
        da = g * b * (s * (1.0 + a * (1.0 - s))) if needs[0] else None
        return da, g * (a * s) if needs[1] else None

    @staticmethod
    def cost(ins, outs, attrs):
        return Cost(5 * outs[0].size, sum(i.nbytes for i in ins), outs[0].nbytes)

    @staticmethod
    def expand(ins, attrs):
        return call("silu", ins[0]) * ins[1]


@op("relu")
class Relu:
    """max(x, 0); gradient 0 at 0."""

    arity, infer, traits, saves, sample = 1, floating, UNARY, Saves(outputs=(0,)), away_from_zero

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        zero = call("full_like", g, value=0.0)
        return (call("where", call("lt", zero, outs[0]), g, zero),)

    @staticmethod
    def expand(ins, attrs):
        return call("clamp", ins[0], low=0.0)


@op("leaky_relu")
class LeakyRelu:
    """x for x > 0, else slope·x; gradient `slope` at 0."""

    arity, attrs, infer, traits, saves = 1, {"slope": 0.01}, floating, UNARY, Saves(inputs=(0,))

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (call("where", call("lt", call("full_like", ins[0], value=0.0), ins[0]), g, g * attrs["slope"]),)

    @staticmethod
    def sample(rng):
        return away_from_zero(rng)[0], {"slope": 0.2}

    @staticmethod
    def expand(ins, attrs):
        x = ins[0]
        return call("where", call("lt", call("full_like", x, value=0.0), x), x, x * attrs["slope"])


@op("elu")
class Elu:
    """x for x > 0, else alpha·(eˣ - 1); gradient g·alpha·eˣ below, alpha at 0 (Clevert et al. 2016)."""

    arity, attrs, infer, traits, saves = 1, {"alpha": 1.0}, floating, UNARY, Saves(inputs=(0,))

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        x = ins[0]
        below = g * (call("exp", call("clamp", x, high=0.0)) * attrs["alpha"])
        return (call("where", call("lt", call("full_like", x, value=0.0), x), g, below),)

    @staticmethod
    def sample(rng):
        return away_from_zero(rng)[0], {"alpha": 0.7}

    @staticmethod
    def expand(ins, attrs):
        x = ins[0]
        below = call("expm1", call("clamp", x, high=0.0)) * attrs["alpha"]
        return call("where", call("lt", call("full_like", x, value=0.0), x), x, below)


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

    @staticmethod
    def expand(ins, attrs):
        x = ins[0]
        if attrs["approximate"] == "none":
            return x * (0.5 * (1.0 + call("erf", x * (0.5**0.5))))
        inner = (2 / np.pi) ** 0.5 * (x + 0.044715 * (x * x * x))
        return 0.5 * x * (1.0 + call("tanh", inner))


@op("softplus")
class Softplus:
    """ln(1 + eˣ) = max(x, 0) + log1p(e^-|x|); gradient g·σ(x)."""

    arity, infer, traits, saves, sample = 1, floating, UNARY, Saves(inputs=(0,)), unary_sample(-4, 4)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (g * call("sigmoid", ins[0]),)

    @staticmethod
    def expand(ins, attrs):
        return call("relu", ins[0]) + call("log1p", call("exp", -call("abs", ins[0])))


@op("logsigmoid")
class LogSigmoid:
    """ln σ(x) = -softplus(-x); gradient g·σ(-x)."""

    arity, infer, traits, saves, sample = 1, floating, UNARY, Saves(inputs=(0,)), unary_sample(-4, 4)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (g * call("sigmoid", -ins[0]),)

    @staticmethod
    def expand(ins, attrs):
        return -call("softplus", -ins[0])


@op("sech")
class Sech:
    """1/cosh x = 2e^-|x| / (1 + e^-2|x|); gradient -g·y·tanh x."""

    arity, infer, traits = 1, floating, UNARY
    saves, sample = Saves(inputs=(0,), outputs=(0,)), unary_sample(-3, 3)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (-(g * (outs[0] * call("tanh", ins[0]))),)

    @staticmethod
    def expand(ins, attrs):
        e = call("exp", -call("abs", ins[0]))
        return (e + e) / (1.0 + e * e)
