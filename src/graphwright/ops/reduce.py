"""Reductions over axes: `axes=None` means all, an empty tuple none. Of equal extrema the lowest index wins."""

from __future__ import annotations

from math import inf, prod

from graphwright.array.dtype import bool_, int64
from graphwright.array.spec import Spec
from graphwright.array.vm.encode import elementwise as forms
from graphwright.array.vm.encode import experts as router
from graphwright.errors import ShapeError
from graphwright.ops.attributes import Attr, AxisList, StaticSize
from graphwright.ops.axes import Atom, AxesRule, AxesUse, Dims, along_axis, axes_of, axis_of, others, spliced
from graphwright.ops.call import call, widened
from graphwright.ops.emit import Emit, literal
from graphwright.ops.onnx import OnnxRow, OnnxUse
from graphwright.ops.registry import Cost, Row, Saves, Traits, op
from graphwright.ops.rules import floating
from graphwright.ops.shape import inverse


def _left(dims, axes, keepdims, one):
    """Return `dims` without the reduced axes; with `keepdims`, each reduced dimension is replaced by `one` instead."""
    named = axes_of(axes, len(dims))
    return tuple(one if a in named else d for a, d in enumerate(dims) if keepdims or a not in named)


def _reduced(x: Spec, axes: tuple[int, ...], keepdims: bool) -> Spec:
    return Spec(_left(x.shape, axes, keepdims, 1), x.dtype)


def _restore(g, x, attrs):
    """Broadcast a reduced gradient back to the shape of the operand."""
    if not attrs["keepdims"]:
        g = call("reshape", g, shape=_left(x.shape, attrs["axes"], True, 1))
    return call("expand", g, shape=x.shape)


def _axes(why: str = "") -> AxesRule:
    """Return the `axes` rule of a reduction: zero units of reduced axes can be removed (`why`: a reason why not)."""

    def rule(u: AxesUse) -> list[Dims]:
        for axis in axes_of(u.attrs["axes"], len(u.ins[0])):
            if why:
                u.mixed(u.ins[0][axis], why)
            else:
                u.summed(u.ins[0][axis], (0, axis))
        return [_left(u.ins[0], u.attrs["axes"], u.attrs["keepdims"], Atom(1))]

    return rule


def _method(name: str) -> Emit:
    """Return an `emit` function that calls a torch method with axes and `keepdim`."""

    def emit(ins, attrs):
        if attrs["axes"] == ():  # torch would take all axes
            return f"{ins[0]}.clone()"
        axes = f"tuple(range({ins[0]}.dim()))" if attrs["axes"] is None else literal(attrs["axes"])
        if attrs["axes"] is not None and len(attrs["axes"]) == 1:
            axes = literal(attrs["axes"][0])
        return f"{ins[0]}.{name}({axes}{', keepdim=True' if attrs['keepdims'] else ''})"

    return emit


def _widened(u: OnnxUse) -> str:
    """Return the operand in the dtype of the result: ONNX sums and multiplies no bools."""
    to = u.outs[0].dtype
    return u.names[0] if u.ins[0].dtype is to else u.cast(u.names[0], to)


def _onnx_reduce(kind: str, truth: bool = False) -> OnnxRow:
    """Return an `onnx` function for a reduction; with `truth`, the operand is cast to bool and reduced as 0 and 1."""

    def row(u: OnnxUse) -> str:
        x = u("Cast", u("Cast", u.names[0], to=9), to=6) if truth else _widened(u)
        axes = axes_of(u.attrs["axes"], len(u.ins[0].shape))
        if axes:
            x = u(kind, x, u.ints(*axes), keepdims=int(u.attrs["keepdims"]))
        elif not truth:
            return u("Identity", x)
        return u("Cast", x, to=9) if truth else x

    return row


class Reduction(Row):
    """An op that reduces axes of one operand."""

    arity, attrs, operands = 1, {"axes": Attr(AxisList | None), "keepdims": Attr(bool, False)}, ("x",)
    cost = lambda ins, outs, attrs: Cost(ins[0].size, ins[0].nbytes, outs[0].nbytes)

    def sample(rng):
        axes = [(0,), (1, 2), (0, 1, 2)][rng.integers(3)]
        return [rng.normal(size=(3, 4, 2))], {"axes": axes, "keepdims": bool(rng.random() < 0.5)}


class _Total(Reduction):
    """A reduction whose result is int64 if the operand is integer or bool."""

    traits = Traits(amp="f32")

    def infer(x, axes, keepdims):
        reduced = _reduced(x, axes, keepdims)
        return reduced if x.dtype.is_float else Spec(reduced.shape, int64)


@op("sum")
class Sum(_Total):
    """Σ x over axes, int64 for integers and bools; the gradient is broadcast back."""

    traits, axes, vm = Traits(mixes="axes", linear_in=(0,)), _axes(), forms.SUM
    emit, onnx = _method("sum"), _onnx_reduce("ReduceSum")
    vjp = lambda g, ins, outs, attrs, needs: (_restore(g, ins[0], attrs),)


@op("prod")
class Prod(_Total):
    """Π x over axes, int64 for integers and bools; the gradient of an entry is g times the product of the others.

    That product is built without division, so entries that are 0 get the exact gradient.
    """

    saves, axes, onnx = Saves(inputs=(0,)), _axes("multiplies over it"), _onnx_reduce("ReduceProd")

    def emit(ins, attrs):  # torch multiplies along one axis at a time
        if attrs["axes"] is None:
            return f"{ins[0]}.prod()" + (f".reshape((1,) * {ins[0]}.dim())" if attrs["keepdims"] else "")
        last = sorted(attrs["axes"], reverse=True)  # first, so that axis numbers stay valid
        text = "".join(f".prod({axis}{', keepdim=True' if attrs['keepdims'] else ''})" for axis in last)
        return ins[0] + (text or ".clone()")

    def vjp(g, ins, outs, attrs, needs):
        x, rank = ins[0], len(ins[0].shape)
        rest, axes = others(attrs["axes"], rank), axes_of(attrs["axes"], rank)
        last = call("permute", x, axes=(*rest, *axes))
        rows = call("reshape", last, shape=(*(x.shape[a] for a in rest), prod(x.shape[a] for a in axes)))
        factor = call("reshape", _products_of_the_others(rows), shape=last.shape)
        return (_restore(g, x, attrs) * call("permute", factor, axes=inverse((*rest, *axes))),)

    def sample(rng):
        (x,), attrs = Reduction.sample(rng)
        return [x * (rng.random(x.shape) < 0.9)], attrs


def _products_of_the_others(x):
    """Return for each entry the product of all others along the last axis, by recursion over products of pairs."""
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

    traits, axes = Traits(amp="f32"), _axes("divides by its size")
    emit, onnx, vm = _method("mean"), _onnx_reduce("ReduceMean"), forms.MEAN
    infer = lambda x, axes, keepdims: _reduced(floating(x), axes, keepdims)

    def vjp(g, ins, outs, attrs, needs):
        x = ins[0]
        n = prod(x.shape[axis] for axis in axes_of(attrs["axes"], len(x.shape)))
        return (_restore(g * (1.0 / max(n, 1)), x, attrs),)  # an empty axis receives nothing


class _Extremum(Reduction):
    saves = Saves(inputs=(0,), outputs=(0,))

    def infer(x, axes, keepdims):
        reduced = _reduced(x, axes, keepdims)
        if any(x.shape[a] == 0 for a in axes_of(axes, len(x.shape))):
            raise ShapeError("cannot take an extremum over an empty axis", got=x)
        return reduced

    def vjp(g, ins, outs, attrs, needs):
        x = ins[0]
        hit = call("cast", call("eq", x, _restore(outs[0], x, attrs)), dtype=x.dtype)
        ties = call("sum", hit, axes=attrs["axes"], keepdims=attrs["keepdims"])
        return (hit * _restore(g / ties, x, attrs),)


@op("amax")
class Amax(_Extremum):
    """max x over axes; ties share the gradient equally."""

    axes, emit, onnx, vm = _axes("takes the largest over it"), _method("amax"), _onnx_reduce("ReduceMax"), forms.AMAX


@op("amin")
class Amin(_Extremum):
    """min x over axes; ties share the gradient equally."""

    axes, emit, onnx = _axes("takes the smallest over it"), _method("amin"), _onnx_reduce("ReduceMin")


class _Truth(Reduction):
    vjp, why = None, {"vjp": "the result is bool"}
    infer = lambda x, axes, keepdims: Spec(_reduced(x, axes, keepdims).shape, bool_)

    def sample(rng):
        (x,), attrs = Reduction.sample(rng)
        return [(abs(x) > 1.5) * x if rng.random() < 0.5 else abs(x) < 1.5], attrs


@op("any")
class Any(_Truth):
    """True if some entry over axes is not 0; false for no entries."""

    axes, emit, onnx = _axes(), _method("any"), _onnx_reduce("ReduceMax", truth=True)


@op("all")
class All(_Truth):
    """True if no entry over axes is 0; true for no entries."""

    axes, emit, onnx = _axes("reads every entry of it"), _method("all"), _onnx_reduce("ReduceMin", truth=True)


class _Index(Row):
    arity, attrs, operands, cost = 1, {"axis": Attr(int, -1)}, ("x",), Reduction.cost
    vjp, why = None, {"vjp": "the result is an index"}
    sample = lambda rng: ([rng.integers(0, 3, (3, 4)).astype(float)], {"axis": int(rng.integers(-2, 2))})

    def infer(x, axis):
        at = axis_of(axis, len(x.shape))
        if x.shape[at] == 0:
            raise ShapeError("cannot take an extremum over an empty axis", where=f"axis {at}", got=x)
        return Spec(spliced(x.shape, at), int64)

    def axes(u: AxesUse):
        u.result_ranges[0] = axis = u.ins[0][u.attrs["axis"]]
        u.mixed(axis, "compares its entries")
        return [spliced(u.ins[0], u.attrs["axis"])]


@op("argmax")
class Argmax(_Index):
    """argmax x along an axis, int64; the lowest index on ties."""

    emit = "{0}.argmax({axis})"
    onnx = lambda u: u("ArgMax", u.names[0], axis=u.attrs["axis"], keepdims=0)


@op("argmin")
class Argmin(_Index):
    """argmin x along an axis, int64; the lowest index on ties."""

    emit = "{0}.argmin({axis})"
    onnx = lambda u: u("ArgMin", u.names[0], axis=u.attrs["axis"], keepdims=0)


@op("cumsum")
class Cumsum(Row):
    """yᵢ = Σ xⱼ for j ≤ i along an axis, or j ≥ i with `reverse`; the gradient is summed in the opposite direction."""

    arity, traits, cost = 1, Traits(amp="f32"), Reduction.cost
    attrs = {"axis": Attr(int), "reverse": Attr(bool, False)}
    operands, axes = ("x",), along_axis("sums up to each entry of it")
    vjp = lambda g, ins, outs, attrs, needs: (call("cumsum", g, axis=attrs["axis"], reverse=not attrs["reverse"]),)
    onnx = lambda u: u("CumSum", _widened(u), u.ints_scalar(u.attrs["axis"]), reverse=int(u.attrs["reverse"]))

    def infer(x, axis, reverse):
        axis_of(axis, len(x.shape))
        return x if x.dtype.is_float else Spec(x.shape, int64)

    def sample(rng):
        return [rng.normal(size=(3, 4, 2))], {"axis": int(rng.integers(-3, 3)), "reverse": bool(rng.random() < 0.5)}

    def emit(ins, attrs):
        text = f".cumsum({attrs['axis']})"
        return f"{ins[0]}.flip({attrs['axis']}){text}.flip({attrs['axis']})" if attrs["reverse"] else ins[0] + text


@op("logsumexp")
class LogSumExp(Reduction):
    """ln Σ eˣ over axes, without overflow for large x; gradient g·e^(x - y), 0 where all entries are -∞."""

    traits, saves = Traits(amp="f32", excludes_minus_infinity=True), Saves(inputs=(0,), outputs=(0,))
    axes, emit, onnx = _axes("sums exponentials over it"), _method("logsumexp"), _onnx_reduce("ReduceLogSumExp")
    infer = lambda x, axes, keepdims: _reduced(floating(x), axes, keepdims)
    cost = lambda ins, outs, attrs: Cost(4 * ins[0].size, ins[0].nbytes, outs[0].nbytes)

    def vjp(g, ins, outs, attrs, needs):
        x, y = ins[0], outs[0]
        nothing = call("eq", y, call("full_like", y, value=-inf))
        level = call("where", nothing, call("full_like", y, value=0.0), y)
        return (_restore(g, x, attrs) * call("exp", x - _restore(level, x, attrs)),)

    def expand(ins, attrs):
        if 0 in ins[0].shape:  # without a maximum
            return call("log", call("sum", ins[0], **attrs))
        return widened(lambda x: _shifted(x, attrs), ins[0])


def _shifted(x, attrs):
    top = call("amax", x, **attrs)
    finite = call("isfinite", top)
    level = call("stop_gradient", call("where", finite, top, call("full_like", top, value=0.0)))
    return level + call("log", call("sum", call("exp", x - _restore(level, x, attrs)), **attrs))


def _sort_text(x: str, axis: int, descending: bool) -> str:
    return f"torch.sort({x}, dim={axis!r}, descending={descending!r}, stable=True)"


def _onnx_topk(u: OnnxUse, axis: int, k: str, largest: bool) -> tuple[str, ...]:
    return u.several(2, "TopK", u.names[0], k, axis=axis, largest=int(largest), sorted=1)


class _Ordered(Row):
    """An op that returns values and their indices; a value's gradient goes to the entry at its index."""

    arity, operands, saves, results = 1, ("x",), Saves(outputs=(1,)), ("values", "indices")

    def vjp(g, ins, outs, attrs, needs):
        return (call("scatter_sum", g[0], outs[1], axis=attrs["axis"], shape=ins[0].shape),)

    def cost(ins, outs, attrs):
        size = ins[0].size
        return Cost(size * max(size.bit_length(), 1), ins[0].nbytes, sum(o.nbytes for o in outs))

    def axes(u: AxesUse):
        dims, axis = u.ins[0], u.attrs["axis"]
        u.result_ranges[1] = dims[axis]
        u.mixed(dims[axis], "orders its entries by value")
        if "k" in u.attrs:
            dims = spliced(dims, axis, u.fresh(u.attrs["k"], "takes a fixed number of entries"))
        return [dims, dims]


@op("sort")
class Sort(_Ordered):
    """Entries along an axis in ascending (or `descending`) order, and their indices; stable."""

    attrs = {"axis": Attr(int, -1), "descending": Attr(bool, False)}
    emit = lambda ins, attrs: _sort_text(ins[0], attrs["axis"], attrs["descending"])

    def infer(x, axis, descending):
        axis_of(axis, len(x.shape))
        return x, Spec(x.shape, int64)

    def sample(rng):
        return [rng.normal(size=(3, 4, 2))], {"axis": int(rng.integers(-3, 3)), "descending": bool(rng.random() < 0.5)}

    def onnx(u: OnnxUse):
        axis = u.axis(u.attrs["axis"])
        return _onnx_topk(u, axis, u.shape(u.ins[0].shape[axis : axis + 1]), u.attrs["descending"])


@op("topk")
class TopK(_Ordered):
    """The k largest (or smallest) entries along an axis, in order, and their indices; ties by ascending index."""

    attrs = {"k": Attr(StaticSize), "axis": Attr(int, -1), "largest": Attr(bool, True)}
    onnx, vm = lambda u: _onnx_topk(u, u.axis(u.attrs["axis"]), u.ints(u.attrs["k"]), u.attrs["largest"]), router.TOPK

    def infer(x, k, axis, largest):
        at = axis_of(axis, len(x.shape))
        size = x.shape[at]
        if isinstance(size, int) and k > size:
            raise ShapeError("k is out of range", where=f"axis {at}", expected=f"0 to {size}", got=k)
        shape = spliced(x.shape, at, k)
        return Spec(shape, x.dtype), Spec(shape, int64)

    def sample(rng):
        axis = int(rng.integers(-3, 3))
        k = int(rng.integers(1, (3, 4, 2)[axis] + 1))
        return [rng.normal(size=(3, 4, 2))], {"k": k, "axis": axis, "largest": bool(rng.random() < 0.5)}

    def expand(ins, attrs):
        ordered = call("sort", ins[0], axis=attrs["axis"], descending=attrs["largest"])
        return tuple(call("slice", t, axis=attrs["axis"], start=0, size=attrs["k"]) for t in ordered)

    def emit(ins, attrs):  # torch.topk leaves the order of ties open
        ordered = _sort_text(ins[0], attrs["axis"], attrs["largest"])
        return f"tuple(map(lambda t: t.narrow({attrs['axis']}, 0, {attrs['k']}), {ordered}))"
