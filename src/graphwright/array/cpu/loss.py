"""Losses: binary losses, and cross entropy from logits, in float32 or wider and without storing probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, kernel, number, statistic
from graphwright.array.dtype import bool_, int64
from graphwright.array.spec import Spec


def _work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    scores, wide = ins[0], statistic(ins[0].dtype)
    rows = (scores.size // max(scores.sizes[-1], 1),)
    per_row = [Spec(rows, int64), Spec(rows, bool_), *(Spec(rows, wide),) * 3]
    return [Spec(scores.shape, wide), *per_row, Spec(scores.shape[-1:], wide), Spec((), wide)]


class _Targets:
    """Scratch for the targets of scores [N, K]: class per row, mask of ignored rows, class weights w, mean(w).

    With label smoothing s, the weights of a row's target distribution sum to (1 - s)·w[target] + s·mean(w).
    """

    def __init__(self, targets: torch.Tensor, weight: Tensors, attrs: Attrs, work: Tensors) -> None:
        self.targets, self.given, self.smoothing = targets, weight, attrs["smoothing"]
        self.index, self.ignored, self.weight, self.mean = work
        self.zero, self.ignore = number(0, targets), number(attrs["ignore_index"], targets)
        self.count, self.rest = self.number(self.weight.shape[0]), self.number(1.0 - self.smoothing)

    def number(self, value: float) -> torch.Tensor:
        """Return a constant tensor in the dtype of the class weights."""
        return number(value, self.weight)

    def prepare(self) -> None:
        """Fill the scratch from the current targets and weights; ignored rows get class 0."""
        torch.eq(self.targets, self.ignore, out=self.ignored)
        torch.where(self.ignored, self.zero, self.targets, out=self.index)
        if self.given:
            torch.sum(self.weight.copy_(self.given[0]), (0,), out=self.mean).div_(self.count)
        elif self.smoothing:
            self.weight.fill_(1.0)
            self.mean.fill_(1.0)

    def times_own(self, row: torch.Tensor, spare: torch.Tensor) -> None:
        """Multiply each entry of `row` [N] in place by (1 - s)·w[target], the weight of its target class."""
        if self.given:
            row.mul_(torch.index_select(self.weight, 0, self.index, out=spare))
        if self.smoothing:
            row.mul_(self.rest)


@kernel("cross_entropy", work=_work)
def cross_entropy(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    scores = ins[0].view(-1, ins[0].shape[-1])
    loss, lse = outs[0].view(-1), outs[1].view(-1)
    wide, (index, ignored, top, spare, smooth, *_) = work[0].view(scores.shape), work[1:]
    t = _Targets(ins[1].view(-1), ins[2:], attrs, (index, ignored, *work[6:]))
    top_column, index_column, loss_column = (v.unsqueeze(1) for v in (top, index, loss))
    share, part = t.number(t.smoothing), t.number(1.0 / max(scores.shape[1], 1))

    def run() -> None:
        t.prepare()
        torch.amax(wide.copy_(scores), (1,), out=top)
        torch.gather(wide.sub_(top_column), 1, index_column, out=loss_column)
        if t.smoothing:
            torch.mv(wide, t.weight, out=smooth)
        torch.sum(wide.exp_(), (1,), out=lse).log_()
        torch.sub(lse, loss, out=loss)  # both relative to the largest score, so no digits are lost
        t.times_own(loss, spare)
        if t.smoothing:  # s·(lse·mean(w) - Σ_k w_k z_k / K)
            loss.add_(torch.mul(lse, t.mean, out=spare).sub_(smooth.mul_(part)).mul_(share))
        loss.masked_fill_(ignored, 0.0)
        lse.add_(top)

    return run


@kernel("cross_entropy_backward", work=_work)
def cross_entropy_backward(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    scores, lse, grad = ins[0].view(-1, ins[0].shape[-1]), ins[2].view(-1, 1), ins[3].view(-1)
    out, (rows, classes) = outs[0].view(scores.shape), scores.shape
    wide, (index, ignored, row, own, spare, *_) = work[0].view(scores.shape), work[1:]
    t = _Targets(ins[1].view(-1), ins[4:], attrs, (index, ignored, *work[6:]))
    target, total = wide if out.dtype != wide.dtype else out, (spare if t.smoothing else own).unsqueeze(1)
    smooth, share, flat = (row.unsqueeze(1), t.weight.unsqueeze(0)), t.number(t.smoothing), target.view(-1)
    starts = torch.arange(rows) * classes

    def run() -> None:
        t.prepare()
        wide.copy_(scores).sub_(lse).exp_()
        own.copy_(row.copy_(grad).masked_fill_(ignored, 0.0))
        t.times_own(own, spare)
        if t.smoothing:  # Σq = own + s·mean(w)
            torch.mul(row, t.mean, out=spare).mul_(share).add_(own)
        torch.mul(wide, total, out=target)
        if t.smoothing:
            torch.addmm(target, *smooth, alpha=-t.smoothing / classes, out=target)
        flat.index_add_(0, index.add_(starts), own.neg_())
        if target is not out:
            out.copy_(target)

    return run


@kernel("bce", work=lambda o, i, a: [o[0]], widen=True)
def bce(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """-(y·ln p + (1 - y)·ln(1 - p)), where logarithms are at least -100."""
    (p, y), out, term = (t.expand(outs[0].shape) for t in ins), outs[0], work[0]
    one, lowest = number(1, out), number(-100, out)

    def run() -> None:
        torch.clamp(torch.neg(p, out=out).log1p_(), lowest, out=out).mul_(torch.sub(y, one, out=term))
        out.sub_(torch.clamp(torch.log(p, out=term), lowest, out=term).mul_(y))

    return run
