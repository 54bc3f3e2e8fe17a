"""Kernels that reduce over axes, and kernels that sort, all without allocating memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from graphwright.array.backend import Attrs, Call, Fresh
from graphwright.array.cpu.kernel import Tensors, kernel, number, out_kernel, statistic
from graphwright.array.dtype import bool_, float32
from graphwright.array.spec import Spec


def _axes(attrs: Attrs, rank: int) -> list[int]:
    """Return the axes to reduce as indices >= 0; all axes if the attribute `axes` is None."""
    return list(range(rank)) if attrs["axes"] is None or rank == 0 else [a % rank for a in attrs["axes"]]


def _reduced(function: Callable[..., object], x: torch.Tensor, attrs: Attrs, out: torch.Tensor) -> Call:
    """Return a call that reduces x; if `axes` is empty it copies x, because ATen would reduce over all axes."""
    axes = _axes(attrs, x.dim())
    return partial(function, x, axes, attrs["keepdims"], out=out) if axes else partial(out.copy_, x)


def _widened(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    """Return specs of the scratch: a copy of x in the dtype of the sum if that differs, which ATen would allocate."""
    reduces = _axes(attrs, len(ins[0].shape))
    return [Spec(ins[0].shape, outs[0].dtype)] if ins[0].dtype is not outs[0].dtype and reduces else []


def _fresh_sum(ins: Tensors, attrs: Attrs) -> Fresh | None:
    axes, x = _axes(attrs, ins[0].dim()), ins[0]
    return (lambda x, *, keepdims, **_: torch.sum(x, axes, keepdims)) if axes and x.is_floating_point() else None


@kernel("sum", work=_widened, fresh=_fresh_sum)
def sum_(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    wide: list[Call] = [partial(w.copy_, ins[0]) for w in work]
    return [*wide, _reduced(torch.sum, (*work, ins[0])[0], attrs, outs[0])]


def _widened_rows(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    """Return specs of the scratch: x with its reduced axes merged at the end; for 16-bit floats, a float32 result."""
    axes, x, kind = _axes(attrs, len(ins[0].shape)), ins[0], statistic(outs[0].dtype)
    rows = Spec((*(d for a, d in enumerate(x.sizes) if a not in axes), math.prod(x.sizes[a] for a in axes)), kind)
    return [rows] + ([Spec(rows.shape[:-1], kind)] if outs[0].dtype.is_low else [])


@kernel("prod", work=_widened_rows)
def prod(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Compute the product over axes; 16-bit floats are multiplied in float32 and rounded once."""
    x, axes, rows = ins[0], _axes(attrs, ins[0].dim()), work[0]
    last = x.permute((*(a for a in range(x.dim()) if a not in axes), *axes))
    result = outs[0].reshape(rows.shape[:-1])
    target = work[1] if len(work) > 1 else result
    calls: list[Call] = [partial(rows.view(last.shape).copy_, last), partial(torch.prod, rows, -1, out=target)]
    return calls if target is result else [*calls, partial(result.copy_, target)]


def _reduction(name: str, function: Callable[..., object], of_truths: bool = False) -> None:
    @kernel(name, work=(lambda o, i, a: [Spec(i[0].shape, bool_)]) if of_truths else None)
    def bind(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
        truths: list[Call] = [partial(torch.ne, ins[0], number(0, ins[0]), out=w) for w in work]
        return [*truths, _reduced(function, (*work, ins[0])[0], attrs, outs[0])]


_reduction("amax", torch.amax)
_reduction("amin", torch.amin)
_reduction("any", torch.any, of_truths=True)
_reduction("all", torch.all, of_truths=True)


def _mean_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    low = ins[0].dtype.is_low and _axes(attrs, len(ins[0].shape))  # 66 entries of 1000 overflow a float16 sum
    return [Spec(ins[0].shape, float32), Spec(outs[0].shape, float32)] if low else []


@kernel("mean", work=_mean_work)
def mean(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Compute sum / count, because `torch.mean(out=)` allocates; 16-bit floats are summed in float32."""
    axes = _axes(attrs, ins[0].dim())
    if not axes:
        return [partial(outs[0].copy_, ins[0])]
    wide, total = work or (ins[0], outs[0])
    count = number(math.prod(wide.shape[a] for a in axes), total)
    calls: list[Call] = [partial(torch.sum, wide, axes, attrs["keepdims"], out=total), partial(total.div_, count)]
    return [partial(wide.copy_, ins[0]), *calls, partial(outs[0].copy_, total)] if work else calls


out_kernel("argmax", lambda i, a: partial(torch.argmax, i[0], a["axis"], False))
out_kernel("argmin", lambda i, a: partial(torch.argmin, i[0], a["axis"], False))


def _reversed_copies(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    wide = [outs[0]] if ins[0].dtype is not outs[0].dtype or attrs["reverse"] else []
    return wide + ([outs[0]] if attrs["reverse"] else [])


@kernel("cumsum", work=_reversed_copies)
def cumsum(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Sum cumulatively along an axis; with `reverse`, from its end, on a flipped copy."""
    x, out, axis = (*work, ins[0])[0], outs[0], attrs["axis"]
    calls: list[Call] = [partial(w.copy_, ins[0]) for w in work[:1]]
    if not attrs["reverse"]:
        return [*calls, partial(torch.cumsum, x, axis, out=out)]
    backwards = torch.arange(x.shape[axis] - 1, -1, -1)
    flip = partial(torch.index_select, x, axis, backwards)
    return [*calls, partial(flip, out=work[1]), partial(torch.cumsum, work[1], axis, out=x), partial(flip, out=out)]


@kernel("sort")
def sort(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    return partial(torch.sort, ins[0], stable=True, dim=attrs["axis"], descending=attrs["descending"], out=tuple(outs))
