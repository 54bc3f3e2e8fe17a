"""Functions without parameters: activations, normalisations, attention, convolutions, pools, losses.

Losses are float32 or wider and reduced by `reduction`: `mean`, `sum` or `none`. Convolutions and pools have the names,
argument orders and defaults of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import inf
from operator import and_
from typing import Any, Literal, overload

import numpy as np

from graphwright.array import float32, from_numpy
from graphwright.autograd import Tensor, as_tensor, training, where
from graphwright.autograd import dropout as drop
from graphwright.errors import ShapeError, UsageError
from graphwright.nn.op_functions import *  # noqa: F403
from graphwright.nn.op_functions import logsigmoid
from graphwright.ops import call
from graphwright.ops.rules import equal_dim

Moments = tuple[Tensor, Tensor, Tensor]
Sizes = int | Sequence[int]


# -- activations: more in `op_functions.py` ----------------------------------------------------------------------------
def softmax(x: Tensor, axis: int = -1, mask: Any = None) -> Tensor:
    """e^(x - max x) / Σ e^(x - max x) along an axis.

    Args:
        mask: bool, broadcast to x; entries where it is false are 0 and get no gradient, even if a whole row is false.
            Without a mask, a row of only -inf gives NaN.
    """
    return x.softmax(axis, mask)


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """ln softmax along an axis."""
    return x.log_softmax(axis)


# -- normalisations ----------------------------------------------------------------------------------------------------
def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, unit_offset: bool = False, cast_before_scale: bool = True
) -> Tensor:
    """x / √(mean(x², -1) + eps) · weight; statistics in float32 or wider (Zhang and Sennrich 2019, eq. 4).

    Args:
        x: [..., D], floating. weight: [D].
        unit_offset: scale by 1 + weight, as Gemma does.
        cast_before_scale: cast the quotient to the dtype of x before scaling by the weight, as Llama does; else after.
    """
    return call("rms_norm", x, weight, eps=eps, unit_offset=unit_offset, cast_before_scale=cast_before_scale)


def layer_norm(
    x: Tensor, shape: int | tuple[int, ...], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """(x - mean) / √(var + eps) · weight + bias over the last axes, of sizes `shape` (Ba et al. 2016).

    Raises: ShapeError if the last axes of x have different sizes; UsageError for a bias without a weight.
    """
    normalised = (shape,) if isinstance(shape, int) else tuple(shape)
    if x.shape[-len(normalised) :] != normalised:
        raise ShapeError("the last axes of x have the wrong sizes", expected=normalised, got=x.spec)
    return call("layer_norm", x, *_scale(weight, bias), rank=len(normalised), eps=eps)


def group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalise x [N, C, ...] over each of `groups` groups of channels and all positions; weight, bias [C].

    Source: Wu and He 2018, "Group Normalization".
    """
    return call("group_norm", x, *_scale(weight, bias), groups=groups, eps=eps)


def instance_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Normalise x [N, C, ...] over the positions of each channel of each sample; weight, bias [C]."""
    return group_norm(x, x.shape[1], weight, bias, eps)


@overload
def batch_norm(
    x: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *,
    training: Literal[False] = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor: ...  # fmt: skip
@overload
def batch_norm(
    x: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *,
    training: Literal[True], momentum: float = 0.1, eps: float = 1e-5,
) -> Moments: ...  # fmt: skip
def batch_norm(
    x: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor | Moments:  # fmt: skip
    """Normalise x [N, C, ...] per channel (Ioffe and Szegedy 2015).

    Training uses the statistics of the batch and returns (y, new running mean, new running variance), for the caller to
    store: the old statistics, moved by the fraction `momentum` to those of the batch (its variance divides by n - 1).
    Evaluation uses the running statistics and returns y. Raises: ShapeError when training on one value per channel.
    """
    operands = (x, running_mean, running_var, *_scale(weight, bias))
    if not training:
        return call("batch_norm", *operands, eps=eps)
    return call("batch_norm_train", *operands, momentum=momentum, eps=eps)


def _scale(weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
    if weight is None and bias is not None:
        raise UsageError("a norm got a bias but no weight", fix="pass a weight of ones")
    return tuple(t for t in (weight, bias) if t is not None)


# -- weights -----------------------------------------------------------------------------------------------------------
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · wᵀ + b: [..., in] with weight [out, in] to [..., out]. Raises: ShapeError."""
    return call("linear", x, weight) if bias is None else call("linear", x, weight, bias)


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Look up rows of a table [num, dim]: ids [...] to rows [..., dim]; row `padding_idx` gets no gradient.

    Raises: IndexOutOfRange.
    """
    rows = call("embedding", weight, ids)
    if padding_idx is None:
        return rows
    padding = (ids == padding_idx % weight.shape[0]).reshape(*ids.shape, 1)
    return call("where", padding, call("stop_gradient", rows), rows)


def dropout(x: Tensor, p: float = 0.5, train: bool = True) -> Tensor:
    """If `train`, x / (1 - p) with probability 1 - p, else 0; if not, x. `gw.mode` overrides `train`."""
    return drop(x, p) if p and training(train) else x


# -- attention ---------------------------------------------------------------------------------------------------------
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None,
    key_mask: Tensor | None = None, causal: bool = False, window: int | None = None,
    q_start: int | Tensor | None = None, softcap: float | None = None, dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """softmax(scale · q kᵀ + bias over the visible keys) v; query head h reads key head h // (H / G).

    Runs as the fused op `sdpa` where that supports the options, else as primitives.

    Args:
        q: [B, H, Tq, D]; k: [B, G, Tk, D]; v: [B, G, Tk, Dv]; H a multiple of G.
        mask: bool, broadcasts to [B, H, Tq, Tk]; true where a key is visible to a query.
        bias: floating, broadcasts to [B, H, Tq, Tk], added after the softcap; -inf hides a key.
        key_mask: bool [B, Tk], false for padding.
        causal: query i sees key j iff j ≤ q_start + i. By default the last query is aligned with the last key; torch's
            `is_causal` aligns the first ones, which is the same for Tq = Tk.
        window: number of keys that a causal query sees, including its own: also j > q_start + i - window.
        q_start: index of the first query among the keys; Tk - Tq by default.
        softcap: scores s become softcap · tanh(s / softcap).
        dropout_p: dropout of the probabilities; the caller passes 0 in evaluation.
        scale: 1/√D by default.
    Returns: [B, H, Tq, Dv], dtype of q; 0, with gradient 0, for a query without visible keys. Scores of 16-bit operands
        are cast to float32 right after the product.
    Raises: ShapeError, DTypeError, UsageError for `window` or `q_start` without `causal`.
    """
    if (window is not None or q_start is not None) and not causal:
        name = "q_start" if window is None else "window"
        raise UsageError(f"{name} was given without causal=True", where="attention", got=f"causal={causal}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if mask is None and bias is None and softcap is None and not dropout_p:
        start = None if q_start is None else as_tensor(q_start)
        extra = {name: t for name, t in (("key_mask", key_mask), ("q_start", start)) if t is not None}
        return call("sdpa", q, k, v, *extra.values(), scale=scale, causal=causal, window=window, optional=tuple(extra))
    scores = _scores(q, k, v) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    masks = [t for t in (mask, None if bias is None else bias > -inf) if t is not None]
    if key_mask is not None:
        masks.append(key_mask.reshape(key_mask.shape[0], 1, 1, key_mask.shape[1]))
    if causal:
        masks.append(visible(q.shape[2], k.shape[2], window, q_start))
    seen = reduce(and_, masks) if masks else None
    weights = scores.softmax(-1, mask=None if seen is None else seen.expand(*scores.shape))
    weights = drop(weights, dropout_p) if dropout_p else weights
    return _mixed(weights.to(q.dtype), v)


def visible(queries: int, keys: int, window: int | None = None, q_start: int | Tensor | None = None) -> Tensor:
    """Return bool [queries, keys], true where query i sees key j under a causal mask: if j ≤ q_start + i.

    With a window, also j > q_start + i - window. `q_start` is keys - queries by default.
    """
    start: Any = keys - queries if q_start is None else q_start
    ahead = Tensor(from_numpy(np.arange(keys)[None] - np.arange(queries)[:, None])) - start
    seen = ahead <= 0
    return seen if window is None else seen & (ahead > -window)


def _scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return q kᵀ [B, H, Tq, Tk], at least float32, for k [B, G, Tk, D]; query head h reads key head h // (H / G)."""
    if any(t.ndim != 4 for t in (q, k, v)):
        got = f"{q.spec}, {k.spec}, {v.spec}"
        raise ShapeError("q, k or v is not 4-d", expected="[B, H, Tq, D], [B, G, Tk, D], [B, G, Tk, Dv]", got=got)
    for at, name in ((0, "batch"), (1, "kv heads"), (2, "length")):
        equal_dim(k.shape[at], v.shape[at], f"{name} of v")
    groups = k.shape[1]
    if not groups or q.shape[1] % groups:
        expected = f"a multiple of the number of key heads, {groups}"
        raise ShapeError("cannot divide the query heads evenly among the key heads", expected=expected, got=q.shape[1])
    split = call("unflatten", q, axis=1, sizes=(groups, q.shape[1] // groups))
    scores = call("flatten", split @ k.unsqueeze(2).transpose(3, 4), start=1, end=2)
    return scores.to(float32) if scores.dtype.is_low else scores


def _mixed(weights: Tensor, v: Tensor) -> Tensor:
    split = call("unflatten", weights, axis=1, sizes=(v.shape[1], weights.shape[1] // v.shape[1]))
    return call("flatten", split @ v.unsqueeze(2), start=1, end=2)


# -- convolutions and pools --------------------------------------------------------------------------------------------
class _Spatial:
    """Convolutions and pools of [N, C, ...] over `rank` spatial axes. All raise ShapeError for a wrong shape."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Sizes = 1, padding: Sizes = 0,
        dilation: Sizes = 1, groups: int = 1,
    ) -> Tensor:  # fmt: skip
        """Cross-correlate x with weight [out, C / groups, kernel...]."""
        slide = {"stride": stride, "padding": padding, "dilation": dilation}
        return self._conv("conv", x, weight, bias, groups, slide)

    def conv_transpose(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Sizes = 1, padding: Sizes = 0,
        output_padding: Sizes = 0, groups: int = 1, dilation: Sizes = 1,
    ) -> Tensor:  # fmt: skip
        """Apply the transpose of `conv`; weight [C, out / groups, kernel...]."""
        slide = {"stride": stride, "padding": padding, "dilation": dilation, "output_padding": output_padding}
        return self._conv("conv_transpose", x, weight, bias, groups, slide)

    def _conv(
        self, op: str, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, slide: dict[str, Sizes]
    ) -> Tensor:
        rank = self.rank + 2
        if weight.ndim != rank:
            where = f"{op}{self.rank}d"
            raise ShapeError("the weight has the wrong rank", where=where, expected=f"rank {rank}", got=weight.spec)
        sizes = {k: v if isinstance(v, int) else tuple(v) for k, v in slide.items()}
        return call(op, x, weight, *(() if bias is None else (bias,)), groups=groups, **sizes)

    def max_pool(
        self, x: Tensor, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, dilation: Sizes = 1
    ) -> Tensor:
        """Return the maximum of each window; `stride` is the kernel size by default."""
        attrs = window(self.rank, kernel_size, stride, padding)
        return call("max_pool", x, **attrs, dilation=per_axis(self.rank, dilation))[0]

    def avg_pool(
        self, x: Tensor, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0,
        count_include_pad: bool = True,
    ) -> Tensor:  # fmt: skip
        """Return the mean of each window; `stride` is the kernel size by default."""
        attrs = window(self.rank, kernel_size, stride, padding)
        return call("avg_pool", x, **attrs, count_include_pad=count_include_pad)

    def adaptive_avg_pool(self, x: Tensor, output_size: Sizes) -> Tensor:
        """Return the means of `output_size` windows that cover the spatial axes."""
        return call("adaptive_avg_pool", x, sizes=per_axis(self.rank, output_size))


def window(rank: int, kernel: Sizes, stride: Sizes | None, padding: Sizes) -> dict[str, Any]:
    """Return the attributes of a pooling op that describe its windows."""
    slide = None if stride is None else per_axis(rank, stride)
    return {"kernel": per_axis(rank, kernel), "stride": slide, "padding": per_axis(rank, padding)}


def per_axis(rank: int, given: Sizes) -> tuple[int, ...]:
    """Return one size per spatial axis; an int is repeated `rank` times."""
    return (given,) * rank if isinstance(given, int) else tuple(given)


_LINE, _PLANE = _Spatial(1), _Spatial(2)
conv1d, conv2d = _LINE.conv, _PLANE.conv
conv_transpose1d, conv_transpose2d = _LINE.conv_transpose, _PLANE.conv_transpose
max_pool1d, max_pool2d = _LINE.max_pool, _PLANE.max_pool
avg_pool1d, avg_pool2d = _LINE.avg_pool, _PLANE.avg_pool
adaptive_avg_pool1d, adaptive_avg_pool2d = _LINE.adaptive_avg_pool, _PLANE.adaptive_avg_pool


def interpolate(x: Tensor, size: Sizes, mode: str = "nearest", align_corners: bool = False) -> Tensor:
    """Resample [N, C, L] or [N, C, H, W] to `size`.

    Args:
        mode: `nearest`, `linear` for one spatial axis or `bilinear` for two.
        align_corners: map the first and last entries of an axis to the first and last of the result.
    Raises: ShapeError, UsageError for any other mode.
    """
    rank = x.ndim - 2
    named = {"nearest": "nearest", ("linear", "bilinear")[min(max(rank, 1), 2) - 1]: "linear"}
    if mode not in named:
        expected, got = ", ".join(named), f"{mode}, {x.spec}"
        raise UsageError("no such interpolation mode for this rank", where="interpolate", expected=expected, got=got)
    return call("interpolate", x, sizes=per_axis(rank, size), mode=named[mode], align_corners=align_corners)


# -- losses of class scores --------------------------------------------------------------------------------------------
def cross_entropy(
    scores: Tensor, targets: Tensor, *, weight: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """-Σ_k w_k q_k ln softmax(scores)_k, averaged over the rows whose target is not ignored.

    q is the one-hot target; with smoothing s it is (1 - s)·one_hot + s/K. w are the class weights. The mean divides by
    Σ w[target]. If all rows are ignored, the mean is NaN, as in torch, and the sum is 0.

    Args:
        scores: [..., K], floating; classes on the last axis.
        targets: int64 [...].
        weight: [K], floating, or None for ones.
        ignore_index: target of rows to ignore.
    Returns: float32 or wider; a scalar unless reduction is `none`.
    Raises: ShapeError, DTypeError, IndexOutOfRange for a class id outside 0..K-1, UsageError.
    """
    operands = (scores, targets) if weight is None else (scores, targets, weight)
    loss, _ = call("cross_entropy", *operands, ignore_index=ignore_index, smoothing=float(label_smoothing))
    return _over_rows(loss, targets, weight, ignore_index, reduction)


def nll_loss(
    log_probabilities: Tensor, targets: Tensor, *, weight: Tensor | None = None, ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """-weight[target]·log_probabilities[target], classes on the last axis; the rest is as in `cross_entropy`."""
    x, targets = _wide(log_probabilities), as_tensor(targets)
    if targets.shape != x.shape[:-1]:
        raise ShapeError("the targets do not have one entry per row", expected=x.shape[:-1], got=targets.spec)
    ignored = targets == ignore_index
    label = where(ignored, 0, targets)
    loss = -call("gather", x, label.reshape(*label.shape, 1), axis=-1).reshape(*label.shape)
    if weight is not None:
        loss = loss * call("gather", _wide(weight), label.reshape(-1), axis=0).reshape(*label.shape)
    return _over_rows(where(ignored, 0.0, loss), targets, weight, ignore_index, reduction)


def _over_rows(loss: Tensor, targets: Any, weight: Tensor | None, ignore_index: int, reduction: str) -> Tensor:
    if reduction != "mean":
        return _reduced(loss, reduction)
    targets = as_tensor(targets)
    ignored = targets == ignore_index
    if weight is None:
        return loss.sum() / (float(loss.numel()) - ignored.to(loss.dtype).sum())
    own = call("gather", weight.to(loss.dtype), where(ignored, 0, targets).reshape(-1), axis=0).reshape(*targets.shape)
    return loss.sum() / where(ignored, 0.0, own).sum()


# -- losses of values --------------------------------------------------------------------------------------------------
def mse_loss(x: Tensor, target: Any, *, reduction: str = "mean") -> Tensor:
    """(x - target)²."""
    difference = _difference(x, target)
    return _reduced(difference * difference, reduction)


def l1_loss(x: Tensor, target: Any, *, reduction: str = "mean") -> Tensor:
    """|x - target|, with gradient 0 at 0."""
    return _reduced(_difference(x, target).abs(), reduction)


def huber_loss(x: Tensor, target: Any, *, delta: float = 1.0, reduction: str = "mean") -> Tensor:
    """½d² up to |d| = delta, delta·(|d| - ½delta) beyond, d = x - target (Huber 1964)."""
    difference = _difference(x, target)
    size = difference.abs()
    return _reduced(where(size <= delta, difference * difference * 0.5, (size - 0.5 * delta) * delta), reduction)


def smooth_l1_loss(x: Tensor, target: Any, *, beta: float = 1.0, reduction: str = "mean") -> Tensor:
    """Huber's loss with delta = beta, divided by beta; at beta 0 it is the absolute difference."""
    if beta == 0:
        return l1_loss(x, target, reduction=reduction)
    return huber_loss(x, target, delta=beta, reduction=reduction) * (1.0 / beta)


def binary_cross_entropy(p: Tensor, target: Any, *, reduction: str = "mean") -> Tensor:
    """-(y·ln p + (1 - y)·ln(1 - p)) for probabilities p; logarithms are clamped at -100, so p = 0 and 1 are finite."""
    return _reduced(call("bce", _wide(p), _wide(target)), reduction)


def binary_cross_entropy_with_logits(
    x: Tensor, target: Any, *, pos_weight: Any = None, reduction: str = "mean"
) -> Tensor:
    """`binary_cross_entropy` of p = σ(x) for logits x, stable for large |x|.

    Args:
        pos_weight: factor of the terms with y = 1; broadcasts to x.
    """
    x, y = _wide(x), _wide(target)
    if pos_weight is None:
        return _reduced(call("bce_with_logits", x, y), reduction)
    return _reduced(-(pos_weight * y * logsigmoid(x) + (1.0 - y) * logsigmoid(-x)), reduction)


def kl_div(x: Tensor, target: Any, *, log_target: bool = False, reduction: str = "mean") -> Tensor:
    """target·(ln target - x) for log-probabilities x; terms with target 0 are 0.

    Args:
        log_target: whether the target is given as its logarithm.
        reduction: `mean`, `sum`, `none`, or `batchmean`: the sum divided by the size of the first axis.
    """
    x, target = _wide(x), _wide(target)
    share, log = (target.exp(), target) if log_target else (target, where(target > 0.0, target, 1.0).log())
    loss = share * log - share * x
    return loss.sum() / float(x.shape[0]) if reduction == "batchmean" else _reduced(loss, reduction)


def _wide(x: Any) -> Tensor:
    x = as_tensor(x)
    return x.to(float32) if x.dtype.is_low else x


def _difference(x: Any, target: Any) -> Tensor:
    x, target = _wide(x), _wide(target)
    if x.shape != target.shape:
        what = "the target and the input have different shapes"
        raise ShapeError(what, expected=x.spec, got=target.spec, fix="reshape or expand the target")
    return x - target


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return loss
    if reduction not in ("mean", "sum"):
        raise UsageError("unknown reduction", expected="mean, sum or none", got=reduction)
    return loss.mean() if reduction == "mean" else loss.sum()
