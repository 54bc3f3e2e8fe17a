"""Losses: cross entropy from logits with statistics in at least float32 and no probability tensor; binary losses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, kernel
from graphwright.array.cpu.norm import statistic
from graphwright.array.dtype import bool_, int64
from graphwright.array.spec import Spec


def _work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    scores = ins[0]
    wide = statistic(scores.dtype)
    rows = (scores.size // max(scores.sizes[-1], 1),)
    classes = Spec(scores.shape[-1:], wide)
    return [
        Spec(scores.shape, wide),
        Spec(rows, int64),
        Spec(rows, bool_),
        *(Spec(rows, wide),) * 3,
        classes,
        Spec((), wide),
    ]


class _Targets:
    """Targets of [N, K] scores in scratch: the class of each row, ignored rows, and class weights.

    Σ_k q_k of a row is (1 - s)·w[target] + s·mean(w).
    """

    def __init__(self, targets: torch.Tensor, weight: Tensors, attrs: Attrs, work: Tensors) -> None:
        self.index, self.ignored, self.weight, self.mean = work
        self.smoothing, self.weighted = attrs["smoothing"], bool(weight)
        zero, ignore = torch.zeros((), dtype=torch.int64), torch.tensor(attrs["ignore_index"])
        self.calls: list[Call] = [
            partial(torch.eq, targets, ignore, out=self.ignored),
            partial(torch.where, self.ignored, zero, targets, out=self.index),
        ]
        if self.weighted:
            count = self.number(self.weight.shape[0])
            self.calls += [
                partial(self.weight.copy_, weight[0]),
                partial(torch.sum, self.weight, [0], out=self.mean),
                partial(self.mean.div_, count),
            ]
        elif self.smoothing:
            self.calls += [partial(self.weight.fill_, 1.0), partial(self.mean.fill_, 1.0)]

    def number(self, value: float) -> torch.Tensor:
        """Return a constant of the statistics' dtype."""
        return torch.tensor(value, dtype=self.weight.dtype)

    def times_own(self, row: torch.Tensor, spare: torch.Tensor) -> list[Call]:
        """Return calls for row · (1 - s)·w[target], in place."""
        calls: list[Call] = []
        if self.weighted:
            calls += [partial(torch.index_select, self.weight, 0, self.index, out=spare), partial(row.mul_, spare)]
        if self.smoothing:
            calls.append(partial(row.mul_, self.number(1.0 - self.smoothing)))
        return calls


@kernel("cross_entropy", work=_work)
def cross_entropy(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Loss per row (0 where the target is ignored) and log Σ exp per row."""
    scores = ins[0].view(-1, ins[0].shape[-1])
    loss, lse = outs[0].view(-1), outs[1].view(-1)
    wide, (index, ignored, top, spare, smooth, *_) = work[0].view(scores.shape), work[1:]
    t = _Targets(ins[1].view(-1), ins[2:], attrs, (index, ignored, *work[6:]))
    s, classes = t.smoothing, scores.shape[1]
    calls: list[Call] = [
        *t.calls,
        partial(wide.copy_, scores),
        partial(torch.amax, wide, [1], out=top),
        partial(wide.sub_, top.unsqueeze(1)),
        partial(torch.gather, wide, 1, index.unsqueeze(1), out=loss.unsqueeze(1)),
        *([partial(torch.mv, wide, t.weight, out=smooth)] if s else []),
        wide.exp_,
        partial(torch.sum, wide, [1], out=lse),
        lse.log_,
        partial(torch.sub, lse, loss, out=loss),  # both relative to the largest score, so no digits are lost
        *t.times_own(loss, spare),
    ]
    if s:  # s·(lse·mean(w) - Σ_k w_k z_k / K)
        calls += [
            partial(torch.mul, lse, t.mean, out=spare),
            partial(smooth.mul_, t.number(1.0 / classes)),
            partial(spare.sub_, smooth),
            partial(spare.mul_, t.number(s)),
            partial(loss.add_, spare),
        ]
    return [*calls, partial(loss.masked_fill_, ignored, 0.0), partial(lse.add_, top)]


@kernel("cross_entropy_backward", work=_work)
def cross_entropy_backward(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """g · (softmax(scores) · Σq - q) per row, 0 where the target is ignored."""
    scores, lse, grad = ins[0].view(-1, ins[0].shape[-1]), ins[2].view(-1), ins[3].view(-1)
    out = outs[0].view(scores.shape)
    wide, (index, ignored, row, own, spare, *_) = work[0].view(scores.shape), work[1:]
    t = _Targets(ins[1].view(-1), ins[4:], attrs, (index, ignored, *work[6:]))
    s, classes = t.smoothing, scores.shape[1]
    target = wide if out.dtype != wide.dtype else out
    calls: list[Call] = [
        *t.calls,
        partial(wide.copy_, scores),
        partial(wide.sub_, lse.unsqueeze(1)),
        wide.exp_,
        partial(row.copy_, grad),
        partial(row.masked_fill_, ignored, 0.0),
        partial(own.copy_, row),
        *t.times_own(own, spare),
    ]
    if s:  # Σq = own + s·mean(w)
        calls += [
            partial(torch.mul, row, t.mean, out=spare),
            partial(spare.mul_, t.number(s)),
            partial(spare.add_, own),
        ]
    total = spare if s else own
    calls.append(partial(torch.mul, wide, total.unsqueeze(1), out=target))
    if s:
        smooth = (row.unsqueeze(1), t.weight.unsqueeze(0))
        calls.append(partial(torch.addmm, target, *smooth, alpha=-s / classes, out=target))
    calls += [
        partial(index.add_, torch.arange(scores.shape[0]) * classes),
        own.neg_,
        partial(target.view(-1).index_add_, 0, index, own),
    ]
    return calls if target is out else [*calls, partial(out.copy_, target)]


def _entries(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    return [outs[0]]


@kernel("bce", work=_entries, widen=True)
def bce(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """-(y·ln p + (1 - y)·ln(1 - p)), logarithms clamped at -100, as (y - 1)·ln(1 - p) - y·ln p."""
    (p, y), out, term = (t.expand(outs[0].shape) for t in ins), outs[0], work[0]
    one, lowest = (torch.tensor(v, dtype=out.dtype) for v in (1.0, -100.0))
    return [
        partial(torch.neg, p, out=out),
        out.log1p_,
        partial(torch.clamp, out, lowest, out=out),
        partial(torch.sub, y, one, out=term),
        partial(out.mul_, term),
        partial(torch.log, p, out=term),
        partial(torch.clamp, term, lowest, out=term),
        partial(term.mul_, y),
        partial(out.sub_, term),
    ]


@kernel("bce_with_logits", work=_entries, widen=True)
def bce_with_logits(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """max(x, 0) - x·y + log1p(e^-|x|), in this order: the first two terms cancel exactly."""
    (x, y), out, term = (t.expand(outs[0].shape) for t in ins), outs[0], work[0]
    return [
        partial(torch.clamp_min, x, 0, out=out),
        partial(torch.mul, x, y, out=term),
        partial(out.sub_, term),
        partial(torch.abs, x, out=term),
        term.neg_,
        term.exp_,
        term.log1p_,
        partial(out.add_, term),
    ]
