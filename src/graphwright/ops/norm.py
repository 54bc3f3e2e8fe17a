"""Normalisations over one or more axes, with statistics in float32 or wider and the biased variance.

With r = 1/√(var + eps), x̂ = (x - mean)·r and u = g·w: dx = r(u - mean(u) - x̂·mean(u·x̂)), dw = Σ g·x̂, db = Σ g.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, prod
from typing import Any

import numpy as np

from graphwright.array.dtype import bool_, float32
from graphwright.array.spec import Spec, broadcast_shapes
from graphwright.array.vm.encode import rows as forms
from graphwright.errors import DTypeError, ShapeError
from graphwright.ops.attributes import Attr
from graphwright.ops.axes import Atom, AxesUse, Correction, Dims, along_axis, axis_of, product, size
from graphwright.ops.call import as_dtype, call
from graphwright.ops.conv import grouped_channels
from graphwright.ops.emit import TorchModule
from graphwright.ops.onnx import OnnxUse, WholeNode, all_float32, numpy_dtype
from graphwright.ops.registry import Cost, Row, Saves, Traits, op
from graphwright.ops.rules import floating, one_dtype, wanted
from graphwright.settings import Number


def _wide(*values: Any) -> list[Any]:
    """Cast 16-bit tensors to float32; specs, which stand for operands that were not saved, are returned unchanged."""
    return [v if isinstance(v, Spec) or not v.dtype.is_low else call("cast", v, dtype=float32) for v in values]


def _narrow(grads, ins):
    """Cast each gradient to the dtype of its operand."""
    return tuple(None if g is None else as_dtype(g, x.dtype) for g, x in zip(grads, ins, strict=True))


def _sum(x, axes):
    return call("sum", x, axes=axes)


def _mean(x, axes):
    return call("mean", x, axes=axes, keepdims=True)


def _count(x, axes, less):
    """Return n - `less`, n the number of entries over `axes`: a float, or a traced value if a size is named."""
    known = prod(n for a in axes if type(n := x.shape[a]) is int)
    named = [call("size", x, axis=a) for a in axes if type(x.shape[a]) is not int]
    if not named:
        return float(known - less)
    count = named[0] * known
    for other in named[1:]:
        count = count * other
    return call("cast", count - less, dtype=x.dtype)


def _standard(x, axes, eps):
    """Return x̂ = (x - mean)·r and r = 1/√(var + eps), with mean and variance over `axes`."""
    apart = x - _mean(x, axes)
    r = call("rsqrt", _mean(apart * apart, axes) + eps)
    return apart * r, r


def _through(u, unit, r, axes):
    """Return r(u - mean(u) - x̂·mean(u·x̂)): the gradient of x, given the gradient u of x̂ = `unit`."""
    return r * (u - _mean(u, axes) - unit * _mean(u * unit, axes))


def _affine(unit, scale):
    """Return x̂·w + b; `scale` is (w, b), (w,) or empty."""
    y = unit * scale[0] if scale else unit
    return y + scale[1] if len(scale) > 1 else y


def _check_scale(x: Spec, shape: tuple, scale: tuple[Spec, ...]) -> Spec:
    for spec in scale:
        if spec.shape != shape:
            raise ShapeError("the weight or bias of a norm has the wrong shape", expected=shape, got=spec)
    return floating(one_dtype(x, *scale))


class _Norm(Row):
    traits = Traits(normalises=True, amp="inner")
    cost = lambda ins, outs, attrs: Cost(8 * outs[0].size, sum(i.nbytes for i in ins), sum(o.nbytes for o in outs))


def _emit_norm(name: str, x: str, over: object, scale: Sequence[str], a: Mapping[str, Any]) -> str:
    named = ", ".join(f"{key}={text}" for key, text in zip(("weight", "bias"), scale, strict=False))
    return f"{name}({x}, {over}, {named}{', ' if named else ''}eps={a['eps']!r})"


def _rms_node(u: OnnxUse) -> str:
    x, w = u.names
    scale = u("Add", w, u.scalar(1.0)) if u.attrs["unit_offset"] else w
    return u("RMSNormalization", x, scale, axis=-1, epsilon=u.attrs["eps"])


def _rms_arguments(ins: Sequence[Spec], eps: float, unit_offset: bool, cast_before_scale: bool) -> tuple | None:
    if cast_before_scale:
        return None if unit_offset else (ins[1].shape[0], eps)
    return ins[1].shape[0], eps, float(unit_offset)


@op("rms_norm")
class RmsNorm(_Norm):
    """x / √(mean(x², -1) + eps) · w; statistics in float32 or wider (Zhang and Sennrich 2019, eq. 4).

    The quotient is cast to the dtype of x before it is scaled, as Llama does, or after (`cast_before_scale=False`);
    with `unit_offset` the factor is 1 + w, as in Gemma. With r = 1/√(..), x̂ = x·r, u = g·w:
    dx = r(u - x̂·mean(u·x̂)), dw = Σ g·x̂.
    """

    arity, saves, vm, onnx_23 = 2, Saves(inputs=(0, 1)), forms.RMS_NORM, WholeNode(all_float32, _rms_node)
    attrs = {"eps": Attr(Number, 1e-6), "unit_offset": Attr(bool, False), "cast_before_scale": Attr(bool, True)}
    traits = Traits(scales_rows=True)
    torch_module = TorchModule("RMSNorm", lambda ins, a: _rms_arguments(ins, **a), {1: "weight"})

    def infer(x, w, eps, unit_offset, cast_before_scale):
        floating(one_dtype(x, w))
        if w.shape != x.shape[-1:]:
            raise ShapeError("the weight does not have the size of the last axis", expected=x.shape[-1:], got=w)
        return x

    def vjp(g, ins, outs, attrs, needs):
        x, w, g = _wide(*ins, g)
        r = call("rsqrt", _mean(x * x, (-1,)) + attrs["eps"])
        unit = x * r
        u = g * (1.0 + w if attrs["unit_offset"] else w)
        dx = r * (u - unit * _mean(u * unit, (-1,))) if needs[0] else None
        dw = _sum(g * unit, tuple(range(len(x.shape) - 1))) if needs[1] else None
        return _narrow((dx, dw), ins)

    def expand(ins, attrs):
        (x,), w = _wide(ins[0]), ins[1]
        unit = x * call("rsqrt", _mean(x * x, (-1,)) + attrs["eps"])
        if attrs["cast_before_scale"]:
            unit = as_dtype(unit, w.dtype)
        else:
            (w,) = _wide(w)
        return as_dtype(unit * (1.0 + w if attrs["unit_offset"] else w), ins[0].dtype)

    def sample(rng):
        options = {"unit_offset": bool(rng.random() < 0.5), "cast_before_scale": bool(rng.random() < 0.5)}
        return [rng.normal(size=(2, 3, 5)), rng.normal(size=5)], {"eps": 1e-5, **options}

    def axes(u: AxesUse):
        x, w = u.ins
        u.same(x[-1], w[0])
        u.mixed(x[-1], "divides by its root mean square")
        u.kind(x[-1], "channels")
        u.corrections.append(Correction(x[-1], 1, "eps", 1.0 if u.attrs["unit_offset"] else 0.0))
        return [x]

    def onnx(u: OnnxUse):
        x, w = u.names
        size = len(u.ins[0].shape) - 1
        unit = u("Div", x, u("Sqrt", u("Add", u("ReduceMean", u("Mul", x, x), u.ints(size), keepdims=1),
                                        u.scalar(u.attrs["eps"]))))  # fmt: skip
        return u("Mul", unit, u("Add", w, u.scalar(1.0)) if u.attrs["unit_offset"] else w)

    def emit(i, a):
        x, w = i
        offset = " + 1.0" if a["unit_offset"] else ""
        if a["cast_before_scale"]:
            return f"rms_norm({x}, {w}{offset}, {a['eps']!r})"
        return f"rms_norm({x}.float(), {w}.float(){offset}, {a['eps']!r}).to({x}.dtype)"


def _layer_arguments(ins: Sequence[Spec], rank: int, eps: float) -> tuple | None:
    return (ins[1].shape[0], eps, True, len(ins) > 2) if rank == 1 and len(ins) > 1 else None


@op("layer_norm")
class LayerNorm(_Norm):
    """(x - mean)/√(var + eps)·w + b over the last `rank` axes (Ba et al. 2016); w and b, if given, have these axes."""

    arity, attrs = (1, 3), {"rank": Attr(int, 1), "eps": Attr(Number, 1e-5)}
    saves, vm = Saves(inputs=(0, 1)), forms.LAYER_NORM
    torch_module = TorchModule("nn.LayerNorm", lambda ins, a: _layer_arguments(ins, **a), {1: "weight", 2: "bias"})
    emit = lambda i, a: _emit_norm("F.layer_norm", i[0], f"{i[0]}.shape[-{a['rank']}:]", i[1:], a)

    def infer(x, *scale, rank, eps):
        if not 1 <= rank <= len(x.shape):
            raise ShapeError("the number of normalised axes is out of range", expected=f"1 to {len(x.shape)}", got=rank)
        return _check_scale(x, x.shape[-rank:], scale)

    def vjp(g, ins, outs, attrs, needs):
        x, g, *scale = _wide(ins[0], g, *ins[1:])
        axes, lead = tuple(range(-attrs["rank"], 0)), tuple(range(len(x.shape) - attrs["rank"]))
        unit, r = _standard(x, axes, attrs["eps"])
        dx = lambda: _through(g * scale[0] if scale else g, unit, r, axes)
        return _narrow(wanted(needs, dx, lambda: _sum(g * unit, lead), lambda: _sum(g, lead)), ins)

    def expand(ins, attrs):
        x, *scale = _wide(*ins)
        unit, _ = _standard(x, tuple(range(-attrs["rank"], 0)), attrs["eps"])
        return as_dtype(_affine(unit, scale), ins[0].dtype)

    def sample(rng):
        rank = int(rng.integers(1, 3))
        shape = (2, 3, 5)
        return [rng.normal(size=s) for s in (shape, shape[-rank:], shape[-rank:])][: rng.integers(1, 4)], {"rank": rank}

    def axes(u: AxesUse):
        x, rank = u.ins[0], u.attrs["rank"]
        for scale in u.ins[1:]:
            for a, b in zip(x[-rank:], scale, strict=True):
                u.same(a, b)
        for term in x[-rank:]:
            u.mixed(term, "subtracts its mean")
            u.kind(term, "channels")
        return [x]

    def onnx(u: OnnxUse):
        rank, shape = u.attrs["rank"], u.ins[0].shape
        scale = u.names[1:] or (u("Expand", u.scalar(1.0), u.shape(shape[-rank:])),)
        return u("LayerNormalization", u.names[0], *scale, axis=-rank, epsilon=u.attrs["eps"])


def _by_channel(w, rank: int, groups: int | None = None):
    """Reshape [C] to [C, 1, ...], or [G, C/G, 1, ...], to broadcast with x [N, C, ...], or [N, G, C/G, ...]."""
    head = w.shape if groups is None else (groups, w.shape[0] // groups)
    return call("reshape", w, shape=(*head, *(1,) * (rank - 2)))


@op("group_norm")
class GroupNorm(_Norm):
    """(x - mean)/√(var + eps)·w + b of x [N, C, ...], per group of channels and over all positions (Wu and He 2018).

    w and b [C] are optional. One group makes it a layer norm over all axes but N, C groups an instance norm.
    """

    arity, attrs, saves = (1, 3), {"groups": Attr(int), "eps": Attr(Number, 1e-5)}, Saves(inputs=(0, 1))
    emit = lambda i, a: _emit_norm("F.group_norm", i[0], a["groups"], i[1:], a)

    def infer(x, *scale, groups, eps):
        if len(x.shape) < 2 or not isinstance(x.shape[1], int) or groups < 1 or x.shape[1] % groups:
            expected, got = "[N, C, ...] with static C, and groups >= 1 that divides C", f"{x}, groups {groups}"
            raise ShapeError("cannot divide the channels evenly into groups", expected=expected, got=got)
        return _check_scale(x, x.shape[1:2], scale)

    def vjp(g, ins, outs, attrs, needs):
        groups, rank, shape = attrs["groups"], len(ins[0].shape), ins[0].shape
        x, g, *scale = _wide(ins[0], g, *ins[1:])
        x, g = (call("unflatten", t, axis=1, sizes=(groups, shape[1] // groups)) for t in (x, g))
        axes, channel = tuple(range(2, rank + 1)), (0, *range(3, rank + 1))
        unit, r = _standard(x, axes, attrs["eps"])
        u = lambda: g * _by_channel(scale[0], rank, groups) if scale else g
        dx = lambda: call("flatten", _through(u(), unit, r, axes), start=1, end=2)
        per_channel = lambda term: call("reshape", _sum(term, channel), shape=shape[1:2])
        return _narrow(wanted(needs, dx, lambda: per_channel(g * unit), lambda: per_channel(g)), ins)

    def expand(ins, attrs):
        x, *scale = _wide(*ins)
        rank, groups = len(x.shape), attrs["groups"]
        x = call("unflatten", x, axis=1, sizes=(groups, x.shape[1] // groups))
        unit, _ = _standard(x, tuple(range(2, rank + 1)), attrs["eps"])
        unit = call("flatten", unit, start=1, end=2)
        return as_dtype(_affine(unit, [_by_channel(s, rank) for s in scale]), ins[0].dtype)

    def sample(rng):
        shape = [(2, 6, 3), (2, 6), (3, 6, 2, 2)][rng.integers(3)]
        groups = int(rng.choice((1, 2, 3) if len(shape) == 2 else (1, 2, 3, 6)))
        return [rng.normal(size=s) for s in (shape, (6,), (6,))][: rng.integers(1, 4)], {"groups": groups}

    def axes(u: AxesUse):
        x = u.ins[0]
        groups, inner = Atom(u.attrs["groups"]), Atom(int(size(x[1])) // u.attrs["groups"])
        u.same(x[1], product(groups, inner))
        u.mixed(inner, "normalises over it")
        grouped_channels(u, groups, x[1])
        for term in x[2:]:
            u.mixed(term, "normalises over it")
        for scale in u.ins[1:]:
            u.same(x[1], scale[0])
        return [x]


class _ChannelNorm(_Norm):
    """Base of the batch norms: each channel of x [N, C, ...] is normalised; operands 1 and 2 are mean and variance."""

    arity = 3, 5

    def axes(u: AxesUse) -> Sequence[Dims]:
        x = u.ins[0]
        u.kind(x[1], "channels")
        for table in u.ins[1:]:
            u.same(x[1], table[0])
        for term in (x[0], *x[2:]) if len(u.shapes) > 1 else ():
            u.mixed(term, "normalises over it")
        return [x, *((x[1],) for _ in u.shapes[1:])]


def _channels(x: Spec, statistics: tuple[Spec, Spec], scale: tuple[Spec, ...]) -> None:
    if len(x.shape) < 2:
        raise ShapeError("the operand of a batch norm has fewer than two axes", expected="[N, C, ...]", got=x)
    _check_scale(x, x.shape[1:2], scale)
    for spec in statistics:
        if spec.shape != x.shape[1:2]:
            raise ShapeError("mean or variance does not have one entry per channel", expected=x.shape[1:2], got=spec)
        if not spec.dtype.is_float or spec.dtype is not statistics[0].dtype:
            raise DTypeError("mean and variance do not share a floating dtype", got=", ".join(map(repr, statistics)))


def _normed_sample(rng: np.random.Generator) -> list:
    shape = [(4, 3), (3, 3, 4), (2, 3, 2, 2)][rng.integers(3)]
    statistics = [rng.normal(size=3), rng.uniform(0.5, 2, 3)]
    return [rng.normal(size=shape), *statistics, *(rng.normal(size=3) for _ in range(rng.integers(0, 3)))]


@op("batch_norm")
class BatchNorm(_ChannelNorm):
    """(x - mean)/√(var + eps)·w + b per channel of x [N, C, ...] with given mean and var [C]: evaluation.

    Mean and variance may have a floating dtype different from that of x; w and b [C] are optional.
    dx = g·w·r with r = 1/√(var + eps).
    """

    attrs, saves, traits = {"eps": Attr(Number, 1e-5)}, Saves(inputs=(0, 1, 2, 3)), Traits(fixed=(1, 2))
    sample = lambda rng: (_normed_sample(rng), {"eps": 1e-3})
    emit = lambda i, a: _emit_norm("F.batch_norm", ", ".join(i[:2]), i[2], i[3:], a)

    def infer(x, mean, var, *scale, eps):
        _channels(x, (mean, var), scale)
        return x

    def vjp(g, ins, outs, attrs, needs):
        rank = len(ins[0].shape)
        x, mean, var, g, *scale = _wide(*ins[:3], g, *ins[3:])
        others = (0, *range(2, rank))
        apart, r = x - _by_channel(mean, rank), call("rsqrt", _by_channel(var, rank) + attrs["eps"])
        u = (g * _by_channel(scale[0], rank) if scale else g) * r
        statistics = (lambda: -_sum(u, others), lambda: _sum(u * apart * (r * r), others) * -0.5)
        affine = (lambda: _sum(g * (apart * r), others), lambda: _sum(g, others))
        return _narrow(wanted(needs, lambda: u, *statistics, *affine), ins)

    def expand(ins, attrs):
        x, mean, var, *scale = (v if i == 0 else _by_channel(v, len(ins[0].shape)) for i, v in enumerate(_wide(*ins)))
        return as_dtype(_affine((x - mean) * call("rsqrt", var + attrs["eps"]), scale), ins[0].dtype)

    def onnx(u: OnnxUse):
        x, mean, var, *scale = u.names
        kind = u.ins[0].dtype
        missing = [u.nodes.constant(np.full(u.ins[1].sizes, v, numpy_dtype(kind))) for v in (1, 0)[len(scale) :]]
        w, b = *scale, *missing
        mean, var = (n if s.dtype is kind else u.cast(n, kind) for n, s in zip((mean, var), u.ins[1:3], strict=True))
        return u("BatchNormalization", x, w, b, mean, var, epsilon=u.attrs["eps"])


@op("batch_norm_train")
class BatchNormTrain(_ChannelNorm):
    """(x - mean)/√(var + eps)·w + b per channel of x [N, C, ...] by batch statistics; and new running mean and var [C].

    Operands are x, running mean, running variance and optionally w and b. The running statistics move by the fraction
    `momentum` to the batch's mean and unbiased variance (Ioffe and Szegedy 2015, algorithms 1 and 2).
    """

    attrs, traits = (
        {"momentum": Attr(Number, 0.1), "eps": Attr(Number, 1e-5)},
        Traits(batch_statistics=True, inference="batch_norm", fixed=(1, 2)),
    )
    saves = Saves(inputs=(0, 3, 4))  # 1 and 2 are written before backward
    results = ("normalized", "mean", "variance")
    why = {
        "onnx": "batch statistics belong to training; program.eval() uses the running statistics instead",
        "emit": "statistics of a batch are not part of an exported model",
    }
    sample = lambda rng: (_normed_sample(rng), {"momentum": 0.3})

    def infer(x, mean, var, *scale, momentum, eps):
        _channels(x, (mean, var), scale)
        if not x.symbolic and x.size <= x.sizes[1]:
            raise ShapeError("cannot take a variance per channel", expected="more than one value per channel", got=x)
        return x, mean, var

    def vjp(g, ins, outs, attrs, needs):
        rank, momentum, (gy, g_mean, g_var) = len(ins[0].shape), attrs["momentum"], g
        x, *scale = _wide(ins[0], *ins[3:])
        axes = (0, *range(2, rank))
        count = _count(x, axes, less=0)
        unit, r = _standard(x, axes, attrs["eps"])
        grads = [None] * len(needs)
        if gy is not None:
            (gy,) = _wide(gy)
            along, total = _sum(gy * unit, axes), _sum(gy, axes)  # gradients of w and b, which dx needs too
            if needs[0]:
                factor = r * _by_channel(scale[0], rank) if scale else r
                mean, slope = (_by_channel(t / count, rank) for t in (total, along))
                grads[0] = factor * (gy - mean - unit * slope)
            for operand, term in enumerate((along, total), 3):
                if len(needs) > operand and needs[operand]:
                    grads[operand] = term
        for operand, moved in ((1, g_mean), (2, g_var)):
            if moved is None:
                continue
            grads[operand] = moved * (1.0 - momentum)
            if needs[0]:
                (moved,) = _wide(moved)
                step = _by_channel(moved, rank) * (momentum / count)
                if operand == 1:
                    step = call("expand", step, shape=x.shape)
                else:
                    step = step * (unit / r) * (2.0 * count / (count - 1))
                grads[0] = step if grads[0] is None else grads[0] + step
        for operand in [p for p, need in enumerate(needs) if need and grads[p] is None]:
            grads[operand] = call("full_like", ins[operand] if operand not in (1, 2) else _sum(x, axes), value=0.0)
        return _narrow([d if need else None for d, need in zip(grads, needs, strict=True)], ins)

    def expand(ins, attrs):
        (x,), rank, momentum = _wide(ins[0]), len(ins[0].shape), attrs["momentum"]
        axes = (0, *range(2, rank))
        unit, _ = _standard(x, axes, attrs["eps"])
        y = as_dtype(_affine(unit, [_by_channel(s, rank) for s in _wide(*ins[3:])]), ins[0].dtype)
        mean = call("mean", x, axes=axes)
        apart = x - _by_channel(mean, rank)
        var = _sum(apart * apart, axes) / _count(x, axes, less=1)
        old = _wide(*ins[1:3])
        moved = [a * (1.0 - momentum) + b * momentum for a, b in zip(old, (mean, var), strict=True)]
        return y, *_narrow(moved, ins[1:3])


class _AlongAxis(Row):
    infer, saves = floating, Saves(outputs=(0,))
    cost = lambda ins, outs, attrs: Cost(5 * outs[0].size, sum(i.nbytes for i in ins), outs[0].nbytes)


@op("softmax")
class Softmax(_AlongAxis):
    """e^(x - max x) / Σ e^(x - max x) along an axis; gradient y(g - Σ g·y).

    An optional second operand is a bool mask that broadcasts to x; where it is false, entries are excluded and give 0.
    If all entries along the axis are excluded, they give 0; if all are -inf, NaN.
    """

    arity, attrs, axes, vm = (1, 2), {"axis": Attr(int, -1)}, along_axis("takes a softmax over it"), forms.SOFTMAX
    traits = Traits(activation=True, normalises=True, excludes_minus_infinity=True, amp="f32", fixed=(1,))

    def infer(x, mask=None, *, axis):
        axis_of(axis, len(x.shape))
        if mask is not None and mask.dtype is not bool_:
            raise DTypeError("the mask is not bool", expected="bool", got=mask)
        if mask is not None and broadcast_shapes(x.shape, mask.shape) != x.shape:
            raise ShapeError("the mask does not broadcast to the operand", expected=x.shape, got=mask)
        return floating(x)

    def vjp(g, ins, outs, attrs, needs):
        y = outs[0]
        return (y * (g - call("sum", g * y, axes=(attrs["axis"],), keepdims=True)),)

    def sample(rng):
        x = rng.normal(size=(2, 3, 5))
        mask = rng.random((3, 5)) < 0.6
        mask[1] = False
        return [x, mask][: rng.integers(1, 3)], {"axis": int(rng.integers(-3, 3))}

    def expand(ins, attrs):
        x, over = ins[0], {"axes": (attrs["axis"],), "keepdims": True}
        if len(ins) == 1:
            e = call("exp", x - call("stop_gradient", call("amax", x, **over)))
            return e / call("sum", e, **over)
        zero = call("full_like", x, value=0.0)
        seen = call("where", ins[1], x, call("full_like", x, value=-inf))
        top = call("stop_gradient", call("amax", seen, **over))
        top = call("where", call("eq", top, -inf), call("full_like", top, value=0.0), top)
        e = call("where", ins[1], call("exp", call("where", ins[1], x - top, zero)), zero)
        total = call("sum", e, **over)
        return e / call("where", call("eq", total, 0.0), call("full_like", total, value=1.0), total)

    def onnx(u: OnnxUse):
        if len(u.names) == 1:
            return u("Softmax", u.names[0], axis=u.attrs["axis"])
        x, mask = u.names
        low = u.scalar(float(np.finfo(numpy_dtype(u.ins[0].dtype)).min) / 2)  # -∞ in a row without a key would give NaN
        return u("Where", mask, u("Softmax", u("Where", mask, x, low), axis=u.attrs["axis"]), u.scalar(0.0))

    def emit(i, a):
        if len(i) == 1:
            return f"{i[0]}.softmax({a['axis']})"
        return f"{i[0]}.masked_fill(~{i[1]}, -torch.inf).softmax({a['axis']}).where({i[1]}, 0.0)"


@op("log_softmax")
class LogSoftmax(_AlongAxis):
    """x - max x - ln Σ e^(x - max x) along an axis; gradient g - e^y·Σ g."""

    arity, attrs, traits = 1, {"axis": Attr(int, -1)}, Traits(activation=True, amp="f32")
    axes = along_axis("takes a softmax over it")
    emit = "{0}.log_softmax({axis})"
    sample = lambda rng: ([rng.normal(size=(2, 3, 5))], {"axis": int(rng.integers(-3, 3))})
    expand = lambda ins, attrs: ins[0] - call("logsumexp", ins[0], axes=(attrs["axis"],), keepdims=True)
    onnx = lambda u: u("LogSoftmax", u.names[0], axis=u.attrs["axis"])

    def infer(x, axis):
        axis_of(axis, len(x.shape))
        return floating(x)

    def vjp(g, ins, outs, attrs, needs):
        return (g - call("exp", outs[0]) * call("sum", g, axes=(attrs["axis"],), keepdims=True),)
