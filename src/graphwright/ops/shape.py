"""Views (reshape, permute, expand, slice, ...) and their transposes. A view costs nothing where strides allow it."""

from __future__ import annotations

from math import prod

from graphwright.array import layout as lay
from graphwright.array.dtype import int64
from graphwright.array.spec import Dim, Spec
from graphwright.errors import ShapeError
from graphwright.ops.call import call
from graphwright.ops.registry import Traits, free_cost, op
from graphwright.ops.rules import axes_of, axis_of, one_dtype


def _fits(x: Spec, shape: tuple[Dim, ...]) -> None:
    have, want = list(x.shape), list(shape)
    for dim in [d for d in have if isinstance(d, str) and d in want]:  # names on both sides cancel
        have.remove(dim)
        want.remove(dim)
    left, right = Spec(tuple(have), x.dtype), Spec(tuple(want), x.dtype)
    if left.symbolic or right.symbolic or left.size != right.size:
        raise ShapeError("another number of elements", expected=x, got=shape)


@op("reshape")
class Reshape:
    """The same elements, row by row, under another shape."""

    arity, attrs, cost = 1, {"shape": ...}, free_cost

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


@op("unflatten")
class Unflatten:
    """Split one axis into several: [.., a·b, ..] -> [.., a, b, ..]; other axes may be named sizes."""

    arity, attrs, cost = 1, {"axis": ..., "sizes": ...}, free_cost

    @staticmethod
    def infer(x, axis, sizes):
        at = axis_of(axis, len(x.shape))
        if x.shape[at] != prod(sizes):
            raise ShapeError("the axis does not split so", where=f"axis {at}", expected=x.shape[at], got=sizes)
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


@op("flatten")
class Flatten:
    """Join axes start..end (both included) into one."""

    arity, attrs, cost = 1, {"start": ..., "end": ...}, free_cost

    @staticmethod
    def infer(x, start, end):
        a, b = axis_of(start, len(x.shape)), axis_of(end, len(x.shape))
        joined = x.shape[a : b + 1]
        named, known = [d for d in joined if isinstance(d, str)], [d for d in joined if isinstance(d, int)]
        if a > b or (named and prod(known) != 1) or len(named) > 1:
            raise ShapeError("these axes do not join into one known size", expected="start <= end, sizes known", got=x)
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


@op("permute")
class Permute:
    """Axes in another order."""

    arity, attrs, cost = 1, {"axes": ...}, free_cost

    @staticmethod
    def infer(x, axes):
        if sorted(axes) != list(range(len(x.shape))):
            raise ShapeError("not an order of the axes", expected=f"each of 0..{len(x.shape) - 1} once", got=axes)
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


@op("expand")
class Expand:
    """Broadcast to a shape; the gradient is summed back by the engine."""

    arity, attrs, cost = 1, {"shape": ...}, free_cost

    @staticmethod
    def infer(x, shape):
        lead = len(shape) - len(x.shape)
        if lead < 0 or any(h not in (1, w) for h, w in zip(x.shape, shape[lead:], strict=True)):
            raise ShapeError("does not broadcast to this shape", expected=shape, got=x)
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


@op("slice")
class Slice:
    """Entries start, start + step, ... (`size` of them) of one axis."""

    arity, attrs, cost = 1, {"axis": ..., "start": ..., "size": ..., "step": 1}, free_cost

    @staticmethod
    def infer(x, axis, start, size, step):
        at = axis_of(axis, len(x.shape))
        full = x.shape[at]
        if isinstance(full, str) or size < 0 or step < 1 or start < 0 or (size and start + (size - 1) * step >= full):
            raise ShapeError(
                "the slice leaves the axis", where=f"axis {at}", expected=full, got=f"{size} from {start}, step {step}"
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


@op("last")
class Last:
    """The last entry of an axis, kept as an axis of size 1."""

    arity, attrs, cost = 1, {"axis": ...}, free_cost

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


@op("size")
class Size:
    """The size of an axis, as an int64 scalar."""

    arity, attrs, cost = 1, {"axis": ...}, free_cost
    vjp, why = None, {"vjp": "a size is an integer"}

    @staticmethod
    def infer(x, axis):
        axis_of(axis, len(x.shape))
        return Spec((), int64)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(2, 4, 3))], {"axis": 1}


@op("squeeze")
class Squeeze:
    """Axes of size 1 left out; the gradient gets them back."""

    arity, attrs, cost = 1, {"axes": ...}, free_cost

    @staticmethod
    def infer(x, axes):
        kept = _without(x.shape, axes)
        if any(x.shape[a] != 1 for a in axes_of(axes, len(x.shape))):
            raise ShapeError("only axes of size 1 can be left out", expected=1, got=f"{x}, axes {axes}")
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


@op("unsqueeze")
class Unsqueeze:
    """New axes of size 1, at these places of the result."""

    arity, attrs, cost = 1, {"axes": ...}, free_cost

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

    @staticmethod
    def infer(x, offset, axes):
        a, b = (axis_of(axis, len(x.shape)) for axis in axes)
        if a == b or isinstance(x.shape[a], str) or isinstance(x.shape[b], str):
            raise ShapeError(
                "a diagonal is of two different axes of known size", expected="two axes", got=f"{x}, {axes}"
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
        start, step = lay.diagonal_places(shape[b], attrs["offset"])
        flat = call("pad_slice", g, axis=-1, start=start, step=step, size=prod((shape[a], shape[b])))
        full = call("unflatten", flat, axis=-1, sizes=(shape[a], shape[b]))
        order = [*rest, a, b]
        return (call("permute", full, axes=tuple(order.index(axis) for axis in range(len(order)))),)

    @staticmethod
    def sample(rng):
        axes = [(0, 1), (1, 0), (-1, 0), (0, -1)][rng.integers(4)]
        return [rng.normal(size=(3, 2, 4)[: rng.integers(2, 4)])], {"offset": int(rng.integers(-1, 2)), "axes": axes}


@op("pad_slice")
class PadSlice:
    """Zeros of `size` along an axis with x at start, start + step, ...: the transpose of `slice`."""

    arity, attrs = 1, {"axis": ..., "start": ..., "step": 1, "size": ...}

    @staticmethod
    def infer(x, axis, start, step, size):
        at = axis_of(axis, len(x.shape))
        if x.shape[at] and start + (x.shape[at] - 1) * step >= size:
            raise ShapeError("does not fit into the padded axis", where=f"axis {at}", expected=size, got=x)
        return Spec((*x.shape[:at], size, *x.shape[at + 1 :]), x.dtype)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        at = axis_of(attrs["axis"], len(g.shape))
        return (call("slice", g, axis=at, start=attrs["start"], step=attrs["step"], size=ins[0].shape[at]),)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(2, 3))], {"axis": int(rng.choice((1, -1))), "start": 1, "step": 2, "size": 7}


@op("concat")
class Concat:
    """Operands behind one another along an axis."""

    arity, attrs, traits = (1, None), {"axis": ...}, Traits(amp="promote")

    @staticmethod
    def infer(*ins, axis):
        one_dtype(*ins)
        at = axis_of(axis, len(ins[0].shape))
        rests = {(*i.shape[:at], *i.shape[at + 1 :]) for i in ins}
        if len(rests) > 1 or any(isinstance(i.shape[at], str) for i in ins):
            raise ShapeError(
                "operands differ beside the joined axis", where=f"axis {at}", got=", ".join(map(repr, ins))
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
