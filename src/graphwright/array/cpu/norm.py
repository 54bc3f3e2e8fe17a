"""Normalisations that compute in preallocated scratch, because ATen's fused kernels allocate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf, prod

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, kernel, number, out_kernel, statistic
from graphwright.array.spec import Spec

aten = torch.ops.aten


def _scratch(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    x, w = ins
    wide = Spec(x.shape, statistic(x.dtype))
    row = Spec((*x.shape[:-1], 1), wide.dtype)
    scale = Spec(w.shape, w.dtype if attrs["cast_before_scale"] else wide.dtype)
    plain = not attrs["unit_offset"] and (attrs["cast_before_scale"] or not w.dtype.is_low)  # the factor is w itself
    return [wide, row] + ([wide] if x.dtype.is_low else []) + ([] if plain else [scale])


@kernel("rms_norm", work=_scratch)
def rms_norm(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    (x, w), out, (square, row, *spare) = ins, outs[0], work
    low, unit_offset, cast_first = square.dtype != x.dtype, attrs["unit_offset"], attrs["cast_before_scale"]
    wide, scale = spare.pop(0) if low else x, spare[0] if spare else w
    count, eps, one = number(x.shape[-1], row), number(attrs["eps"], row), number(1, scale)

    def run() -> None:
        if low:
            wide.copy_(x)
        if scale is not w:
            scale.copy_(w)
        if unit_offset:
            scale.add_(one)
        torch.mul(wide, wide, out=square)
        torch.sum(square, (-1,), True, out=row).div_(count).add_(eps).rsqrt_()
        if not low:
            torch.mul(wide, row, out=out).mul_(scale)
        elif cast_first:
            out.copy_(torch.mul(wide, row, out=square)).mul_(scale)
        else:
            out.copy_(torch.mul(wide, row, out=square).mul_(scale))

    return run


def _affine(out: torch.Tensor, scale: Tensors) -> Call:
    """Return a call that computes out·weight + bias in place; `scale` is (weight, bias), (weight,) or empty."""
    changes = list(zip((out.mul_, out.add_), scale, strict=False))

    def run() -> None:
        for change, factor in changes:
            change(factor)

    return run


def _standard(x: torch.Tensor, axes: list[int], eps: float, out: torch.Tensor, work: Tensors) -> Call:
    """Return a call that writes (x - mean) / √(var + eps); `work` holds squares, mean and 1 / √(var + eps)."""
    square, mean, root = work
    count, least = number(prod(x.shape[a] for a in axes), x), number(eps, x)

    def run() -> None:
        torch.sub(x, torch.sum(x, axes, True, out=mean).div_(count), out=out)
        torch.mul(out, out, out=square)
        out.mul_(torch.sum(square, axes, True, out=root).div_(count).add_(least).rsqrt_())

    return run


def _layer_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    x, rank = ins[0], attrs["rank"]
    row = Spec((*x.shape[:-rank], *(1,) * rank), x.dtype)
    return [x, row, row]


@kernel("layer_norm", work=_layer_work, widen=True)
def layer_norm(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    axes = list(range(-attrs["rank"], 0))
    return [_standard(ins[0], axes, attrs["eps"], outs[0], work), _affine(outs[0], ins[1:])]


def _group_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    x, groups = ins[0], attrs["groups"]
    split = (x.sizes[0], groups, x.sizes[1] // groups, *x.sizes[2:])
    row = Spec((*split[:2], *(1,) * (len(split) - 2)), x.dtype)
    return [Spec(split, x.dtype), row, row]


@kernel("group_norm", work=_group_work, widen=True)
def group_norm(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    x, split = ins[0], (attrs["groups"], -1) if ins[0].numel() else work[0].shape[1:3]
    parts, out = x.unflatten(1, split), outs[0].unflatten(1, split)
    standard = _standard(parts, list(range(2, parts.dim())), attrs["eps"], out, work)
    return [standard, _affine(outs[0], by_channel(ins[1:], x))]


def by_channel(vectors: Tensors, x: torch.Tensor) -> list[torch.Tensor]:
    """Return views of vectors [C] as [C, 1, ...], which broadcast along axis 1 of x."""
    return [v.view(-1, *(1,) * (x.dim() - 2)) for v in vectors]


@kernel("batch_norm", work=lambda o, i, a: [Spec(i[1].shape, i[0].dtype)] * 2, widen=True)
def batch_norm(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    (x, mean, var, *scale), (at, root), eps = ins, work, number(attrs["eps"], work[1])
    wide_at, wide_root = by_channel(work, x)

    def run() -> None:
        at.copy_(mean)
        root.copy_(var).add_(eps).rsqrt_()
        torch.sub(x, wide_at, out=outs[0]).mul_(wide_root)

    return [run, _affine(outs[0], by_channel(scale, x))]


def _batch_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    x = ins[0]
    row = Spec((1, x.shape[1], *(1,) * (len(x.shape) - 2)), x.dtype)
    return [x, row, row, Spec(x.shape[1:2], ins[1].dtype)]


@kernel("batch_norm_train", work=_batch_work, widen=True)
def batch_norm_train(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    (x, mean, var, *scale), (out, new_mean, new_var), (square, row, root, step) = ins, outs, work
    axes, pull = [0, *range(2, x.dim())], attrs["momentum"]
    size = prod(x.shape[a] for a in axes)
    count, least, keep, fresh = number(size, x), number(attrs["eps"], x), number(1.0 - pull, step), number(pull, step)
    unbiased, batch_mean, batch_var = number(pull * size / max(size - 1, 1), step), row.view(-1), root.view(-1)

    def move(new: torch.Tensor, old: torch.Tensor, batch: torch.Tensor, weight: torch.Tensor) -> None:
        step.copy_(batch).mul_(weight)
        torch.mul(old, keep, out=new).add_(step)

    def run() -> None:
        torch.sum(x, axes, True, out=row).div_(count)
        move(new_mean, mean, batch_mean, fresh)
        torch.mul(torch.sub(x, row, out=out), out, out=square)
        torch.sum(square, axes, True, out=root).div_(count)
        move(new_var, var, batch_var, unbiased)
        out.mul_(root.add_(least).rsqrt_())

    return [run, _affine(out, by_channel(scale, x))]


@kernel("softmax", work=lambda o, i, a: [Spec(i[1].shape, i[1].dtype)] if len(i) > 1 else [])
def softmax(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """exp(x - max) / Σ exp(x - max) along an axis; entries where the mask operand is false are 0, also if all are."""
    out, axis = outs[0], attrs["axis"]
    if len(ins) == 1:
        return partial(aten._softmax.out, ins[0], axis, False, out=out)

    def run() -> None:
        hidden = torch.logical_not(ins[1], out=work[0])
        out.copy_(ins[0]).masked_fill_(hidden, -inf)
        aten._softmax.out(out, axis, False, out=out)
        out.masked_fill_(hidden, 0.0)

    return run


out_kernel("log_softmax", lambda i, a: partial(aten._log_softmax.out, i[0], a["axis"], False))
