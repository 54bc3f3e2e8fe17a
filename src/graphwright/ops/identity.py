"""Ops that return their operand with a different dtype, memory or gradient; and `full_like`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal

from graphwright.array.dtype import DType, dtype
from graphwright.array.spec import Spec
from graphwright.array.vm.encode import elementwise as elementwise_forms
from graphwright.array.vm.encode import rows as row_forms
from graphwright.errors import ShapeError
from graphwright.ops.attributes import Attr, Dimension
from graphwright.ops.axes import AxesUse, Dims, OrNone, broadcast, identity
from graphwright.ops.call import call
from graphwright.ops.emit import sizes
from graphwright.ops.registry import Row, Traits, free_cost, moving_cost, op
from graphwright.ops.rules import floating, same, unary_sample

_RELATIONS = {">=": operator.ge, "==": operator.eq, "!=": operator.ne}


@op("cast")
class Cast(Row):
    """x cast to a dtype, rounded to nearest even, elementwise; the gradient is cast back."""

    arity, attrs = 1, {"dtype": Attr(DType)}
    traits = Traits(casts=True, linear_in=(0,), elementwise=True, convert=True)
    axes, cost = identity, moving_cost
    emit = "{0}.to({dtype})"
    vm = row_forms.CAST
    infer = lambda x, dtype: Spec(x.shape, dtype)
    vjp = lambda g, ins, outs, attrs, needs: (call("cast", g, dtype=ins[0].dtype),)
    sample = lambda rng: ([rng.normal(size=(3, 4))], {"dtype": dtype("float64")})
    onnx = lambda u: u.cast(u.names[0], u.outs[0].dtype)


@op("copy")
class Copy(Row):
    """x, copied to new row-major memory."""

    arity, infer, traits, sample = 1, same, Traits(linear_in=(0,), elementwise=True, convert=True), unary_sample(-1, 1)
    axes, cost = identity, moving_cost
    onnx = "Identity"
    emit = "{0}.clone()"
    vm = row_forms.COPY
    vjp = lambda g, ins, outs, attrs, needs: (g,)


@op("full_like")
class FullLike(Row):
    """`value`, in every entry of an array with the spec of x."""

    arity, attrs, infer = 1, {"value": Attr(bool | int | float)}, same
    traits = Traits(valueless=True, elementwise=True)
    vjp, why = None, {"vjp": "the result does not depend on the operand's values"}
    emit = "torch.full_like({0}, {value})"
    vm = elementwise_forms.FULL_LIKE
    sample = lambda rng: ([rng.uniform(-1, 1, (3, 5))], {"value": 1.5})
    onnx = lambda u: u("Expand", u.scalar(u.attrs["value"]), u("Shape", u.names[0]))

    def axes(u: AxesUse) -> Sequence[Dims]:
        found = u.ranges[0]
        if u.attrs["value"] == -1 and found is not None:
            u.result_ranges[0] = found if isinstance(found, OrNone) else OrNone(found)
        return broadcast(u)


def _itself(layout, attrs):
    return layout


@op("stop_gradient")
class StopGradient(Row):
    """x, with gradient 0; a view."""

    arity, infer, view, cost, sample = 1, same, _itself, free_cost, unary_sample(-1, 1)
    vjp, why = None, {"vjp": "its purpose is to stop gradients"}
    axes = identity
    onnx = "Identity"
    emit = "{0}.detach()"
    traits = Traits(linear_in=(0,), gradient_scale=0)


@op("scale_gradient")
class ScaleGradient(Row):
    """x, with gradient scale·g; a view. Scale 0 stops gradients, -1 reverses them (Ganin and Lempitsky 2015)."""

    arity, attrs, infer, view, cost = 1, {"scale": Attr(float)}, same, _itself, free_cost
    sample = unary_sample(-1, 1, scale=-0.5)
    axes = identity
    onnx = "Identity"
    emit = "{0}"
    traits = Traits(linear_in=(0,), gradient_scale="scale")
    vjp = lambda g, ins, outs, attrs, needs: (g * attrs["scale"],)


@op("recall")
class Recall(Row):
    """x, as a view that is an optimisation barrier: values computed from x and from the view are never merged."""

    arity, infer, view, cost, sample = 1, same, _itself, free_cost, unary_sample(-1, 1)
    traits = Traits(linear_in=(0,), barrier=True)
    axes = identity
    onnx = "Identity"
    emit = "{0}"
    vjp = lambda g, ins, outs, attrs, needs: (g,)


def _met(left: Any, right: Any, relation: str, text: str) -> None:
    """Raise ShapeError if two sizes are known and not in the relation."""
    if not isinstance(left, str) and not isinstance(right, str) and not _RELATIONS[relation](left, right):
        raise ShapeError(f"sizes do not meet the condition {text}", expected=text, got=f"{left} {relation} {right}")


@op("assert_sizes")
class AssertSizes(Row):
    """x, as a view; raises ShapeError unless the sizes `left` and `right` are in the relation, described by `text`."""

    arity, cost = 1, free_cost
    attrs = {
        "left": Attr(Dimension),
        "right": Attr(Dimension),
        "relation": Attr(Literal[">=", "==", "!="]),
        "text": Attr(str),
    }
    sample = unary_sample(-1, 1, left=5, right=3, relation=">=", text="T > 2")
    traits = Traits(linear_in=(0,))
    axes = identity
    onnx = "Identity"
    vjp = lambda g, ins, outs, attrs, needs: (g,)

    def infer(x, left, right, relation, text):
        _met(left, right, relation, text)
        return x

    def view(layout, attrs):
        _met(**attrs)
        return layout

    def emit(i, a):
        left, right = sizes((a["left"],)), sizes((a["right"],))
        return f"({i[0]}, torch._check({left} {a['relation']} {right}, lambda: {a['text']!r}))[0]"


@op("assert_finite")
class AssertFinite(Row):
    """x unchanged; raises NonFinite with the node, the count and the first index of infinite or NaN entries, if any."""

    arity, infer, sample = 1, floating, unary_sample(-1, 1)
    traits = Traits(linear_in=(0,), elementwise=True, inplace=((0, 0),))
    axes = identity
    onnx = "Identity"
    emit = "{0}"
    vjp = lambda g, ins, outs, attrs, needs: (g,)
