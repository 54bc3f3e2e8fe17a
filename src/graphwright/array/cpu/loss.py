"""Cross entropy on raw scores, statistics in float32 or wider; no probability tensor is kept."""

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
    return [Spec(scores.shape, wide), Spec(rows, wide), Spec(rows, int64), Spec(rows, bool_)]


@kernel("cross_entropy", work=_work)
def cross_entropy(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Loss per row (0 where the target is ignored) and log Σ exp per row."""
    scores, targets = ins[0].view(-1, ins[0].shape[-1]), ins[1].view(-1)
    loss, lse = outs[0].view(-1), outs[1].view(-1)
    wide, top, index, ignored = work[0].view(scores.shape), *work[1:]
    zero = torch.zeros((), dtype=torch.int64)
    ignore = torch.tensor(attrs["ignore_index"])
    return [
        partial(wide.copy_, scores),
        partial(torch.amax, wide, [1], out=top),
        partial(wide.sub_, top.unsqueeze(1)),
        partial(torch.eq, targets, ignore, out=ignored),
        partial(torch.where, ignored, zero, targets, out=index),
        partial(torch.gather, wide, 1, index.unsqueeze(1), out=loss.unsqueeze(1)),
        wide.exp_,
        partial(torch.sum, wide, [1], out=lse),
        lse.log_,
        partial(torch.sub, lse, loss, out=loss),  # both relative to the largest score: no digits of it are lost
        partial(loss.masked_fill_, ignored, 0.0),
        partial(lse.add_, top),
    ]


@kernel("cross_entropy_backward", work=_work)
def cross_entropy_backward(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """G · (softmax(scores) - one_hot(target)) per row, 0 where the target is ignored."""
    scores, targets = ins[0].view(-1, ins[0].shape[-1]), ins[1].view(-1)
    lse, grad = ins[2].view(-1), ins[3].view(-1)
    out = outs[0].view(scores.shape)
    wide, row, index, ignored = work[0].view(scores.shape), *work[1:]
    zero = torch.zeros((), dtype=torch.int64)
    ignore = torch.tensor(attrs["ignore_index"])
    classes = scores.shape[1]
    base = torch.arange(scores.shape[0]) * classes
    target = wide if out.dtype != wide.dtype else out
    calls: list[Call] = [
        partial(wide.copy_, scores),
        partial(wide.sub_, lse.unsqueeze(1)),
        wide.exp_,
        partial(torch.eq, targets, ignore, out=ignored),
        partial(torch.where, ignored, zero, targets, out=index),
        partial(row.copy_, grad),
        partial(row.masked_fill_, ignored, 0.0),
        partial(torch.mul, wide, row.unsqueeze(1), out=target),
        partial(index.add_, base),
        row.neg_,
        partial(target.view(-1).index_add_, 0, index, row),
    ]
    if target is not out:
        calls.append(partial(out.copy_, target))
    return calls
