"""Ops that reorder, repeat, pad and mask entries of an array, and the transposes of these ops."""

from __future__ import annotations

from typing import Literal

from graphwright.array.dtype import int64
from graphwright.array.sizes import product as multiplied
from graphwright.array.sizes import total
from graphwright.array.spec import Spec
from graphwright.errors import ShapeError
from graphwright.ops.attributes import Attr, AxisList, NamedSize
from graphwright.ops.axes import Atom, AxesUse, axes_of, axis_of, fixed_size, product, resized_last, size, spliced
from graphwright.ops.call import call
from graphwright.ops.emit import literal
from graphwright.ops.onnx import OnnxUse
from graphwright.ops.registry import Row, Traits, free_cost, op
from graphwright.ops.rules import Backward, floating
from graphwright.ops.shape import onnx_size


@op("flip")
class Flip(Row):
    """x[..., -1 - i, ...]: entries along some axes in reversed order."""

    arity, attrs, emit = 1, {"axes": Attr(AxisList)}, "{0}.flip({axes})"
    axes = fixed_size("reverses it, so that the order of its entries matters", attr="axes")
    vjp = lambda g, ins, outs, attrs, needs: (call("flip", g, axes=attrs["axes"]),)
    sample = lambda rng: ([rng.normal(size=(2, 3, 4))], {"axes": [(0,), (-1,), (1, 2), (0, 1, 2)][rng.integers(4)]})

    def infer(x, axes):
        axes_of(axes, len(x.shape))
        return x

    def onnx(u: OnnxUse):
        axes = [u.axis(a) for a in u.attrs["axes"]]
        n = len(axes)
        return u("Slice", u.names[0], u.ints(*[-1] * n), u.ints(*[-(2**62)] * n), u.ints(*axes), u.ints(*[-1] * n))


@op("roll")
class Roll(Row):
    """x[(i - shift) mod n]: entries shifted cyclically along axes."""

    arity, attrs, emit = 1, {"shifts": Attr(AxisList), "axes": Attr(AxisList)}, "{0}.roll({shifts}, {axes})"
    axes = fixed_size("shifts entries along it, so that their order matters", attr="axes")

    def infer(x, shifts, axes):
        if len(axes_of(axes, len(x.shape))) != len(shifts) or len(axes) != len(shifts):
            expected = "distinct axes, and one shift for each of them"
            raise ShapeError("invalid shifts or axes of roll", expected=expected, got=f"shifts {shifts}, axes {axes}")
        return x

    def vjp(g, ins, outs, attrs, needs):
        return (call("roll", g, shifts=tuple(-s for s in attrs["shifts"]), axes=attrs["axes"]),)

    def sample(rng):
        axes = [(0,), (-1,), (2, 0)][rng.integers(3)]
        x = rng.normal(size=(3, 2, 5))
        return [x], {"shifts": tuple(int(s) for s in rng.integers(-7, 8, len(axes))), "axes": axes}

    def onnx(u: OnnxUse):
        x = u.names[0]
        for shift, axis in zip(u.attrs["shifts"], u.attrs["axes"], strict=True):
            at, size = u.axis(axis), u.ins[0].shape[axis]
            if isinstance(size, str):
                return None
            k = -shift % size if size else 0
            parts = ((k, 2**62), (0, k))
            x = u("Concat", *(u("Slice", x, u.ints(a), u.ints(b), u.ints(at)) for a, b in parts), axis=at)
        return x


@op("tile")
class Tile(Row):
    """x repeated as a whole, `repeats[k]` times along axis k: a b -> a b a b. A longer `repeats` adds leading axes."""

    arity, attrs, emit = 1, {"repeats": Attr(tuple[int | NamedSize, ...])}, "{0}.tile({repeats:sizes})"

    def infer(x, repeats):
        if len(repeats) < len(x.shape) or any(isinstance(r, int) and r < 0 for r in repeats):
            expected = f"at least {len(x.shape)} counts, each >= 0"
            raise ShapeError("invalid repeats of tile", expected=expected, got=repeats)
        shape = (*(1,) * (len(repeats) - len(x.shape)), *x.shape)
        return Spec(tuple(map(multiplied, zip(shape, repeats, strict=True))), x.dtype)

    def vjp(g, ins, outs, attrs, needs):
        shape, repeats = ins[0].shape, attrs["repeats"]
        copies = len(repeats) - len(shape)
        pairs = (n for pair in zip(repeats[copies:], shape, strict=True) for n in pair)
        g = call("reshape", g, shape=(*repeats[:copies], *pairs))
        axes = (*range(copies), *range(copies, len(g.shape), 2))
        return (call("sum", g, axes=axes, keepdims=False),)

    def sample(rng):
        return [rng.normal(size=(2, 3))], {"repeats": tuple(int(r) for r in rng.integers(1, 4, rng.integers(2, 4)))}

    def axes(u: AxesUse):
        x, repeats = u.ins[0], u.attrs["repeats"]
        dims = (*(Atom(1) for _ in range(len(repeats) - len(x))), *x)
        u.sizes["repeats"] = copies = tuple(Atom(r) for r in repeats)
        return [tuple(t if size(c) == 1 else product(c, t) for c, t in zip(copies, dims, strict=True))]

    def onnx(u: OnnxUse):
        x, rank, repeats = u.names[0], len(u.ins[0].shape), u.attrs["repeats"]
        if len(repeats) > rank:
            x = u("Unsqueeze", x, u.ints(*range(len(repeats) - rank)))
        return u("Tile", x, u.shape((*[1] * (rank - len(repeats)), *repeats)))


@op("repeat_interleave")
class RepeatInterleave(Row):
    """Each entry along an axis repeated `repeats` times in a row: a b -> a a b b."""

    arity, attrs = 1, {"repeats": Attr(int), "axis": Attr(int)}
    emit = "{0}.repeat_interleave({repeats}, {axis})"

    def infer(x, repeats, axis):
        at = axis_of(axis, len(x.shape))
        if repeats < 0:
            raise ShapeError("repeats is negative", expected=">= 0", got=repeats)
        return Spec(spliced(x.shape, at, multiplied((x.shape[at], repeats))), x.dtype)

    def vjp(g, ins, outs, attrs, needs):
        at = axis_of(attrs["axis"], len(ins[0].shape))
        pairs = call("unflatten", g, axis=at, sizes=(ins[0].shape[at], attrs["repeats"]))
        return (call("sum", pairs, axes=(at + 1,), keepdims=False),)

    def sample(rng):
        return [rng.normal(size=(2, 3, 2))], {"repeats": int(rng.integers(1, 4)), "axis": int(rng.integers(-3, 3))}

    def axes(u: AxesUse):
        x, axis = u.ins[0], u.attrs["axis"]
        u.sizes["repeats"] = copies = Atom(u.attrs["repeats"])
        return [spliced(x, axis, product(x[axis], copies))]

    def onnx(u: OnnxUse):
        axis, rank = u.axis(u.attrs["axis"]), len(u.ins[0].shape)
        apart = u("Unsqueeze", u.names[0], u.ints(axis + 1))
        many = u("Tile", apart, u.ints(*(u.attrs["repeats"] if i == axis + 1 else 1 for i in range(rank + 1))))
        return u("Reshape", many, u.shape(u.outs[0].shape))


MODES = ("constant", "reflect", "replicate")
_PADDING = {"widths": Attr(tuple[tuple[int, int], ...]), "mode": Attr(Literal[MODES], "constant")}


def _padded(x: Spec, widths: tuple[tuple[int, int], ...], mode: str) -> Spec:
    lead = len(x.shape) - len(widths)
    if lead < 0 or any(min(pair) < 0 for pair in widths):
        expected = f"at most {len(x.shape)} pairs (before, after) of numbers >= 0"
        raise ShapeError("invalid padding widths", expected=expected, got=widths)
    for axis, (n, pair) in enumerate(zip(x.shape[lead:], widths, strict=True), lead):
        if not any(pair):
            continue
        least = {"constant": 0, "reflect": max(pair) + 1, "replicate": 1}[mode]
        if isinstance(n, int) and n < least:
            what = f"the axis is too small to be padded by {pair} in mode {mode!r}"
            raise ShapeError(what, where=f"axis {axis}", expected=f"size >= {least}", got=x)
    sizes = (total((n, *p)) for n, p in zip(x.shape[lead:], widths, strict=True))
    return Spec((*x.shape[:lead], *sizes), x.dtype)


@op("pad")
class Pad(Row):
    """x with padding before and after its last axes; `widths` has a pair (before, after) for each of them.

    Mode `constant` pads with `value`; `reflect` mirrors at the outermost entry without repeating it; `replicate` copies
    the outermost entry.
    """

    arity, attrs = 1, {**_PADDING, "value": Attr(bool | int | float, 0.0)}
    axes = resized_last("makes it longer")
    infer = lambda x, widths, mode, value: _padded(x, widths, mode)
    vjp = lambda g, ins, outs, attrs, needs: (call("pad_backward", g, widths=attrs["widths"], mode=attrs["mode"]),)

    def sample(rng):
        widths = tuple((int(a), int(b)) for a, b in rng.integers(0, 3, (rng.integers(1, 3), 2)))
        return [rng.normal(size=(2, 3, 4))], {"widths": widths, "mode": MODES[rng.integers(3)], "value": 0.0}

    def onnx(u: OnnxUse):
        rank, widths, mode = len(u.ins[0].shape), u.attrs["widths"], u.attrs["mode"]
        pads = u.ints(*(w[0] for w in widths), *(w[1] for w in widths))
        value = u.scalar(u.attrs["value"]) if mode == "constant" else ""
        axes = u.ints(*range(rank - len(widths), rank))
        return u("Pad", u.names[0], pads, value, axes, mode="edge" if mode == "replicate" else mode)

    def emit(i, a):
        widths = [n for pair in reversed(a["widths"]) for n in pair]
        value = f", value={literal(a['value'])}" if a["mode"] == "constant" else ""
        return f"F.pad({i[0]}, {widths}, mode={a['mode']!r}{value})"


@op("pad_backward")
class PadBackward(Backward):
    """Gradient of `pad`: g without the padding.

    In modes `reflect` and `replicate`, g of each padding entry is added to that of the entry that it copies.
    """

    arity, attrs, traits = 1, _PADDING, Traits(backward_of="pad")
    vjp = lambda g, ins, outs, attrs, needs: (call("pad", g, **attrs),)

    def infer(g, widths, mode):
        lead = len(floating(g).shape) - len(widths)
        sizes = (total((n, -before, -after)) for n, (before, after) in zip(g.shape[lead:], widths, strict=True))
        x = Spec((*g.shape[:lead], *sizes), g.dtype)
        _padded(x, widths, mode)
        return x

    def sample(rng):
        _, attrs = Pad.sample(rng)
        sizes = [2, 3, 4]
        for axis, pair in enumerate(attrs["widths"]):
            sizes[axis - len(attrs["widths"])] += sum(pair)
        return [rng.normal(size=sizes)], {"widths": attrs["widths"], "mode": attrs["mode"]}


class _Triangle(Row):
    """Base of `tril` and `triu`, which keep a triangle of each matrix (the last two axes) and set the rest to 0."""

    arity, attrs, operands = 1, {"diagonal": Attr(int, 0)}, ("x",)
    axes = fixed_size("keeps a triangle, so that the order of its entries matters", last=2)
    sample = lambda rng: ([rng.normal(size=(2, 4, 3))], {"diagonal": int(rng.integers(-2, 3))})

    def infer(x, diagonal):
        if len(x.shape) < 2:
            raise ShapeError("cannot take a triangle of an operand with fewer than two axes", got=x)
        return x


@op("tril")
class Tril(_Triangle):
    """x[i, j] if j ≤ i + diagonal else 0, over the last two axes."""

    emit = "{0}.tril({diagonal})"
    vjp = lambda g, ins, outs, attrs, needs: (call("tril", g, diagonal=attrs["diagonal"]),)
    onnx = lambda u: u("Trilu", u.names[0], u.ints_scalar(u.attrs["diagonal"]), upper=0)


@op("triu")
class Triu(_Triangle):
    """x[i, j] if j ≥ i + diagonal else 0, over the last two axes."""

    emit = "{0}.triu({diagonal})"
    vjp = lambda g, ins, outs, attrs, needs: (call("triu", g, diagonal=attrs["diagonal"]),)
    onnx = lambda u: u("Trilu", u.names[0], u.ints_scalar(u.attrs["diagonal"]), upper=1)


@op("iota")
class Iota(Row):
    """0, 1, ..., n - 1 for the size n of an axis of x, int64; n may be a named size."""

    arity, attrs, cost, traits = 1, {"axis": Attr(int)}, free_cost, Traits(valueless=True)
    vjp, why, emit = None, {"vjp": "indices are integers"}, "torch.arange({0}.shape[{axis}])"
    infer = lambda x, axis: Spec((x.shape[axis_of(axis, len(x.shape))],), int64)
    sample = lambda rng: ([rng.normal(size=(2, 4, 3))], {"axis": int(rng.integers(-3, 3))})
    onnx = lambda u: u("Range", u.ints_scalar(0), onnx_size(u, u.attrs["axis"]), u.ints_scalar(1))

    def axes(u: AxesUse):
        u.result_ranges[0] = axis = u.ins[0][u.attrs["axis"]]
        u.mixed(axis, "numbers its entries")
        return [(axis,)]
