"""Pooling and resampling over one or two trailing spatial axes.

Averages and interpolations are linear: the gradient of each is its transpose, whose gradient is the op itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Literal

from graphwright.array.dtype import int64
from graphwright.array.layout import Window, trailing
from graphwright.array.sizes import product
from graphwright.array.spec import Spec
from graphwright.errors import ShapeError
from graphwright.ops.attributes import Attr, PerAxis, Shape
from graphwright.ops.axes import resized_last
from graphwright.ops.call import call
from graphwright.ops.conv import each
from graphwright.ops.emit import Emit
from graphwright.ops.onnx import OnnxRow, OnnxUse
from graphwright.ops.registry import Cost, Row, Saves, Traits, op
from graphwright.ops.rules import Backward, floating

_WINDOWS = {"kernel": Attr(tuple[int, ...]), "stride": Attr(PerAxis | None, None), "padding": Attr(PerAxis, 0)}


class _PoolOp(Row):
    arity, traits = 1, Traits(contiguous=(0,))


def _windows(x: Spec, kernel: Any, attrs: Any) -> Spec:
    """Check that x can be pooled with this kernel; return the spec of the result, which has one entry per window."""
    rule, rank = Window.of(kernel, attrs), len(kernel)
    if rank > 2:
        raise ShapeError("the pooling kernel has too many axes", expected="1 or 2", got=rank)
    if len(floating(x).shape) < rank:
        raise ShapeError("the operand has fewer axes than the pooling kernel", expected=f"{rank} or more", got=x)
    if any(2 * p > e for p, e in zip(rule.padding, rule.extent, strict=True)):
        expected = f"at most half of {rule.extent}"
        raise ShapeError("the padding exceeds half of the window", expected=expected, got=rule.padding)
    at = len(x.shape) - rank
    return Spec((*x.shape[:at], *rule.counts(x.shape[at:])), x.dtype)


def _resized(x: Spec, sizes: tuple[int, ...]) -> Spec:
    """Return the spec of x with its trailing axes resized. Raises: ShapeError for a size below 1."""
    at = len(floating(x).shape) - len(sizes)
    if not 1 <= len(sizes) <= 2 or at < 0 or any(type(n) is int and n < 1 for n in (*sizes, *x.shape[at:])):
        expected = "one or two trailing axes of size >= 1, and sizes >= 1"
        raise ShapeError("cannot resize the trailing axes", expected=expected, got=f"{x} to sizes {sizes}")
    return Spec((*x.shape[:at], *sizes), x.dtype)


def _back(op: str, g: Any, ins: Any, attrs: Mapping[str, Any]) -> tuple:
    """Return (gradient of the operand,): the op named `op`, the transpose of the forward op, applied to g."""
    return (call(op, g, **{**attrs, "sizes": trailing(ins[0].shape, len(attrs["sizes"]))}),)


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
    """Return an `emit` function that calls torch's `F.<name><rank>d`; `given`: names of the attributes to pass."""

    def row(i: Sequence[str], a: Mapping[str, Any]) -> str:
        rank = len(a[given[0]])
        rest = "".join(f", {k}={a[k]!r}" for k in given[1:])
        more = ", return_indices=True" if name.startswith("max") else ""
        return f"F.{name}{rank}d({i[0]}, {tuple(a[given[0]])}{rest}{more})"

    return row


def _onnx_pool(kind: str, *extra: str) -> OnnxRow:
    def row(u: OnnxUse) -> str:
        rank = len(u.attrs["kernel"])
        stride = u.attrs["stride"] if u.attrs["stride"] is not None else u.attrs["kernel"]
        options: dict[str, Any] = {"kernel_shape": list(u.attrs["kernel"]), "strides": each(stride, rank)}
        options["pads"] = each(u.attrs["padding"], rank) * 2
        options |= {name: int(u.attrs[name]) for name in extra if name != "dilation"}
        options |= {"dilations": each(u.attrs["dilation"], rank)} if "dilation" in extra else {}
        return _on_planes(u, rank, lambda x: u(kind, x, **options))

    return row


def _on_planes(u: OnnxUse, rank: int, node: Callable[[str], str]) -> str:
    """Return `node(x)`, which adds an ONNX node, for the operand x; x is reshaped to [N, C, spatial...] for it."""
    shape = u.ins[0].shape
    if len(shape) == rank + 2:
        return node(u.names[0])
    y = node(u("Reshape", u.names[0], u.shape((1, product(shape[:-rank]), *shape[-rank:]))))
    return u("Reshape", y, u.shape(u.outs[0].shape))


@op("max_pool")
class MaxPool(_PoolOp):
    """The maximum of each window and its flat int64 index over the spatial axes, the first index of equal entries.

    Padding counts as -∞. The gradient goes to the entry at that index.
    """

    attrs, saves = {**_WINDOWS, "dilation": Attr(PerAxis, 1)}, Saves(outputs=(1,))
    axes, results = resized_last("slides a window over it"), ("largest", "index")
    emit = _emit_pool("max_pool", "kernel", "stride", "padding", "dilation")
    sample = lambda rng: _sample(rng, dilation=int(rng.integers(1, 3)))

    def infer(x, kernel, **window):
        best = _windows(x, kernel, window)
        return best, Spec(best.shape, int64)

    def vjp(g, ins, outs, attrs, needs):
        rank, shape = len(attrs["kernel"]), ins[0].shape
        flat = (*shape[: len(shape) - rank], prod(trailing(shape, rank)))
        parts = (call("flatten", t, start=-rank, end=-1) for t in (g[0], outs[1]))
        return (call("reshape", call("scatter_sum", *parts, axis=-1, shape=flat), shape=shape),)

    def cost(ins, outs, attrs):
        return Cost(outs[0].size * prod(attrs["kernel"]), ins[0].nbytes, sum(o.nbytes for o in outs))

    def onnx(u: OnnxUse):
        values = _onnx_pool("MaxPool", "dilation")(u)
        assert isinstance(values, str)
        return (values,)


@op("avg_pool")
class AvgPool(_PoolOp):
    """The mean of each window; with `count_include_pad`, padding counts as entries of 0."""

    attrs = {**_WINDOWS, "count_include_pad": Attr(bool, True)}
    axes = resized_last("slides a window over it")
    onnx = _onnx_pool("AveragePool", "count_include_pad")
    emit = _emit_pool("avg_pool", "kernel", "stride", "padding", "count_include_pad")
    infer = lambda x, kernel, count_include_pad, **window: _windows(x, kernel, window)
    cost = lambda ins, outs, attrs: Cost(outs[0].size * prod(attrs["kernel"]), ins[0].nbytes, outs[0].nbytes)
    sample = lambda rng: _sample(rng, count_include_pad=bool(rng.random() < 0.5))

    def vjp(g, ins, outs, attrs, needs):
        return (call("avg_pool_backward", g, **attrs, sizes=trailing(ins[0].shape, len(attrs["kernel"]))),)


@op("avg_pool_backward")
class AvgPoolBackward(_PoolOp, Backward):
    """Gradient of `avg_pool`: spreads each entry of g evenly over its window; the result's last axes have `sizes`."""

    attrs, traits = {**AvgPool.attrs, "sizes": Attr(Shape)}, Traits(backward_of="avg_pool")
    vjp = lambda g, ins, outs, attrs, needs: (call("avg_pool", g, **{name: attrs[name] for name in AvgPool.attrs}),)

    def infer(g, sizes, kernel, count_include_pad, **window):
        x = Spec((*g.shape[: len(g.shape) - len(kernel)], *sizes), g.dtype)
        if len(x.shape) != len(g.shape) or _windows(x, kernel, window) != g:
            raise ShapeError("the gradient does not have one entry per window", expected=f"windows over {sizes}", got=g)
        return x

    def sample(rng):
        (x,), attrs = AvgPool.sample(rng)
        positions = Window.of(attrs["kernel"], attrs).counts(x.shape[2:])
        return [rng.normal(size=(2, 3, *positions))], {**attrs, "sizes": x.shape[2:]}


@op("adaptive_avg_pool")
class AdaptiveAvgPool(_PoolOp):
    """Means over windows that cover the trailing axes: entry i of m averages x[⌊i·n/m⌋ : ⌈(i+1)·n/m⌉] of n entries."""

    attrs, axes = {"sizes": Attr(Shape)}, resized_last("divides it into windows")
    emit = _emit_pool("adaptive_avg_pool", "sizes")
    vjp = lambda g, ins, outs, attrs, needs: _back("adaptive_avg_pool_backward", g, ins, attrs)
    infer = lambda x, sizes: _resized(x, sizes)

    def sample(rng):
        rank = int(rng.integers(1, 3))
        x = rng.normal(size=(2, 3, *rng.integers(2, 8, rank)))
        return [x], {"sizes": tuple(map(int, rng.integers(1, 6, rank)))}

    def onnx(u: OnnxUse):
        sizes, spatial = u.attrs["sizes"], u.ins[0].shape[-len(u.attrs["sizes"]) :]
        if any(isinstance(n, str) or n % m for n, m in zip(spatial, sizes, strict=True)):
            return None
        kernel = [int(n) // m for n, m in zip(spatial, sizes, strict=True)]
        return _on_planes(u, len(sizes), lambda x: u("AveragePool", x, kernel_shape=kernel, strides=kernel))


@op("adaptive_avg_pool_backward")
class AdaptiveAvgPoolBackward(_PoolOp, Backward):
    """Gradient of `adaptive_avg_pool`: spreads each entry of g over its window; the result's last axes have `sizes`."""

    attrs, traits, sample = {"sizes": Attr(Shape)}, Traits(backward_of="adaptive_avg_pool"), AdaptiveAvgPool.sample
    vjp = lambda g, ins, outs, attrs, needs: _back("adaptive_avg_pool", g, ins, attrs)
    infer = lambda g, sizes: _resized(g, sizes)


def _interpolated(x: Spec, sizes: tuple[int, ...], mode: str, align_corners: bool) -> Spec:
    if align_corners and mode == "nearest":
        raise ShapeError("align_corners was given without linear interpolation", expected="mode linear", got=mode)
    return _resized(x, sizes)


@op("interpolate")
class Interpolate(_PoolOp):
    """x resampled to `sizes` along its trailing axes; from n to m entries, result i is x at position s.

    `nearest`: s = ⌊i·n/m⌋. `linear`: s = (i + ½)·n/m - ½, at least 0, or i·(n-1)/(m-1) with `align_corners`; x is
    interpolated linearly between its entries.
    """

    infer = _interpolated
    attrs = {
        "sizes": Attr(Shape),
        "mode": Attr(Literal["nearest", "linear"], "nearest"),
        "align_corners": Attr(bool, False),
    }
    axes = resized_last("resamples it")
    vjp = lambda g, ins, outs, attrs, needs: _back("interpolate_backward", g, ins, attrs)

    def sample(rng):
        inputs, attrs = AdaptiveAvgPool.sample(rng)
        mode = "linear" if rng.random() < 0.6 else "nearest"
        return inputs, {**attrs, "mode": mode, "align_corners": mode == "linear" and bool(rng.random() < 0.5)}

    def onnx(u: OnnxUse):
        rank, linear = len(u.attrs["sizes"]), u.attrs["mode"] == "linear"
        way = "align_corners" if u.attrs["align_corners"] else "half_pixel" if linear else "asymmetric"
        options: dict[str, Any] = {"mode": "linear"} if linear else {"mode": "nearest", "nearest_mode": "floor"}
        options |= {"axes": list(range(2, 2 + rank)), "coordinate_transformation_mode": way}
        return _on_planes(u, rank, lambda x: u("Resize", x, "", "", u.shape(u.attrs["sizes"]), **options))

    def emit(i, a):
        mode = "bilinear" if a["mode"] == "linear" and len(a["sizes"]) == 2 else a["mode"]
        corners = ", align_corners=True" if a["align_corners"] else ""
        return f"F.interpolate({i[0]}, {tuple(a['sizes'])}, mode={mode!r}{corners})"


@op("interpolate_backward")
class InterpolateBackward(_PoolOp, Backward):
    """Gradient of `interpolate`: adds each entry of g, weighted, to its sources in x, whose last axes have `sizes`."""

    attrs, infer, sample = Interpolate.attrs, _interpolated, Interpolate.sample
    traits = Traits(backward_of="interpolate")
    vjp = lambda g, ins, outs, attrs, needs: _back("interpolate", g, ins, attrs)
