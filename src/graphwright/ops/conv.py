"""Convolution over any number of spatial axes, its two transposes, and `unfold` and `fold` (im2col, col2im).

`conv`, `conv_transpose` and `conv_weight` are the three partial maps of one trilinear form, so each occurs in the
gradients of the other two (Dumoulin and Visin 2016, "A guide to convolution arithmetic for deep learning", section 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from graphwright.array import sizes as named
from graphwright.array.layout import Window, per_axis
from graphwright.array.spec import Spec
from graphwright.errors import ShapeError
from graphwright.ops.attributes import Attr, PerAxis, Shape
from graphwright.ops.axes import Atom, AxesUse, Dims, Term, product, size
from graphwright.ops.call import call
from graphwright.ops.onnx import OnnxRow, OnnxUse
from graphwright.ops.registry import Attrs, Cost, Row, Saves, Traits, op
from graphwright.ops.rules import Backward, equal_dim, floating, one_dtype, wanted

_WINDOW = {"stride": Attr(PerAxis, 1), "padding": Attr(PerAxis, 0), "dilation": Attr(PerAxis, 1)}
_GROUPED = {**_WINDOW, "groups": Attr(int, 1)}


def _only(names: Mapping[str, Any], attrs: Attrs) -> dict[str, Any]:
    return {name: attrs[name] for name in names}


def _operands(x: Spec, w: Spec, b: Spec | None, channels: tuple[Any, ...]) -> None:
    floating(one_dtype(x, w, b))
    if len(x.shape) < 3 or len(w.shape) != len(x.shape):
        expected = "x [N, C, spatial...] and a weight of the same rank, at least 3"
        raise ShapeError("invalid operands of a convolution", expected=expected, got=f"{x}, {w}")
    if b is not None and b.shape != channels:
        raise ShapeError("the bias does not have one entry per output channel", expected=channels, got=b)


def _divides(groups: int, *channels: Any) -> None:
    if groups < 1 or any(isinstance(c, str) or c % groups for c in channels):
        expected = f"static numbers of channels, and groups >= 1 that divides all of {channels}"
        raise ShapeError("cannot divide the channels evenly into groups", expected=expected, got=groups)


def _bias(g: Any) -> Any:
    """Return the gradient of the bias: g summed over all axes but the channels."""
    return call("sum", g, axes=(0, *range(2, len(g.shape))), keepdims=False)


def _cost(positions: Spec, weight: Spec, ins: Sequence[Spec], outs: Sequence[Spec]) -> Cost:
    """Return the cost if each entry of `positions` is multiplied with all entries of weight[k], for one k."""
    flops = 2 * positions.size * (weight.size // max(weight.sizes[0], 1))
    return Cost(flops, sum(i.nbytes for i in ins), outs[0].nbytes)


def _geometry(rng: np.random.Generator) -> tuple[dict[str, Any], int, tuple[int, ...], tuple[int, ...]]:
    """Draw attributes, groups, kernel and input sizes of a test sample; windows need not cover the whole input."""
    rank, groups = int(rng.integers(1, 3)), int(rng.integers(1, 3))
    kernel = tuple(int(k) for k in rng.integers(1, 4, rank))
    attrs: dict[str, Any] = {
        "stride": tuple(int(s) for s in rng.integers(1, 3, rank)),
        "padding": tuple(int(rng.integers(0, k)) for k in kernel),
        "dilation": int(rng.integers(1, 3)),
    }
    return attrs, groups, kernel, tuple(int(n) for n in rng.integers(5, 7, rank))


def _onnx_conv(kind: str) -> OnnxRow:
    def row(u: OnnxUse) -> str:
        names = {"stride": "strides", "padding": "pads", "dilation": "dilations", "output_padding": "output_padding"}
        given = {new: each(u.attrs[k], len(u.ins[1].shape) - 2) for k, new in names.items() if k in u.attrs}
        return u(kind, *u.names, **{**given, "pads": given["pads"] * 2}, group=u.attrs["groups"])

    return row


def _emit_conv(i: Sequence[str], a: Mapping[str, Any]) -> str:
    rest = each(a["output_padding"]) if "output_padding" in a else [0]
    slide = ", ".join(str(each(a[k])) for k in ("stride", "padding", "dilation"))
    bias = i[2] if len(i) > 2 else None
    return f"torch.convolution({i[0]}, {i[1]}, {bias}, {slide}, {'output_padding' in a}, {rest}, {a['groups']})"


def each(value: int | Sequence[int], rank: int = 1) -> list[int]:
    """Return one number per spatial axis; an int is repeated `rank` times."""
    return [value] * rank if isinstance(value, int) else list(value)


def _convolved(u: AxesUse, groups: Atom, read: Term, made: Term, at: int) -> Sequence[Dims]:
    x, w = u.ins[:2]
    u.summed(read, (0, 1), (1, at))
    grouped_channels(u, groups, x[1], made)
    if len(u.ins) > 2:
        u.same(made, u.ins[2][0])
    for term in (*x[2:], *w[2:]):
        u.frozen(term, "slides a window over it")
    return [(x[0], made, *(u.fresh(n, "has one entry per window position") for n in u.shapes[0][2:]))]


def grouped_channels(u: AxesUse, groups: Atom, *channels: Term) -> None:
    """State that the axis `groups`, sized by the attribute `groups`, counts channel groups, the `channels` channels."""
    u.sizes["groups"] = groups
    u.kind(groups, "channel_groups")
    for term in channels:
        u.kind(term, "channels")


class _Convolution(Row):
    arity, saves, emit = (2, 3), Saves(inputs=(0, 1)), _emit_conv
    traits = Traits(channels_first=True, amp="low", contiguous=(0, 1), addend=2)


@op("conv")
class Conv(_Convolution):
    """Cross-correlation: x [N, C, spatial...], w [O, C/groups, kernel...] (, b [O]) -> [N, O, positions...].

    y[n, o, i] = b[o] + Σ w[o, c, k] · x[n, c, stride·i + dilation·k - padding], where x is 0 outside its bounds and c
    runs over the channels in the group of o.
    """

    attrs, traits, onnx = _GROUPED, Traits(contracts="window"), _onnx_conv("Conv")
    cost = lambda ins, outs, attrs: _cost(outs[0], ins[1], ins, outs)

    def infer(x, w, b=None, *, groups, **window):
        _operands(x, w, b, w.shape[:1])
        _divides(groups, x.shape[1], w.shape[0])
        equal_dim(w.shape[1], x.shape[1] // groups, "channels of a group")
        return Spec((x.shape[0], w.shape[0], *Window.of(w.shape[2:], window).counts(x.shape[2:])), x.dtype)

    def vjp(g, ins, outs, attrs, needs):
        x, w = ins[:2]
        same, window = _only(_GROUPED, attrs), Window.of(w.shape[2:], attrs)
        dx = lambda: call("conv_transpose", g, w, **same, output_padding=window.rest(x.shape[2:]))
        return wanted(needs, dx, lambda: call("conv_weight", x, g, **same, kernel=window.kernel), lambda: _bias(g))

    def sample(rng):
        attrs, groups, kernel, sizes = _geometry(rng)
        w = rng.normal(size=(3 * groups, 2, *kernel))
        operands = [rng.normal(size=(2, 2 * groups, *sizes)), w, rng.normal(size=len(w))]
        return operands[: rng.integers(2, 4)], {**attrs, "groups": groups}

    def axes(u: AxesUse):
        x, w = u.ins[:2]
        groups, made = Atom(u.attrs["groups"]), Atom(int(size(w[0])) // u.attrs["groups"])
        u.same(x[1], product(groups, w[1]))
        u.same(w[0], product(groups, made))
        return _convolved(u, groups, w[1], w[0], 1)


@op("conv_transpose")
class ConvTranspose(_Convolution):
    """Transposed convolution: x [N, I, spatial...], w [I, O/groups, kernel...] (, b [O]) -> [N, O, sizes...].

    It maps an output gradient of `conv` with weight w to the gradient of that conv's input. A spatial size n becomes
    (n - 1)·stride - 2·padding + dilation·(kernel - 1) + 1 + output_padding. `output_padding`, below the stride, is the
    number of input entries after the last window of that conv.
    """

    attrs, onnx = {**_GROUPED, "output_padding": Attr(PerAxis, 0)}, _onnx_conv("ConvTranspose")
    cost = lambda ins, outs, attrs: _cost(ins[0], ins[1], ins, outs)

    def infer(x, w, b=None, *, groups, output_padding, **window):
        _operands(x, w, None, ())
        _divides(groups, x.shape[1], w.shape[0])
        channels = w.shape[1] * groups
        _operands(x, w, b, (channels,))
        equal_dim(w.shape[0], x.shape[1], "channels in")
        rule = Window.of(w.shape[2:], window)
        sizes = rule.spread(x.shape[2:], per_axis(output_padding, len(rule.kernel), "output_padding"))
        return Spec((x.shape[0], channels, *sizes), x.dtype)

    def vjp(g, ins, outs, attrs, needs):
        x, w, same = *ins[:2], _only(_GROUPED, attrs)
        dw = lambda: call("conv_weight", g, x, **same, kernel=w.shape[2:])
        return wanted(needs, lambda: call("conv", g, w, **same), dw, lambda: _bias(g))

    def sample(rng):
        attrs, groups, kernel, _ = _geometry(rng)
        rest = tuple(int(rng.integers(0, s)) for s in attrs["stride"])
        w = rng.normal(size=(2 * groups, 3, *kernel))
        operands = [rng.normal(size=(2, 2 * groups, *(4 for _ in kernel))), w, rng.normal(size=3 * groups)]
        return operands[: rng.integers(2, 4)], {**attrs, "groups": groups, "output_padding": rest}

    def axes(u: AxesUse):
        x, w = u.ins[:2]
        groups, read = Atom(u.attrs["groups"]), Atom(int(size(w[0])) // u.attrs["groups"])
        u.same(w[0], product(groups, read))
        u.same(x[1], w[0])
        return _convolved(u, groups, read, product(groups, w[1]), 0)


@op("conv_weight")
class ConvWeight(Backward):
    """Gradient of `conv` with respect to w: x [N, C, spatial...], g [N, O, positions...] -> [O, C/groups, kernel...].

    dw[o, c, k] = Σ over n and positions i of g[n, o, i] · x[n, c, stride·i + dilation·k - padding].
    """

    arity, attrs, saves = 2, {**_GROUPED, "kernel": Attr(tuple[int, ...])}, Saves(inputs=(0, 1))
    traits = Traits(backward_of="conv", amp="low", contiguous=(0, 1))
    cost = lambda ins, outs, attrs: _cost(ins[1], outs[0], ins, outs)

    def infer(x, g, *, groups, kernel, **window):
        _operands(x, g, None, ())
        _divides(groups, x.shape[1], g.shape[1])
        equal_dim(g.shape[0], x.shape[0], "N")
        positions = Window.of(kernel, window).counts(x.shape[2:])
        if g.shape[2:] != positions:
            raise ShapeError("the gradient does not have one entry per window position", expected=positions, got=g)
        return Spec((g.shape[1], x.shape[1] // groups, *kernel), x.dtype)

    def vjp(g, ins, outs, attrs, needs):
        (x, upstream), same = ins, _only(_GROUPED, attrs)
        rest = Window.of(attrs["kernel"], attrs).rest(x.shape[2:])
        dx = lambda: call("conv_transpose", upstream, g, **same, output_padding=rest)
        return wanted(needs, dx, lambda: call("conv", x, g, **same))

    def sample(rng):
        attrs, groups, kernel, sizes = _geometry(rng)
        positions = Window.of(kernel, attrs).counts(sizes)
        x, g = rng.normal(size=(2, 2 * groups, *sizes)), rng.normal(size=(2, 3 * groups, *positions))
        return [x, g], {**attrs, "groups": groups, "kernel": kernel}


class _Columns(Row):
    arity, traits = 1, Traits(contiguous=(0,))
    why = {
        "onnx": "a convolution is the op to export",
        "emit": "torch has them for planes only; a convolution is the op to export",
    }


@op("unfold")
class Unfold(_Columns):
    """The windows of x as columns: x [N, C, spatial...] -> [N, C · kernel entries, positions], with 0 for padding."""

    attrs = {**_WINDOW, "kernel": Attr(tuple[int, ...])}
    vjp = lambda g, ins, outs, attrs, needs: (call("fold", g, **attrs, sizes=ins[0].shape[2:]),)

    def infer(x, kernel, **window):
        if len(x.shape) < 3 or isinstance(x.shape[1], str):
            raise ShapeError("invalid operand of unfold", expected="[N, C, spatial...] with a static C", got=x)
        rule = Window.of(kernel, window)
        return Spec((x.shape[0], x.shape[1] * rule.entries, named.product(rule.counts(x.shape[2:]))), x.dtype)

    def sample(rng):
        attrs, groups, kernel, sizes = _geometry(rng)
        return [rng.normal(size=(2, groups, *sizes))], {**attrs, "kernel": kernel}

    def axes(u: AxesUse):
        x, kernel = u.ins[0], u.fresh(prod(u.attrs["kernel"]), "has one entry per kernel entry")
        for term in x[2:]:
            u.frozen(term, "slides a window over it")
        return [(x[0], product(x[1], kernel), u.fresh(u.shapes[0][2], "has one entry per window position"))]


@op("fold")
class Fold(_Columns):
    """Transpose of `unfold`: adds each column to its window, [N, C · kernel entries, positions] -> [N, C, sizes...]."""

    attrs = {**_WINDOW, "kernel": Attr(tuple[int, ...]), "sizes": Attr(Shape)}
    vjp = lambda g, ins, outs, attrs, needs: (call("unfold", g, **_only(Unfold.attrs, attrs)),)

    def infer(x, kernel, sizes, **window):
        rule = Window.of(kernel, window)
        positions = prod(rule.counts(sizes))
        if len(x.shape) != 3 or isinstance(x.shape[1], str) or x.shape[1] % rule.entries or x.shape[2] != positions:
            want = ("N", f"C·{rule.entries}", positions)
            raise ShapeError("the operand does not have the shape of unfolded windows", expected=want, got=x)
        return Spec((x.shape[0], x.shape[1] // rule.entries, *sizes), floating(x).dtype)

    def sample(rng):
        attrs, groups, kernel, sizes = _geometry(rng)
        rule = Window.of(kernel, attrs)
        columns = rng.normal(size=(2, groups * rule.entries, prod(rule.counts(sizes))))
        return [columns], {**attrs, "kernel": kernel, "sizes": sizes}

    def axes(u: AxesUse):
        x, kernel = u.ins[0], u.fresh(prod(u.attrs["kernel"]), "has one entry per kernel entry")
        channels = Atom(u.shapes[0][1])
        u.same(x[1], product(channels, kernel))
        u.frozen(x[2], "slides a window over it")
        return [(x[0], channels, *(u.fresh(n, "slides a window over it") for n in u.shapes[0][2:]))]
