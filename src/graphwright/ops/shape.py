"""Views (reshape, permute, expand, slice, ...) and their transposes. A view costs nothing where strides allow it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from graphwright.array import layout as lay
from graphwright.array.dtype import int64
from graphwright.array.spec import Dim, Spec
from graphwright.array.vm.encode import elementwise as forms
from graphwright.errors import ShapeError
from graphwright.ops.axes import Atom, AxesUse, Term, axes_of, axis_of, chain, product, size
from graphwright.ops.call import call
from graphwright.ops.emit import sizes
from graphwright.ops.onnx import OnnxUse
from graphwright.ops.registry import Traits, free_cost, op
from graphwright.ops.rules import Backward, one_dtype


def _fits(x: Spec, shape: tuple[Dim, ...]) -> None:
    have, want = list(x.shape), list(shape)
    for dim in [d for d in have if isinstance(d, str) and d in want]:  # names on both sides cancel
        have.remove(dim)
        want.remove(dim)
    left, right = Spec(tuple(have), x.dtype), Spec(tuple(want), x.dtype)
    if left.symbolic or right.symbolic or left.size != right.size:
        raise ShapeError("the shapes have different numbers of elements", expected=x, got=shape)


def _unflatten(u: OnnxUse) -> str:
    return u("Reshape", u.names[0], u.shape(u.outs[0].shape))


def onnx_size(u: OnnxUse, axis: int) -> str:
    """The size of an axis of the first operand, as an int64 scalar."""
    axis = u.axis(axis)
    return u("Squeeze", u("Shape", u.names[0], start=axis, end=axis + 1), u.ints(0))


def _runs(dims: Sequence[Term], shape: Sequence[Dim]) -> list[tuple[Dim | None, list[Term]]]:
    """(name that begins it or None, its dimensions)."""
    runs: list[tuple[Dim | None, list[Term]]] = [(None, [])]
    for term, n in zip(dims, shape, strict=True):
        if isinstance(n, str):
            runs.append((n, []))
        runs[-1][1].append(term)
    return runs


def _count(dims: Sequence[Term]) -> int:
    return prod(n for t in dims if isinstance(n := size(t), int))


@op("reshape")
class Reshape:
    """The same elements in row-major order, under another shape."""

    arity, attrs, cost = 1, {"shape": ...}, free_cost
    onnx = _unflatten
    emit = "{0}.reshape({shape:sizes})"
    traits = Traits(rearranges=True)

    @staticmethod
    def infer(x, shape):
        _fits(x, shape)
        return Spec(tuple(shape), x.dtype)

    @staticmethod
    def view(layout, attrs):
        return lay.reshape(layout, attrs["shape"])

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (call("reshape", g, shape=ins[0].shape),)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(4, 6))], {"shape": (2, 3, 4)}

    @staticmethod
    def axes(u: AxesUse):
        x, shape = u.ins[0], u.shapes[0]
        out = tuple(Atom(n) for n in shape)
        u.result_ranges[0], u.sizes["shape"] = u.ranges[0], out
        left, right = _runs(x, [size(t) for t in x]), _runs(out, shape)
        if [a for a, _ in left] != [a for a, _ in right] or any(
            _count(a) != _count(b) for (_, a), (_, b) in zip(left, right, strict=True)
        ):
            for term in (*x, *out):
                u.frozen(term, "moves it across a dimension of unknown size")
            return [out]
        for (_, a), (_, b) in zip(left, right, strict=True):
            named = [t for t in (*a, *b) if isinstance(size(t), str)]
            if named:
                u.same(*named)
            a, b = ([t for t in run if not isinstance(size(t), str)] for run in (a, b))
            if a or b:
                u.same(product(*a), product(*b))
        return [out]


def _unflattened(parts: Sequence[int]) -> str:
    """Sizes of a split axis, the first left to torch: so blocks that differ in their number of heads read the same."""
    return f"({sizes((-1, *parts[1:]))}{',' if len(parts) == 1 else ''})"


@op("unflatten")
class Unflatten:
    """Split one axis into several: [.., a·b, ..] -> [.., a, b, ..]; other axes may have symbolic sizes."""

    arity, attrs, cost = 1, {"axis": ..., "sizes": ...}, free_cost
    onnx = _unflatten
    traits = Traits(rearranges=True, splits_axis=True, linear_in=(0,))

    @staticmethod
    def infer(x, axis, sizes):
        at = axis_of(axis, len(x.shape))
        if x.shape[at] != prod(sizes):
            raise ShapeError(
                "the sizes do not multiply to the axis", where=f"axis {at}", expected=x.shape[at], got=sizes
            )
        return Spec((*x.shape[:at], *sizes, *x.shape[at + 1 :]), x.dtype)

    @staticmethod
    def view(layout, attrs):
        at = axis_of(attrs["axis"], len(layout.shape))
        return lay.reshape(layout, (*layout.shape[:at], *attrs["sizes"], *layout.shape[at + 1 :]))

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        at = axis_of(attrs["axis"], len(ins[0].shape))
        return (call("flatten", g, start=at, end=at + len(attrs["sizes"]) - 1),)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(3, 6))], {"axis": 1, "sizes": (2, 3)}

    @staticmethod
    def axes(u: AxesUse):
        x, at = u.ins[0], axis_of(u.attrs["axis"], len(u.ins[0]))
        parts = tuple(Atom(n) for n in u.attrs["sizes"])
        u.same(x[at], product(*parts))
        u.sizes["sizes"], u.result_ranges[0] = parts, u.ranges[0]
        return [(*x[:at], *parts, *x[at + 1 :])]

    @staticmethod
    def emit(i, a):
        return f"{i[0]}.unflatten({a['axis']}, {_unflattened(a['sizes'])})"


@op("flatten")
class Flatten:
    """Axes start..end, both included, joined into one: [.., a, b, ..] -> [.., a·b, ..]."""

    arity, attrs, cost = 1, {"start": ..., "end": ...}, free_cost
    onnx = _unflatten
    emit = "{0}.flatten({start}, {end})"
    traits = Traits(rearranges=True, joins_axis=True, linear_in=(0,))

    @staticmethod
    def infer(x, start, end):
        a, b = axis_of(start, len(x.shape)), axis_of(end, len(x.shape))
        joined = x.shape[a : b + 1]
        named, known = [d for d in joined if isinstance(d, str)], [d for d in joined if isinstance(d, int)]
        if a > b or (named and prod(known) != 1) or len(named) > 1:
            raise ShapeError(
                "these axes cannot be joined into one known size", expected="start <= end, sizes known", got=x
            )
        size = named[0] if named else prod(known)
        return Spec((*x.shape[:a], size, *x.shape[b + 1 :]), x.dtype)

    @staticmethod
    def view(layout, attrs):
        a, b = (axis_of(attrs[k], len(layout.shape)) for k in ("start", "end"))
        joined = prod(layout.shape[a : b + 1])
        return lay.reshape(layout, (*layout.shape[:a], joined, *layout.shape[b + 1 :]))

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        a, b = (axis_of(attrs[k], len(ins[0].shape)) for k in ("start", "end"))
        return (call("unflatten", g, axis=a, sizes=ins[0].shape[a : b + 1]),)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(3, 2, 2))], {"start": 1, "end": 2}

    @staticmethod
    def axes(u: AxesUse):
        x = u.ins[0]
        a, b = (axis_of(u.attrs[k], len(x)) for k in ("start", "end"))
        u.result_ranges[0] = u.ranges[0]
        return [(*x[:a], product(*x[a : b + 1]), *x[b + 1 :])]


@op("permute")
class Permute:
    """The axes of x in another order."""

    arity, attrs, cost = 1, {"axes": ...}, free_cost
    emit = "{0}.permute({axes:sizes})"
    traits = Traits(rearranges=True, linear_in=(0,))

    @staticmethod
    def infer(x, axes):
        if sorted(axes) != list(range(len(x.shape))):
            raise ShapeError("axes must be a permutation", expected=f"each of 0..{len(x.shape) - 1} once", got=axes)
        return Spec(tuple(x.shape[a] for a in axes), x.dtype)

    @staticmethod
    def view(layout, attrs):
        return lay.permute(layout, attrs["axes"])

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        inverse = [0] * len(attrs["axes"])
        for to, came in enumerate(attrs["axes"]):
            inverse[came] = to
        return (call("permute", g, axes=tuple(inverse)),)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(2, 3, 4))], {"axes": (2, 0, 1)}

    @staticmethod
    def axes(u: AxesUse):
        u.result_ranges[0] = u.ranges[0]
        return [tuple(u.ins[0][a] for a in u.attrs["axes"])]

    @staticmethod
    def onnx(u: OnnxUse):
        return u("Transpose", u.names[0], perm=[u.axis(a) for a in u.attrs["axes"]])


@op("expand")
class Expand:
    """x broadcast to a shape; the autograd engine sums the gradient back."""

    arity, attrs, cost = 1, {"shape": ...}, free_cost
    emit = "{0}.expand({shape:sizes})"

    @staticmethod
    def infer(x, shape):
        lead = len(shape) - len(x.shape)
        if lead < 0 or any(h not in (1, w) for h, w in zip(x.shape, shape[lead:], strict=True)):
            raise ShapeError("the operand does not broadcast to this shape", expected=shape, got=x)
        return Spec(tuple(shape), x.dtype)

    @staticmethod
    def view(layout, attrs):
        return lay.expand(layout, attrs["shape"])

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (g,)  # of the broadcast shape: the engine reduces it

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(3, 1))], {"shape": (2, 3, 4)}

    @staticmethod
    def axes(u: AxesUse):
        u.result_ranges[0], x, shape = u.ranges[0], u.ins[0], u.shapes[0]
        lead = len(shape) - len(x)
        out = tuple(x[i - lead] if i >= lead and size(x[i - lead]) == n else Atom(n) for i, n in enumerate(shape))
        u.sizes["shape"] = out
        return [out]

    @staticmethod
    def onnx(u: OnnxUse):
        return u("Expand", u.names[0], u.shape(u.outs[0].shape))


@op("slice")
class Slice:
    """x[start : start + size·step : step] along one axis: `size` entries."""

    arity, attrs, cost = 1, {"axis": ..., "start": ..., "size": ..., "step": 1}, free_cost
    traits = Traits(slices=True, linear_in=(0,), mixes="axis")

    @staticmethod
    def infer(x, axis, start, size, step):
        at = axis_of(axis, len(x.shape))
        full = x.shape[at]
        if isinstance(full, str) or size < 0 or step < 1 or start < 0 or (size and start + (size - 1) * step >= full):
            raise ShapeError(
                "the slice exceeds the axis", where=f"axis {at}", expected=full, got=f"{size} from {start}, step {step}"
            )
        return Spec((*x.shape[:at], size, *x.shape[at + 1 :]), x.dtype)

    @staticmethod
    def view(layout, attrs):
        at = axis_of(attrs["axis"], len(layout.shape))
        return lay.narrow(layout, at, attrs["start"], attrs["size"], attrs["step"])

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        at = axis_of(attrs["axis"], len(ins[0].shape))
        return (call("pad_slice", g, axis=at, start=attrs["start"], step=attrs["step"], size=ins[0].shape[at]),)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(2, 7))], {"axis": 1, "start": 1, "size": 3, "step": 2}

    @staticmethod
    def axes(u: AxesUse):
        x, a = u.ins[0], u.attrs
        at = axis_of(a["axis"], len(x))
        u.result_ranges[0] = u.ranges[0]
        whole, taken = int(size(x[at])), Atom(a["size"])  # a slice has a known axis
        if a["step"] == 1 and a["size"]:
            before, after = Atom(a["start"]), Atom(whole - a["start"] - a["size"])
            u.same(x[at], chain(before, taken, after))
            u.sizes |= {"start": before, "size": taken}
        elif a["size"] != whole:
            for term in (x[at], taken):
                u.frozen(term, f"takes every {a['step']}th entry of it")
        else:
            u.same(x[at], taken)
            u.sizes["size"] = taken
        return [(*x[:at], taken, *x[at + 1 :])]

    @staticmethod
    def onnx(u: OnnxUse):
        start, step = u.attrs["start"], u.attrs["step"]
        place = u.ints(u.axis(u.attrs["axis"]))  # constants are numbered in this order
        return u("Slice", u.names[0], u.ints(start), u.ints(start + u.attrs["size"] * step), place, u.ints(step))

    @staticmethod
    def emit(i, a):
        axis, step = a["axis"], a["step"]
        part = f"{a['start'] or ''}:{a['start'] + a['size'] * step}" + (f":{step}" if step != 1 else "")
        return f"{i[0]}[{':, ' * axis}{part}]" if axis >= 0 else f"{i[0]}[..., {part}{', :' * (-axis - 1)}]"


@op("last")
class Last:
    """x[-1:] along one axis, which keeps size 1."""

    arity, attrs, cost = 1, {"axis": ...}, free_cost
    emit = "{0}.narrow({axis}, -1, 1)"

    @staticmethod
    def infer(x, axis):
        at = axis_of(axis, len(x.shape))
        if x.shape[at] == 0:
            raise ShapeError("an empty axis has no last entry", where=f"axis {at}", got=x)
        return Spec((*x.shape[:at], 1, *x.shape[at + 1 :]), x.dtype)

    @staticmethod
    def view(layout, attrs):
        at = axis_of(attrs["axis"], len(layout.shape))
        return lay.narrow(layout, at, layout.shape[at] - 1, 1)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        at = axis_of(attrs["axis"], len(g.shape))
        size = ins[0].shape[at]
        return (call("pad_slice", g, axis=at, start=size - 1, step=1, size=size),)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(2, 4, 3))], {"axis": 1}

    @staticmethod
    def axes(u: AxesUse):
        x, at = u.ins[0], axis_of(u.attrs["axis"], len(u.ins[0]))
        u.frozen(x[at], "reads its last entry")
        return [(*x[:at], Atom(1), *x[at + 1 :])]

    @staticmethod
    def onnx(u: OnnxUse):
        return u("Slice", u.names[0], u.ints(-1), u.ints(2**62), u.ints(u.axis(u.attrs["axis"])))


@op("size")
class Size:
    """The size of an axis, as an int64 scalar."""

    arity, attrs, cost = 1, {"axis": ...}, free_cost
    vjp, why = None, {"vjp": "a size is an integer", "emit": "a size is a number of the run"}
    vm = forms.SIZE
    traits = Traits(valueless=True)

    @staticmethod
    def infer(x, axis):
        axis_of(axis, len(x.shape))
        return Spec((), int64)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(2, 4, 3))], {"axis": 1}

    @staticmethod
    def axes(u: AxesUse):
        u.mixed(u.ins[0][axis_of(u.attrs["axis"], len(u.ins[0]))], "reads its size")
        return [()]

    @staticmethod
    def onnx(u: OnnxUse):
        return onnx_size(u, u.attrs["axis"])


@op("squeeze")
class Squeeze:
    """x without some axes of size 1."""

    arity, attrs, cost = 1, {"axes": ...}, free_cost
    emit = "{0}.squeeze({axes})"
    traits = Traits(rearranges=True, linear_in=(0,))

    @staticmethod
    def infer(x, axes):
        kept = _without(x.shape, axes)
        if any(x.shape[a] != 1 for a in axes_of(axes, len(x.shape))):
            raise ShapeError("only axes of size 1 can be removed", expected=1, got=f"{x}, axes {axes}")
        return Spec(kept, x.dtype)

    @staticmethod
    def view(layout, attrs):
        axes = attrs["axes"]
        return lay.Layout(_without(layout.shape, axes), _without(layout.strides, axes), layout.offset)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (call("unsqueeze", g, axes=axes_of(attrs["axes"], len(ins[0].shape))),)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(1, 3, 1, 2))], {"axes": [(0,), (-2,), (0, 2), (2, 0)][rng.integers(4)]}

    @staticmethod
    def axes(u: AxesUse):
        x, u.result_ranges[0] = u.ins[0], u.ranges[0]
        left_out = axes_of(u.attrs["axes"], len(x))
        return [tuple(t for a, t in enumerate(x) if a not in left_out)]

    @staticmethod
    def onnx(u: OnnxUse):
        return u("Squeeze", u.names[0], u.ints(*u.attrs["axes"]))


@op("unsqueeze")
class Unsqueeze:
    """x with new axes of size 1, at these axis numbers of the result."""

    arity, attrs, cost = 1, {"axes": ...}, free_cost
    traits = Traits(rearranges=True, linear_in=(0,))

    @staticmethod
    def infer(x, axes):
        at = axes_of(axes, len(x.shape) + len(axes))
        if len(at) != len(axes):
            raise ShapeError("an axis is named twice", expected=at, got=axes)
        return Spec(_with(x.shape, axes), x.dtype)

    @staticmethod
    def view(layout, attrs):
        return lay.Layout(_with(layout.shape, attrs["axes"]), _with(layout.strides, attrs["axes"]), layout.offset)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (call("squeeze", g, axes=attrs["axes"]),)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(3, 2))], {"axes": [(0,), (-1,), (1, 3), (-1, 0)][rng.integers(4)]}

    @staticmethod
    def axes(u: AxesUse):
        rank = len(u.shapes[0])
        added, rest = axes_of(u.attrs["axes"], rank), iter(u.ins[0])
        u.result_ranges[0] = u.ranges[0]
        return [tuple(Atom(1) if a in added else next(rest) for a in range(rank))]

    @staticmethod
    def onnx(u: OnnxUse):
        return u("Reshape", u.names[0], u.shape(u.outs[0].shape))

    @staticmethod
    def emit(i, a):
        front, back = sorted(n for n in a["axes"] if n >= 0), sorted((n for n in a["axes"] if n < 0), reverse=True)
        return i[0] + "".join(f".unsqueeze({n})" for n in (*front, *back))


def _without(sizes, axes):
    left_out = axes_of(axes, len(sizes))
    return tuple(n for a, n in enumerate(sizes) if a not in left_out)


def _with(sizes, axes):
    rank = len(sizes) + len(axes)
    added, rest = axes_of(axes, rank), iter(sizes)
    return tuple(1 if a in added else next(rest) for a in range(rank))


@op("diagonal")
class Diagonal:
    """Entries x[.., i, .., i + offset, ..] of two axes, as a last axis instead of them."""

    arity, attrs, cost = 1, {"offset": 0, "axes": (0, 1)}, free_cost
    emit = "{0}.diagonal({offset}, {axes:sizes})"
    why = {"onnx": "opset 20 has no view along two axes"}

    @staticmethod
    def infer(x, offset, axes):
        a, b = (axis_of(axis, len(x.shape)) for axis in axes)
        if a == b or isinstance(x.shape[a], str) or isinstance(x.shape[b], str):
            raise ShapeError(
                "a diagonal needs two different axes of known size", expected="two axes", got=f"{x}, {axes}"
            )
        return Spec((*_without(x.shape, axes), lay.diagonal_size(x.shape[a], x.shape[b], offset)), x.dtype)

    @staticmethod
    def view(layout, attrs):
        a, b = (axis_of(axis, len(layout.shape)) for axis in attrs["axes"])
        return lay.diagonal(layout, a, b, attrs["offset"])

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        shape = ins[0].shape
        a, b = (axis_of(axis, len(shape)) for axis in attrs["axes"])
        rest = [axis for axis in range(len(shape)) if axis not in (a, b)]
        start, step = lay.diagonal_entries(shape[b], attrs["offset"])
        flat = call("pad_slice", g, axis=-1, start=start, step=step, size=prod((shape[a], shape[b])))
        full = call("unflatten", flat, axis=-1, sizes=(shape[a], shape[b]))
        order = [*rest, a, b]
        return (call("permute", full, axes=tuple(order.index(axis) for axis in range(len(order)))),)

    @staticmethod
    def sample(rng):
        axes = [(0, 1), (1, 0), (-1, 0), (0, -1)][rng.integers(4)]
        return [rng.normal(size=(3, 2, 4)[: rng.integers(2, 4)])], {"offset": int(rng.integers(-1, 2)), "axes": axes}

    @staticmethod
    def axes(u: AxesUse):
        x = u.ins[0]
        a, b = (axis_of(axis, len(x)) for axis in u.attrs["axes"])
        rest = tuple(t for i, t in enumerate(x) if i not in (a, b))
        if u.attrs["offset"] == 0 and size(x[a]) == size(x[b]):
            u.same(x[a], x[b])
            return [(*rest, x[a])]
        for term in (x[a], x[b]):
            u.frozen(term, "reads a diagonal of it")
        return [(*rest, u.fresh(u.shapes[0][-1], "reads a diagonal"))]


@op("pad_slice")
class PadSlice(Backward):
    """sliceᵀ x: zeros of `size` along an axis, with x at start, start + step, ..."""

    arity, attrs = 1, {"axis": ..., "start": ..., "step": 1, "size": ...}
    traits = Traits(pads=True, backward_of="slice")

    @staticmethod
    def infer(x, axis, start, step, size):
        at = axis_of(axis, len(x.shape))
        if x.shape[at] and start + (x.shape[at] - 1) * step >= size:
            raise ShapeError("the operand does not fit into the padded axis", where=f"axis {at}", expected=size, got=x)
        return Spec((*x.shape[:at], size, *x.shape[at + 1 :]), x.dtype)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        at = axis_of(attrs["axis"], len(g.shape))
        return (call("slice", g, axis=at, start=attrs["start"], step=attrs["step"], size=ins[0].shape[at]),)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(2, 3))], {"axis": int(rng.choice((1, -1))), "start": 1, "step": 2, "size": 7}

    @staticmethod
    def axes(u: AxesUse):
        x, a = u.ins[0], u.attrs
        at = axis_of(a["axis"], len(x))
        if a["step"] == 1:
            before = Atom(a["start"])
            after = Atom(a["size"] - a["start"] - int(size(x[at])))
            full = chain(before, x[at], after)
            u.sizes |= {"start": before, "size": full}
        else:
            full = u.fresh(a["size"], f"puts zeros between {a['step']} entries of it")
            u.frozen(x[at], f"puts zeros between {a['step']} entries of it")
        return [(*x[:at], full, *x[at + 1 :])]


@op("concat")
class Concat:
    """Operands concatenated along an axis."""

    arity, attrs, traits = (1, None), {"axis": ...}, Traits(jointly_linear=True, mixes="axis", amp="promote")

    @staticmethod
    def infer(*ins, axis):
        one_dtype(*ins)
        at = axis_of(axis, len(ins[0].shape))
        rests = {(*i.shape[:at], *i.shape[at + 1 :]) for i in ins}
        if len(rests) > 1 or any(isinstance(i.shape[at], str) for i in ins):
            raise ShapeError(
                "operands differ on an axis other than the concatenated one",
                where=f"axis {at}",
                got=", ".join(map(repr, ins)),
            )
        return Spec((*ins[0].shape[:at], sum(i.shape[at] for i in ins), *ins[0].shape[at + 1 :]), ins[0].dtype)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        at = axis_of(attrs["axis"], len(g.shape))
        grads, start = [], 0
        for part, need in zip(ins, needs, strict=True):
            size = part.shape[at]
            grads.append(call("slice", g, axis=at, start=start, size=size) if need else None)
            start += size
        return tuple(grads)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(2, n)) for n in (3, 1, 2)], {"axis": 1}

    @staticmethod
    def axes(u: AxesUse):
        at = axis_of(u.attrs["axis"], len(u.ins[0]))
        for other in u.ins[1:]:
            for i, (a, b) in enumerate(zip(u.ins[0], other, strict=True)):
                if i != at:
                    u.same(a, b)
        x = u.ins[0]
        return [(*x[:at], chain(*(dims[at] for dims in u.ins)), *x[at + 1 :])]

    @staticmethod
    def onnx(u: OnnxUse):
        return u("Concat", *u.names, axis=u.attrs["axis"])

    @staticmethod
    def emit(i, a):
        return f"torch.cat(({', '.join(i)}{(',' if len(i) == 1 else '')}), {a['axis']})"
