"""Cross entropy from logits and its gradient, one program per row, without storing probabilities."""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl

from graphwright.array.backend import Attrs
from graphwright.array.cpu.kernel import Tensors
from graphwright.array.triton.kernel import FLOATS, Launch, compiled, kernel
from graphwright.array.triton.rows import all_aligned, along_two, multiple, narrow, number, wide

LOWEST = tl.constexpr(float("-inf"))
WIDTHS = (128, 1024, 4096)
"""Classes that a program reads at once."""


@triton.jit
def _weights(w, at, inside, like, WEIGHTED: tl.constexpr):
    """Return the weights of classes in the dtype of `like`, 0 outside."""
    if WEIGHTED:
        return wide(tl.load(w + at, mask=inside, other=0.0)).to(like.dtype)
    else:
        return inside.to(like.dtype)


@triton.jit
def _mean_weight(w, classes, like, COLUMNS: tl.constexpr, WEIGHTED: tl.constexpr):
    """Return the mean weight of the classes."""
    total = tl.zeros([COLUMNS], like.dtype)
    lane = tl.arange(0, COLUMNS)
    for first in range(0, classes, COLUMNS):
        total += _weights(w, first + lane, first + lane < classes, like, WEIGHTED)
    return tl.sum(total, 0) / classes


@compiled
def cross_entropy_rows(
    scores, targets, w, loss, lse, classes: tl.int32, ignored: tl.int64, smoothing: tl.float64,
    COLUMNS: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute (1 - s)·w[t]·(lse - z[t]) + s·(lse·mean(w) - Σ w·z / K) and lse = ln Σ e^z of one row of scores [N, K].

    The loss is 0 if the target is `ignored`, and NaN if it is no class.
    """
    count, classes = classes, multiple(classes, ALIGNED)
    row = tl.program_id(0).to(tl.int64)
    z = scores + row * classes
    lane = tl.arange(0, COLUMNS)
    here = row >= 0
    top = tl.full([], LOWEST, loss.dtype.element_ty)
    total = tl.zeros([], loss.dtype.element_ty)
    for first in range(0, classes, COLUMNS):
        values = wide(tl.load(z + first + lane, mask=first + lane < classes, other=LOWEST))
        highest = tl.maximum(top, tl.max(values, 0))
        base = tl.where(highest == LOWEST, 0.0, highest)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(values - base), 0)
        top = highest
    level = tl.log(total)
    target = tl.load(targets + row, mask=here, other=0).to(tl.int64)
    known = (target >= 0) & (target < classes)
    own = _weights(w, target, known, total, WEIGHTED)
    picked = wide(tl.load(z + target, mask=known, other=float("nan")))
    found = (level - (picked - top)) * own
    if SMOOTH:
        share = number(smoothing, total)
        mixed = tl.zeros([COLUMNS], loss.dtype.element_ty)
        for first in range(0, classes, COLUMNS):
            inside = first + lane < classes
            values = wide(tl.load(z + first + lane, mask=inside, other=0.0)) - top
            mixed += tl.where(inside, values, 0.0) * _weights(w, first + lane, inside, total, WEIGHTED)
        mean = _mean_weight(w, classes, total, COLUMNS, WEIGHTED)
        found = found * (1.0 - share) + (level * mean - tl.sum(mixed, 0) / count) * share
    found = tl.where(known, found, float("nan"))
    tl.store(loss + row, tl.where(target == ignored, 0.0, found), mask=here)
    tl.store(lse + row, level + top, mask=here)


@compiled
def cross_entropy_slopes(
    scores, targets, lse, grad, w, out, rows: tl.int32, classes: tl.int32, ignored: tl.int64, smoothing: tl.float64,
    COLUMNS: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute g·(softmax(z)·Σq - q) of COLUMNS classes of one row: q = s·w/K, and (1 - s)·w[t] more at the target."""
    count, classes = classes, multiple(classes, ALIGNED)
    row, part = along_two(rows)
    row = row.to(tl.int64)
    here = row >= 0
    level = wide(tl.load(lse + row, mask=here, other=0.0))
    target = tl.load(targets + row, mask=here, other=0)
    known = (target >= 0) & (target < classes)
    g = wide(tl.load(grad + row, mask=here, other=0.0))
    g = tl.where(target == ignored, 0.0, tl.where(known, g, float("nan")))
    own = g * _weights(w, target, known, level, WEIGHTED)
    total = own
    if SMOOTH:
        share = number(smoothing, level)
        own = own * (1.0 - share)
        total = own + g * share * _mean_weight(w, classes, level, COLUMNS, WEIGHTED)
    at = part * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < classes
    offset = row * classes + at
    slope = tl.exp(wide(tl.load(scores + offset, mask=inside, other=0.0)) - level) * total
    if SMOOTH:
        slope -= _weights(w, at, inside, level, WEIGHTED) * (g * share / count)
    slope -= tl.where(at == target, own, 0.0)
    tl.store(out + offset, narrow(slope, out), mask=inside)


def _takes(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    if not all(t.is_contiguous() for t in (*ins, *outs)):
        return "an operand is not contiguous"
    kinds = {t.dtype for t in (ins[0], *outs)}
    if not kinds <= {*FLOATS} or ins[0].shape[-1] == 0:
        return f"no kernel for {', '.join(map(str, kinds))} and {ins[0].shape[-1]} classes"
    return ""


def _columns(scores: torch.Tensor) -> int:
    return next((n for n in WIDTHS if scores.shape[-1] <= n), WIDTHS[-1])


def _constants(scores: torch.Tensor, weight: Tensors, attrs: Attrs) -> dict[str, object]:
    return {"COLUMNS": _columns(scores), "WEIGHTED": len(weight) > 0, "SMOOTH": attrs["smoothing"] != 0,
            "ALIGNED": all_aligned(scores.shape[-1])}  # fmt: skip


@kernel("cross_entropy", takes=_takes)
def cross_entropy(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Launch:
    scores, targets, *weight = ins
    numbers = (scores.shape[-1], attrs["ignore_index"], attrs["smoothing"])
    args = (scores, targets, (*weight, scores)[0], *outs, *numbers)
    constants = _constants(scores, weight, attrs)
    return Launch(cross_entropy_rows, (prod(targets.shape),), args, constants, 4 if _columns(scores) < 4096 else 8)


@kernel("cross_entropy_backward", takes=_takes)
def cross_entropy_backward(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Launch:
    scores, targets, lse, grad, *weight = ins
    rows, columns = prod(targets.shape), _columns(scores)
    numbers = (rows, scores.shape[-1], attrs["ignore_index"], attrs["smoothing"])
    args = (scores, targets, lse, grad, (*weight, scores)[0], outs[0], *numbers)
    grid = (rows * -(-scores.shape[-1] // columns),)
    return Launch(cross_entropy_slopes, grid, args, _constants(scores, weight, attrs), 4 if columns < 4096 else 8)
