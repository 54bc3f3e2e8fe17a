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
from graphwright.autograd import Tensor, as_tensor, cat, training
from graphwright.autograd import dropout as drop
from graphwright.autograd import one_hot as encoded
from graphwright.errors import ShapeError, UsageError
from graphwright.nn.activations import *  # noqa: F403
from graphwright.nn.losses import *  # noqa: F403
from graphwright.nn.op_functions import *  # noqa: F403
from graphwright.ops import call
from graphwright.ops.rules import equal_dim

Moments = tuple[Tensor, Tensor, Tensor]
Sizes = int | Sequence[int]


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
    input: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """(x - mean) / √(var + eps) · weight + bias over the last axes, of sizes `normalized_shape` (Ba et al. 2016).

    Raises: ShapeError if the last axes of x have different sizes; UsageError for a bias without a weight.
    """
    normalised = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if input.shape[-len(normalised) :] != normalised:
        raise ShapeError("the last axes of the input have the wrong sizes", expected=normalised, got=input.spec)
    return call("layer_norm", input, *_scale(weight, bias), rank=len(normalised), eps=eps)


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalise an input [N, C, ...] over each of `num_groups` groups of channels and all positions; weight, bias [C].

    Source: Wu and He 2018, "Group Normalization".
    """
    return call("group_norm", input, *_scale(weight, bias), groups=num_groups, eps=eps)


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
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · wᵀ + b: [..., in] with weight [out, in] to [..., out]. Raises: ShapeError."""
    return call("linear", input, weight) if bias is None else call("linear", input, weight, bias)


def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Look up rows of a table [num, dim]: ids, the input [...], to rows [..., dim]; row `padding_idx` gets no gradient.

    Raises: IndexOutOfRange.
    """
    rows = call("embedding", weight, input)
    if padding_idx is None:
        return rows
    padding = (input == padding_idx % weight.shape[0]).reshape(*input.shape, 1)
    return call("where", padding, call("stop_gradient", rows), rows)


def dropout(x: Tensor, p: float = 0.5, train: bool = True) -> Tensor:
    """If `train`, x / (1 - p) with probability 1 - p, else 0; if not, x. `gw.mode` overrides `train`."""
    return drop(x, p) if p and training(train) else x


def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Encode ids as one-hot vectors along a new last axis, int64; by default of the largest id + 1 entries."""
    return encoded(tensor, None if num_classes == -1 else num_classes)


def normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """x / max(‖x‖ₚ, eps) along an axis."""
    return input / input.norm(p, dim, True).clamp(min=eps)


def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Pad, or for negative widths crop, the last axes.

    Args:
        pad: (before, after) of the last axis, then of the one before it, ...
        mode: `constant` (with `value`, 0 by default), `reflect`, `replicate` or `circular`.
    Raises: ShapeError for an odd number of widths, or an axis too small to reflect.
    """
    if len(pad) % 2 or len(pad) > 2 * input.ndim:
        raise ShapeError("pad has a wrong number of widths", expected="two for each padded axis", got=tuple(pad))
    pairs = list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    first = input.ndim - len(pairs)
    for axis, (before, after) in enumerate(pairs, first):
        start, end = max(-before, 0), max(-after, 0)
        input = input.narrow(axis, start, input.shape[axis] - start - end) if start or end else input
    grown = tuple((max(a, 0), max(b, 0)) for a, b in pairs)
    if mode != "circular":
        return call("pad", input, widths=grown, mode=mode, value=0.0 if value is None else float(value))
    for axis, (before, after) in enumerate(grown, first):
        n = input.shape[axis]
        input = cat([input.narrow(axis, n - before, before), input, input.narrow(axis, 0, after)], axis)
    return input


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


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`attention` in torch's form: operands [..., T, D], of up to four axes.

    Args:
        attn_mask: bool, true where a key is visible, or floating, added to the scores.
        is_causal: query i sees keys 0 to i.
        enable_gqa: allow fewer heads of keys than of queries.
    Raises: ShapeError; UsageError for a mask together with `is_causal`.
    """
    if attn_mask is not None and is_causal:
        raise UsageError("a mask was given together with is_causal=True", where="scaled_dot_product_attention")
    if not enable_gqa and query.ndim == 4 and query.shape[1] != key.shape[1]:
        raise ShapeError("queries and keys have different numbers of heads", expected=query.spec, got=key.spec,
                         fix="pass enable_gqa=True")  # fmt: skip
    lead = 4 - query.ndim
    q, k, v = (x.reshape(*(1,) * lead, *x.shape) for x in (query, key, value))
    masks: dict[str, Any] = {}
    if attn_mask is not None:
        masks["mask" if attn_mask.dtype.kind == "bool" else "bias"] = attn_mask
    start = 0 if is_causal else None
    made = attention(q, k, v, causal=is_causal, q_start=start, dropout_p=dropout_p, scale=scale, **masks)
    return made.reshape(*made.shape[lead:])


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
