"""Losses: float32 or wider, reduced by `reduction`: `mean`, `sum` or `none`. Names and defaults are torch's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from math import log, pi
from typing import Any

import numpy as np

from graphwright.autograd import Tensor, as_tensor, cat, minimum, one_hot, stack, where
from graphwright.autograd.create import device_of
from graphwright.autograd.functions import wide
from graphwright.autograd.pointwise import xlogy
from graphwright.autograd.products import cosine_similarity, pairwise_distance, pdist
from graphwright.autograd.shapes import movedim
from graphwright.errors import ShapeError, UsageError
from graphwright.nn.op_functions import logsigmoid
from graphwright.ops import call
from graphwright.ops.axes import axis_of

__all__ = [
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss", "cosine_similarity",
    "cross_entropy", "ctc_loss", "gaussian_nll_loss", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss",
    "margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss",
    "nll_loss", "pairwise_distance", "pdist", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss",
    "triplet_margin_loss", "triplet_margin_with_distance_loss",
]  # fmt: skip


# -- losses of class scores --------------------------------------------------------------------------------------------
def cross_entropy(
    input: Tensor, target: Any, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, *, dim: int = 1,
) -> Tensor:  # fmt: skip
    """-Σ_k w_k q_k ln softmax(input)_k, averaged over the rows whose target is not ignored.

    q is the one-hot target; with smoothing s it is (1 - s)·one_hot + s/K. w are the class weights. The mean divides by
    Σ w[target]. If all rows are ignored, the mean is NaN, as in torch, and the sum is 0.

    Args:
        input: scores, floating: [K], [N, K], or [N, K, d1, ...].
        target: int64 class ids in the shape of the input without the axis of classes; or probabilities in its shape.
        weight: [K], floating, or None for ones.
        ignore_index: target of rows to ignore.
        dim: axis of the classes; -1 for a language model's logits [B, T, K] with targets [B, T].
    Returns: float32 or wider; a scalar unless reduction is `none`.
    Raises: ShapeError, DTypeError, IndexOutOfRange for a class id outside 0..K-1, UsageError.
    """
    if not 0 <= label_smoothing <= 1:
        raise UsageError(
            "label_smoothing is out of range", where="cross_entropy", expected="0 to 1", got=label_smoothing
        )
    target = as_tensor(target)
    if target.dtype.is_float:
        return _soft_cross_entropy(input, target, weight, reduction, label_smoothing, _classes(input, dim))
    rows = _classes_last(input, target, dim)
    operands = (rows, target) if weight is None else (rows, target, weight)
    loss, _ = call("cross_entropy", *operands, ignore_index=ignore_index, smoothing=float(label_smoothing))
    return _over_rows(loss, target, weight, ignore_index, reduction)


def _classes(input: Tensor, dim: int) -> int:
    return axis_of(dim, input.ndim) if input.ndim > 1 else 0


def _classes_last(input: Tensor, target: Tensor, dim: int) -> Tensor:
    """Return the scores with the axis of classes last. Raises: ShapeError unless the target has the other axes."""
    at = _classes(input, dim)
    rest = (*input.shape[:at], *input.shape[at + 1 :])
    if target.shape != rest:
        last = target.shape == input.shape[:-1]
        raise ShapeError("the targets do not have one entry per row of scores", expected=rest, got=target.spec,
                         fix="pass dim=-1, if the classes are on the last axis" if last else None)  # fmt: skip
    return input if at == input.ndim - 1 else movedim(input, at, -1)


def _soft_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: str, smoothing: float, at: int
) -> Tensor:
    if target.shape != input.shape:
        raise ShapeError("probabilities have another shape than the scores", expected=input.spec, got=target.spec)
    shares = wide(target) if not smoothing else wide(target) * (1.0 - smoothing) + smoothing / input.shape[at]
    terms = -shares * wide(input).log_softmax(at)
    if weight is not None:
        terms = terms * weight.reshape(*(-1 if a == at else 1 for a in range(input.ndim)))
    loss = terms.sum(at)
    return loss.sum() / loss.numel() if reduction == "mean" else _reduced(loss, reduction)


def nll_loss(
    input: Tensor, target: Any, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean", *,
    dim: int = 1,
) -> Tensor:  # fmt: skip
    """-weight[target]·input[target] for log-probabilities; the rest is as in `cross_entropy`."""
    targets = as_tensor(target)
    x = _classes_last(wide(input), targets, dim)
    ignored = targets == ignore_index
    label = where(ignored, 0, targets)
    loss = -call("gather", x, label.reshape(*label.shape, 1), axis=-1).reshape(*label.shape)
    if weight is not None:
        loss = loss * call("gather", wide(weight), label.reshape(-1), axis=0).reshape(*label.shape)
    return _over_rows(where(ignored, 0.0, loss), targets, weight, ignore_index, reduction)


def _over_rows(loss: Tensor, targets: Any, weight: Tensor | None, ignore_index: int, reduction: str) -> Tensor:
    if reduction != "mean":
        return _reduced(loss, reduction)
    targets = as_tensor(targets)
    ignored = targets == ignore_index
    if weight is None:
        return loss.sum() / (loss.numel() - ignored.to(loss.dtype).sum())
    own = call("gather", weight.to(loss.dtype), where(ignored, 0, targets).reshape(-1), axis=0).reshape(*targets.shape)
    return loss.sum() / where(ignored, 0.0, own).sum()


# -- losses of values --------------------------------------------------------------------------------------------------
def mse_loss(input: Tensor, target: Any, reduction: str = "mean") -> Tensor:
    """(x - target)²; other shapes than that of the input broadcast, with a warning."""
    difference = _difference(input, target)
    return _reduced(difference * difference, reduction)


def l1_loss(input: Tensor, target: Any, reduction: str = "mean") -> Tensor:
    """|x - target|, with gradient 0 at 0."""
    return _reduced(_difference(input, target).abs(), reduction)


def huber_loss(input: Tensor, target: Any, reduction: str = "mean", delta: float = 1.0) -> Tensor:
    """½d² up to |d| = delta, delta·(|d| - ½delta) beyond, d = x - target (Huber 1964). Raises: UsageError."""
    if delta <= 0:
        raise UsageError("delta is not positive", where="huber_loss", expected="> 0", got=delta)
    difference = _difference(input, target)
    size = difference.abs()
    return _reduced(where(size <= delta, difference * difference * 0.5, (size - 0.5 * delta) * delta), reduction)


def smooth_l1_loss(input: Tensor, target: Any, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    """Huber's loss with delta = beta, divided by beta; at beta 0 it is the absolute difference."""
    if beta == 0:
        return l1_loss(input, target, reduction)
    return huber_loss(input, target, reduction, beta) * (1.0 / beta)


def binary_cross_entropy(input: Tensor, target: Any, weight: Any = None, reduction: str = "mean") -> Tensor:
    """-w(y·ln p + (1 - y)·ln(1 - p)) for probabilities p; logarithms are clamped at -100, so p = 0 and 1 are finite.

    Raises: ShapeError unless input and target have one shape; UsageError.
    """
    x, y = _of_one_shape("binary_cross_entropy", input, target)
    return _reduced(_weighted(call("bce", x, y), weight), reduction)


def _of_one_shape(where: str, input: Tensor, target: Any) -> tuple[Tensor, Tensor]:
    x, y = wide(input), wide(target)
    if x.shape != y.shape:
        fix = f"target.reshape{x.shape}" if x.numel() == y.numel() else None
        raise ShapeError("input and target differ in shape", where=where, expected=x.shape, got=y.spec, fix=fix)
    return x, y


def _weighted(loss: Tensor, weight: Any) -> Tensor:
    return loss if weight is None else loss * weight


def binary_cross_entropy_with_logits(
    input: Tensor, target: Any, weight: Any = None, reduction: str = "mean", pos_weight: Any = None
) -> Tensor:
    """`binary_cross_entropy` of p = σ(x) for logits x, stable for large |x|.

    Args:
        weight: factor of all terms; broadcasts to x.
        pos_weight: factor of the terms with y = 1; broadcasts to x.
    Raises: ShapeError unless input and target have one shape; UsageError.
    """
    x, y = _of_one_shape("binary_cross_entropy_with_logits", input, target)
    if pos_weight is None:
        return _reduced(_weighted(call("bce_with_logits", x, y), weight), reduction)
    return _reduced(_weighted(-(pos_weight * y * logsigmoid(x) + (1.0 - y) * logsigmoid(-x)), weight), reduction)


def kl_div(input: Tensor, target: Any, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """target·(ln target - x) for log-probabilities x; terms with target 0 are 0.

    Args:
        log_target: whether the target is given as its logarithm.
        reduction: `mean`, `sum`, `none`, or `batchmean`: the sum divided by the size of the first axis.
    """
    x, y = wide(input), wide(target)
    loss = y.exp() * (y - x) if log_target else xlogy(y, y) - y * x
    if reduction == "batchmean":
        return loss.sum() / (x.shape[0] if x.ndim else 1)
    return _reduced(loss, reduction)


def poisson_nll_loss(
    input: Tensor, target: Any, log_input: bool = True, full: bool = False, eps: float = 1e-8, reduction: str = "mean"
) -> Tensor:
    """eˣ - y·x, or with `log_input` False x - y·ln(x + eps); `full` adds Stirling's terms for targets above 1."""
    x, y = wide(input), wide(target)
    loss = x.exp() - y * x if log_input else x - y * (x + eps).log()
    if full:
        safe = where(y > 1.0, y, 1.0)
        loss = loss + where(y > 1.0, y * safe.log() - y + (safe * (2.0 * pi)).log() * 0.5, 0.0)
    return _reduced(loss, reduction)


def gaussian_nll_loss(
    input: Tensor, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """½(ln v + (x - y)²/v), v = max(var, eps), without gradient through the bound; `full` adds ½ ln 2π.

    Raises: ShapeError; outside traces UsageError for a negative variance.
    """
    x, y, v = wide(input), wide(target), wide(var)
    if v.shape != x.shape and v.shape == x.shape[:-1]:
        v = v.unsqueeze(-1)
    elif v.shape != x.shape and v.shape[:-1] != x.shape[:-1] and v.ndim:
        expected = f"{x.shape} or {x.shape[:-1]}"
        raise ShapeError("the variance has a wrong shape", where="gaussian_nll_loss", expected=expected, got=v.spec)
    if not v.symbolic and bool((v < 0.0).any().item()):
        raise UsageError("a variance is negative", where="gaussian_nll_loss", expected=">= 0")
    v = where(v < eps, eps, v)
    loss = (v.log() + (x - y) ** 2 / v) * 0.5
    return _reduced(loss + 0.5 * log(2.0 * pi) if full else loss, reduction)


# -- losses of pairs and margins ---------------------------------------------------------------------------------------
def cosine_embedding_loss(
    input1: Tensor, input2: Tensor, target: Any, margin: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """1 - cos for target 1, max(0, cos - margin) for target -1."""
    cosine, y = cosine_similarity(wide(input1), wide(input2), dim=-1), as_tensor(target)
    return _reduced(where(y == 1, 1.0 - cosine, 0.0) + where(y == -1, (cosine - margin).relu(), 0.0), reduction)


def margin_ranking_loss(
    input1: Tensor, input2: Tensor, target: Any, margin: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """max(0, -y(a - b) + margin). Raises: ShapeError for operands of different numbers of axes; UsageError."""
    ranks = {x.ndim for x in map(as_tensor, (input1, input2, target))}
    if len(ranks) > 1:
        raise ShapeError("the operands have different numbers of axes", where="margin_ranking_loss", got=ranks)
    return _reduced((margin - wide(target) * (wide(input1) - input2)).relu(), reduction)


def hinge_embedding_loss(input: Tensor, target: Any, margin: float = 1.0, reduction: str = "mean") -> Tensor:
    """x for target 1, max(0, margin - x) for target -1."""
    x, y = wide(input), as_tensor(target)
    return _reduced(where(y != -1, x, 0.0) + where(y != 1, (margin - x).relu(), 0.0), reduction)


def soft_margin_loss(input: Tensor, target: Any, reduction: str = "mean") -> Tensor:
    """ln(1 + e^(-yx))."""
    return _reduced(-logsigmoid(wide(input) * wide(target)), reduction)


def multi_margin_loss(
    input: Tensor, target: Any, p: int = 1, margin: float = 1.0, weight: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """Σ_k max(0, margin - x[y] + x[k])ᵖ / K over the other classes k. Raises: UsageError unless p is 1 or 2."""
    if p not in (1, 2):
        raise UsageError("unsupported power", where="multi_margin_loss", expected="1 or 2", got=p)
    x, y = wide(input), as_tensor(target)
    x = x if x.ndim else x.unsqueeze(0)
    y = y.squeeze(0) if x.ndim == 1 and y.ndim == 1 else y
    own = x.gather(-1, y.unsqueeze(-1))
    terms = (margin - own + x).relu() ** p
    terms = terms if weight is None else terms * weight.gather(0, y).unsqueeze(-1)
    others = one_hot(y, x.shape[-1]) == 0
    return _reduced(where(others, terms, 0.0).sum(-1) / x.shape[-1], reduction)


def multilabel_soft_margin_loss(input: Tensor, target: Any, weight: Any = None, reduction: str = "mean") -> Tensor:
    """Mean over classes of `binary_cross_entropy_with_logits`."""
    return _reduced(binary_cross_entropy_with_logits(input, target, weight, "none").mean(-1), reduction)


def multilabel_margin_loss(input: Tensor, target: Any, reduction: str = "mean") -> Tensor:
    """Σ max(0, 1 - (x[y] - x[k])) / K over targets y and all other classes k; targets end at the first -1."""
    x, y = wide(input), as_tensor(target)
    x, y = (t if t.ndim else t.unsqueeze(0) for t in (x, y))
    if y.shape != x.shape or x.ndim > 2:
        expected = f"int64 {x.shape}, of at most two axes"
        raise ShapeError("invalid target", where="multilabel_margin_loss", expected=expected, got=y.spec)
    valid = (y < 0).to("int64").cumsum(-1) == 0
    ids = where(valid, y, 0)
    hits = valid.unsqueeze(-1) & (one_hot(ids, x.shape[-1]) == 1)
    others = ~hits.any(-2)
    terms = (1.0 - x.gather(-1, ids).unsqueeze(-1) + x.unsqueeze(-2)).relu()
    kept = valid.unsqueeze(-1) & others.unsqueeze(-2)
    return _reduced(where(kept, terms, 0.0).sum((-2, -1)) / x.shape[-1], reduction)


def triplet_margin_with_distance_loss(
    anchor: Tensor, positive: Tensor, negative: Tensor, *, distance_function: Callable[..., Tensor] | None = None,
    margin: float = 1.0, swap: bool = False, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """max(0, d(anchor, positive) - d(anchor, negative) + margin).

    Args:
        distance_function: d, by default `pairwise_distance`.
        swap: take the smaller of d(anchor, negative) and d(positive, negative) (Balntas et al. 2016).
    Raises: UsageError for a margin that is not positive.
    """
    if margin <= 0:
        raise UsageError("the margin is not positive", where="triplet_margin_loss", expected="> 0", got=margin)
    distance = pairwise_distance if distance_function is None else distance_function
    near, far = distance(anchor, positive), distance(anchor, negative)
    if swap:
        far = minimum(far, distance(positive, negative))
    return _reduced((near - far + margin).relu(), reduction)


def triplet_margin_loss(
    anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 1.0, p: float = 2, eps: float = 1e-6,
    swap: bool = False, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """`triplet_margin_with_distance_loss` with `pairwise_distance` of order p. Raises: UsageError."""
    return triplet_margin_with_distance_loss(
        wide(anchor), wide(positive), wide(negative), margin=margin, swap=swap, reduction=reduction,
        distance_function=partial(pairwise_distance, p=p, eps=eps),
    )  # fmt: skip


def ctc_loss(
    log_probs: Tensor, targets: Any, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """-ln p(target) summed over all alignments with blanks (Graves et al. 2006, eq. 6 to 8).

    Args:
        log_probs: [T, N, C], or [T, C] for a single sequence.
        targets: class ids [N, S], or those of all sequences joined; known outside traces, as the lengths are.
        reduction: `mean` divides each loss by the length of its target first.
        zero_infinity: replace infinite losses, of targets that do not fit, and their gradients by 0.
    Raises: ShapeError for lengths that do not fit; UsageError.
    """
    x = wide(log_probs if log_probs.ndim == 3 else log_probs.unsqueeze(1))
    steps, count = x.shape[:2]
    times, sizes = (_host_ids(n).reshape(-1) for n in (input_lengths, target_lengths))
    ids = _host_ids(targets)
    longest, joined = int(max(sizes, default=0)), ids.ndim == 1 and log_probs.ndim == 3
    fits = ids.shape == (sum(sizes),) if joined else ids.ndim == log_probs.ndim - 1 and ids.shape[-1] >= longest
    if len(times) != count or len(sizes) != count or max(times, default=0) > steps or min((*sizes, *times, 0)) < 0:
        expected = f"{count} lengths >= 0, of inputs at most {steps}"
        raise ShapeError("invalid lengths", where="ctc_loss", expected=expected, got=f"{times}, {sizes}")
    if not fits or (not joined and ids.ndim == 2 and len(ids) != count):
        expected = f"[{sum(sizes)}], or [{count}, {longest}] or longer"
        raise ShapeError(
            "the targets do not have the given lengths", where="ctc_loss", expected=expected, got=ids.shape
        )
    if joined:
        parts = np.split(ids, np.cumsum(sizes)[:-1])
        ids = np.stack([np.pad(p, (0, longest - len(p))) for p in parts]) if count else ids.reshape(0, 0)
    ids = (ids if ids.ndim == 2 else ids[None])[:, :longest]
    labels = np.full((count, 2 * longest + 1), blank)
    labels[:, 1::2] = ids
    skips = np.zeros(labels.shape, bool)
    skips[:, 2:] = labels[:, 2:] != labels[:, :-2]
    never = as_tensor(np.full(labels.shape, -np.inf), x.dtype, device_of(x))
    index, jump, first = (as_tensor(a, device=device_of(x)) for a in (labels, skips, np.arange(labels.shape[1]) < 2))
    alpha = where(first, x[0].gather(1, index), never)
    seen = [alpha]
    for t in range(1, steps):
        back = [alpha, *(cat([never[:, :n], alpha[:, : labels.shape[1] - n]], 1) for n in (1, 2))]
        back[2] = where(jump, back[2], never)
        alpha = _log_sum(stack(back)) + x[t].gather(1, index)
        seen.append(alpha)
    last = [seen[t - 1][i] if t else never[i] for i, t in enumerate(times)]
    losses = []
    for i, (row, n) in enumerate(zip(last, sizes, strict=True)):
        ends = row[max(2 * n - 1, 0) : 2 * n + 1]
        losses.append(-_log_sum(ends) if times[i] or n else x[0, i, 0] * 0.0)
    loss = stack(losses)
    if zero_infinity:
        loss = where(loss == float("inf"), 0.0, loss)
    if log_probs.ndim == 2:
        loss = loss.squeeze(0)
    if reduction == "mean":
        return (loss / as_tensor(np.maximum(sizes, 1), loss.dtype, device_of(loss)).reshape(*loss.shape)).mean()
    return _reduced(loss, reduction)


def _host_ids(values: Any) -> np.ndarray:
    return as_tensor(values).numpy().astype(np.int64)


def _log_sum(x: Tensor) -> Tensor:
    """ln Σ eˣ over the first axis, with gradient 0 where all entries are -∞."""
    none = x.amax(0).detach() == float("-inf")
    return where(none, float("-inf"), where(none, 0.0, x).logsumexp(0))


def _difference(input: Tensor, target: Any) -> Tensor:
    x, y = wide(input), wide(target)
    if x.shape != y.shape:
        what = f"the target has another shape than the input, {y.shape} and {x.shape}, and is broadcast"
        warnings.warn(what, UserWarning, stacklevel=3)
    return x - y


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return loss
    if reduction not in ("mean", "sum"):
        raise UsageError("unknown reduction", expected="mean, sum or none", got=reduction)
    return loss.mean() if reduction == "mean" else loss.sum()
