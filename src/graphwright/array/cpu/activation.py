"""Activation kernels: ATen's fused forms where they neither allocate nor lose digits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, kernel, pointwise, row_major
from graphwright.array.dtype import float32
from graphwright.array.spec import Spec

aten = torch.ops.aten

pointwise(sigmoid=torch.sigmoid)


@kernel("silu", fresh=row_major(torch.nn.functional.silu))
def silu(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """X·σ(x)."""
    return partial(aten.silu.out, ins[0], out=outs[0])


@kernel("swiglu")
def swiglu(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """silu(a)·b: the first factor is written to the output."""
    a, b = ins
    return [partial(aten.silu.out, a.expand(outs[0].shape), out=outs[0]), partial(outs[0].mul_, b)]


@kernel("relu", fresh=row_major(lambda x: torch.clamp_min(x, 0)))
def relu(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """max(x, 0)."""
    return partial(torch.clamp_min, ins[0], 0, out=outs[0])


@kernel("leaky_relu")
def leaky_relu(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """One factor above 0, `slope` below."""
    return partial(aten.leaky_relu.out, ins[0], attrs["slope"], out=outs[0])


@kernel("elu")
def elu(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """The operand above 0, alpha·(eˣ - 1) below."""
    return partial(aten.elu.out, ins[0], attrs["alpha"], out=outs[0])


@kernel("gelu")
def gelu(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """The erf form, or the tanh form with `approximate="tanh"`."""
    return partial(aten.gelu.out, ins[0], approximate=attrs["approximate"], out=outs[0])


def _linear_from(x: torch.Tensor) -> float:
    """Where softplus(x) is x to the last digit and eˣ is still finite; ATen's own 20 costs float64 seven digits."""
    return 700.0 if x.dtype == torch.float64 else 80.0


@kernel("softplus")
def softplus(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """ln(1 + eˣ)."""
    return partial(aten.softplus.out, ins[0], 1, _linear_from(ins[0]), out=outs[0])


@kernel("logsigmoid")
def logsigmoid(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """-softplus(-x), in the output's memory."""
    out = outs[0]
    return [
        partial(torch.neg, ins[0], out=out),
        partial(aten.softplus.out, out, 1, _linear_from(out), out=out),
        out.neg_,
    ]


def _sech_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    wide = float32 if ins[0].dtype.is_low else ins[0].dtype
    return [Spec(ins[0].shape, wide)] * 2


@kernel("sech", work=_sech_work)
def sech(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """2e / (1 + e²) with e = e^-|x|, in float32 or wider."""
    e, square = work
    one = torch.ones((), dtype=e.dtype)
    return [
        partial(e.copy_, ins[0]),
        e.abs_,
        e.neg_,
        e.exp_,
        partial(torch.mul, e, e, out=square),
        partial(square.add_, one),
        partial(e.add_, e),
        partial(e.div_, square),
        partial(outs[0].copy_, e),
    ]
