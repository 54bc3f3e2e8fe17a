"""Reductions over given axes, into planned memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, kernel
from graphwright.array.dtype import float32
from graphwright.array.spec import Spec


def _axes(attrs: Attrs, rank: int) -> list[int]:
    """The axes to reduce; None means all of them, an empty tuple none."""
    return list(range(rank)) if attrs["axes"] is None else list(attrs["axes"])


def _widened(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    """Scratch for a sum in another dtype than the operand's: ATen would make the same copy, unplanned."""
    reduces = _axes(attrs, len(ins[0].shape))
    return [Spec(ins[0].shape, outs[0].dtype)] if ins[0].dtype is not outs[0].dtype and reduces else []


@kernel("sum", work=_widened)
def sum_(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Σ over axes, in the dtype of the output."""
    axes = _axes(attrs, ins[0].dim())
    if not axes:  # nothing to reduce; ATen reads an empty list as "all axes"
        return [partial(outs[0].copy_, ins[0])]
    x, calls = (work[0], [partial(work[0].copy_, ins[0])]) if work else (ins[0], [])
    return [*calls, partial(torch.sum, x, axes, attrs["keepdims"], out=outs[0])]


@kernel("amax")
def amax(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Largest entry over axes."""
    axes = _axes(attrs, ins[0].dim())
    if not axes:
        return partial(outs[0].copy_, ins[0])
    return partial(torch.amax, ins[0], axes, attrs["keepdims"], out=outs[0])


def mean_calls(x: torch.Tensor, axes: list[int], keepdims: bool, out: torch.Tensor) -> list[Call]:
    """Sum, then divide by a count held in a tensor: `torch.mean(out=)` allocates two scalars each time."""
    count = torch.tensor(math.prod(x.shape[a] for a in axes), dtype=out.dtype)
    return [partial(torch.sum, x, axes, keepdims, out=out), partial(out.div_, count)]


def _mean_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    low = ins[0].dtype.is_low and _axes(attrs, len(ins[0].shape))  # 66 entries of 1000 overflow a float16 sum
    return [Spec(ins[0].shape, float32), Spec(outs[0].shape, float32)] if low else []


@kernel("mean", work=_mean_work)
def mean(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Mean over axes; of 16-bit floats in float32, rounded once."""
    axes, keepdims = _axes(attrs, ins[0].dim()), attrs["keepdims"]
    if not axes:
        return [partial(outs[0].copy_, ins[0])]
    if not work:
        return mean_calls(ins[0], axes, keepdims, outs[0])
    wide, total = work
    return [partial(wide.copy_, ins[0]), *mean_calls(wide, axes, keepdims, total), partial(outs[0].copy_, total)]


@kernel("argmax")
def argmax(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Index of the first largest entry along one axis."""
    return partial(torch.argmax, ins[0], attrs["axis"], False, out=outs[0])
