"""Reordering, repeating, padding and masking entries of an array, and the transposes of these ops."""

from __future__ import annotations

from graphwright.array.dtype import int64
from graphwright.array.spec import Spec
from graphwright.errors import ShapeError
from graphwright.ops.axes import Atom, AxesUse, axes_of, axis_of, fixed_size, product, resized_last, size
from graphwright.ops.call import call
from graphwright.ops.emit import literal
from graphwright.ops.onnx import OnnxUse
from graphwright.ops.registry import Traits, free_cost, op
from graphwright.ops.rules import Backward, floating
from graphwright.ops.shape import onnx_size


@op("flip")
class Flip:
    """x[..., -1 - i, ...]: some axes in reversed order."""

    arity, attrs = 1, {"axes": ...}
    axes = fixed_size("the order of its entries matters: it reverses the axis", attr="axes")
    emit = "{0}.flip({axes})"

    @staticmethod
    def infer(x, axes):
        axes_of(axes, len(x.shape))
        return x

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (call("flip", g, axes=attrs["axes"]),)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(2, 3, 4))], {"axes": [(0,), (-1,), (1, 2), (0, 1, 2)][rng.integers(4)]}

    @staticmethod
    def onnx(u: OnnxUse):
        axes = [u.axis(a) for a in u.attrs["axes"]]
        n = len(axes)
        return u("Slice", u.names[0], u.ints(*[-1] * n), u.ints(*[-(2**62)] * n), u.ints(*axes), u.ints(*[-1] * n))


@op("roll")
class Roll:
    """x[(i - shift) mod n]: entries shifted cyclically along axes."""

    arity, attrs = 1, {"shifts": ..., "axes": ...}
    axes = fixed_size("the order of its entries matters: it shifts entries along it", attr="axes")
    emit = "{0}.roll({shifts}, {axes})"

    @staticmethod
    def infer(x, shifts, axes):
        if len(axes_of(axes, len(x.shape))) != len(shifts) or len(axes) != len(shifts):
            raise ShapeError("shifts and axes must pair up, each axis once", expected=axes, got=shifts)
        return x

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (call("roll", g, shifts=tuple(-s for s in attrs["shifts"]), axes=attrs["axes"]),)

    @staticmethod
    def sample(rng):
        axes = [(0,), (-1,), (2, 0)][rng.integers(3)]
        return [rng.normal(size=(3, 2, 5))], {
            "shifts": tuple(int(s) for s in rng.integers(-7, 8, len(axes))),
            "axes": axes,
        }

    @staticmethod
    def onnx(u: OnnxUse):
        x = u.names[0]
        for shift, axis in zip(u.attrs["shifts"], u.attrs["axes"], strict=True):
            at = u.axis(axis)
            size = u.ins[0].shape[at]
            if isinstance(size, str):
                return None
            k = -shift % size if size else 0
            parts = ((k, 2**62), (0, k))
            x = u("Concat", *(u("Slice", x, u.ints(a), u.ints(b), u.ints(at)) for a, b in parts), axis=at)
        return x


@op("tile")
class Tile:
    """The whole array repeated along each axis: a b -> a b a b; `repeats` may be longer than the rank of x."""

    arity, attrs = 1, {"repeats": ...}
    emit = "{0}.tile({repeats})"

    @staticmethod
    def infer(x, repeats):
        if len(repeats) < len(x.shape) or min(repeats, default=1) < 0:
            raise ShapeError("repeats must have an entry >= 0 for each axis", expected=len(x.shape), got=repeats)
        shape = (*(1,) * (len(repeats) - len(x.shape)), *x.shape)
        if any(isinstance(n, str) and r != 1 for n, r in zip(shape, repeats, strict=True)):
            raise ShapeError("an axis of symbolic size cannot be repeated", expected=x, got=repeats)
        return Spec(tuple(n if r == 1 else n * r for n, r in zip(shape, repeats, strict=True)), x.dtype)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        shape, repeats = ins[0].shape, attrs["repeats"]
        copies = len(repeats) - len(shape)
        pairs = (n for pair in zip(repeats[copies:], shape, strict=True) for n in pair)
        g = call("reshape", g, shape=(*repeats[:copies], *pairs))
        axes = (*range(copies), *range(copies, len(g.shape), 2))
        return (call("sum", g, axes=axes, keepdims=False),)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(2, 3))], {"repeats": tuple(int(r) for r in rng.integers(1, 4, rng.integers(2, 4)))}

    @staticmethod
    def axes(u: AxesUse):
        x, repeats = u.ins[0], u.attrs["repeats"]
        dims = (*(Atom(1) for _ in range(len(repeats) - len(x))), *x)
        copies = tuple(Atom(r) for r in repeats)
        u.sizes["repeats"] = copies
        return [tuple(t if size(c) == 1 else product(c, t) for c, t in zip(copies, dims, strict=True))]

    @staticmethod
    def onnx(u: OnnxUse):
        rank, repeats = len(u.ins[0].shape), u.attrs["repeats"]
        x = u.names[0]
        if len(repeats) > rank:
            x = u("Unsqueeze", x, u.ints(*range(len(repeats) - rank)))
        return u("Tile", x, u.ints(*[1] * (rank - len(repeats)), *repeats))


@op("repeat_interleave")
class RepeatInterleave:
    """Each entry of an axis repeated in place: a b -> a a b b."""

    arity, attrs = 1, {"repeats": ..., "axis": ...}
    emit = "{0}.repeat_interleave({repeats}, {axis})"

    @staticmethod
    def infer(x, repeats, axis):
        at = axis_of(axis, len(x.shape))
        if isinstance(x.shape[at], str) or repeats < 0:
            raise ShapeError(
                "repeat_interleave needs a known size and repeats >= 0",
                where=f"axis {at}",
                expected="a number at least 0",
                got=repeats,
            )
        return Spec((*x.shape[:at], x.shape[at] * repeats, *x.shape[at + 1 :]), x.dtype)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        at = axis_of(attrs["axis"], len(ins[0].shape))
        pairs = call("unflatten", g, axis=at, sizes=(ins[0].shape[at], attrs["repeats"]))
        return (call("sum", pairs, axes=(at + 1,), keepdims=False),)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(2, 3, 2))], {"repeats": int(rng.integers(1, 4)), "axis": int(rng.integers(-3, 3))}

    @staticmethod
    def axes(u: AxesUse):
        x, copies = u.ins[0], Atom(u.attrs["repeats"])
        at = axis_of(u.attrs["axis"], len(x))
        u.sizes["repeats"] = copies
        return [(*x[:at], product(x[at], copies), *x[at + 1 :])]

    @staticmethod
    def onnx(u: OnnxUse):
        axis, rank = u.axis(u.attrs["axis"]), len(u.ins[0].shape)
        apart = u("Unsqueeze", u.names[0], u.ints(axis + 1))
        many = u("Tile", apart, u.ints(*(u.attrs["repeats"] if i == axis + 1 else 1 for i in range(rank + 1))))
        return u("Reshape", many, u.shape(u.outs[0].shape))


MODES = ("constant", "reflect", "replicate")
_ONNX_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}


def _padded(x: Spec, widths: tuple[tuple[int, int], ...], mode: str) -> Spec:
    lead = len(x.shape) - len(widths)
    if mode not in MODES or lead < 0 or any(len(pair) != 2 or min(pair) < 0 for pair in widths):
        raise ShapeError(
            f"padding must be {', '.join(MODES)}, with widths (before, after) for each of the last axes",
            got=f"{mode}, {widths}",
        )
    for n, pair in zip(x.shape[lead:], widths, strict=True):
        least = {"constant": 0, "reflect": max(pair) + 1 if any(pair) else 0, "replicate": 1}[mode]
        if any(pair) and (isinstance(n, str) or n < least):
            raise ShapeError(f"the axis is too small for padding mode {mode}", expected=f"at least {least}", got=x)
    sizes = (n + sum(p) if isinstance(n, int) else n for n, p in zip(x.shape[lead:], widths, strict=True))
    return Spec((*x.shape[:lead], *sizes), x.dtype)


@op("pad")
class Pad:
    """x with its last axes extended by `widths` = (before, after) each.

    `constant` pads with `value`; `reflect` mirrors at the outermost entry without repeating it; `replicate` copies the
    outermost entry.
    """

    arity, attrs = 1, {"widths": ..., "mode": "constant", "value": 0.0}
    axes = resized_last("makes it longer")

    @staticmethod
    def infer(x, widths, mode, value):
        return _padded(x, widths, mode)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (call("pad_backward", g, widths=attrs["widths"], mode=attrs["mode"]),)

    @staticmethod
    def sample(rng):
        widths = tuple((int(a), int(b)) for a, b in rng.integers(0, 3, (rng.integers(1, 3), 2)))
        return [rng.normal(size=(2, 3, 4))], {"widths": widths, "mode": MODES[rng.integers(3)], "value": 0.0}

    @staticmethod
    def onnx(u: OnnxUse):
        rank, widths = len(u.ins[0].shape), u.attrs["widths"]
        axes = list(range(rank - len(widths), rank))
        pads = u.ints(*(w[0] for w in widths), *(w[1] for w in widths))
        value = u.scalar(u.attrs["value"]) if u.attrs["mode"] == "constant" else ""
        return u("Pad", u.names[0], pads, value, u.ints(*axes), mode=_ONNX_MODES[u.attrs["mode"]])

    @staticmethod
    def emit(i, a):
        widths = [n for pair in reversed(a["widths"]) for n in pair]
        value = f", value={literal(a['value'])}" if a["mode"] == "constant" else ""
        return f"F.pad({i[0]}, {widths}, mode={a['mode']!r}{value})"


@op("pad_backward")
class PadBackward(Backward):
    """padᵀ g: each padding entry of g added to the entry it was copied from, the last axes cut to size."""

    arity, attrs = 1, {"widths": ..., "mode": "constant"}
    traits = Traits(backward_of="pad")

    @staticmethod
    def infer(g, widths, mode):
        lead = len(floating(g).shape) - len(widths)
        sizes = (n if not any(p) else n - sum(p) for n, p in zip(g.shape[lead:], widths, strict=True))
        x = Spec((*g.shape[:lead], *sizes), g.dtype)
        _padded(x, widths, mode)
        return x

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (call("pad", g, **attrs),)

    @staticmethod
    def sample(rng):
        _, attrs = Pad.sample(rng)
        sizes = [2, 3, 4]
        for axis, pair in enumerate(attrs["widths"]):
            sizes[axis - len(attrs["widths"])] += sum(pair)
        return [rng.normal(size=sizes)], {"widths": attrs["widths"], "mode": attrs["mode"]}


class _Triangle:
    """A triangle of the last two axes."""

    arity, attrs, operands = 1, {"diagonal": 0}, ("x",)
    axes = fixed_size("the order of its entries matters: it keeps a triangle", last=2)

    @staticmethod
    def infer(x, diagonal):
        if len(x.shape) < 2:
            raise ShapeError("a triangle needs at least two axes", got=x)
        return x

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(2, 4, 3))], {"diagonal": int(rng.integers(-2, 3))}


@op("tril")
class Tril(_Triangle):
    """x[i, j] if j ≤ i + diagonal else 0, over the last two axes."""

    emit = "{0}.tril({diagonal})"

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (call("tril", g, diagonal=attrs["diagonal"]),)

    @staticmethod
    def onnx(u: OnnxUse):
        return u("Trilu", u.names[0], u.ints_scalar(u.attrs["diagonal"]), upper=0)


@op("triu")
class Triu(_Triangle):
    """x[i, j] if j ≥ i + diagonal else 0, over the last two axes."""

    emit = "{0}.triu({diagonal})"

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (call("triu", g, diagonal=attrs["diagonal"]),)

    @staticmethod
    def onnx(u: OnnxUse):
        return u("Trilu", u.names[0], u.ints_scalar(u.attrs["diagonal"]), upper=1)


@op("iota")
class Iota:
    """0, 1, ..., n - 1 for the size n of an axis of x, int64; n may be symbolic."""

    arity, attrs, cost = 1, {"axis": ...}, free_cost
    vjp, why = None, {"vjp": "indices are integers"}
    emit = "torch.arange({0}.shape[{axis}])"
    traits = Traits(valueless=True)

    @staticmethod
    def infer(x, axis):
        return Spec((x.shape[axis_of(axis, len(x.shape))],), int64)

    @staticmethod
    def sample(rng):
        return [rng.normal(size=(2, 4, 3))], {"axis": int(rng.integers(-3, 3))}

    @staticmethod
    def axes(u: AxesUse):
        u.result_ranges[0] = axis = u.ins[0][axis_of(u.attrs["axis"], len(u.ins[0]))]
        u.mixed(axis, "numbers its entries")
        return [(axis,)]

    @staticmethod
    def onnx(u: OnnxUse):
        return u("Range", u.ints_scalar(0), onnx_size(u, u.attrs["axis"]), u.ints_scalar(1))
