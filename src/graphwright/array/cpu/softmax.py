"""Softmax kernels: ATen's, which keep their sums in float32, and a mask around them."""

from __future__ import annotations

from functools import partial
from math import inf

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, kernel
from graphwright.array.spec import Spec

aten = torch.ops.aten


@kernel("softmax", work=lambda o, i, a: [Spec(i[1].shape, i[1].dtype)] if len(i) > 1 else [])
def softmax(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """exp(x - max) / Σ along an axis; what a mask leaves out is 0, also in a row of which nothing is left."""
    out, axis = outs[0], attrs["axis"]
    if len(ins) == 1:
        return [partial(aten._softmax.out, ins[0], axis, False, out=out)]
    hidden = work[0]
    return [
        partial(torch.logical_not, ins[1], out=hidden),
        partial(out.copy_, ins[0]),
        partial(out.masked_fill_, hidden, -inf),
        partial(aten._softmax.out, out, axis, False, out=out),
        partial(out.masked_fill_, hidden, 0.0),
    ]


@kernel("log_softmax")
def log_softmax(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """The logarithm of softmax along an axis."""
    return partial(aten._log_softmax.out, ins[0], attrs["axis"], False, out=outs[0])
