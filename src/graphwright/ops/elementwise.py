"""Arithmetic: signs, rounding, functions of one operand, arithmetic of two, extrema, comparisons, and the junction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from graphwright.array.dtype import float32
from graphwright.array.spec import Spec, broadcast_shapes
from graphwright.array.vm.code import Code
from graphwright.array.vm.encode import elementwise as forms
from graphwright.errors import DTypeError, ShapeError, UsageError
from graphwright.ops import rules
from graphwright.ops.attributes import Attr
from graphwright.ops.axes import AxesUse, Dims, broadcast, common_range
from graphwright.ops.call import call
from graphwright.ops.onnx import OnnxUse
from graphwright.ops.registry import Row, Saves, Traits, op


# -- signs and rounding ------------------------------------------------------------------------------------------------
@op("neg")
class Neg(rules.Unary):
    """-x, elementwise."""

    sample, traits = rules.unary_sample(-2, 2), Traits(keeps_zero=True, linear_in=(0,))
    emit, onnx, aten, vm = "-{0}", "Neg", "neg", forms.pointwise(Code.NEG)
    vjp = lambda g, ins, outs, attrs, needs: (-g,)


@op("abs")
class Abs(rules.Unary):
    """|x|, elementwise; gradient sign(x), 0 at 0."""

    saves, sample, traits = Saves(inputs=(0,)), rules.away_from_zero, Traits(activation=True, keeps_zero=True)
    emit, onnx, aten, vm, method = "torch.abs({0})", "Abs", "abs", forms.pointwise(Code.ABS), "abs"
    vjp = lambda g, ins, outs, attrs, needs: (g * call("sign", ins[0]),)


@op("sign")
class Sign(rules.Flat, rules.Unary):
    """-1, 0 or 1, the sign of x, elementwise; gradient 0."""

    sample, traits = rules.away_from_zero, Traits(activation=True, keeps_zero=True)
    emit, onnx, aten, vm, method = "torch.sign({0})", "Sign", "sign", forms.pointwise(Code.SIGN), "sign"


@op("step")
class Step(rules.Flat, rules.Unary):
    """1 if x > 0 else 0, elementwise; gradient 0."""

    sample, traits, emit = rules.away_from_zero, Traits(activation=True, keeps_zero=True), "({0} > 0).to({0}.dtype)"
    onnx = lambda u: u.cast(u("Greater", u.names[0], u.scalar(0)), u.outs[0].dtype)


@op("floor")
class Floor(rules.Flat, rules.Unary):
    """⌊x⌋, the largest integer ≤ x, elementwise; gradient 0."""

    sample, traits = rules.between_integers, Traits(keeps_zero=True)
    emit, onnx, aten, vm, method = "torch.floor({0})", "Floor", "floor", forms.pointwise(Code.FLOOR), "floor"


@op("ceil")
class Ceil(rules.Flat, rules.Unary):
    """⌈x⌉, the smallest integer ≥ x, elementwise; gradient 0."""

    sample, traits = rules.between_integers, Traits(keeps_zero=True)
    emit, onnx, aten, method = "torch.ceil({0})", "Ceil", "ceil", "ceil"


@op("round")
class Round(rules.Flat, rules.Unary):
    """The nearest integer, elementwise, ties to even; gradient 0."""

    sample, traits = rules.between_integers, Traits(keeps_zero=True)
    emit, onnx, aten, method = "torch.round({0})", "Round", "round", "round"


# -- functions of one operand ------------------------------------------------------------------------------------------
class _Wide(rules.FloatFunction):
    """A function computed in float32 under autocast, because its results exceed the range or precision of 16 bits."""

    traits = Traits(amp="f32")


@op("exp")
class Exp(_Wide):
    """eˣ, elementwise."""

    saves, sample, traits = Saves(outputs=(0,)), rules.unary_sample(-2, 2), Traits(activation=True)
    emit, onnx, aten, vm, method = "torch.exp({0})", "Exp", "exp", forms.pointwise(Code.EXP), "exp"
    vjp = lambda g, ins, outs, attrs, needs: (g * outs[0],)


@op("expm1")
class Expm1(_Wide):
    """eˣ - 1, elementwise, accurate near 0; gradient g(y + 1)."""

    saves, sample, traits = Saves(outputs=(0,)), rules.unary_sample(-2, 2), Traits(keeps_zero=True)
    emit, aten, vm, method = "torch.expm1({0})", "expm1", forms.pointwise(Code.EXPM1), "expm1"
    vjp = lambda g, ins, outs, attrs, needs: (g * (outs[0] + 1.0),)
    onnx = lambda u: u("Sub", u("Exp", u.names[0]), u.scalar(1.0))


@op("log")
class Log(_Wide):
    """ln x, elementwise."""

    saves, sample = Saves(inputs=(0,)), rules.unary_sample(0.2, 3)
    emit, onnx, aten, vm, method = "torch.log({0})", "Log", "log", forms.pointwise(Code.LOG), "log"
    vjp = lambda g, ins, outs, attrs, needs: (g / ins[0],)


@op("log1p")
class Log1p(_Wide):
    """ln(1 + x), elementwise, accurate near 0; gradient g / (1 + x)."""

    saves, sample, traits = Saves(inputs=(0,)), rules.unary_sample(-0.7, 3), Traits(keeps_zero=True)
    emit, aten, vm, method = "torch.log1p({0})", "log1p", forms.pointwise(Code.LOG1P), "log1p"
    vjp = lambda g, ins, outs, attrs, needs: (g / (1.0 + ins[0]),)
    onnx = lambda u: u("Log", u("Add", u.names[0], u.scalar(1.0)))


@op("sqrt")
class Sqrt(rules.FloatFunction):
    """√x, elementwise; gradient g / 2y."""

    saves, sample, traits = Saves(outputs=(0,)), rules.unary_sample(0.2, 3), Traits(keeps_zero=True)
    emit, onnx, aten, vm, method = "torch.sqrt({0})", "Sqrt", "sqrt", forms.pointwise(Code.SQRT), "sqrt"
    vjp = lambda g, ins, outs, attrs, needs: (g / (outs[0] + outs[0]),)


@op("rsqrt")
class Rsqrt(_Wide):
    """1/√x, elementwise; gradient -g·y³/2."""

    saves, sample = Saves(outputs=(0,)), rules.unary_sample(0.2, 3)
    emit, aten, vm, method = "torch.rsqrt({0})", "rsqrt", forms.pointwise(Code.RSQRT), "rsqrt"
    onnx = lambda u: u("Reciprocal", u("Sqrt", u.names[0]))

    def vjp(g, ins, outs, attrs, needs):
        y = outs[0]
        return (g * (y * y * y) * -0.5,)


@op("reciprocal")
class Reciprocal(_Wide):
    """1/x, elementwise; gradient -g·y²."""

    saves, sample, vm = Saves(outputs=(0,)), rules.unary_sample(0.3, 3), forms.pointwise(Code.RECIPROCAL)
    emit, onnx, aten, method = "torch.reciprocal({0})", "Reciprocal", "reciprocal", "reciprocal"
    vjp = lambda g, ins, outs, attrs, needs: (-(g * (outs[0] * outs[0])),)


@op("sin")
class Sin(rules.FloatFunction):
    """sin x, elementwise."""

    saves, sample, traits = Saves(inputs=(0,)), rules.unary_sample(-3, 3), Traits(activation=True, keeps_zero=True)
    emit, onnx, aten, vm, method = "torch.sin({0})", "Sin", "sin", forms.pointwise(Code.SIN), "sin"
    vjp = lambda g, ins, outs, attrs, needs: (g * call("cos", ins[0]),)


@op("cos")
class Cos(rules.FloatFunction):
    """cos x, elementwise."""

    saves, sample = Saves(inputs=(0,)), rules.unary_sample(-3, 3)
    emit, onnx, aten, vm, method = "torch.cos({0})", "Cos", "cos", forms.pointwise(Code.COS), "cos"
    vjp = lambda g, ins, outs, attrs, needs: (-(g * call("sin", ins[0])),)


@op("erf")
class Erf(rules.FloatFunction):
    """erf x, elementwise; gradient g·2/√π·exp(-x²)."""

    saves, sample, traits = Saves(inputs=(0,)), rules.unary_sample(-2, 2), Traits(keeps_zero=True)
    emit, onnx, aten, vm, method = "torch.erf({0})", "Erf", "erf", forms.pointwise(Code.ERF), "erf"
    vjp = lambda g, ins, outs, attrs, needs: (g * call("exp", -(ins[0] * ins[0])) * (2.0 / np.pi**0.5),)


@op("clamp")
class Clamp(rules.Unary):
    """min(max(x, low), high), elementwise; a bound may be None. Gradient g where low ≤ x ≤ high, else 0.

    With `gradient="inside"` it is 0 at the bounds too, as that of hardtanh; with "all" it is g everywhere, so that a
    parameter beyond a bound can return (straight-through).
    """

    attrs = {
        "low": Attr(int | float | None, None), "high": Attr(int | float | None, None),
        "gradient": Attr(Literal["bounds", "inside", "all"], "bounds"),
    }  # fmt: skip
    saves = Saves(inputs=(0,))
    emit = "{0}.clamp({low}, {high})"

    def infer(x, low, high, gradient):
        if low is None and high is None:
            raise UsageError("clamp got no bound", expected="low, high or both")
        if not x.dtype.is_float and any(isinstance(bound, float) for bound in (low, high)):
            raise DTypeError("clamp of integers got a float bound", expected="ints or None", got=f"{low}, {high}")
        return x

    def vjp(g, ins, outs, attrs, needs):
        if attrs["gradient"] == "all":
            return (g,)
        x, low, high = ins[0], attrs["low"], attrs["high"]
        zero, inside = call("full_like", g, value=0.0), "lt" if attrs["gradient"] == "inside" else "le"
        if low is not None:
            g = call("where", call(inside, call("full_like", x, value=low), x), g, zero)
        if high is not None:
            g = call("where", call(inside, x, call("full_like", x, value=high)), g, zero)
        return (g,)

    def expand(ins, attrs):
        x, low, high = ins[0], attrs["low"], attrs["high"]
        x = x if low is None else call("maximum", x, low)
        return x if high is None else call("minimum", x, high)

    def sample(rng):
        bounds = [(-1.0, 1.0), (None, 0.5), (-0.5, None)][rng.integers(3)]
        return [rng.uniform(-2, 2, (3, 5))], dict(zip(("low", "high"), bounds, strict=True))

    def onnx(u: OnnxUse):
        low, high = (u.scalar(v) if v is not None else "" for v in (u.attrs["low"], u.attrs["high"]))
        return u("Clip", u.names[0], low, high)


# -- arithmetic of two operands ----------------------------------------------------------------------------------------
@op("add")
class Add(rules.Binary):
    """a + b, elementwise."""

    traits = Traits(identity=((0, -0.0), (1, -0.0)), sums=True, keeps_zero=True, jointly_linear=True)
    emit, onnx, aten, vm = "{0} + {1}", "Add", "add", forms.ADD
    vjp = lambda g, ins, outs, attrs, needs: (g, g)


@op("sub")
class Sub(rules.Binary):
    """a - b, elementwise."""

    traits = Traits(identity=((1, 0.0),), keeps_zero=True, jointly_linear=True)
    emit, onnx, aten, vm = "{0} - {1}", "Sub", "sub", forms.pointwise(Code.SUB)
    vjp = lambda g, ins, outs, attrs, needs: (g, -g if needs[1] else None)


@op("mul")
class Mul(rules.Binary):
    """a · b, elementwise."""

    saves, traits = (
        Saves(inputs=(0, 1)),
        Traits(identity=((0, 1.0), (1, 1.0)), multiplies=True, annihilated=True, linear_in=(0, 1)),
    )
    emit, onnx, aten, vm = "{0} * {1}", "Mul", "mul", forms.pointwise(Code.MUL)
    vjp = lambda g, ins, outs, attrs, needs: (g * ins[1] if needs[0] else None, g * ins[0] if needs[1] else None)


@op("div")
class Div(rules.Binary):
    """a / b, elementwise, in float32 for integers; gradients g/b and -g·a/b²."""

    saves, traits = Saves(inputs=(0, 1)), Traits(identity=((1, 1.0),), divides=True, linear_in=(0,))
    emit, aten, vm = "{0} / {1}", "div", forms.pointwise(Code.DIV)
    sample = lambda rng: rules.binary_sample(rng, 0.5, 2)
    onnx = lambda u: u("Div", *(u.cast(n, u.outs[0].dtype) for n in u.names))

    def infer(a, b):
        spec = rules.broadcast(a, b)
        return spec if spec.dtype.is_float else Spec(spec.shape, float32)

    def vjp(g, ins, outs, attrs, needs):
        a, b = ins
        by_b = g / b
        return by_b if needs[0] else None, -(by_b * (a / b)) if needs[1] else None


@op("floor_divide")
class FloorDivide(rules.Flat, rules.Binary):
    """⌊a / b⌋, elementwise; integers stay integers, and an integer divisor of 0 raises."""

    emit, aten = "torch.floor_divide({0}, {1})", "floor_divide"
    sample = lambda rng: ([rng.uniform(1, 9, (3, 1, 4)), rng.uniform(0.5, 2, (5, 4))], {})

    def onnx(u: OnnxUse):
        x, y = u.names
        if u.ins[0].dtype.is_float:
            return u("Floor", u("Div", x, y))
        return u("Div", u("Sub", x, u("Mod", x, y)), y)  # integer Div truncates, Mod has the divisor's sign


@op("remainder")
class Remainder(rules.Binary):
    """a - b·⌊a / b⌋, elementwise, with the sign of b; gradients g and -g·⌊a / b⌋."""

    saves, emit, aten = Saves(inputs=(0, 1)), "torch.remainder({0}, {1})", "remainder"
    vjp = lambda g, ins, outs, attrs, needs: (g, -(g * call("floor_divide", *ins)) if needs[1] else None)

    def sample(rng):
        b = rng.uniform(0.5, 2, (5, 4)) * rng.choice((-1.0, 1.0), (5, 4))
        return [b[:3, None] * 0 + b * (rng.integers(-3, 4, (3, 5, 4)) + rng.uniform(0.2, 0.8, (3, 5, 4))), b], {}

    def onnx(u: OnnxUse):
        x, y = u.names
        if not u.ins[0].dtype.is_float:
            return u("Mod", x, y)
        return u("Sub", x, u("Mul", u("Floor", u("Div", x, y)), y))


@op("pow")
class Pow(rules.Binary):
    """xᵖ, elementwise; x < 0 needs an integer p. Gradients g·p·xᵖ⁻¹ (0 if p = 0) and g·y·ln x (0 if x = 0 ≤ p)."""

    saves, traits = Saves(inputs=(0, 1), outputs=(0,)), Traits(amp="f32")
    emit, onnx, aten = "torch.pow({0}, {1})", "Pow", "pow"
    sample = lambda rng: ([rng.uniform(0.3, 2, (3, 1, 4)), rng.choice((-1.5, 0.0, 1.0, 2.0, 2.5), (5, 4))], {})

    def vjp(g, ins, outs, attrs, needs):
        x, p = ins
        dx = dp = None
        if needs[0]:  # x⁰ instead of the infinite or NaN x⁻¹ where p = 0: the factor p is 0 there
            invertible = call("lt", 0.0, call("abs", x))
            constant = call("logical_and", call("logical_not", invertible), call("eq", p, 0.0))
            dx = g * p * call("pow", x, call("where", constant, 0.0, p - 1.0))
        if needs[1]:  # ln 1 where 0ᵖ does not change with p
            still = call("logical_and", call("eq", x, 0.0), call("le", 0.0, p))
            dp = g * outs[0] * call("log", call("where", still, 1.0, x))
        return dx, dp


@op("minimum")
class Minimum(rules.Binary):
    """min(a, b), elementwise; at a tie each operand gets half of the gradient."""

    saves, vm, method = Saves(inputs=(0, 1)), forms.pointwise(Code.MINIMUM), "minimum"
    emit, onnx, aten = "torch.minimum({0}, {1})", "Min", "minimum"
    vjp = lambda g, ins, outs, attrs, needs: _extremum(g, ins[1], ins[0], needs)


@op("maximum")
class Maximum(rules.Binary):
    """max(a, b), elementwise; at a tie each operand gets half of the gradient."""

    saves, vm, method = Saves(inputs=(0, 1)), forms.pointwise(Code.MAXIMUM), "maximum"
    emit, onnx, aten = "torch.maximum({0}, {1})", "Max", "maximum"
    vjp = lambda g, ins, outs, attrs, needs: _extremum(g, ins[0], ins[1], needs)


def _extremum(g: Any, first: Any, second: Any, needs: tuple[bool, ...]) -> tuple:
    # the first operand wins where it is larger; by `where`, not by a factor: inf · 0 must not reach the other
    zero, tie = call("full_like", g, value=0.0), call("eq", first, second)
    shared = call("where", tie, g * 0.5, zero)
    return (
        call("where", call("lt", second, first), g, shared) if needs[0] else None,
        call("where", call("lt", first, second), g, shared) if needs[1] else None,
    )


@op("junction")
class Junction(Row):
    """Σ of any number of equal-shaped operands, in port order; zeros if it has no operand."""

    arity, vm = (0, None), forms.JUNCTION
    traits = Traits(nary=True, inplace=((0, 0),), amp="promote", keeps_zero=True, jointly_linear=True)
    vjp = lambda g, ins, outs, attrs, needs: tuple(g if need else None for need in needs)
    sample = lambda rng: ([rng.normal(size=(3, 4)) for _ in range(3)], {})
    emit = lambda ins, attrs: " + ".join(ins)

    def infer(*ins, **attrs):
        if not ins:
            fix = "add it with an operand, whose spec it takes; edges can be cut later"
            raise ShapeError("cannot infer the spec of a junction without operands", expected="an operand", fix=fix)
        rules.one_dtype(*ins)
        for port, other in enumerate(ins):
            if other.shape != ins[0].shape:
                what, fix = "a junction has operands of different shapes", "insert a linear or reshape op on this edge"
                raise ShapeError(what, where=f"port {port}", expected=ins[0], got=other, fix=fix)
        return ins[0]

    def axes(u: AxesUse) -> list[Dims]:
        for other in u.ins[1:]:
            for a, b in zip(u.ins[0], other, strict=True):
                u.same(a, b)
        return [u.ins[0] if u.ins else tuple(u.fresh(n, "has no operand that states its size") for n in u.shapes[0])]

    def onnx(u: OnnxUse):
        if not u.names:
            return u("Expand", u.scalar(0, u.outs[0]), u.shape(u.outs[0].shape))
        if u.outs[0].dtype.is_float:
            return u("Sum", *u.names)
        total = u.names[0]  # Sum takes floats only
        for name in u.names[1:]:
            total = u("Add", total, name)
        return total


# -- comparisons, logic and choice -------------------------------------------------------------------------------------
@op("eq")
class Eq(rules.ComparisonOp):
    """a = b, elementwise."""

    emit, onnx, aten, vm = "{0} == {1}", "Equal", "eq", forms.compared(Code.EQ)


@op("ne")
class Ne(rules.ComparisonOp):
    """a ≠ b, elementwise."""

    emit, aten, vm = "{0} != {1}", "ne", forms.compared(Code.NE)
    onnx = lambda u: u("Not", u("Equal", *u.names))


@op("lt")
class Lt(rules.ComparisonOp):
    """a < b, elementwise."""

    emit, onnx, aten, vm = "{0} < {1}", "Less", "lt", forms.compared(Code.LT)


@op("le")
class Le(rules.ComparisonOp):
    """a ≤ b, elementwise."""

    emit, onnx, aten, vm = "{0} <= {1}", "LessOrEqual", "le", forms.compared(Code.LE)


@op("gt")
class Gt(rules.ComparisonOp):
    """a > b, elementwise."""

    emit, onnx, aten, vm = "{0} > {1}", "Greater", "gt", forms.compared(Code.LT, swapped=True)


@op("ge")
class Ge(rules.ComparisonOp):
    """a ≥ b, elementwise."""

    emit, onnx, aten, vm = "{0} >= {1}", "GreaterOrEqual", "ge", forms.compared(Code.LE, swapped=True)


def _on_bools(kind: str) -> Any:
    return lambda u: u(kind, *(u("Cast", n, to=9) for n in u.names))


@op("logical_and")
class LogicalAnd(rules.ComparisonOp):
    """a ∧ b, elementwise; a number is true unless it is 0."""

    emit, onnx, aten = "torch.logical_and({0}, {1})", _on_bools("And"), "logical_and"


@op("logical_or")
class LogicalOr(rules.ComparisonOp):
    """a ∨ b, elementwise; a number is true unless it is 0."""

    emit, onnx, aten = "torch.logical_or({0}, {1})", _on_bools("Or"), "logical_or"


@op("logical_xor")
class LogicalXor(rules.ComparisonOp):
    """Exclusive or, elementwise; a number is true unless it is 0."""

    emit, onnx, aten = "torch.logical_xor({0}, {1})", _on_bools("Xor"), "logical_xor"


class _Test(rules.Predicate):
    arity, operands = 1, ("input",)
    sample = lambda rng: ([rng.choice((0.0, -0.0, 1.5, np.inf, -np.inf, np.nan), (3, 5))], {})


@op("logical_not")
class LogicalNot(_Test):
    """¬x, elementwise: true where x is 0 or false."""

    emit, onnx, aten = "torch.logical_not({0})", _on_bools("Not"), "logical_not"


@op("isnan")
class IsNaN(_Test):
    """True where x is NaN, elementwise."""

    emit, onnx, method = "torch.isnan({0})", "IsNaN", "isnan"


def _to_infinity(comparison: str, x: Any) -> Any:
    return call(comparison, call("abs", x), np.inf)


@op("isinf")
class IsInf(_Test):
    """True where x is +∞ or -∞, elementwise."""

    emit, onnx, method = "torch.isinf({0})", "IsInf", "isinf"
    expand = lambda ins, attrs: _to_infinity("eq", ins[0]) if ins[0].dtype.is_float else call("ne", ins[0], ins[0])


@op("isfinite")
class IsFinite(_Test):
    """True where x is neither infinite nor NaN, elementwise."""

    emit, method = "torch.isfinite({0})", "isfinite"
    expand = lambda ins, attrs: _to_infinity("lt", ins[0]) if ins[0].dtype.is_float else call("eq", ins[0], ins[0])
    onnx = lambda u: u("Not", u("Or", u("IsNaN", u.names[0]), u("IsInf", u.names[0])))


@op("where")
class Where(Row):
    """a if c else b, elementwise; the condition c is bool and gets no gradient."""

    arity, saves, traits = 3, Saves(inputs=(0,)), Traits(elementwise=True, amp="promote", fixed=(0,))
    emit, onnx, vm = "torch.where({all})", "Where", forms.WHERE
    sample = lambda rng: ([rng.random((3, 4)) < 0.5, rng.normal(size=(3, 4)), rng.normal(size=(4,))], {})

    def infer(c, a, b):
        if c.dtype.kind != "bool":
            raise DTypeError("the condition is not bool", expected="bool", got=c)
        rules.one_dtype(a, b)
        return Spec(broadcast_shapes(c.shape, a.shape, b.shape), a.dtype)

    def vjp(g, ins, outs, attrs, needs):
        zero = call("full_like", g, value=0.0)  # not 0 · g: an inf in the branch not taken must not reach the other
        return (
            None,
            call("where", ins[0], g, zero) if needs[1] else None,
            call("where", ins[0], zero, g) if needs[2] else None,
        )

    def axes(u: AxesUse) -> Sequence[Dims]:
        u.result_ranges[0] = common_range(*u.ranges[1:])
        return broadcast(u)
