"""Functions without parameters: attention, windows, activations, normalisations, losses.

Losses give float32 or wider and are reduced by `reduction`: `mean`, `sum` or `none`.
"""

from __future__ import annotations

from typing import Any, Literal, overload

from graphwright.array import float32
from graphwright.autograd import Tensor, as_tensor, where
from graphwright.errors import ShapeError, UsageError
from graphwright.nn.attend import attention as attention
from graphwright.nn.windows import (
    adaptive_avg_pool1d as adaptive_avg_pool1d,
)
from graphwright.nn.windows import (
    adaptive_avg_pool2d as adaptive_avg_pool2d,
)
from graphwright.nn.windows import (
    avg_pool1d as avg_pool1d,
)
from graphwright.nn.windows import (
    avg_pool2d as avg_pool2d,
)
from graphwright.nn.windows import (
    conv1d as conv1d,
)
from graphwright.nn.windows import (
    conv2d as conv2d,
)
from graphwright.nn.windows import (
    conv_transpose1d as conv_transpose1d,
)
from graphwright.nn.windows import (
    conv_transpose2d as conv_transpose2d,
)
from graphwright.nn.windows import (
    dropout as dropout,
)
from graphwright.nn.windows import (
    embedding as embedding,
)
from graphwright.nn.windows import (
    interpolate as interpolate,
)
from graphwright.nn.windows import (
    linear as linear,
)
from graphwright.nn.windows import (
    max_pool1d as max_pool1d,
)
from graphwright.nn.windows import (
    max_pool2d as max_pool2d,
)
from graphwright.ops import call

Moments = tuple[Tensor, Tensor, Tensor]


# -- activations -------------------------------------------------------------------------------------------------------
def relu(x: Tensor) -> Tensor:
    """max(x, 0), with derivative 0 at 0."""
    return call("relu", x)


def leaky_relu(x: Tensor, slope: float = 0.01) -> Tensor:
    """X above 0, else slope·x."""
    return call("leaky_relu", x, slope=slope)


def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """X above 0, else alpha·(eˣ - 1) (Clevert et al. 2016)."""
    return call("elu", x, alpha=alpha)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x·Φ(x), or with `approximate="tanh"` its approximation by tanh (Hendrycks and Gimpel 2016)."""
    return call("gelu", x, approximate=approximate)


def silu(x: Tensor) -> Tensor:
    """x·σ(x)."""
    return call("silu", x)


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """silu(a)·b, as one op that keeps a and b alone (Shazeer 2020)."""
    return call("swiglu", a, b)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e⁻ˣ)."""
    return call("sigmoid", x)


def tanh(x: Tensor) -> Tensor:
    """Tanh x."""
    return call("tanh", x)


def softplus(x: Tensor) -> Tensor:
    """ln(1 + eˣ)."""
    return call("softplus", x)


def logsigmoid(x: Tensor) -> Tensor:
    """Ln σ(x)."""
    return call("logsigmoid", x)


def sech(x: Tensor) -> Tensor:
    """1 / cosh x."""
    return call("sech", x)


def softmax(x: Tensor, axis: int = -1, mask: Any = None) -> Tensor:
    """e^(x - max) / Σ along an axis.

    Args:
        mask: bool, broadcast to x; entries where it is false are 0 and get no gradient, also when a row has no other.
            Without a mask, a row of -inf alone is NaN.
    """
    return x.softmax(axis, mask)


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Ln softmax along an axis."""
    return x.log_softmax(axis)


# -- normalisations ----------------------------------------------------------------------------------------------------
def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, unit_offset: bool = False, cast_before_scale: bool = True
) -> Tensor:
    """X / √(mean(x², -1) + eps) · weight; statistics in float32 or wider (Zhang and Sennrich 2019, eq. 4).

    Args:
        x: [..., D], floating. weight: [D].
        unit_offset: scale by 1 + weight, as Gemma does.
        cast_before_scale: cast the quotient to the dtype of x and then scale, as Llama does, or the other way round.
    """
    return call("rms_norm", x, weight, eps=eps, unit_offset=unit_offset, cast_before_scale=cast_before_scale)


def layer_norm(
    x: Tensor, shape: int | tuple[int, ...], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """(x - mean) / √(var + eps) · weight + bias over the last axes, which have `shape` (Ba et al. 2016).

    Raises: ShapeError if x does not end in that shape; UsageError for a bias without a weight.
    """
    normalised = (shape,) if isinstance(shape, int) else tuple(shape)
    if x.shape[-len(normalised) :] != normalised:
        raise ShapeError("the last axes have another shape", expected=normalised, got=x.spec)
    return call("layer_norm", x, *_scale(weight, bias), rank=len(normalised), eps=eps)


def group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Norm of x [N, C, ...] over each of `groups` runs of channels and all places; weight, bias [C].

    Source: Wu and He 2018, "Group Normalization".
    """
    return call("group_norm", x, *_scale(weight, bias), groups=groups, eps=eps)


def instance_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Norm of x [N, C, ...] over the places of each channel of each sample; weight, bias [C]."""
    return group_norm(x, x.shape[1], weight, bias, eps)


@overload
def batch_norm(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    training: Literal[False] = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor: ...
@overload
def batch_norm(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    training: Literal[True],
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Moments: ...
def batch_norm(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | Moments:
    """Norm of x [N, C, ...] per channel (Ioffe and Szegedy 2015).

    In training with the statistics of the batch; the result is (y, running mean, running variance), the latter two
    moved by `momentum` towards the batch's (variance with n - 1), for the caller to keep. Else with the running ones.

    Raises: ShapeError when training on one value per channel.
    """
    operands = (x, running_mean, running_var, *_scale(weight, bias))
    if not training:
        return call("batch_norm", *operands, eps=eps)
    return call("batch_norm_train", *operands, momentum=momentum, eps=eps)


def _scale(weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
    if weight is None and bias is not None:
        raise UsageError("a bias needs a weight before it", fix="a weight of ones")
    return tuple(t for t in (weight, bias) if t is not None)


# -- losses of class scores --------------------------------------------------------------------------------------------
def cross_entropy(
    scores: Tensor,
    targets: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """-Σ_k q_k ln softmax(scores)_k, averaged over the rows whose target is not ignored.

    q is one at the target; with smoothing s, 1 - s there and s/K everywhere; times the weights of the classes. The mean
    divides by Σ weight[target]; it is NaN if all rows are ignored, as in torch, and the sum is 0.

    Args:
        scores: [..., K], floating; classes on the last axis.
        targets: int64 [...].
        weight: [K], floating, or None for ones.
        ignore_index: target of rows that do not count.
    Returns: float32 or wider; a scalar unless reduction is `none`.
    Raises: ShapeError, DTypeError, IndexOutOfRange for a class id outside 0..K-1, UsageError.
    """
    classes = () if weight is None else (weight,)
    loss, _ = call(
        "cross_entropy", scores, targets, *classes, ignore_index=ignore_index, smoothing=float(label_smoothing)
    )
    return _over_rows(loss, targets, weight, ignore_index, reduction)


def nll_loss(
    log_probabilities: Tensor,
    targets: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """-log_probabilities[target], times weight[target]; classes on the last axis. See `cross_entropy`."""
    x, targets = _wide(log_probabilities), as_tensor(targets)
    if targets.shape != x.shape[:-1]:
        raise ShapeError("one target per row", expected=x.shape[:-1], got=targets.spec)
    ignored = targets == ignore_index
    place = where(ignored, 0, targets)
    loss = -call("gather", x, place.reshape(*place.shape, 1), axis=-1).reshape(*place.shape)
    if weight is not None:
        loss = loss * call("gather", _wide(weight), place.reshape(-1), axis=0).reshape(*place.shape)
    return _over_rows(where(ignored, 0.0, loss), targets, weight, ignore_index, reduction)


def _over_rows(loss: Tensor, targets: Any, weight: Tensor | None, ignore_index: int, reduction: str) -> Tensor:
    if reduction != "mean":
        return _reduced(loss, reduction)
    targets = as_tensor(targets)
    ignored = targets == ignore_index
    if weight is None:
        return loss.sum() / (float(loss.size) - ignored.to(loss.dtype).sum())
    own = call("gather", weight.to(loss.dtype), where(ignored, 0, targets).reshape(-1), axis=0).reshape(*targets.shape)
    return loss.sum() / where(ignored, 0.0, own).sum()


# -- losses of values --------------------------------------------------------------------------------------------------
def mse_loss(x: Tensor, target: Any, *, reduction: str = "mean") -> Tensor:
    """(x - target)²."""
    apart = _apart(x, target)
    return _reduced(apart * apart, reduction)


def l1_loss(x: Tensor, target: Any, *, reduction: str = "mean") -> Tensor:
    """|x - target|, with gradient 0 at 0."""
    return _reduced(_apart(x, target).abs(), reduction)


def huber_loss(x: Tensor, target: Any, *, delta: float = 1.0, reduction: str = "mean") -> Tensor:
    """½d² up to |d| = delta, delta·(|d| - ½delta) beyond, d = x - target (Huber 1964)."""
    apart = _apart(x, target)
    size = apart.abs()
    return _reduced(where(size <= delta, apart * apart * 0.5, (size - 0.5 * delta) * delta), reduction)


def smooth_l1_loss(x: Tensor, target: Any, *, beta: float = 1.0, reduction: str = "mean") -> Tensor:
    """Huber's loss with delta = beta, divided by beta; the absolute difference for beta 0."""
    if beta == 0:
        return l1_loss(x, target, reduction=reduction)
    return huber_loss(x, target, delta=beta, reduction=reduction) * (1.0 / beta)


def binary_cross_entropy(p: Tensor, target: Any, *, reduction: str = "mean") -> Tensor:
    """-(y·ln p + (1 - y)·ln(1 - p)) for probabilities p; logarithms stop at -100, so p = 0 and 1 are finite."""
    return _reduced(call("bce", _wide(p), _wide(target)), reduction)


def binary_cross_entropy_with_logits(
    x: Tensor, target: Any, *, pos_weight: Any = None, reduction: str = "mean"
) -> Tensor:
    """The same of p = σ(x), for scores of any size.

    Args:
        pos_weight: factor of the terms with y = 1; broadcast to x.
    """
    x, y = _wide(x), _wide(target)
    if pos_weight is None:
        return _reduced(call("bce_with_logits", x, y), reduction)
    return _reduced(-(pos_weight * y * logsigmoid(x) + (1.0 - y) * logsigmoid(-x)), reduction)


def kl_div(x: Tensor, target: Any, *, log_target: bool = False, reduction: str = "mean") -> Tensor:
    """target·(ln target - x) for log-probabilities x; terms with target 0 are 0.

    Args:
        log_target: the target is given as its logarithm.
        reduction: also `batchmean`: the sum divided by the size of the first axis.
    """
    x, target = _wide(x), _wide(target)
    share, log = (target.exp(), target) if log_target else (target, where(target > 0.0, target, 1.0).log())
    loss = share * log - share * x
    if reduction == "batchmean":
        return loss.sum() / float(x.shape[0])
    return _reduced(loss, reduction)


def _wide(x: Any) -> Tensor:
    x = as_tensor(x)
    return x.to(float32) if x.dtype.is_low else x


def _apart(x: Any, target: Any) -> Tensor:
    x, target = _wide(x), _wide(target)
    if x.shape != target.shape:
        raise ShapeError("a target of another shape", expected=x.spec, got=target.spec, fix="reshape or expand one")
    return x - target


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return loss
    if reduction not in ("mean", "sum"):
        raise UsageError("unknown reduction", expected="mean, sum or none", got=reduction)
    return loss.mean() if reduction == "mean" else loss.sum()
