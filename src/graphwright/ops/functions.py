"""Functions of one real variable: exponentials, logarithms, roots, sines, error function."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from graphwright.ops.call import call
from graphwright.ops.registry import Saves, op
from graphwright.ops.rules import UNARY, floating
from graphwright.ops.samples import unary_sample

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
