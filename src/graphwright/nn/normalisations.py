"""Normalisations under torch's names."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from graphwright.array import finfo, float32
from graphwright.autograd import Tensor, no_grad, ones, zeros
from graphwright.errors import ShapeError
from graphwright.ops import call

__all__ = ["batch_norm", "group_norm", "instance_norm", "layer_norm", "normalize", "rms_norm"]


def rms_norm(
    input: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None = None, eps: float | None = None, *,
    unit_offset: bool = False, cast_before_scale: bool = True,
) -> Tensor:  # fmt: skip
    """x / √(mean x² + eps) · weight over the last axes (Zhang and Sennrich 2019, eq. 4).

    Statistics are float32 or wider.

    Args:
        normalized_shape: sizes of the last axes.
        eps: by default that of the dtype in which statistics are computed.
        unit_offset: scale by 1 + weight, as Gemma does.
        cast_before_scale: cast the quotient to the dtype of x before scaling by the weight, as Llama does; else after.
    Raises: ShapeError if the last axes of x have different sizes.
    """
    axes = _last_axes(input, normalized_shape)
    x = input if len(axes) == 1 else input.reshape(*input.shape[: input.ndim - len(axes)], prod(axes))
    scale = _ones(prod(axes), x) if weight is None else weight.reshape(-1)
    least = finfo(float32 if x.dtype.is_low else x.dtype).eps if eps is None else float(eps)
    made = call("rms_norm", x, scale, eps=least, unit_offset=unit_offset, cast_before_scale=cast_before_scale)
    return made if len(axes) == 1 else made.reshape(*input.shape)


def layer_norm(
    input: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """(x - mean) / √(var + eps) · weight + bias over the last axes, of sizes `normalized_shape` (Ba et al. 2016).

    Raises: ShapeError if the last axes of x have different sizes.
    """
    axes = _last_axes(input, normalized_shape)
    return call("layer_norm", input, *scale_and_shift(weight, bias), rank=len(axes), eps=eps)


def _last_axes(x: Tensor, normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    axes = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not axes or x.shape[-len(axes) :] != axes:
        raise ShapeError("the last axes of the input have the wrong sizes", expected=axes, got=x.spec)
    return axes


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalise an input [N, C, ...] over each of `num_groups` groups of channels and all positions; weight, bias [C].

    Source: Wu and He 2018, "Group Normalization".
    """
    return call("group_norm", input, *scale_and_shift(weight, bias), groups=num_groups, eps=eps)


def instance_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Normalise [N, C, ...] over the positions of each channel of each sample (Ulyanov et al. 2016); weight, bias [C].

    Running statistics, if given, are moved by the fraction `momentum` to the mean over the samples; without
    `use_input_stats` they normalise instead.
    """
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    positions = tuple(range(2, input.ndim))
    if not positions or prod(input.shape[2:]) == 1:
        expected = "more than one position per channel"
        raise ShapeError("there is nothing to normalise over", where="instance_norm", expected=expected, got=input.spec)
    if running_mean is not None and running_var is not None:
        with no_grad():
            x = input.to(running_mean.dtype)
            means = (x.mean(positions).mean(0), x.var(positions).mean(0))
            for running, here in zip((running_mean, running_var), means, strict=True):
                running.copy_(running * (1.0 - momentum) + here * momentum)
    return group_norm(input, input.shape[1], weight, bias, eps)


def batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Normalise x [N, C, ...] per channel (Ioffe and Szegedy 2015).

    Training uses the statistics of the batch, and moves the running ones in place by the fraction `momentum` to these
    (the variance divides by n - 1). Evaluation uses the running statistics.
    Raises: ShapeError when training on one value per channel, or evaluating without running statistics.
    """
    scale = scale_and_shift(weight, bias)
    if not training:
        if running_mean is None or running_var is None:
            raise ShapeError("evaluation needs running statistics", where="batch_norm", expected="two tensors [C]")
        return call("batch_norm", input, running_mean, running_var, *scale, eps=eps)
    kind = float32 if input.dtype.is_low else input.dtype
    channels = input.shape[1:2]
    old = (zeros(*channels, dtype=kind) if running_mean is None else running_mean,
           ones(*channels, dtype=kind) if running_var is None else running_var)  # fmt: skip
    made, *moved = call("batch_norm_train", input, *old, *scale, momentum=momentum, eps=eps)
    with no_grad():
        for running, new in zip((running_mean, running_var), moved, strict=True):
            if running is not None:
                running.copy_(new)
    return made


def scale_and_shift(weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Return those of weight and bias that are given; ones stand for a weight that is missing beside a bias."""
    if weight is None and bias is not None:
        weight = _ones(bias.shape[0], bias)
    return tuple(t for t in (weight, bias) if t is not None)


def _ones(count: int, like: Tensor) -> Tensor:
    return ones(count, dtype=like.dtype, device=None if like.symbolic else like.device)


def normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """x / max(‖x‖ₚ, eps) along an axis."""
    return input / input.norm(p, dim, True).clamp(min=eps)
