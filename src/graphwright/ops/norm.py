"""Normalisations."""

from __future__ import annotations

from graphwright.errors import ShapeError
from graphwright.ops.call import call
from graphwright.ops.registry import Cost, Saves, Traits, op
from graphwright.ops.rules import floating, one_dtype


@op("rms_norm")
class RmsNorm:
    """x / √(mean(x², -1) + eps) · w; statistics in float32 or wider (Zhang and Sennrich 2019, eq. 4).

    With r = 1/√(..), x̂ = x·r, u = g·w: dx = r(u - x̂·mean(u·x̂)), dw = Σ g·x̂.
    """

    arity, attrs, saves, traits = 2, {"eps": 1e-6}, Saves(inputs=(0, 1)), Traits(amp="inner")

    @staticmethod
    def infer(x, w, eps):
        one_dtype(x, w)
        floating(x)
        if w.shape != x.shape[-1:]:
            raise ShapeError("the weight must have the size of the last axis", expected=x.shape[-1:], got=w)
        return x

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        x, w = ins
        dtype = x.dtype
        if dtype.is_low:  # statistics of the gradient in float32 as well
            from graphwright.array.dtype import float32

            x, w, g = (call("cast", t, dtype=float32) for t in (x, w, g))
        r = call("rsqrt", call("mean", x * x, axes=(-1,), keepdims=True) + attrs["eps"])
        unit = x * r
        u = g * w
        dx = r * (u - unit * call("mean", u * unit, axes=(-1,), keepdims=True)) if needs[0] else None
        dw = call("sum", g * unit, axes=tuple(range(len(x.shape) - 1)), keepdims=False) if needs[1] else None
        if dtype.is_low:
            dx, dw = (None if t is None else call("cast", t, dtype=dtype) for t in (dx, dw))
        return dx, dw

    @staticmethod
    def cost(ins, outs, attrs):
        return Cost(5 * outs[0].size, ins[0].nbytes + ins[1].nbytes, outs[0].nbytes)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(2, 3, 5)), rng.normal(size=5)], {"eps": 1e-5}
