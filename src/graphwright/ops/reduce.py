"""Reductions over axes: `axes` None means all, an empty tuple none. Of equal extrema the lowest index wins."""

from __future__ import annotations

from math import inf, prod

from graphwright.array.dtype import bool_, int64
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


@op("prod")
class Prod:
    """Π over axes, of integers and bools in int64; the gradient of an entry is g times the product of the others.

    That product is built without division, so entries that are 0 get the exact gradient.
    """

    arity, attrs, cost = 1, {"axes": ..., "keepdims": False}, _cost
    traits, saves = Traits(amp="f32"), Saves(inputs=(0,))

    @staticmethod
    def infer(x, axes, keepdims):
        reduced = _reduced(x, axes, keepdims)
        return reduced if x.dtype.is_float else Spec(reduced.shape, int64)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        x = ins[0]
        axes = axes_of(attrs["axes"], len(x.shape))
        order = (*(a for a in range(len(x.shape)) if a not in axes), *axes)
        last = call("permute", x, axes=order)
        count = prod(x.shape[a] for a in axes)
        rows = call("reshape", last, shape=(*(x.shape[a] for a in order[: len(order) - len(axes)]), count))
        others = call("reshape", _products_of_the_others(rows), shape=last.shape)
        return (_restore(g, x, attrs) * call("permute", others, axes=tuple(order.index(a) for a in range(len(order)))),)

    @staticmethod
    def sample(rng):
        (x,), attrs = _sample(rng)
        return [x * (rng.random(x.shape) < 0.9)], attrs


def _products_of_the_others(x):
    """Along the last axis, for each entry the product of all others: up and down a tree of pairs."""
    n = x.shape[-1]
    if n <= 1:
        return call("full_like", x, value=1.0)
    if n % 2:
        one = call("full_like", call("slice", x, axis=-1, start=0, size=1), value=1.0)
        padded = _products_of_the_others(call("concat", x, one, axis=-1))
        return call("slice", padded, axis=-1, start=0, size=n)
    pairs = call("unflatten", x, axis=-1, sizes=(n // 2, 2))
    left, right = (call("slice", pairs, axis=-1, start=i, size=1) for i in (0, 1))
    above = _products_of_the_others(call("flatten", left * right, start=-2, end=-1))
    above = call("unflatten", above, axis=-1, sizes=(n // 2, 1))
    return call("flatten", above * call("concat", right, left, axis=-1), start=-2, end=-1)


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
        return (_restore(g * (1.0 / max(n, 1)), x, attrs),)  # of no entries, which receive nothing


class _Extremum:
    arity, attrs, sample, cost = 1, {"axes": ..., "keepdims": False}, _sample, _cost
    saves = Saves(inputs=(0,), outputs=(0,))

    @staticmethod
    def infer(x, axes, keepdims):
        reduced = _reduced(x, axes, keepdims)
        if any(x.shape[a] == 0 for a in axes_of(axes, len(x.shape))):
            raise ShapeError("the extremum of no entries", got=x)
        return reduced

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        x = ins[0]
        hit = call("cast", call("eq", x, _restore(outs[0], x, attrs)), dtype=x.dtype)
        ties = call("sum", hit, axes=attrs["axes"], keepdims=attrs["keepdims"])
        return (hit * _restore(g / ties, x, attrs),)


@op("amax")
class Amax(_Extremum):
    """Largest entry over axes; ties share the gradient equally."""


@op("amin")
class Amin(_Extremum):
    """Smallest entry over axes; ties share the gradient equally."""


class _Truth:
    arity, attrs, cost = 1, {"axes": ..., "keepdims": False}, _cost
    vjp, why = None, {"vjp": "the result is bool"}

    @staticmethod
    def infer(x, axes, keepdims):
        return Spec(_reduced(x, axes, keepdims).shape, bool_)

    @staticmethod
    def sample(rng):
        (x,), attrs = _sample(rng)
        return [(abs(x) > 1.5) * x if rng.random() < 0.5 else abs(x) < 1.5], attrs


@op("any")
class Any(_Truth):
    """Some entry over axes is not 0; of none, false."""


@op("all")
class All(_Truth):
    """No entry over axes is 0; of none, true."""


class _Place:
    arity, attrs, cost = 1, {"axis": -1}, _cost
    vjp, why = None, {"vjp": "the result is an index"}

    @staticmethod
    def infer(x, axis):
        at = axis_of(axis, len(x.shape))
        if x.shape[at] == 0:
            raise ShapeError("the extremum of no entries", where=f"axis {at}", got=x)
        return Spec((*x.shape[:at], *x.shape[at + 1 :]), int64)

    @staticmethod
    def sample(rng):
        return [rng.integers(0, 3, (3, 4)).astype(float)], {"axis": int(rng.integers(-2, 2))}


@op("argmax")
class Argmax(_Place):
    """Index of the largest entry along an axis, the lowest on ties; int64."""


@op("argmin")
class Argmin(_Place):
    """Index of the smallest entry along an axis, the lowest on ties; int64."""


@op("cumsum")
class Cumsum:
    """Sums of the entries up to each place of an axis, or from it on (`reverse`); the gradient runs the other way."""

    arity, attrs, traits, cost = 1, {"axis": ..., "reverse": False}, Traits(amp="f32"), _cost

    @staticmethod
    def infer(x, axis, reverse):
        axis_of(axis, len(x.shape))
        return x if x.dtype.is_float else Spec(x.shape, int64)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (call("cumsum", g, axis=attrs["axis"], reverse=not attrs["reverse"]),)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(3, 4, 2))], {"axis": int(rng.integers(-3, 3)), "reverse": bool(rng.random() < 0.5)}


@op("logsumexp")
class LogSumExp:
    """ln Σ eˣ over axes, the largest entry taken out; gradient g·e^(x - y), 0 where all entries are -inf."""

    arity, attrs, sample = 1, {"axes": ..., "keepdims": False}, _sample
    traits, saves = Traits(amp="f32"), Saves(inputs=(0,), outputs=(0,))

    @staticmethod
    def infer(x, axes, keepdims):
        return _reduced(floating(x), axes, keepdims)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        x, y = ins[0], outs[0]
        nothing = call("eq", y, call("full_like", y, value=-inf))
        level = call("where", nothing, call("full_like", y, value=0.0), y)
        return (_restore(g, x, attrs) * call("exp", x - _restore(level, x, attrs)),)

    @staticmethod
    def cost(ins, outs, attrs):
        return Cost(4 * ins[0].size, ins[0].nbytes, outs[0].nbytes)

    @staticmethod
    def expand(ins, attrs):
        x = ins[0]
        top = call("amax", x, **attrs)
        finite = call("isfinite", top)
        level = call("stop_gradient", call("where", finite, top, call("full_like", top, value=0.0)))
        return level + call("log", call("sum", call("exp", x - _restore(level, x, attrs)), **attrs))


class _Ordered:
    """Results are values and their indices; the gradient of a value goes to its index."""

    arity, saves = 1, Saves(outputs=(1,))

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (call("scatter_sum", g[0], outs[1], axis=attrs["axis"], shape=ins[0].shape),)

    @staticmethod
    def cost(ins, outs, attrs):
        size = ins[0].size
        return Cost(size * max(size.bit_length(), 1), ins[0].nbytes, sum(o.nbytes for o in outs))


@op("sort")
class Sort(_Ordered):
    """Entries along an axis from the smallest to the largest, or the other way, and their indices; stable."""

    attrs = {"axis": -1, "descending": False}

    @staticmethod
    def infer(x, axis, descending):
        axis_of(axis, len(x.shape))
        return x, Spec(x.shape, int64)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(3, 4, 2))], {"axis": int(rng.integers(-3, 3)), "descending": bool(rng.random() < 0.5)}


@op("topk")
class TopK(_Ordered):
    """The k largest entries along an axis, or the smallest, in order, and their indices; of ties the lowest first."""

    attrs = {"k": ..., "axis": -1, "largest": True}

    @staticmethod
    def infer(x, k, axis, largest):
        at = axis_of(axis, len(x.shape))
        size = x.shape[at]
        if k < 0 or (isinstance(size, int) and k > size):
            raise ShapeError("not that many entries", where=f"axis {at}", expected=f"k of 0 to {size}", got=k)
        shape = (*x.shape[:at], k, *x.shape[at + 1 :])
        return Spec(shape, x.dtype), Spec(shape, int64)

    @staticmethod
    def sample(rng):
        axis = int(rng.integers(-3, 3))
        k = int(rng.integers(1, (3, 4, 2)[axis] + 1))
        return [rng.normal(size=(3, 4, 2))], {"k": k, "axis": axis, "largest": bool(rng.random() < 0.5)}

    @staticmethod
    def expand(ins, attrs):
        ordered = call("sort", ins[0], axis=attrs["axis"], descending=attrs["largest"])
        return tuple(call("slice", t, axis=attrs["axis"], start=0, size=attrs["k"]) for t in ordered)
