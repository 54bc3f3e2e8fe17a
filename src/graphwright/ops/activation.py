"""Activations: elementwise nonlinearities of networks. None of them overflows, however large the operand is."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from graphwright.array.formulas import activations, specialise
from graphwright.array.vm.code import Code
from graphwright.array.vm.encode import elementwise as forms
from graphwright.ops.attributes import Attr
from graphwright.ops.call import call, widened
from graphwright.ops.registry import Cost, Saves, Traits, op
from graphwright.ops.rules import Binary, FloatFunction, UnaryFloat, away_from_zero, broadcast, floating, unary_sample

_OPS = {"absolute": "abs", **{name: name for name in ("erf", "exp", "log1p", "sigmoid", "tanh")}}
FORMULAS: Any = specialise(
    activations, {name: partial(call, op) for name, op in _OPS.items()} | {"maximum": lambda x, zero: call("relu", x)}
)
"""`array.formulas.activations` on tensors; the only maximum there is that with 0."""


class Activation(UnaryFloat):
    """An elementwise nonlinearity of one floating operand."""

    saves, sample, traits = Saves(inputs=(0,)), unary_sample(-4, 4), Traits(activation=True)


@op("sigmoid")
class Sigmoid(Activation, FloatFunction):
    """1 / (1 + e⁻ˣ), elementwise; gradient g·y(1 - y)."""

    saves, emit, onnx, aten = Saves(outputs=(0,)), "torch.sigmoid({0})", "Sigmoid", "sigmoid"
    vm, method, functional = forms.pointwise(Code.SIGMOID), "sigmoid", "sigmoid"
    vjp = lambda g, ins, outs, attrs, needs: (g * FORMULAS.sigmoid_slope(None, outs[0]),)


@op("tanh")
class Tanh(Activation, FloatFunction):
    """tanh x, elementwise; gradient g(1 - y²)."""

    saves, sample, traits = Saves(outputs=(0,)), unary_sample(-3, 3), Traits(keeps_zero=True)
    emit, onnx, aten, vm = "torch.tanh({0})", "Tanh", "tanh", forms.pointwise(Code.TANH)
    method, functional = "tanh", "tanh"
    vjp = lambda g, ins, outs, attrs, needs: (g * FORMULAS.tanh_slope(None, outs[0]),)


@op("silu")
class Silu(Activation):
    """x·σ(x), elementwise; gradient g·σ(1 + x(1 - σ))."""

    traits, emit, vm = Traits(keeps_zero=True), "F.silu({0})", forms.pointwise(Code.SILU)
    vjp = lambda g, ins, outs, attrs, needs: (g * FORMULAS.silu_slope(ins[0], None),)
    expand = lambda ins, attrs: FORMULAS.silu(ins[0])
    onnx = lambda u: u("Mul", u.names[0], u("Sigmoid", u.names[0]))


@op("swiglu")
class SwiGlu(Binary):
    """silu(a)·b, elementwise, the gated unit of Shazeer 2020, eq. 6; gradients g·b·σ(1 + a(1 - σ)) and g·silu(a)."""

    saves, traits = Saves(inputs=(0, 1)), Traits(inplace=((0, 0),), annihilated=True, applies="silu")
    emit, vm, functional = "F.silu({0}) * {1}", forms.pointwise(Code.SWIGLU), "swiglu"
    infer = lambda a, b: floating(broadcast(a, b))
    cost = lambda ins, outs, attrs: Cost(5 * outs[0].size, sum(i.nbytes for i in ins), outs[0].nbytes)
    expand = lambda ins, attrs: call("silu", ins[0]) * ins[1]
    onnx = lambda u: u("Mul", Silu.onnx(u), u.names[1])

    def vjp(g, ins, outs, attrs, needs):
        a, b = ins
        s = call("sigmoid", a)
        da = g * b * FORMULAS.silu_slope_of(a, s) if needs[0] else None
        return da, g * (a * s) if needs[1] else None


@op("relu")
class Relu(Activation):
    """max(x, 0), elementwise, also of integers; gradient 0 at 0."""

    saves, sample, traits = Saves(outputs=(0,)), away_from_zero, Traits(keeps_zero=True, rectifies=True)
    emit, onnx, vm = "F.relu({0})", "Relu", forms.pointwise(Code.RELU)
    method = "relu"
    expand = lambda ins, attrs: call("clamp", ins[0], low=0.0 if ins[0].dtype.is_float else 0)

    def infer(x):
        return x if x.dtype.kind in ("int", "uint") else floating(x)

    vjp = lambda g, ins, outs, attrs, needs: (call("where", call("lt", 0.0, outs[0]), g, 0.0),)


def _if_positive(x: Any, above: Any, below: Any) -> Any:
    return call("where", call("lt", call("full_like", x, value=0.0), x), above, below)


@op("leaky_relu")
class LeakyRelu(Activation):
    """x if x > 0 else slope·x, elementwise; gradient `slope` at 0."""

    attrs, traits = {"slope": Attr(float, 0.01)}, Traits(keeps_zero=True)
    emit = "F.leaky_relu({0}, {slope})"
    sample = lambda rng: (away_from_zero(rng)[0], {"slope": 0.2})
    vjp = lambda g, ins, outs, attrs, needs: (_if_positive(ins[0], g, g * attrs["slope"]),)
    expand = lambda ins, attrs: _if_positive(ins[0], ins[0], ins[0] * attrs["slope"])
    onnx = lambda u: u("LeakyRelu", u.names[0], alpha=u.attrs["slope"])


@op("elu")
class Elu(Activation):
    """x if x > 0 else alpha·(eˣ - 1), elementwise; gradient g·alpha·eˣ if x ≤ 0 (Clevert et al. 2016)."""

    attrs, traits, emit = {"alpha": Attr(float, 1.0)}, Traits(keeps_zero=True), "F.elu({0}, {alpha})"
    sample = lambda rng: (away_from_zero(rng)[0], {"alpha": 0.7})
    onnx = lambda u: u("Elu", u.names[0], alpha=u.attrs["alpha"])

    def vjp(g, ins, outs, attrs, needs):
        below = g * (call("exp", call("clamp", ins[0], high=0.0)) * attrs["alpha"])
        return (_if_positive(ins[0], g, below),)

    def expand(ins, attrs):
        below = call("expm1", call("clamp", ins[0], high=0.0)) * attrs["alpha"]
        return _if_positive(ins[0], ins[0], below)


@op("gelu")
class Gelu(Activation):
    """x·Φ(x) (`approximate="none"`), or ½x(1 + tanh(√(2/π)(x + 0.044715x³))) (`"tanh"`), elementwise."""

    attrs, traits = {"approximate": Attr(Literal["none", "tanh"], "none")}, Traits(keeps_zero=True)
    emit = "F.gelu({0}, approximate={approximate})"
    vm, functional = forms.GELU, "gelu"
    sample = lambda rng: ([rng.uniform(-3, 3, (4, 3))], {"approximate": "tanh" if rng.random() < 0.5 else "none"})
    expand = lambda ins, attrs: (FORMULAS.gelu if attrs["approximate"] == "none" else FORMULAS.gelu_tanh)(ins[0])
    onnx = lambda u: u("Gelu", u.names[0], approximate=u.attrs["approximate"])

    def vjp(g, ins, outs, attrs, needs):
        slope = FORMULAS.gelu_slope if attrs["approximate"] == "none" else FORMULAS.gelu_tanh_slope
        return (g * slope(ins[0], None),)


@op("softplus")
class Softplus(Activation):
    """ln(1 + eˣ) = max(x, 0) + log1p(e^-|x|), elementwise; gradient g·σ(x)."""

    emit, onnx = "F.softplus({0}, threshold=80)", "Softplus"
    vjp = lambda g, ins, outs, attrs, needs: (g * call("sigmoid", ins[0]),)
    expand = lambda ins, attrs: FORMULAS.softplus(ins[0])


@op("logsigmoid")
class LogSigmoid(Activation):
    """ln σ(x) = -softplus(-x), elementwise; gradient g·σ(-x)."""

    emit, functional = "F.logsigmoid({0})", "logsigmoid"
    vjp = lambda g, ins, outs, attrs, needs: (g * call("sigmoid", -ins[0]),)
    expand = lambda ins, attrs: -call("softplus", -ins[0])
    onnx = lambda u: u("Neg", u("Softplus", u("Neg", u.names[0])))


@op("sech")
class Sech(Activation):
    """1 / cosh x = 2e^-|x| / (1 + e^-2|x|), elementwise; gradient -g·y·tanh x."""

    saves, sample = Saves(inputs=(0,), outputs=(0,)), unary_sample(-3, 3)
    emit, functional = "torch.cosh({0}).reciprocal()", "sech"
    vjp = lambda g, ins, outs, attrs, needs: (g * FORMULAS.sech_slope(ins[0], outs[0]),)
    expand = lambda ins, attrs: widened(FORMULAS.sech, ins[0])
    onnx = lambda u: u("Reciprocal", u("Cosh", u.names[0]))
