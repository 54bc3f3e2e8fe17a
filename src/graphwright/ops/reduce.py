"""Reductions: sum, mean, amax, argmax. `axes` None means all; stored as sorted, non-negative axes."""

from __future__ import annotations

from graphwright.array.dtype import int64
from graphwright.array.spec import Spec
from graphwright.errors import ShapeError
from graphwright.ops.call import call
from graphwright.ops.registry import Cost, Saves, Traits, op
from graphwright.ops.rules import axes_of, axis_of, floating


def _reduced(x: Spec, axes: tuple[int, ...], keepdims: bool) -> Spec:
    axes = axes_of(axes, len(x.shape))
    if keepdims:
        return Spec(tuple(1 if a in axes else d for a, d in enumerate(x.shape)), x.dtype)
    return Spec(tuple(d for a, d in enumerate(x.shape) if a not in axes), x.dtype)


def _cost(ins, outs, attrs):
    return Cost(ins[0].size, ins[0].nbytes, outs[0].nbytes)


def _restore(g, x, attrs):
    """A reduced gradient, spread over the shape of the operand again."""
    if not attrs["keepdims"]:
        axes = axes_of(attrs["axes"], len(x.shape))
        g = call("reshape", g, shape=tuple(1 if a in axes else d for a, d in enumerate(x.shape)))
    return call("expand", g, shape=x.shape)


def _sample(rng):
    axes = [(0,), (1, 2), (0, 1, 2)][rng.integers(3)]
    return [rng.normal(size=(3, 4, 2))], {"axes": axes, "keepdims": bool(rng.random() < 0.5)}


@op("sum")
class Sum:
    """Σ over axes, of integers and bools in int64; the gradient is spread back."""

    arity, attrs, sample, cost = 1, {"axes": ..., "keepdims": False}, _sample, _cost
    traits = Traits(amp="f32")

    @staticmethod
    def infer(x, axes, keepdims):
        reduced = _reduced(x, axes, keepdims)
        return reduced if x.dtype.is_float else Spec(reduced.shape, int64)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (_restore(g, ins[0], attrs),)


@op("mean")
class Mean:
    """Mean over axes; gradient g / n, spread back."""

    arity, attrs, sample, cost = 1, {"axes": ..., "keepdims": False}, _sample, _cost
    traits = Traits(amp="f32")

    @staticmethod
    def infer(x, axes, keepdims):
        return _reduced(floating(x), axes, keepdims)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        x = ins[0]
        n = 1
        for axis in axes_of(attrs["axes"], len(x.shape)):
            n *= x.shape[axis]
        return (_restore(g * (1.0 / n), x, attrs),)


@op("amax")
class Amax:
    """Largest entry over axes; ties share the gradient equally."""

    arity, attrs, sample, cost = 1, {"axes": ..., "keepdims": False}, _sample, _cost
    saves = Saves(inputs=(0,), outputs=(0,))

    @staticmethod
    def infer(x, axes, keepdims):
        reduced = _reduced(x, axes, keepdims)
        if any(x.shape[a] == 0 for a in axes_of(axes, len(x.shape))):
            raise ShapeError("the maximum of no entries", got=x)
        return reduced

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        x = ins[0]
        hit = call("cast", call("eq", x, _restore(outs[0], x, attrs)), dtype=x.dtype)
        ties = call("sum", hit, axes=attrs["axes"], keepdims=attrs["keepdims"])
        return (hit * _restore(g / ties, x, attrs),)


@op("argmax")
class Argmax:
    """Index of the largest entry along an axis, the lowest on ties; int64."""

    arity, attrs, cost = 1, {"axis": -1}, _cost
    vjp, why = None, {"vjp": "the result is an index"}

    @staticmethod
    def infer(x, axis):
        at = axis_of(axis, len(x.shape))
        if x.shape[at] == 0:
            raise ShapeError("the maximum of no entries", where=f"axis {at}", got=x)
        return Spec((*x.shape[:at], *x.shape[at + 1 :]), int64)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(3, 4))], {"axis": int(rng.integers(-2, 2))}
