"""Arithmetic kernels: one ATen `out=` call each, and the sum of a junction."""

from __future__ import annotations

from functools import partial

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, kernel, pointwise
from graphwright.array.dtype import float32
from graphwright.array.spec import Spec

pointwise(
    neg=torch.neg,
    abs=torch.abs,
    sign=torch.sign,
    floor=torch.floor,
    ceil=torch.ceil,
    round=torch.round,
    add=torch.add,
    sub=torch.sub,
    mul=torch.mul,
    div=torch.div,
    floor_divide=torch.floor_divide,
    remainder=torch.remainder,
    pow=torch.pow,
    minimum=torch.minimum,
    maximum=torch.maximum,
)


@kernel("step")
def step(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """1 where x > 0, else 0."""
    return partial(torch.heaviside, ins[0], torch.zeros((), dtype=ins[0].dtype), out=outs[0])


@kernel("clamp")
def clamp(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Between two bounds, each of which may be None."""
    return partial(torch.clamp, ins[0], attrs["low"], attrs["high"], out=outs[0])


@kernel("junction", work=lambda o, i, a: [Spec(o[0].shape, float32)] if o[0].dtype.is_low and len(i) > 2 else [])
def junction(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Sum in port order; three or more 16-bit operands are summed in float32 and rounded once."""
    out = outs[0]
    if not ins:
        return [out.zero_]
    if len(ins) == 1:
        return [partial(out.copy_, ins[0])]
    target = work[0] if work else out
    calls: list[Call] = [partial(torch.add, ins[0], ins[1], out=target)]
    calls += [partial(target.add_, other) for other in ins[2:]]
    if work:
        calls = [partial(target.copy_, ins[0]), *(partial(target.add_, other) for other in ins[1:])]
        calls.append(partial(out.copy_, target))
    return calls
