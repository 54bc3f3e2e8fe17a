"""Scans: ops whose entries depend on all earlier ones along an axis, by a recurrence."""

from __future__ import annotations

from graphwright.array.dtype import float32
from graphwright.array.spec import Spec
from graphwright.errors import ShapeError
from graphwright.ops.attributes import Attr
from graphwright.ops.axes import AxesUse, Dims, along_axis, axis_of, spliced
from graphwright.ops.call import call
from graphwright.ops.onnx import OnnxUse
from graphwright.ops.registry import Cost, Row, Saves, Traits, op
from graphwright.ops.rules import floating, one_dtype, wanted


@op("linear_scan")
class LinearScan(Row):
    """hₜ = aₜ·hₜ₋₁ + bₜ along an axis, where the state before the first entry is 0; with `reverse`, from the end.

    All other axes are elementwise. 16-bit floats are computed in float32 and rounded once. The gradient of b is the
    scan of g in the opposite direction, by the factor of the next entry; that of aₜ is the gradient of bₜ times hₜ₋₁.

    Attributes:
        axis: axis of the steps.
        reverse: hₜ = aₜ·hₜ₊₁ + bₜ instead.

    Source: Martin and Cundy 2018, "Parallelizing Linear Recurrent Neural Nets Over Sequence Length", eq. 5.
    """

    arity, operands, saves = 2, ("a", "b"), Saves(inputs=(0,), outputs=(0,))
    attrs = {"axis": Attr(int), "reverse": Attr(bool, False)}
    traits = Traits(inplace=((0, 0), (0, 1)), contiguous=(0, 1), amp="f32")
    cost = lambda ins, outs, attrs: Cost(2 * outs[0].size, ins[0].nbytes + ins[1].nbytes, outs[0].nbytes)
    emit = "linear_scan({0}, {1}, {axis}, {reverse})"

    def infer(a, b, axis, reverse):
        axis_of(axis, len(one_dtype(floating(a), b).shape))
        if a.shape != b.shape:
            raise ShapeError("factors and summands of a scan have different shapes", expected=a.shape, got=b.shape)
        return b

    def axes(u: AxesUse) -> list[Dims]:
        for a, b in zip(*u.ins, strict=True):
            u.same(a, b)
        return list(_mixes(u))

    def vjp(g, ins, outs, attrs, needs):
        a, h, axis, reverse = ins[0], outs[0], attrs["axis"], attrs["reverse"]
        summed = call("linear_scan", _next(a, axis, reverse), g, axis=axis, reverse=not reverse)
        return wanted(needs, lambda: summed * _next(h, axis, not reverse), lambda: summed)

    def onnx(u: OnnxUse):
        axis, low = u.axis(u.attrs["axis"]), u.outs[0].dtype.is_low
        step = Spec(spliced(u.outs[0].shape, axis), float32 if low else u.outs[0].dtype)
        operands = [u.cast(name, float32) for name in u.names] if low else u.names
        body = u.nodes.body(
            [("Mul", ("a", "before"), "scaled"), ("Add", ("scaled", "b"), "after"), ("Identity", ("after",), "h")],
            {"before": step, "a": step, "b": step}, {"after": step, "h": step},
        )  # fmt: skip
        zeros = u("Expand", u.scalar(0.0, step), u.shape(step.shape))
        directions = [int(u.attrs["reverse"])]
        made = u.several(2, "Scan", zeros, *operands, body=body, num_scan_inputs=2, scan_input_axes=[axis] * 2,
                         scan_output_axes=[axis], scan_input_directions=directions * 2,
                         scan_output_directions=directions)[1]  # fmt: skip
        return u.cast(made, u.outs[0].dtype) if low else made

    def sample(rng):
        operands = [rng.uniform(-1.5, 1.5, (3, 4, 2)), rng.normal(size=(3, 4, 2))]
        return operands, {"axis": int(rng.integers(-3, 3)), "reverse": bool(rng.random() < 0.5)}


_mixes = along_axis("carries its state along it")


def _next(x, axis, reverse):
    """Return for each entry along an axis the next one (with `reverse`, the one before), 0 for the last."""
    n = x.shape[axis]
    if type(n) is int and n == 0:
        return x
    rest = call("slice", x, axis=axis, start=0 if reverse else 1, size=n - 1)
    return call("pad_slice", rest, axis=axis, start=1 if reverse else 0, size=n)
