"""Reductions over given axes into planned memory, and sorting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from graphwright.array.backend import Attrs, Call, Fresh
from graphwright.array.cpu.kernel import Bind, Tensors, kernel
from graphwright.array.dtype import bool_, float32, int64
from graphwright.array.spec import Spec


def _axes(attrs: Attrs, rank: int) -> list[int]:
    """Return the axes to reduce; None means all, an empty tuple none."""
    return list(range(rank)) if attrs["axes"] is None else [a % rank for a in attrs["axes"]]


def _widened(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    """Return scratch for a sum in another dtype than the operand's: ATen would allocate the same copy."""
    reduces = _axes(attrs, len(ins[0].shape))
    return [Spec(ins[0].shape, outs[0].dtype)] if ins[0].dtype is not outs[0].dtype and reduces else []


def _fresh_sum(ins: Tensors, attrs: Attrs) -> Fresh | None:
    axes, x = _axes(attrs, ins[0].dim()), ins[0]
    return (lambda x, *, keepdims, **_: torch.sum(x, axes, keepdims)) if axes and x.is_floating_point() else None


@kernel("sum", work=_widened, fresh=_fresh_sum)
def sum_(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Σ over axes, in the dtype of the output."""
    axes = _axes(attrs, ins[0].dim())
    if not axes:  # nothing to reduce; ATen reads an empty list as "all axes"
        return [partial(outs[0].copy_, ins[0])]
    x, calls = (work[0], [partial(work[0].copy_, ins[0])]) if work else (ins[0], [])
    return [*calls, partial(torch.sum, x, axes, attrs["keepdims"], out=outs[0])]


def _widened_rows(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    """Return scratch for the reduced axes moved to the end, in the dtype of the computation."""
    axes, x = _axes(attrs, len(ins[0].shape)), ins[0]
    kind = float32 if outs[0].dtype.is_low else outs[0].dtype
    rows = Spec((*(d for a, d in enumerate(x.sizes) if a not in axes), math.prod(x.sizes[a] for a in axes)), kind)
    return [rows] + ([Spec(rows.shape[:-1], kind)] if outs[0].dtype.is_low else [])


@kernel("prod", work=_widened_rows)
def prod(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Π over axes; 16-bit floats in float32, rounded once."""
    x, axes, rows = ins[0], _axes(attrs, ins[0].dim()), work[0]
    kept = [a for a in range(x.dim()) if a not in axes]
    last = x.permute((*kept, *axes))
    result = outs[0].reshape(rows.shape[:-1])
    target = work[1] if len(work) > 1 else result
    calls: list[Call] = [partial(rows.view(last.shape).copy_, last), partial(torch.prod, rows, -1, out=target)]
    return calls if target is result else [*calls, partial(result.copy_, target)]


def _extremum(reduce: Callable[..., object]) -> Bind:
    def bind(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
        axes = _axes(attrs, ins[0].dim())
        if not axes:
            return partial(outs[0].copy_, ins[0])
        return partial(reduce, ins[0], axes, attrs["keepdims"], out=outs[0])

    return bind


kernel("amax")(_extremum(torch.amax))
kernel("amin")(_extremum(torch.amin))


def _truths(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    return [Spec(ins[0].shape, bool_)]


def _truth(reduce: Callable[..., object]) -> Bind:
    def bind(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
        zero, axes = torch.zeros((), dtype=ins[0].dtype), _axes(attrs, ins[0].dim())
        calls: list[Call] = [partial(torch.ne, ins[0], zero, out=work[0])]
        if not axes:
            return [*calls, partial(outs[0].copy_, work[0])]
        return [*calls, partial(reduce, work[0], axes, attrs["keepdims"], out=outs[0])]

    return bind


kernel("any", work=_truths)(_truth(torch.any))
kernel("all", work=_truths)(_truth(torch.all))


def mean_calls(x: torch.Tensor, axes: list[int], keepdims: bool, out: torch.Tensor) -> list[Call]:
    """Sum, then divide by a count in a tensor: `torch.mean(out=)` allocates two scalars per call."""
    count = torch.tensor(math.prod(x.shape[a] for a in axes), dtype=out.dtype)
    return [partial(torch.sum, x, axes, keepdims, out=out), partial(out.div_, count)]


def _mean_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    low = ins[0].dtype.is_low and _axes(attrs, len(ins[0].shape))  # 66 entries of 1000 overflow a float16 sum
    return [Spec(ins[0].shape, float32), Spec(outs[0].shape, float32)] if low else []


@kernel("mean", work=_mean_work)
def mean(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Mean over axes; 16-bit floats in float32, rounded once."""
    axes, keepdims = _axes(attrs, ins[0].dim()), attrs["keepdims"]
    if not axes:
        return [partial(outs[0].copy_, ins[0])]
    if not work:
        return mean_calls(ins[0], axes, keepdims, outs[0])
    wide, total = work
    return [partial(wide.copy_, ins[0]), *mean_calls(wide, axes, keepdims, total), partial(outs[0].copy_, total)]


def _place(reduce: Callable[..., object]) -> Bind:
    return lambda outs, ins, attrs, work: partial(reduce, ins[0], attrs["axis"], False, out=outs[0])


kernel("argmax")(_place(torch.argmax))
kernel("argmin")(_place(torch.argmin))


def _reversed_copies(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    wide = [outs[0]] if ins[0].dtype is not outs[0].dtype or attrs["reverse"] else []
    return wide + ([outs[0]] if attrs["reverse"] else [])


@kernel("cumsum", work=_reversed_copies)
def cumsum(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Cumulative sum along an axis; reversed through a copy, because torch has no negative strides."""
    x, out, axis = ins[0], outs[0], attrs["axis"]
    calls: list[Call] = []
    if work:
        calls.append(partial(work[0].copy_, x))
        x = work[0]
    if not attrs["reverse"]:
        return [*calls, partial(torch.cumsum, x, axis, out=out)]
    backwards = torch.arange(x.shape[axis] - 1, -1, -1)
    return [
        *calls,
        partial(torch.index_select, x, axis, backwards, out=work[1]),
        partial(torch.cumsum, work[1], axis, out=x),
        partial(torch.index_select, x, axis, backwards, out=out),
    ]


def _log_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    kind = float32 if ins[0].dtype.is_low else ins[0].dtype
    axes = _axes(attrs, len(ins[0].shape))
    kept = Spec(tuple(1 if a in axes else d for a, d in enumerate(ins[0].shape)), kind)
    return [Spec(ins[0].shape, kind), kept, kept]


@kernel("logsumexp", work=_log_work)
def logsumexp(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """max + ln Σ exp(x - max), in float32 or wider; an infinite max is kept."""
    wide, top, total = work
    axes, result = _axes(attrs, ins[0].dim()), outs[0].view(work[1].shape)
    if not axes:
        return [partial(outs[0].copy_, ins[0])]
    if not wide.numel():
        return [partial(outs[0].fill_, -math.inf)]
    return [
        partial(wide.copy_, ins[0]),
        partial(torch.amax, wide, axes, True, out=top),
        partial(torch.nan_to_num, top, math.nan, 0.0, 0.0, out=top),
        partial(wide.sub_, top),
        wide.exp_,
        partial(torch.sum, wide, axes, True, out=total),
        total.log_,
        partial(total.add_, top),
        partial(result.copy_, total),
    ]


@kernel("sort")
def sort(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Values and indices along an axis."""
    return partial(torch.sort, ins[0], stable=True, dim=attrs["axis"], descending=attrs["descending"], out=tuple(outs))


def _whole(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    return [ins[0], Spec(ins[0].shape, int64)]


@kernel("topk", work=_whole)
def topk(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """The first k entries of the sorted axis."""
    axis = attrs["axis"]
    order = partial(torch.sort, ins[0], stable=True, dim=axis, descending=attrs["largest"], out=tuple(work))
    return [order, *(partial(o.copy_, w.narrow(axis, 0, attrs["k"])) for o, w in zip(outs, work, strict=True))]
