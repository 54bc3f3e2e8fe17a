"""Pooling and resampling over one or two trailing spatial axes.

Averages and interpolations are linear: each has its transpose beside it, and the two are each other's gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from graphwright.array.dtype import int64
from graphwright.array.layout import Window, trailing
from graphwright.array.spec import Spec
from graphwright.errors import ShapeError
from graphwright.ops.axes import resized_last
from graphwright.ops.call import call
from graphwright.ops.conv import each
from graphwright.ops.emit import Emit
from graphwright.ops.onnx import OnnxRow, OnnxUse
from graphwright.ops.registry import Cost, Saves, Traits, op
from graphwright.ops.rules import Backward, floating

_ROW_MAJOR = Traits(contiguous=(0,))


def _window(x: Spec, kernel: Any, attrs: Any) -> tuple[Spec, Window]:
    """The spec with one entry per window over the trailing axes, and the windows."""
    rule, rank = Window.of(kernel, attrs), len(kernel)
    if rank > 2 or len(floating(x).shape) < rank:
        raise ShapeError("pooling takes one or two trailing spatial axes", expected=f"[..., {rank} axes]", got=x)
    if any(2 * p > e for p, e in zip(rule.padding, rule.extent, strict=True)):
        raise ShapeError("padding must be at most half of the window", expected=rule.extent, got=rule.padding)
    at = len(x.shape) - rank
    return Spec((*x.shape[:at], *rule.counts(x.shape[at:])), x.dtype), rule


def _resized(x: Spec, sizes: tuple[int, ...]) -> Spec:
    """The spec with other sizes of the trailing axes."""
    at = len(floating(x).shape) - len(sizes)
    if not 1 <= len(sizes) <= 2 or at < 0 or any(isinstance(n, str) or n < 1 for n in (*sizes, *x.shape[at:])):
        raise ShapeError("resizing takes one or two trailing spatial axes of size >= 1", expected=sizes, got=x)
    return Spec((*x.shape[:at], *sizes), x.dtype)


def _flat(t: Any, rank: int) -> Any:
    return call("flatten", t, start=-rank, end=-1)


def _sample(rng, **more):
    rank = int(rng.integers(1, 3))
    kernel = tuple(int(k) for k in rng.integers(2, 4, rank))
    attrs = {
        "kernel": kernel,
        "stride": None if rng.random() < 0.3 else tuple(int(s) for s in rng.integers(1, 3, rank)),
        "padding": int(rng.integers(0, 2)),
    }
    return [rng.normal(size=(2, 3, *rng.integers(5, 8, rank)))], {**attrs, **more}


def _emit_pool(name: str, *given: str) -> Emit:
    """A function of torch named for the rank, with the attributes that it calls by the same names."""

    def row(i: Sequence[str], a: Mapping[str, Any]) -> str:
        rank = len(a[given[0]])
        rest = "".join(f", {k}={a[k]!r}" for k in given[1:])
        more = ", return_indices=True" if name.startswith("max") else ""
        return f"F.{name}{rank}d({i[0]}, {tuple(a[given[0]])}{rest}{more})"

    return row


def _onnx_pool(kind: str, *extra: str) -> OnnxRow:
    def row(u: OnnxUse) -> str:
        rank = len(u.attrs["kernel"])
        x, folded = _planes(u, rank)
        stride = u.attrs["stride"] if u.attrs["stride"] is not None else u.attrs["kernel"]
        more = {name: int(u.attrs[name]) for name in extra if name != "dilation"}
        more |= {"dilations": each(u.attrs["dilation"], rank)} if "dilation" in extra else {}
        y = u(kind, x, kernel_shape=list(u.attrs["kernel"]), strides=each(stride, rank),
              pads=each(u.attrs["padding"], rank) * 2, **more)  # fmt: skip
        return u("Reshape", y, u.shape(u.outs[0].shape)) if folded else y

    return row


def _planes(u: OnnxUse, rank: int) -> tuple[str, bool]:
    """The operand as [N, C, ...], and whether it had another rank."""
    shape = u.ins[0].shape
    if len(shape) == rank + 2:
        return u.names[0], False
    lead = -1 if any(isinstance(d, str) for d in shape[:-rank]) else int(np.prod([int(d) for d in shape[:-rank]]))
    return u("Reshape", u.names[0], u.ints(1, lead, *(int(d) for d in shape[-rank:]))), True


@op("max_pool")
class MaxPool:
    """max over each window, and its flat index over the spatial axes (int64); the first of equal entries.

    Padding counts as -∞. The gradient goes to that index.
    """

    arity, saves, traits = 1, Saves(outputs=(1,)), _ROW_MAJOR
    attrs = {"kernel": ..., "stride": None, "padding": 0, "dilation": 1}
    axes = resized_last("slides a window over it")
    emit = _emit_pool("max_pool", "kernel", "stride", "padding", "dilation")
    results = ("largest", "index")

    @staticmethod
    def infer(x, kernel, **window):
        best = _window(x, kernel, window)[0]
        return best, Spec(best.shape, int64)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        rank, shape = len(attrs["kernel"]), ins[0].shape
        flat = (*shape[: len(shape) - rank], prod(trailing(ins[0].shape, rank)))
        total = call("scatter_sum", _flat(g[0], rank), _flat(outs[1], rank), axis=-1, shape=flat)
        return (call("reshape", total, shape=shape),)

    @staticmethod
    def cost(ins, outs, attrs):
        return Cost(outs[0].size * prod(attrs["kernel"]), ins[0].nbytes, sum(o.nbytes for o in outs))

    @staticmethod
    def sample(rng):
        return _sample(rng, dilation=int(rng.integers(1, 3)))

    @staticmethod
    def onnx(u: OnnxUse):
        values = _onnx_pool("MaxPool", "dilation")(u)
        assert isinstance(values, str)
        return (values,)


@op("avg_pool")
class AvgPool:
    """Mean over each window; with `count_include_pad`, zeros of the padding count as entries."""

    arity, traits = 1, _ROW_MAJOR
    attrs = {"kernel": ..., "stride": None, "padding": 0, "count_include_pad": True}
    axes = resized_last("slides a window over it")
    onnx = _onnx_pool("AveragePool", "count_include_pad")
    emit = _emit_pool("avg_pool", "kernel", "stride", "padding", "count_include_pad")

    @staticmethod
    def infer(x, kernel, count_include_pad, **window):
        return _window(x, kernel, window)[0]

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (call("avg_pool_backward", g, **attrs, sizes=trailing(ins[0].shape, len(attrs["kernel"]))),)

    @staticmethod
    def cost(ins, outs, attrs):
        return Cost(outs[0].size * prod(attrs["kernel"]), ins[0].nbytes, outs[0].nbytes)

    @staticmethod
    def sample(rng):
        return _sample(rng, count_include_pad=bool(rng.random() < 0.5))


@op("avg_pool_backward")
class AvgPoolBackward(Backward):
    """avg_poolᵀ g: each entry spread evenly over its window, trailing axes of `sizes`."""

    arity, traits = 1, replace(_ROW_MAJOR, backward_of="avg_pool")
    attrs = {**AvgPool.attrs, "sizes": ...}

    @staticmethod
    def infer(g, sizes, kernel, count_include_pad, **window):
        x = Spec((*g.shape[: len(g.shape) - len(kernel)], *sizes), g.dtype)
        if len(x.shape) != len(g.shape) or _window(x, kernel, window)[0] != g:
            raise ShapeError("the gradient must have one entry per window", expected=f"windows over {sizes}", got=g)
        return x

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (call("avg_pool", g, **{name: attrs[name] for name in AvgPool.attrs}),)

    @staticmethod
    def sample(rng):
        (x,), attrs = AvgPool.sample(rng)
        positions = Window.of(attrs["kernel"], attrs).counts(x.shape[2:])
        return [rng.normal(size=(2, 3, *positions))], {**attrs, "sizes": x.shape[2:]}


@op("adaptive_avg_pool")
class AdaptiveAvgPool:
    """Means over windows that divide the trailing axes: entry i of m covers ⌊i·n/m⌋ to ⌈(i+1)·n/m⌉."""

    arity, attrs, traits = 1, {"sizes": ...}, _ROW_MAJOR
    axes = resized_last("divides it into windows")
    emit = _emit_pool("adaptive_avg_pool", "sizes")

    @staticmethod
    def infer(x, sizes):
        return _resized(x, sizes)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (call("adaptive_avg_pool_backward", g, sizes=trailing(ins[0].shape, len(attrs["sizes"]))),)

    @staticmethod
    def sample(rng):
        rank = int(rng.integers(1, 3))
        return [rng.normal(size=(2, 3, *rng.integers(2, 8, rank)))], {
            "sizes": tuple(map(int, rng.integers(1, 6, rank)))
        }

    @staticmethod
    def onnx(u: OnnxUse):
        sizes, spatial = u.attrs["sizes"], u.ins[0].shape[-len(u.attrs["sizes"]) :]
        if any(isinstance(n, str) or n % m for n, m in zip(spatial, sizes, strict=True)):
            return None
        kernel = [int(n) // m for n, m in zip(spatial, sizes, strict=True)]
        x, folded = _planes(u, len(sizes))
        y = u("AveragePool", x, kernel_shape=kernel, strides=kernel)
        return u("Reshape", y, u.shape(u.outs[0].shape)) if folded else y


@op("adaptive_avg_pool_backward")
class AdaptiveAvgPoolBackward(Backward):
    """adaptive_avg_poolᵀ g: each entry spread evenly over its window, trailing axes of `sizes`."""

    arity, attrs, traits, sample = (
        1,
        {"sizes": ...},
        replace(_ROW_MAJOR, backward_of="adaptive_avg_pool"),
        AdaptiveAvgPool.sample,
    )

    @staticmethod
    def infer(g, sizes):
        return _resized(g, sizes)

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        return (call("adaptive_avg_pool", g, sizes=trailing(ins[0].shape, len(attrs["sizes"]))),)


def _interpolated(x: Spec, sizes: tuple[int, ...], mode: str, align_corners: bool) -> Spec:
    if mode not in ("nearest", "linear") or (align_corners and mode == "nearest"):
        raise ShapeError(
            "unknown interpolation mode", expected="nearest, or linear with or without align_corners", got=mode
        )
    return _resized(x, sizes)


@op("interpolate")
class Interpolate:
    """The trailing axes resampled to `sizes`: entry i of m reads at s of n, `nearest` below or `linear` between two.

    nearest: s = floor(i·n/m). linear: s = (i + ½)·n/m - ½, at least 0, or i·(n-1)/(m-1) with `align_corners`.
    """

    arity, attrs, traits = 1, {"sizes": ..., "mode": "nearest", "align_corners": False}, _ROW_MAJOR
    infer = _interpolated
    axes = resized_last("resamples it")

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        same = {"mode": attrs["mode"], "align_corners": attrs["align_corners"]}
        return (call("interpolate_backward", g, **same, sizes=trailing(ins[0].shape, len(attrs["sizes"]))),)

    @staticmethod
    def sample(rng):
        inputs, attrs = AdaptiveAvgPool.sample(rng)
        mode = "linear" if rng.random() < 0.6 else "nearest"
        return inputs, {**attrs, "mode": mode, "align_corners": mode == "linear" and bool(rng.random() < 0.5)}

    @staticmethod
    def onnx(u: OnnxUse):
        rank, linear = len(u.attrs["sizes"]), u.attrs["mode"] == "linear"
        x, folded = _planes(u, rank)
        way = "align_corners" if u.attrs["align_corners"] else "half_pixel" if linear else "asymmetric"
        options = {"mode": "linear"} if linear else {"mode": "nearest", "nearest_mode": "floor"}
        axes = list(range(2, 2 + rank))
        y = u("Resize", x, "", "", u.ints(*u.attrs["sizes"]), axes=axes, coordinate_transformation_mode=way, **options)
        return u("Reshape", y, u.shape(u.outs[0].shape)) if folded else y

    @staticmethod
    def emit(i, a):
        mode = "bilinear" if a["mode"] == "linear" and len(a["sizes"]) == 2 else a["mode"]
        corners = ", align_corners=True" if a["align_corners"] else ""
        return f"F.interpolate({i[0]}, {tuple(a['sizes'])}, mode={mode!r}{corners})"


@op("interpolate_backward")
class InterpolateBackward(Backward):
    """interpolateᵀ g: each entry added to the entries it was interpolated from, trailing axes of `sizes`."""

    arity, attrs, traits, sample = (
        1,
        Interpolate.attrs,
        replace(_ROW_MAJOR, backward_of="interpolate"),
        Interpolate.sample,
    )
    infer = _interpolated

    @staticmethod
    def vjp(g, ins, outs, attrs, needs):
        same = {"mode": attrs["mode"], "align_corners": attrs["align_corners"]}
        return (call("interpolate", g, **same, sizes=trailing(ins[0].shape, len(attrs["sizes"]))),)
