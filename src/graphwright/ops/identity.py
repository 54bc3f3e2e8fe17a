"""Ops that hand values on, in another dtype, memory or role for gradients; and the constant of an operand's spec."""

from __future__ import annotations

from graphwright.array.dtype import DType, dtype
from graphwright.array.spec import Spec
from graphwright.ops.call import call
from graphwright.ops.registry import Traits, free_cost, op
from graphwright.ops.rules import floating, same, unary_sample


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


def _itself(layout, attrs):
    return layout


@op("stop_gradient")
class StopGradient:
    """x, as a constant for gradients; a view."""

    arity, infer, view, cost, sample = 1, same, _itself, free_cost, unary_sample(-1, 1)
    vjp, why = None, {"vjp": "to end gradients is what it is for"}


@op("scale_gradient")
class ScaleGradient:
    """x; its gradient is scale·g. With scale 0 a stop, with -1 a gradient reversal (Ganin and Lempitsky 2015)."""

    arity, attrs, infer, view, cost = 1, {"scale": ...}, same, _itself, free_cost
    sample = unary_sample(-1, 1, scale=-0.5)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (g * attrs["scale"],)


@op("recall")
class Recall:
    """x, as a value of its own: rewrites keep apart what is computed from the two; a view."""

    arity, infer, view, cost, sample = 1, same, _itself, free_cost, unary_sample(-1, 1)
    traits = Traits(barrier=True)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (g,)


@op("assert_finite")
class AssertFinite:
    """x; raises NonFinite with the node, the count and the first index where it is infinite or NaN."""

    arity, infer, traits, sample = 1, floating, Traits(elementwise=True, inplace=((0, 0),)), unary_sample(-1, 1)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (g,)
