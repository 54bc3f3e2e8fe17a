"""Softmax and its logarithm."""

from __future__ import annotations

from math import inf

from graphwright.array.dtype import bool_
from graphwright.array.spec import broadcast_shapes
from graphwright.errors import DTypeError, ShapeError
from graphwright.ops.call import call
from graphwright.ops.registry import Cost, Saves, Traits, op
from graphwright.ops.rules import axis_of, floating


class _AlongAxis:
    infer, saves = floating, Saves(outputs=(0,))

    @staticmethod
    def cost(ins, outs, attrs):
        return Cost(5 * outs[0].size, sum(i.nbytes for i in ins), outs[0].nbytes)


@op("softmax")
class Softmax(_AlongAxis):
    """e^(x - max) / Σ along an axis; gradient y(g - Σ g·y).

    A second operand is a mask, broadcast to x: entries where it is false are left out, and a row that is left out
    altogether is 0. A row of -inf alone is NaN.
    """

    arity, attrs, traits = (1, 2), {"axis": -1}, Traits(amp="f32", fixed=(1,))

    @staticmethod
    def infer(x, mask=None, *, axis):
        axis_of(axis, len(x.shape))
        if mask is not None and mask.dtype is not bool_:
            raise DTypeError("the mask must be bool", got=mask)
        if mask is not None and broadcast_shapes(x.shape, mask.shape) != x.shape:
            raise ShapeError("the mask must broadcast to the operand", expected=x, got=mask)
        return floating(x)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        y = outs[0]
        return (y * (g - call("sum", g * y, axes=(attrs["axis"],), keepdims=True)), *(None for _ in ins[1:]))

    @staticmethod
    def sample(rng):
        x = rng.normal(size=(2, 3, 5))
        mask = rng.random((3, 5)) < 0.6
        mask[1] = False
        return [x, mask][: rng.integers(1, 3)], {"axis": int(rng.integers(-3, 3))}

    @staticmethod
    def expand(ins, attrs):
        x, over = ins[0], {"axes": (attrs["axis"],), "keepdims": True}
        if len(ins) == 1:
            e = call("exp", x - call("stop_gradient", call("amax", x, **over)))
            return e / call("sum", e, **over)
        zero = call("full_like", x, value=0.0)
        seen = call("where", ins[1], x, call("full_like", x, value=-inf))
        top = call("stop_gradient", call("amax", seen, **over))
        top = call("where", call("eq", top, -inf), call("full_like", top, value=0.0), top)
        e = call("where", ins[1], call("exp", call("where", ins[1], x - top, zero)), zero)
        total = call("sum", e, **over)
        return e / call("where", call("eq", total, 0.0), call("full_like", total, value=1.0), total)


@op("log_softmax")
class LogSoftmax(_AlongAxis):
    """x - max - ln Σ e^(x - max) along an axis; gradient g - e^y·Σ g."""

    arity, attrs, traits = 1, {"axis": -1}, Traits(amp="f32")

    @staticmethod
    def infer(x, axis):
        axis_of(axis, len(x.shape))
        return floating(x)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (g - call("exp", outs[0]) * call("sum", g, axes=(attrs["axis"],), keepdims=True),)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(2, 3, 5))], {"axis": int(rng.integers(-3, 3))}

    @staticmethod
    def expand(ins, attrs):
        return ins[0] - call("logsumexp", ins[0], axes=(attrs["axis"],), keepdims=True)
