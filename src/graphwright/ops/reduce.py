"""Reductions over axes: `axes` None means all, an empty tuple none. Of equal extrema the lowest index wins."""

from __future__ import annotations

from math import inf, prod

from graphwright.array.dtype import bool_, int64
from graphwright.array.spec import Spec
from graphwright.array.vm.encode import elementwise as forms
from graphwright.errors import ShapeError
from graphwright.ops.axes import Atom, AxesRule, AxesUse, Dims, Term, along_axis, axes_of, axis_of
from graphwright.ops.call import call
from graphwright.ops.emit import Emit
from graphwright.ops.onnx import OnnxRow, OnnxUse
from graphwright.ops.registry import Cost, Saves, Traits, op
from graphwright.ops.rules import floating


def _reduced(x: Spec, axes: tuple[int, ...], keepdims: bool) -> Spec:
    axes = axes_of(axes, len(x.shape))
    if keepdims:
        return Spec(tuple(1 if a in axes else d for a, d in enumerate(x.shape)), x.dtype)
    return Spec(tuple(d for a, d in enumerate(x.shape) if a not in axes), x.dtype)


def _restore(g, x, attrs):
    """Broadcast a reduced gradient back to the shape of the operand."""
    if not attrs["keepdims"]:
        axes = axes_of(attrs["axes"], len(x.shape))
        g = call("reshape", g, shape=tuple(1 if a in axes else d for a, d in enumerate(x.shape)))
    return call("expand", g, shape=x.shape)


def _split_axes(u: AxesUse) -> tuple[list[Term], Dims]:
    """The reduced dimensions, and those of the result."""
    x = u.ins[0]
    named = axes_of(u.attrs["axes"], len(x))
    left = tuple(Atom(1) if a in named else t for a, t in enumerate(x) if u.attrs["keepdims"] or a not in named)
    return [x[a] for a in named], left


def _summed(u: AxesUse) -> list[Dims]:
    """Axes end here, and zero units leave no trace."""
    gone, left = _split_axes(u)
    for term in gone:
        u.summed(term, (0, next(i for i, t in enumerate(u.ins[0]) if t is term)))
    return [left]


def _mixed(why: str) -> AxesRule:
    """Axes end here, and zero units leave a trace."""

    def rule(u: AxesUse) -> list[Dims]:
        gone, left = _split_axes(u)
        for term in gone:
            u.mixed(term, why)
        return [left]

    return rule


def _method(name: str) -> Emit:
    """A torch method that takes axes and `keepdim`."""

    def emit(ins, attrs):
        if not attrs["axes"]:  # torch would take all axes
            return f"{ins[0]}.clone()"
        axes = attrs["axes"][0] if len(attrs["axes"]) == 1 else tuple(attrs["axes"])
        return f"{ins[0]}.{name}({axes}{', keepdim=True' if attrs['keepdims'] else ''})"

    return emit


def _onnx_reduce(kind: str) -> OnnxRow:
    def row(u: OnnxUse) -> str:
        if not u.attrs["axes"]:
            return u("Identity", *u.names)
        return u(kind, u.names[0], u.ints(*u.attrs["axes"]), keepdims=int(u.attrs["keepdims"]))

    return row


class Reduction:
    """An op that reduces axes of one operand."""

    arity, attrs, operands = 1, {"axes": ..., "keepdims": False}, ("x",)

    @staticmethod
    def cost(ins, outs, attrs):
        return Cost(ins[0].size, ins[0].nbytes, outs[0].nbytes)

    @staticmethod
    def sample(rng):
        axes = [(0,), (1, 2), (0, 1, 2)][rng.integers(3)]
        return [rng.normal(size=(3, 4, 2))], {"axes": axes, "keepdims": bool(rng.random() < 0.5)}


class _Wide(Reduction):
    """A reduction that gives int64 for integers and bools."""

    traits = Traits(amp="f32")

    @staticmethod
    def infer(x, axes, keepdims):
        reduced = _reduced(x, axes, keepdims)
        return reduced if x.dtype.is_float else Spec(reduced.shape, int64)


@op("sum")
class Sum(_Wide):
    """Σ x over axes, int64 for integers and bools; the gradient is broadcast back."""

    traits, axes, emit, onnx, vm = (
        Traits(mixes="axes", linear_in=(0,)),
        _summed,
        _method("sum"),
        _onnx_reduce("ReduceSum"),
        forms.SUM,
    )

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (_restore(g, ins[0], attrs),)


@op("prod")
class Prod(_Wide):
    """Π x over axes, int64 for integers and bools; the gradient of an entry is g times the product of the others.

    That product is built without division, so entries that are 0 get the exact gradient.
    """

    saves, axes, onnx = Saves(inputs=(0,)), _mixed("multiplies over it"), _onnx_reduce("ReduceProd")

    @staticmethod
    def emit(
        ins, attrs
    ):  # torch multiplies along one axis at a time; from the last on, so that axis numbers stay valid
        last = sorted(attrs["axes"], reverse=True)
        text = "".join(f".prod({axis}{', keepdim=True' if attrs['keepdims'] else ''})" for axis in last)
        return ins[0] + (text or ".clone()")

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
        (x,), attrs = Reduction.sample(rng)
        return [x * (rng.random(x.shape) < 0.9)], attrs


def _products_of_the_others(x):
    """For each entry, the product of all others along the last axis: up and down a tree of pairs."""
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
class Mean(Reduction):
    """Σ x / n over axes; gradient g / n, broadcast back."""

    traits, axes = Traits(amp="f32"), _mixed("divides by its size")
    emit, onnx, vm = _method("mean"), _onnx_reduce("ReduceMean"), forms.MEAN

    @staticmethod
    def infer(x, axes, keepdims):
        return _reduced(floating(x), axes, keepdims)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        x = ins[0]
        n = 1
        for axis in axes_of(attrs["axes"], len(x.shape)):
            n *= x.shape[axis]
        return (_restore(g * (1.0 / max(n, 1)), x, attrs),)  # an empty axis receives nothing


class _Extremum(Reduction):
    saves = Saves(inputs=(0,), outputs=(0,))

    @staticmethod
    def infer(x, axes, keepdims):
        reduced = _reduced(x, axes, keepdims)
        if any(x.shape[a] == 0 for a in axes_of(axes, len(x.shape))):
            raise ShapeError("an empty axis has no extremum", got=x)
        return reduced

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        x = ins[0]
        hit = call("cast", call("eq", x, _restore(outs[0], x, attrs)), dtype=x.dtype)
        ties = call("sum", hit, axes=attrs["axes"], keepdims=attrs["keepdims"])
        return (hit * _restore(g / ties, x, attrs),)


@op("amax")
class Amax(_Extremum):
    """max x over axes; ties share the gradient equally."""

    axes, emit, onnx, vm = _mixed("takes the largest over it"), _method("amax"), _onnx_reduce("ReduceMax"), forms.AMAX


@op("amin")
class Amin(_Extremum):
    """min x over axes; ties share the gradient equally."""

    axes, emit, onnx = _mixed("takes the smallest over it"), _method("amin"), _onnx_reduce("ReduceMin")


def _onnx_truth(kind: str) -> OnnxRow:
    """Any and all, as the maximum and the minimum of 0 and 1."""

    def row(u: OnnxUse) -> str:
        flags = u("Cast", u("Cast", u.names[0], to=9), to=6)
        if not u.attrs["axes"]:
            return u("Cast", flags, to=9)
        return u("Cast", u(kind, flags, u.ints(*u.attrs["axes"]), keepdims=int(u.attrs["keepdims"])), to=9)

    return row


class _Truth(Reduction):
    vjp, why = None, {"vjp": "the result is bool"}

    @staticmethod
    def infer(x, axes, keepdims):
        return Spec(_reduced(x, axes, keepdims).shape, bool_)

    @staticmethod
    def sample(rng):
        (x,), attrs = Reduction.sample(rng)
        return [(abs(x) > 1.5) * x if rng.random() < 0.5 else abs(x) < 1.5], attrs


@op("any")
class Any(_Truth):
    """True if some entry over axes is not 0; false for no entries."""

    axes, emit, onnx = _summed, _method("any"), _onnx_truth("ReduceMax")


@op("all")
class All(_Truth):
    """True if no entry over axes is 0; true for no entries."""

    axes, emit, onnx = _mixed("reads every entry of it"), _method("all"), _onnx_truth("ReduceMin")


class _Index:
    arity, attrs, operands, cost = 1, {"axis": -1}, ("x",), Reduction.cost
    vjp, why = None, {"vjp": "the result is an index"}

    @staticmethod
    def infer(x, axis):
        at = axis_of(axis, len(x.shape))
        if x.shape[at] == 0:
            raise ShapeError("an empty axis has no extremum", where=f"axis {at}", got=x)
        return Spec((*x.shape[:at], *x.shape[at + 1 :]), int64)

    @staticmethod
    def sample(rng):
        return [rng.integers(0, 3, (3, 4)).astype(float)], {"axis": int(rng.integers(-2, 2))}

    @staticmethod
    def axes(u: AxesUse):
        x, at = u.ins[0], axis_of(u.attrs["axis"], len(u.ins[0]))
        u.mixed(x[at], "compares its entries")
        u.result_ranges[0] = x[at]
        return [(*x[:at], *x[at + 1 :])]


@op("argmax")
class Argmax(_Index):
    """argmax x along an axis, int64; the lowest index on ties."""

    emit = "{0}.argmax({axis})"

    @staticmethod
    def onnx(u: OnnxUse):
        return u("ArgMax", u.names[0], axis=u.attrs["axis"], keepdims=0)


@op("argmin")
class Argmin(_Index):
    """argmin x along an axis, int64; the lowest index on ties."""

    emit = "{0}.argmin({axis})"

    @staticmethod
    def onnx(u: OnnxUse):
        return u("ArgMin", u.names[0], axis=u.attrs["axis"], keepdims=0)


@op("cumsum")
class Cumsum:
    """yᵢ = Σ x over entries up to i along an axis, or from i on (`reverse`); the gradient runs the other way."""

    arity, attrs, traits, cost = 1, {"axis": ..., "reverse": False}, Traits(amp="f32"), Reduction.cost
    operands, axes = ("x",), along_axis("sums up to each entry of it")

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

    @staticmethod
    def onnx(u: OnnxUse):
        return u("CumSum", u.names[0], u.ints_scalar(u.attrs["axis"]), reverse=int(u.attrs["reverse"]))

    @staticmethod
    def emit(ins, attrs):
        text = f".cumsum({attrs['axis']})"
        return f"{ins[0]}.flip({attrs['axis']}){text}.flip({attrs['axis']})" if attrs["reverse"] else ins[0] + text


@op("logsumexp")
class LogSumExp(Reduction):
    """ln Σ eˣ over axes, shifted by the maximum; gradient g·e^(x - y), 0 where all entries are -∞."""

    traits, saves = Traits(amp="f32"), Saves(inputs=(0,), outputs=(0,))
    axes, emit, onnx = _mixed("sums exponentials over it"), _method("logsumexp"), _onnx_reduce("ReduceLogSumExp")

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


def _sort_text(x: str, axis: int, descending: bool) -> str:
    return f"torch.sort({x}, dim={axis}, descending={descending}, stable=True)"


def _onnx_topk(u: OnnxUse, axis: int, k: str, largest: bool) -> tuple[str, ...]:
    return u.several(2, "TopK", u.names[0], k, axis=axis, largest=int(largest), sorted=1)


class _Ordered:
    """Results are values and their indices; the gradient of a value goes to its index."""

    arity, operands, saves, results = 1, ("x",), Saves(outputs=(1,)), ("values", "indices")

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (call("scatter_sum", g[0], outs[1], axis=attrs["axis"], shape=ins[0].shape),)

    @staticmethod
    def cost(ins, outs, attrs):
        size = ins[0].size
        return Cost(size * max(size.bit_length(), 1), ins[0].nbytes, sum(o.nbytes for o in outs))

    @staticmethod
    def axes(u: AxesUse):
        x, at = u.ins[0], axis_of(u.attrs["axis"], len(u.ins[0]))
        u.mixed(x[at], "orders its entries by value")
        dims = x
        if "k" in u.attrs:
            dims = (*x[:at], u.fresh(u.attrs["k"], "takes a fixed number of entries"), *x[at + 1 :])
        u.result_ranges[1] = x[at]
        return [dims, dims]


@op("sort")
class Sort(_Ordered):
    """Entries along an axis in ascending (or `descending`) order, and their indices; stable."""

    attrs = {"axis": -1, "descending": False}

    @staticmethod
    def infer(x, axis, descending):
        axis_of(axis, len(x.shape))
        return x, Spec(x.shape, int64)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(3, 4, 2))], {"axis": int(rng.integers(-3, 3)), "descending": bool(rng.random() < 0.5)}

    @staticmethod
    def emit(ins, attrs):
        return _sort_text(ins[0], attrs["axis"], attrs["descending"])

    @staticmethod
    def onnx(u: OnnxUse):
        axis = u.axis(u.attrs["axis"])
        return _onnx_topk(u, axis, u.shape(u.ins[0].shape[axis : axis + 1]), u.attrs["descending"])


@op("topk")
class TopK(_Ordered):
    """The k largest (or smallest) entries along an axis, in order, and their indices; ties by ascending index."""

    attrs = {"k": ..., "axis": -1, "largest": True}

    @staticmethod
    def infer(x, k, axis, largest):
        at = axis_of(axis, len(x.shape))
        size = x.shape[at]
        if k < 0 or (isinstance(size, int) and k > size):
            raise ShapeError("k exceeds the axis", where=f"axis {at}", expected=f"k of 0 to {size}", got=k)
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

    @staticmethod
    def emit(ins, attrs):  # torch.topk leaves the order of ties open
        ordered = _sort_text(ins[0], attrs["axis"], attrs["largest"])
        return f"tuple(t.narrow({attrs['axis']}, 0, {attrs['k']}) for t in {ordered})"

    @staticmethod
    def onnx(u: OnnxUse):
        return _onnx_topk(u, u.axis(u.attrs["axis"]), u.ints(u.attrs["k"]), u.attrs["largest"])
