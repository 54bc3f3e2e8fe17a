"""Stable sorting; the first k of it, as ATen's own selection leaves the order of ties open."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, kernel
from graphwright.array.dtype import int64
from graphwright.array.spec import Spec


@kernel("sort")
def sort(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Values and indices along an axis."""
    return partial(torch.sort, ins[0], stable=True, dim=attrs["axis"], descending=attrs["descending"], out=tuple(outs))


def _whole(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    return [ins[0], Spec(ins[0].shape, int64)]


@kernel("topk", work=_whole)
def topk(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """The first k of the sorted axis."""
    axis = attrs["axis"]
    order = partial(torch.sort, ins[0], stable=True, dim=axis, descending=attrs["largest"], out=tuple(work))
    return [order, *(partial(o.copy_, w.narrow(axis, 0, attrs["k"])) for o, w in zip(outs, work, strict=True))]
