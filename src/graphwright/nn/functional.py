"""Functions without parameters."""

from __future__ import annotations

from graphwright.autograd import Tensor, as_tensor
from graphwright.errors import UsageError
from graphwright.ops import call


def cross_entropy(scores: Tensor, targets: Tensor, *, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """-log softmax(scores)[target], averaged over the rows whose target is not ignored.

    Args:
        scores: [..., K], floating; classes on the last axis.
        targets: int64 [...].
        ignore_index: target of rows that do not count.
        reduction: `mean`, `sum` or `none`.
    Returns: float32 or wider; a scalar unless reduction is `none`.
    """
    loss, _ = call("cross_entropy", scores, targets, ignore_index=ignore_index)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    if reduction != "mean":
        raise UsageError("unknown reduction", expected="mean, sum or none", got=reduction)
    ignored = (as_tensor(targets) == ignore_index).to(loss.dtype).sum()
    return loss.sum() / (float(loss.size) - ignored)
