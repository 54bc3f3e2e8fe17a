"""Normalisations in planned scratch; ATen's fused forms allocate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf, prod

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, kernel
from graphwright.array.cpu.reduce import mean_calls
from graphwright.array.dtype import DType, float32
from graphwright.array.spec import Spec


def statistic(dtype: DType) -> DType:
    """Return the dtype of sums over an axis: float32 for 16-bit floats, else the dtype itself."""
    return float32 if dtype.is_low else dtype


def _scratch(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    x, w = ins
    wide = Spec(x.shape, statistic(x.dtype))
    row = Spec((*x.shape[:-1], 1), wide.dtype)
    scale = Spec(w.shape, w.dtype if attrs["cast_before_scale"] else wide.dtype)
    return [wide, row] + ([wide] if x.dtype.is_low else []) + ([] if _as_it_is(w.dtype, attrs) else [scale])


def _as_it_is(dtype: DType, attrs: Attrs) -> bool:
    """Return True if the weight itself is the factor, in its own dtype."""
    return not attrs["unit_offset"] and (attrs["cast_before_scale"] or not dtype.is_low)


@kernel("rms_norm", work=_scratch)
def rms_norm(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """x / sqrt(mean(x², -1) + eps), cast to the dtype of x before or after scaling."""
    x, w, out = ins[0], ins[1], outs[0]
    square, row, *spare = work
    calls: list[Call] = []
    low = square.dtype != x.dtype
    if low:
        wide = spare.pop(0)
        calls.append(partial(wide.copy_, x))
        x = wide
    if spare:
        scale = spare[0]
        calls.append(partial(scale.copy_, w))
        if attrs["unit_offset"]:
            calls.append(partial(scale.add_, torch.ones((), dtype=scale.dtype)))
        w = scale
    eps = torch.tensor(attrs["eps"], dtype=row.dtype)
    calls += [
        partial(torch.mul, x, x, out=square),
        *mean_calls(square, [-1], True, row),
        partial(row.add_, eps),
        row.rsqrt_,
    ]
    if not low:
        return [*calls, partial(torch.mul, x, row, out=out), partial(out.mul_, w)]
    calls.append(partial(torch.mul, x, row, out=square))
    if attrs["cast_before_scale"]:
        return [*calls, partial(out.copy_, square), partial(out.mul_, w)]
    return [*calls, partial(square.mul_, w), partial(out.copy_, square)]


def _standard(x: torch.Tensor, axes: list[int], eps: float, out: torch.Tensor, work: Tensors) -> list[Call]:
    """Return calls for (x - mean) / sqrt(var + eps) into `out`; `work` is scratch of its shape, mean and root."""
    square, mean, root = work
    return [
        *mean_calls(x, axes, True, mean),
        partial(torch.sub, x, mean, out=out),
        partial(torch.mul, out, out, out=square),
        *mean_calls(square, axes, True, root),
        partial(root.add_, torch.tensor(eps, dtype=root.dtype)),
        root.rsqrt_,
        partial(out.mul_, root),
    ]


def _affine(out: torch.Tensor, scale: Tensors) -> list[Call]:
    """Return calls for out·w + b, for those of w and b that are given."""
    return [partial(change, s) for change, s in zip((out.mul_, out.add_), scale, strict=False)]


def _layer_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    x, rank = ins[0], attrs["rank"]
    row = Spec((*x.shape[:-rank], *(1,) * rank), x.dtype)
    return [x, row, row]


@kernel("layer_norm", work=_layer_work, widen=True)
def layer_norm(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Normalise over the last `rank` axes."""
    x, *scale = ins
    return [*_standard(x, list(range(-attrs["rank"], 0)), attrs["eps"], outs[0], work), *_affine(outs[0], scale)]


def _group_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    x, groups = ins[0], attrs["groups"]
    split = (x.sizes[0], groups, x.sizes[1] // groups, *x.sizes[2:])
    row = Spec((*split[:2], *(1,) * (len(split) - 2)), x.dtype)
    return [Spec(split, x.dtype), row, row]


@kernel("group_norm", work=_group_work, widen=True)
def group_norm(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Normalise over each group of channels and all positions."""
    x, *scale = ins
    split = (attrs["groups"], -1) if x.numel() else work[0].shape[1:3]
    parts, out = x.unflatten(1, split), outs[0].unflatten(1, split)
    calls = _standard(parts, list(range(2, parts.dim())), attrs["eps"], out, work)
    return [*calls, *_affine(outs[0], [_by_channel(s, x) for s in scale])]


def _by_channel(vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """View [C] as [C, 1, ...], aligned with axis 1 of x."""
    return vector.view(-1, *(1,) * (x.dim() - 2))


def _given_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    kind = ins[0].dtype
    return [Spec(ins[1].shape, kind)] * 2


@kernel("batch_norm", work=_given_work, widen=True)
def batch_norm(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """(x - mean) / sqrt(var + eps) per channel."""
    x, mean, var, *scale = ins
    at, root = work
    return [
        partial(at.copy_, mean),
        partial(root.copy_, var),
        partial(root.add_, torch.tensor(attrs["eps"], dtype=root.dtype)),
        root.rsqrt_,
        partial(torch.sub, x, _by_channel(at, x), out=outs[0]),
        partial(outs[0].mul_, _by_channel(root, x)),
        *_affine(outs[0], [_by_channel(s, x) for s in scale]),
    ]


def _batch_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    x = ins[0]
    row = Spec((1, x.shape[1], *(1,) * (len(x.shape) - 2)), x.dtype)
    return [x, row, row, Spec(x.shape[1:2], ins[1].dtype)]


@kernel("batch_norm_train", work=_batch_work, widen=True)
def batch_norm_train(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Normalise over N and all positions; update the running mean and variance."""
    x, mean, var, *scale = ins
    out, new_mean, new_var = outs
    square, row, root, step = work
    axes = [0, *range(2, x.dim())]
    count = prod(x.shape[a] for a in axes)
    keep, pull = (torch.tensor(f, dtype=step.dtype) for f in (1.0 - attrs["momentum"], attrs["momentum"]))
    unbiased = torch.tensor(attrs["momentum"] * count / max(count - 1, 1), dtype=step.dtype)
    eps = torch.tensor(attrs["eps"], dtype=x.dtype)

    def move(new: torch.Tensor, old: torch.Tensor, batch: torch.Tensor, weight: torch.Tensor) -> list[Call]:
        return [
            partial(step.copy_, batch.view(-1)),
            partial(step.mul_, weight),
            partial(torch.mul, old, keep, out=new),
            partial(new.add_, step),
        ]

    return [
        *mean_calls(x, axes, True, row),
        *move(new_mean, mean, row, pull),
        partial(torch.sub, x, row, out=out),
        partial(torch.mul, out, out, out=square),
        *mean_calls(square, axes, True, root),
        *move(new_var, var, root, unbiased),
        partial(root.add_, eps),
        root.rsqrt_,
        partial(out.mul_, root),
        *_affine(out, [_by_channel(s, x) for s in scale]),
    ]


aten = torch.ops.aten


@kernel("softmax", work=lambda o, i, a: [Spec(i[1].shape, i[1].dtype)] if len(i) > 1 else [])
def softmax(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """exp(x - max) / Σ along an axis; masked entries are 0, also in a fully masked row."""
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
    """ln softmax(x) along an axis."""
    return partial(aten._log_softmax.out, ins[0], attrs["axis"], False, out=outs[0])
