"""Reductions over given axes, into planned memory."""

from __future__ import annotations

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


for _name, _call in {"sum": torch.sum, "mean": torch.mean, "amax": torch.amax}.items():
    _reduction(_name, _call)


@kernel("argmax")
def argmax(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Index of the first largest entry along one axis."""
    return partial(torch.argmax, ins[0], attrs["axis"], False, out=outs[0])
