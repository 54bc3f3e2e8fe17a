"""Elementwise kernels: one ATen `out=` call each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, kernel
from graphwright.array.dtype import float32
from graphwright.array.spec import Spec

aten = torch.ops.aten


def _unary(name: str, call: Callable) -> None:
    def bind(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
        return partial(call, ins[0], out=outs[0])

    kernel(name)(bind)


def _binary(name: str, call: Callable) -> None:
    def bind(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
        return partial(call, ins[0], ins[1], out=outs[0])

    kernel(name)(bind)


for _name, _call in {
    "neg": torch.neg,
    "abs": torch.abs,
    "sign": torch.sign,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
    "silu": aten.silu.out,
}.items():
    _unary(_name, _call)

for _name, _call in {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "eq": torch.eq,
    "lt": torch.lt,
    "le": torch.le,
}.items():
    _binary(_name, _call)


@kernel("relu")
def relu(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """max(x, 0)."""
    return partial(torch.clamp_min, ins[0], 0, out=outs[0])


@kernel("gelu")
def gelu(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """The erf form, or the tanh form with `approximate="tanh"`."""
    return partial(aten.gelu.out, ins[0], approximate=attrs["approximate"], out=outs[0])


@kernel("where")
def where(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """A where the condition holds, else b."""
    return partial(torch.where, ins[0], ins[1], ins[2], out=outs[0])


@kernel("cast")
@kernel("copy")
def copy(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Elements into fresh memory, converted to the dtype of the output."""
    return partial(outs[0].copy_, ins[0])


@kernel("full_like")
def full_like(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """One value everywhere."""
    return partial(outs[0].fill_, attrs["value"])


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
