"""Reductions over given axes, into planned memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, kernel


def _reduction(name: str, call: Callable) -> None:
    def bind(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
        if not attrs["axes"]:  # nothing to reduce; ATen reads an empty list as "all axes"
            return partial(outs[0].copy_, ins[0])
        return partial(call, ins[0], list(attrs["axes"]), attrs["keepdims"], out=outs[0])

    kernel(name)(bind)


for _name, _call in {"sum": torch.sum, "amax": torch.amax}.items():
    _reduction(_name, _call)


def mean_calls(x: torch.Tensor, axes: list[int], keepdims: bool, out: torch.Tensor) -> list[Call]:
    """Sum, then divide by a count held in a tensor: `torch.mean(out=)` allocates two scalars each time."""
    count = torch.tensor(math.prod(x.shape[a] for a in axes), dtype=out.dtype)
    return [partial(torch.sum, x, axes, keepdims, out=out), partial(out.div_, count)]


@kernel("mean")
def mean(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Mean over axes."""
    if not attrs["axes"]:
        return [partial(outs[0].copy_, ins[0])]
    return mean_calls(ins[0], list(attrs["axes"]), attrs["keepdims"], outs[0])


@kernel("argmax")
def argmax(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Index of the first largest entry along one axis."""
    return partial(torch.argmax, ins[0], attrs["axis"], False, out=outs[0])
