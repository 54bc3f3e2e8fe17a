"""Comparisons, logic, tests for special values, and the choice by a condition."""

from __future__ import annotations

import numpy as np

from graphwright.array.dtype import bool_
from graphwright.array.spec import Spec, broadcast_shapes
from graphwright.errors import DTypeError
from graphwright.ops.call import call
from graphwright.ops.registry import Saves, Traits, op
from graphwright.ops.rules import broadcast, one_dtype


def _comparison(*ins: Spec) -> Spec:
    """Operands of one dtype, broadcast together, to bool."""
    return Spec(broadcast(*ins).shape, bool_)


def _pair(rng: np.random.Generator) -> tuple[list, dict]:
    """Two operands that broadcast, with ties, zeros and both signs."""
    return [rng.integers(-1, 2, (3, 1, 4)).astype(float), rng.integers(-1, 2, (5, 4)).astype(float)], {}


def _special(rng: np.random.Generator) -> tuple[list, dict]:
    return [rng.choice((0.0, -0.0, 1.5, np.inf, -np.inf, np.nan), (3, 5))], {}


for _name, (_arity, _doc) in {
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
    op(_name)(
        type(
            _name,
            (),
            {
                "__doc__": _doc,
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
