"""Views (reshape, permute, expand, slice, ...) and their transposes. A view costs nothing where strides allow it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

from graphwright.array import layout as views
from graphwright.array import sizes as named
from graphwright.array.dtype import int64
from graphwright.array.spec import Spec
from graphwright.array.vm.encode import elementwise as forms
from graphwright.errors import ShapeError
from graphwright.ops.attributes import Attr, AxisList, Dimension, Shape
from graphwright.ops.axes import (
    Atom,
    AxesUse,
    Term,
    axes_of,
    axis_of,
    chain,
    known,
    match_factors,
    others,
    product,
    size,
    spliced,
)
from graphwright.ops.call import call
from graphwright.ops.emit import sizes
from graphwright.ops.onnx import OnnxUse
from graphwright.ops.registry import Row, Traits, free_cost, moving_cost, op
from graphwright.ops.rules import Backward, ViewOp, normal_sample, one_dtype
from graphwright.settings import AtLeastOne


def _reshape_node(u: OnnxUse) -> str:
    return u("Reshape", u.names[0], u.shape(u.outs[0].shape))


def onnx_size(u: OnnxUse, axis: int) -> str:
    """Add nodes for the size of an axis of the first operand, an int64 scalar, and return its name."""
    axis = u.axis(axis)
    return u("Squeeze", u("Shape", u.names[0], start=axis, end=axis + 1), u.ints(0))


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """Return the inverse of a permutation."""
    return tuple(order.index(axis) for axis in range(len(order)))


def _runs(dims: Sequence[Term]) -> list[tuple[Term | None, list[Term]]]:
    """Split dimensions into pairs (dimension of named size, list of the static dimensions that follow it).

    The first pair has None instead of a dimension of named size.
    """
    runs: list[tuple[Term | None, list[Term]]] = [(None, [])]
    for term in dims:
        if isinstance(size(term), str):
            runs.append((term, []))
        else:
            runs[-1][1].append(term)
    return runs


@op("reshape")
class Reshape(ViewOp):
    """The elements of x in row-major order, with a new shape."""

    attrs, traits, sample = {"shape": Attr(Shape)}, Traits(rearranges=True), normal_sample(4, 6, shape=(2, 3, 4))
    onnx, emit = _reshape_node, "{0}.reshape({shape:sizes})"
    view = lambda layout, attrs: views.reshape(layout, attrs["shape"])
    vjp = lambda g, ins, outs, attrs, needs: (call("reshape", g, shape=ins[0].shape),)

    def infer(x, shape):
        if named.product(x.shape) != named.product(shape):
            raise ShapeError("the shapes have different numbers of elements", expected=x, got=shape)
        return Spec(tuple(shape), x.dtype)

    def axes(u: AxesUse):
        x, out = u.ins[0], tuple(Atom(n) for n in u.shapes[0])
        u.result_ranges[0], u.sizes["shape"] = u.ranges[0], out
        before, after = _runs(x), _runs(out)
        left, right = ([(a and size(a), prod(map(known, rest))) for a, rest in runs] for runs in (before, after))
        if left != right:  # such as [B, heads·d] -> [B·heads, d]
            given, made = ([t for t in terms if size(t) != 1] for terms in (x, out))
            while given and made and size(given[0]) == size(made[0]):
                u.same(given.pop(0), made.pop(0))
            if not match_factors(given, made):
                for term in (*given, *made):
                    u.frozen(term, "moves it across a dimension of unknown size")
            return [out]
        for (a, some), (b, more) in zip(before, after, strict=True):
            if a is not None and b is not None:
                u.same(a, b)
            if some or more:
                u.same(product(*some), product(*more))
        return [out]


@op("unflatten")
class Unflatten(ViewOp):
    """Split one axis into several: [.., a·b, ..] -> [.., a, b, ..]; each may have a named size."""

    attrs, sample = {"axis": Attr(int), "sizes": Attr(Shape)}, normal_sample(3, 6, axis=1, sizes=(2, 3))
    onnx, traits = _reshape_node, Traits(rearranges=True, splits_axis=True, linear_in=(0,))
    view = lambda layout, a: views.reshape(layout, spliced(layout.shape, a["axis"], *a["sizes"]))

    def infer(x, axis, sizes):
        at = axis_of(axis, len(x.shape))
        if x.shape[at] != named.product(sizes):
            where, expected = f"axis {at}", f"product {x.shape[at]}"
            raise ShapeError("the sizes do not multiply to the axis size", where=where, expected=expected, got=sizes)
        return Spec(spliced(x.shape, at, *sizes), x.dtype)

    def vjp(g, ins, outs, attrs, needs):
        at = axis_of(attrs["axis"], len(ins[0].shape))
        return (call("flatten", g, start=at, end=at + len(attrs["sizes"]) - 1),)

    def axes(u: AxesUse):
        parts = tuple(Atom(n) for n in u.attrs["sizes"])
        u.same(u.ins[0][u.attrs["axis"]], product(*parts))
        u.sizes["sizes"], u.result_ranges[0] = parts, u.ranges[0]
        return [spliced(u.ins[0], u.attrs["axis"], *parts)]

    def emit(i, a):  # torch finds the first size: so blocks that differ in their number of heads read the same
        rest = a["sizes"][1:]
        return f"{i[0]}.unflatten({a['axis']}, ({sizes((-1, *rest))}{'' if rest else ','}))"


@op("flatten")
class Flatten(ViewOp):
    """Axes start..end, both included, joined into one: [.., a, b, ..] -> [.., a·b, ..]."""

    attrs, sample = {"start": Attr(int), "end": Attr(int)}, normal_sample(3, 2, 2, start=1, end=2)
    onnx, traits = _reshape_node, Traits(rearranges=True, joins_axis=True, linear_in=(0,))
    emit = "{0}.flatten({start}, {end})"

    def infer(x, start, end):
        a, b = axis_of(start, len(x.shape)), axis_of(end, len(x.shape))
        if a > b:
            got = f"{x}, start {start}, end {end}"
            raise ShapeError("cannot merge these axes into one", expected="start <= end", got=got)
        return Spec((*x.shape[:a], named.product(x.shape[a : b + 1]), *x.shape[b + 1 :]), x.dtype)

    def view(layout, attrs):
        a, b = (axis_of(attrs[k], len(layout.shape)) for k in ("start", "end"))
        return views.reshape(layout, (*layout.shape[:a], prod(layout.shape[a : b + 1]), *layout.shape[b + 1 :]))

    def vjp(g, ins, outs, attrs, needs):
        a, b = (axis_of(attrs[k], len(ins[0].shape)) for k in ("start", "end"))
        return (call("unflatten", g, axis=a, sizes=ins[0].shape[a : b + 1]),)

    def axes(u: AxesUse):
        x, u.result_ranges[0] = u.ins[0], u.ranges[0]
        a, b = (axis_of(u.attrs[k], len(x)) for k in ("start", "end"))
        return [(*x[:a], product(*x[a : b + 1]), *x[b + 1 :])]


@op("permute")
class Permute(ViewOp):
    """x with its axes in a different order."""

    attrs, emit = {"axes": Attr(AxisList)}, "{0}.permute({axes:sizes})"
    sample = normal_sample(2, 3, 4, axes=(2, 0, 1))
    traits = Traits(rearranges=True, linear_in=(0,))
    view = lambda layout, attrs: views.permute(layout, attrs["axes"])
    vjp = lambda g, ins, outs, attrs, needs: (call("permute", g, axes=inverse(attrs["axes"])),)
    onnx = lambda u: u("Transpose", u.names[0], perm=[u.axis(a) for a in u.attrs["axes"]])

    def infer(x, axes):
        if sorted(axes) != list(range(len(x.shape))):
            raise ShapeError("the axes are not a permutation", expected=f"each of 0..{len(x.shape) - 1} once", got=axes)
        return Spec(tuple(x.shape[a] for a in axes), x.dtype)

    def axes(u: AxesUse):
        u.result_ranges[0] = u.ranges[0]
        return [tuple(u.ins[0][a] for a in u.attrs["axes"])]


@op("expand")
class Expand(ViewOp):
    """x broadcast to a shape; the autograd engine sums the gradient back."""

    attrs, emit = {"shape": Attr(Shape)}, "{0}.expand({shape:sizes})"
    sample = normal_sample(3, 1, shape=(2, 3, 4))
    view = lambda layout, attrs: views.expand(layout, attrs["shape"])
    vjp = lambda g, ins, outs, attrs, needs: (g,)  # of the broadcast shape: the engine reduces it
    onnx = lambda u: u("Expand", u.names[0], u.shape(u.outs[0].shape))

    def infer(x, shape):
        lead = len(shape) - len(x.shape)
        if lead < 0 or any(h not in (1, w) for h, w in zip(x.shape, shape[lead:], strict=True)):
            raise ShapeError("the operand does not broadcast to this shape", expected=shape, got=x)
        return Spec(tuple(shape), x.dtype)

    def axes(u: AxesUse):
        u.result_ranges[0], x, shape = u.ranges[0], u.ins[0], u.shapes[0]
        lead = len(shape) - len(x)
        out = tuple(x[i - lead] if i >= lead and size(x[i - lead]) == n else Atom(n) for i, n in enumerate(shape))
        u.sizes["shape"] = out
        return [out]


@op("slice")
class Slice(ViewOp):
    """x[start : start + size·step : step] along one axis: `size` entries. A run checks that they are inside."""

    attrs = {"axis": Attr(int), "start": Attr(Dimension), "size": Attr(Dimension), "step": Attr(AtLeastOne, 1)}
    traits = Traits(slices=True, linear_in=(0,), mixes="axis")
    sample = normal_sample(2, 7, axis=1, start=1, size=3, step=2)

    def view(layout, attrs):
        axis = axis_of(attrs["axis"], len(layout.shape))
        _check_inside(axis, layout.shape[axis], attrs["start"], attrs["size"], attrs["step"])
        return views.narrow(layout, axis, attrs["start"], attrs["size"], attrs["step"])

    def infer(x, axis, start, size, step):
        at = axis_of(axis, len(x.shape))
        _check_inside(at, x.shape[at], start, size, step)
        return Spec(spliced(x.shape, at, size), x.dtype)

    def vjp(g, ins, outs, attrs, needs):
        at = axis_of(attrs["axis"], len(ins[0].shape))
        return (call("pad_slice", g, axis=at, start=attrs["start"], step=attrs["step"], size=ins[0].shape[at]),)

    def axes(u: AxesUse):
        a, x, u.result_ranges[0] = u.attrs, u.ins[0][u.attrs["axis"]], u.ranges[0]
        if isinstance(size(x), str) or isinstance(a["size"], str) or isinstance(a["start"], str):
            u.frozen(x, "reads entries of it by their number")
            return [spliced(u.ins[0], a["axis"], u.fresh(a["size"], "reads entries by their number"))]
        whole, taken = known(x), Atom(a["size"])
        if a["step"] == 1 and a["size"]:
            before, after = Atom(a["start"]), Atom(whole - a["start"] - a["size"])
            u.same(x, chain(before, taken, after))
            u.sizes |= {"start": before, "size": taken}
        elif a["step"] * a["size"] == whole and a["size"] and a["start"] < a["step"]:  # of each group of neighbours one
            group = Atom(a["step"])
            u.frozen(group, f"takes one of {a['step']} neighbours")
            u.same(x, product(taken, group))
            u.sizes["size"] = taken
        elif a["size"] != whole:
            for term in (x, taken):
                u.frozen(term, f"takes every {a['step']}th entry of it")
        else:
            u.same(x, taken)
            u.sizes["size"] = taken
        return [spliced(u.ins[0], a["axis"], taken)]

    def onnx(u: OnnxUse):
        start, step = u.attrs["start"], u.attrs["step"]
        axis = u.ints(u.axis(u.attrs["axis"]))  # constants are numbered in this order
        end = (named.Size.of(start) + named.Size.of(u.attrs["size"]) * step).dim
        return u("Slice", u.names[0], u.shape([start]), u.shape([end]), axis, u.ints(step))

    def emit(i, a):
        axis, step, end = a["axis"], a["step"], (named.Size.of(a["start"]) + named.Size.of(a["size"]) * a["step"]).dim
        part = f"{sizes([a['start']]) if a['start'] else ''}:{sizes([end])}" + (f":{step}" if step != 1 else "")
        return f"{i[0]}[{':, ' * axis}{part}]" if axis >= 0 else f"{i[0]}[..., {part}{', :' * (-axis - 1)}]"


def _check_inside(axis: int, full: Any, start: Any, size: Any, step: int) -> None:
    """Raise ShapeError if a slice ends after its axis, as far as the sizes are known."""
    rest = full - start - (size - 1) * step if type(full) is type(start) is type(size) is int else None
    rest = (named.Size.of(full) - start - (named.Size.of(size) - 1) * step).dim if rest is None else rest
    if size and isinstance(rest, int) and rest < 1:
        expected, got = f"start + (size - 1)·step < {full}", f"start {start}, size {size}, step {step}"
        raise ShapeError("the slice is not inside the axis", where=f"axis {axis}", expected=expected, got=got)


@op("last")
class Last(ViewOp):
    """x[-1:] along one axis; the result keeps the axis, with size 1."""

    attrs, emit, sample = {"axis": Attr(int)}, "{0}.narrow({axis}, -1, 1)", normal_sample(2, 4, 3, axis=1)
    onnx = lambda u: u("Slice", u.names[0], u.ints(-1), u.ints(2**62), u.ints(u.axis(u.attrs["axis"])))

    def infer(x, axis):
        at = axis_of(axis, len(x.shape))
        if x.shape[at] == 0:
            raise ShapeError("cannot take the last entry of an empty axis", where=f"axis {at}", got=x)
        return Spec(spliced(x.shape, at, 1), x.dtype)

    def view(layout, attrs):
        at = axis_of(attrs["axis"], len(layout.shape))
        return views.narrow(layout, at, layout.shape[at] - 1, 1)

    def vjp(g, ins, outs, attrs, needs):
        at = axis_of(attrs["axis"], len(g.shape))
        size = ins[0].shape[at]
        return (call("pad_slice", g, axis=at, start=size - 1, step=1, size=size),)

    def axes(u: AxesUse):
        u.frozen(u.ins[0][u.attrs["axis"]], "reads its last entry")
        return [spliced(u.ins[0], u.attrs["axis"], Atom(1))]


@op("size")
class Size(Row):
    """The size of an axis, as an int64 scalar."""

    arity, attrs, cost, vm = 1, {"axis": Attr(int)}, free_cost, forms.SIZE
    traits, sample = Traits(valueless=True), normal_sample(2, 4, 3, axis=1)
    vjp, why = None, {"vjp": "a size is an integer", "emit": "a size is known only at run time"}
    onnx = lambda u: onnx_size(u, u.attrs["axis"])

    def infer(x, axis):
        axis_of(axis, len(x.shape))
        return Spec((), int64)

    def axes(u: AxesUse):
        u.mixed(u.ins[0][u.attrs["axis"]], "reads its size")
        return [()]


@op("squeeze")
class Squeeze(ViewOp):
    """x without some axes of size 1."""

    attrs, emit = {"axes": Attr(AxisList)}, "{0}.squeeze({axes})"
    traits = Traits(rearranges=True, linear_in=(0,))
    view = lambda layout, attrs: views.permute(layout, others(attrs["axes"], len(layout.shape)))
    vjp = lambda g, ins, outs, attrs, needs: (call("unsqueeze", g, axes=axes_of(attrs["axes"], len(ins[0].shape))),)
    sample = lambda rng: ([rng.normal(size=(1, 3, 1, 2))], {"axes": [(0,), (-2,), (0, 2), (2, 0)][rng.integers(4)]})
    onnx = lambda u: u("Squeeze", u.names[0], u.ints(*u.attrs["axes"]))

    def infer(x, axes):
        if any(x.shape[a] != 1 for a in axes_of(axes, len(x.shape))):
            raise ShapeError("cannot squeeze an axis whose size is not 1", expected="size 1", got=f"{x}, axes {axes}")
        return Spec(tuple(x.shape[a] for a in others(axes, len(x.shape))), x.dtype)

    def axes(u: AxesUse):
        x, u.result_ranges[0] = u.ins[0], u.ranges[0]
        return [tuple(x[a] for a in others(u.attrs["axes"], len(x)))]


@op("unsqueeze")
class Unsqueeze(ViewOp):
    """x with new axes of size 1; `axes` are their indices in the result."""

    attrs, onnx, traits = {"axes": Attr(AxisList)}, _reshape_node, Traits(rearranges=True, linear_in=(0,))
    vjp = lambda g, ins, outs, attrs, needs: (call("squeeze", g, axes=attrs["axes"]),)
    sample = lambda rng: ([rng.normal(size=(3, 2))], {"axes": [(0,), (-1,), (1, 3), (-1, 0)][rng.integers(4)]})

    def infer(x, axes):
        at = axes_of(axes, len(x.shape) + len(axes))
        if len(at) != len(axes):
            raise ShapeError("an axis is named twice", expected="distinct axes", got=axes)
        return Spec(_with(x.shape, axes, 1), x.dtype)

    def view(layout, attrs):
        shape, strides = (_with(sizes, attrs["axes"], 1) for sizes in (layout.shape, layout.strides))
        return views.Layout(shape, strides, layout.offset)

    def axes(u: AxesUse):
        u.result_ranges[0] = u.ranges[0]
        return [_with(u.ins[0], u.attrs["axes"], Atom(1))]

    def emit(i, a):
        front, back = sorted(n for n in a["axes"] if n >= 0), sorted((n for n in a["axes"] if n < 0), reverse=True)
        return i[0] + "".join(f".unsqueeze({n})" for n in (*front, *back))


def _with(dims, axes, new):
    """Return `dims` with `new` inserted at each of the indices `axes` of the result."""
    rank = len(dims) + len(axes)
    added, rest = axes_of(axes, rank), iter(dims)
    return tuple(new if a in added else next(rest) for a in range(rank))


@op("diagonal")
class Diagonal(ViewOp):
    """Entries x[.., i, .., i + offset, ..]: a diagonal of two axes, as a new last axis that replaces them."""

    attrs = {"offset": Attr(int, 0), "axes": Attr(tuple[int, int], (0, 1))}
    emit = "{0}.diagonal({offset}, {axes:sizes})"
    why = {"onnx": "opset 20 has no view along two axes"}

    def infer(x, offset, axes):
        a, b = (axis_of(axis, len(x.shape)) for axis in axes)
        n, m = x.shape[a], x.shape[b]
        rest = (x.shape[axis] for axis in others(axes, len(x.shape)))
        if a != b and n == m and not offset:
            return Spec((*rest, n), x.dtype)
        if a == b or isinstance(n, str) or isinstance(m, str):
            expected = "two different axes of static size, or the main diagonal of two axes of one size"
            raise ShapeError("cannot take a diagonal of these axes", expected=expected, got=f"{x}, axes {axes}")
        return Spec((*rest, views.diagonal_size(n, m, offset)), x.dtype)

    def view(layout, attrs):
        a, b = (axis_of(axis, len(layout.shape)) for axis in attrs["axes"])
        return views.diagonal(layout, a, b, attrs["offset"])

    def vjp(g, ins, outs, attrs, needs):
        shape = ins[0].shape
        a, b = (axis_of(axis, len(shape)) for axis in attrs["axes"])
        start, step = views.diagonal_entries(shape[b], attrs["offset"])
        flat = call("pad_slice", g, axis=-1, start=start, step=step, size=shape[a] * shape[b])
        full = call("unflatten", flat, axis=-1, sizes=(shape[a], shape[b]))
        return (call("permute", full, axes=inverse((*others((a, b), len(shape)), a, b))),)

    def sample(rng):
        axes = [(0, 1), (1, 0), (-1, 0), (0, -1)][rng.integers(4)]
        return [rng.normal(size=(3, 2, 4)[: rng.integers(2, 4)])], {"offset": int(rng.integers(-1, 2)), "axes": axes}

    def axes(u: AxesUse):
        a, b = (u.ins[0][axis] for axis in u.attrs["axes"])
        rest = tuple(u.ins[0][i] for i in others(u.attrs["axes"], len(u.ins[0])))
        if u.attrs["offset"] == 0 and size(a) == size(b):
            u.same(a, b)
            return [(*rest, a)]
        for term in (a, b):
            u.frozen(term, "reads a diagonal of it")
        return [(*rest, u.fresh(u.shapes[0][-1], "reads a diagonal"))]


@op("pad_slice")
class PadSlice(Backward):
    """Transpose of `slice`: `size` entries along an axis, those of x at start, start + step, ..., and 0 elsewhere."""

    arity = 1
    attrs = {"axis": Attr(int), "start": Attr(Dimension), "step": Attr(AtLeastOne, 1), "size": Attr(Dimension)}
    traits = Traits(pads=True, backward_of="slice")

    def infer(x, axis, start, step, size):
        at = axis_of(axis, len(x.shape))
        n = x.shape[at]
        rest = (named.Size.of(size) - start - (named.Size.of(n) - 1) * step).dim
        if n and isinstance(rest, int) and rest < 1:
            expected, got = f"start + (n - 1)·step < {size}", f"n {n}, start {start}, step {step}"
            raise ShapeError("the operand does not fit into the result", where=f"axis {at}", expected=expected, got=got)
        return Spec(spliced(x.shape, at, size), x.dtype)

    def vjp(g, ins, outs, attrs, needs):
        at = axis_of(attrs["axis"], len(g.shape))
        return (call("slice", g, axis=at, start=attrs["start"], step=attrs["step"], size=ins[0].shape[at]),)

    def sample(rng):
        return [rng.normal(size=(2, 3))], {"axis": int(rng.choice((1, -1))), "start": 1, "step": 2, "size": 7}

    def axes(u: AxesUse):
        x, a = u.ins[0][u.attrs["axis"]], u.attrs
        if str in map(type, (size(x), a["size"], a["start"])):
            full = u.fresh(a["size"], "puts entries by their number")
            u.frozen(x, "puts entries of it by their number")
        elif a["step"] == 1:
            before, after = Atom(a["start"]), Atom(a["size"] - a["start"] - known(x))
            full = chain(before, x, after)
            u.sizes |= {"start": before, "size": full}
        else:
            full = u.fresh(a["size"], f"puts zeros between {a['step']} entries of it")
            u.frozen(x, f"puts zeros between {a['step']} entries of it")
        return [spliced(u.ins[0], a["axis"], full)]


@op("concat")
class Concat(Row):
    """Operands concatenated along an axis."""

    arity, attrs, traits = (1, None), {"axis": Attr(int)}, Traits(jointly_linear=True, mixes="axis", amp="promote")
    sample = lambda rng: ([rng.normal(size=(2, n)) for n in (3, 1, 2)], {"axis": 1})
    onnx = lambda u: u("Concat", *u.names, axis=u.attrs["axis"])
    emit = lambda i, a: f"torch.cat(({', '.join(i)}{(',' if len(i) == 1 else '')}), {a['axis']})"

    def infer(*ins, axis):
        one_dtype(*ins)
        at = axis_of(axis, len(ins[0].shape))
        if len({spliced(i.shape, axis) for i in ins}) > 1:
            raise ShapeError("operands differ on an axis other than the concatenated one",
                             expected=f"different sizes on axis {at} only", got=", ".join(map(repr, ins)))  # fmt: skip
        return Spec(spliced(ins[0].shape, at, named.total(i.shape[at] for i in ins)), ins[0].dtype)

    def vjp(g, ins, outs, attrs, needs):
        at = axis_of(attrs["axis"], len(g.shape))
        sizes = [part.shape[at] for part in ins]
        parts = zip(accumulate(sizes, initial=0), sizes, needs, strict=False)
        return tuple(call("slice", g, axis=at, start=start, size=n) if need else None for start, n, need in parts)

    def axes(u: AxesUse):
        axis = u.attrs["axis"]
        for other in u.ins[1:]:
            for a, b in zip(spliced(u.ins[0], axis), spliced(other, axis), strict=True):
                u.same(a, b)
        parts = [dims[axis] for dims in u.ins]
        if not any(isinstance(size(part), str) for part in parts):
            return [spliced(u.ins[0], axis, chain(*parts))]
        for part in parts:
            u.frozen(part, "joins it with a dimension of unknown size")
        return [spliced(u.ins[0], axis, u.fresh(u.shapes[0][axis], "joins dimensions of unknown size"))]


@op("stack")
class Stack(Row):
    """Operands of one spec along a new first axis. Each is a unit of its own: removed with its entry of the result."""

    arity, attrs, traits, cost = (1, None), {}, Traits(jointly_linear=True, amp="promote"), moving_cost
    groups = lambda attrs: (0, 1)
    emit = lambda i, a: f"torch.stack(({', '.join(i)}{',' if len(i) == 1 else ''}))"

    def infer(*ins):
        one_dtype(*ins)
        if any(i.shape != ins[0].shape for i in ins):
            raise ShapeError("the operands have different shapes", expected=ins[0], got=", ".join(map(repr, ins)))
        return Spec((len(ins), *ins[0].shape), ins[0].dtype)

    def vjp(g, ins, outs, attrs, needs):
        parts = (call("slice", g, axis=0, start=i, size=1) if need else None for i, need in enumerate(needs))
        return tuple(part if part is None else call("squeeze", part, axes=(0,)) for part in parts)

    def sample(rng):
        shape = [(), (3,), (2, 3)][rng.integers(3)]
        return [rng.normal(size=shape) for _ in range(rng.integers(1, 4))], {}

    def expand(ins, attrs):
        return call("concat", *(call("unsqueeze", x, axes=(0,)) for x in ins), axis=0)

    def axes(u: AxesUse):
        for other in u.ins[1:]:
            for a, b in zip(u.ins[0], other, strict=True):
                u.same(a, b)
        units = Atom(len(u.ins))
        u.counts(units, 0, 1)
        return [(units, *u.ins[0])]
