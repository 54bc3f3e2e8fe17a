"""Operators of layers: products, convolutions, norms, pools, attention, dropout, losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphwright.array import int64, uint8
from graphwright.autograd import Tensor, create, top
from graphwright.autograd.einsum import einsum as run_einsum
from graphwright.models.importing.operators.table import equal, operator
from graphwright.nn import functional
from graphwright.nn.normalisations import scale_and_shift
from graphwright.ops import call

equal(top, "addmm addmv addbmm baddbmm bmm dot vdot matmul mm mv outer cdist")
equal(functional, """
    linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d
    cosine_similarity pairwise_distance
""")  # fmt: skip

operator("_adaptive_avg_pool2d")(functional.adaptive_avg_pool2d)
operator("_adaptive_avg_pool3d")(functional.adaptive_avg_pool3d)


@operator("einsum")
def einsum(equation: str, tensors: Sequence[Tensor], path: Any = None) -> Tensor:
    """Sum products over labels of axes; the order of the products is from left to right."""
    return run_einsum(equation, *tensors)


@operator("conv1d.padding", "conv2d.padding", "conv3d.padding")
def same_conv(x: Tensor, weight: Tensor, *args: Any) -> Tensor:
    """Convolution with padding `same` or `valid`."""
    return (functional.conv1d, functional.conv2d, functional.conv3d)[weight.ndim - 3](x, weight, *args)


@operator("convolution")
def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Tensor:  # fmt: skip
    """Convolution, or its transpose, over the axes after channels."""
    axes = weight.ndim - 2
    if transposed:
        run = getattr(functional, f"conv_transpose{axes}d")
        return run(x, weight, bias, tuple(stride), tuple(padding), tuple(output_padding), groups, tuple(dilation))
    run = getattr(functional, f"conv{axes}d")
    return run(x, weight, bias, tuple(stride), tuple(padding), tuple(dilation), groups)


@operator("transformers::grouped_mm_fallback", "_grouped_mm")
def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows of x by the matrix of their group; `ends` are the last rows + 1 of the groups."""
    starts = create.zeros(1, dtype=int64)
    return call("grouped_matmul", x, weight, top.cat([starts, ends.to(int64)]))


# -- norms -------------------------------------------------------------------------------------------------------------
@operator("layer_norm")
def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    cudnn: bool = False,
) -> Tensor:  # fmt: skip
    """Normalise the last axes."""
    return functional.layer_norm(x, tuple(shape), weight, bias, eps)


@operator("native_layer_norm")
def native_layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor | None, ...]:
    """Normalise the last axes; results 2 and 3 are mean and 1 / deviation."""
    axes = list(range(x.ndim - len(shape), x.ndim))
    return functional.layer_norm(x, tuple(shape), weight, bias, eps), *_statistics(x, axes, eps, True)


def _statistics(x: Tensor, axes: list[int], eps: float, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / √(variance + eps) over axes."""
    return x.mean(axes, keepdim), (x.var(axes, unbiased=False, keepdim=keepdim) + eps).rsqrt()


@operator("rms_norm")
def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """x / √(mean x² + eps) over the last axes."""
    return functional.rms_norm(x, tuple(shape), weight, eps)


@operator("group_norm")
def group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    cudnn: bool = False,
) -> Tensor:  # fmt: skip
    """Normalise groups of channels."""
    return functional.group_norm(x, groups, weight, bias, eps)


@operator("native_group_norm")
def native_group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, channels: int, size: int, groups: int, eps: float
) -> tuple[Tensor | None, ...]:
    """Normalise groups of channels; results 2 and 3 are mean and 1 / deviation."""
    parts = x.reshape((n, groups, channels * size // groups))
    return functional.group_norm(x, groups, weight, bias, eps), *_statistics(parts, [2], eps, False)


@operator("instance_norm")
def instance_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, from_input: bool,
    momentum: float, eps: float, cudnn: bool = False,
) -> Tensor:  # fmt: skip
    """Normalise each channel of each sample over its positions, or by running statistics."""
    return functional.instance_norm(x, mean, var, weight, bias, from_input, momentum, eps)


@operator("batch_norm")
def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, training: bool,
    momentum: float, eps: float, cudnn: bool = False,
) -> Tensor:  # fmt: skip
    """Normalise channels by running statistics, or by those of the batch."""
    return functional.batch_norm(x, mean, var, weight, bias, training, momentum, eps)


@operator("_native_batch_norm_legit_no_training", "_batch_norm_no_update")
def batch_norm_eval(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Tensor | None, ...]:
    """Normalise channels by running statistics."""
    return functional.batch_norm(x, mean, var, weight, bias, False, momentum, eps), None, None, None


@operator("_native_batch_norm_legit.no_stats")
def batch_norm_statless(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    """Normalise channels by the statistics of the batch; results 2 and 3 are mean and 1 / deviation."""
    made = functional.batch_norm(x, None, None, weight, bias, True, momentum, eps)
    return made, *_statistics(x, [0, *range(2, x.ndim)], eps, False)


@operator("_native_batch_norm_legit_functional")
def batch_norm_functional(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, training: bool, momentum: float,
    eps: float,
) -> tuple[Any, ...]:  # fmt: skip
    """Normalise channels; results 2 and 3 are mean and 1 / deviation, the last two the new running statistics."""
    if not training:
        none = create.zeros((0,), dtype=x.dtype)
        return functional.batch_norm(x, mean, var, weight, bias, False, momentum, eps), none, none, mean, var
    scale = scale_and_shift(weight, bias)
    made, *moved = call("batch_norm_train", x, mean.detach(), var.detach(), *scale, momentum=momentum, eps=eps)
    return made, *_statistics(x, [0, *range(2, x.ndim)], eps, False), *(t.detach() for t in moved)


@operator("_batch_norm_with_update_functional")
def batch_norm_with_update(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Any, ...]:
    """Normalise channels by the statistics of the batch; result 4 is memory of torch's backward pass, here empty."""
    made, *saved, new_mean, new_var = batch_norm_functional(x, weight, bias, mean, var, True, momentum, eps)
    return made, *saved, create.zeros((0,), dtype=uint8), new_mean, new_var


@operator("_weight_norm", "_weight_norm_interface")
def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g·v / ‖v‖ along all axes but `dim`."""
    axes = [axis for axis in range(v.ndim) if axis != dim % v.ndim]
    return v * (g / v.norm(2, axes, True))


# -- pools and images --------------------------------------------------------------------------------------------------
@operator("max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices")
def max_pool_with_indices(x: Tensor, kernel: Any, *args: Any) -> tuple[Tensor, Tensor]:
    """Largest entries of windows, and their indices."""
    run = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[len(kernel) - 1]
    stride = args[0] if args and args[0] else None
    return run(x, tuple(kernel), stride, *args[1:], return_indices=True)


@operator("adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(x: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Largest entries of as many parts as `size` says, and their indices."""
    run = functional.adaptive_max_pool2d if len(size) == 2 else functional.adaptive_max_pool3d
    return run(x, tuple(size), return_indices=True)


def _upsampled(mode: str) -> Any:
    def run(x: Tensor, size: Any, *args: Any) -> Tensor:
        corners = args[0] if args and isinstance(args[0], bool) else None
        factors = next((a for a in args if isinstance(a, list | tuple) and a), None)
        if size is None and all(float(f).is_integer() for f in factors or ()):
            size = [n * int(f) for n, f in zip(x.shape[2:], factors or (), strict=True)]
        if size is not None:
            return functional.interpolate(x, size=tuple(size), mode=mode, align_corners=corners)
        return functional.interpolate(x, scale_factor=tuple(factors or ()), mode=mode, align_corners=corners)

    return run


for _name in ["nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d"]:
    operator(f"upsample_{_name}")(_upsampled(_name[:-2]))


@operator("im2col")
def im2col(x: Tensor, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Tensor:
    """Windows as columns."""
    return functional.unfold(x, tuple(kernel), tuple(dilation), tuple(padding), tuple(stride))


@operator("col2im")
def col2im(x: Tensor, size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Tensor:
    """Sum of columns at their windows."""
    return functional.fold(x, tuple(size), tuple(kernel), tuple(dilation), tuple(padding), tuple(stride))


# -- attention, dropout, losses ----------------------------------------------------------------------------------------
@operator("scaled_dot_product_attention")
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, dropout: float = 0.0, causal: bool = False, *,
              scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """Attention; one key head is broadcast to all query heads."""
    shared = q.ndim == 4 and k.ndim == 4 and type(k.shape[1]) is int and k.shape[1] == v.shape[1] == 1
    return functional.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale, enable_gqa or shared)


@operator("_scaled_dot_product_flash_attention_for_cpu")
def flash(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, *, attn_mask: Any = None,
          scale: float | None = None) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Attention; the logarithms of sums that torch returns too are None."""
    return functional.scaled_dot_product_attention(q, k, v, attn_mask, dropout, causal, scale), None


@operator("dropout")
def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Set entries to 0 with probability p and scale the others, in training."""
    return functional.dropout(x, p, train)


@operator("native_dropout")
def native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor | None, ...]:
    """Set entries to 0 with probability p and scale the others, in training; the mask is None."""
    return functional.dropout(x, p, train is not False), None


def _reduction(number: int) -> str:
    """Return the name of one of torch's reductions."""
    return "mean" if number == 1 else "sum" if number else "none"


@operator("cross_entropy_loss")
def cross_entropy(logits: Tensor, target: Tensor, weight: Any = None, reduction: int = 1, ignore: int = -100,
                  smoothing: float = 0.0) -> Tensor:  # fmt: skip
    """Cross-entropy of logits and classes."""
    return functional.cross_entropy(logits, target, weight, ignore_index=ignore, reduction=_reduction(reduction),
                                    label_smoothing=smoothing)  # fmt: skip


@operator("mse_loss")
def mse_loss(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """Mean squared error."""
    return functional.mse_loss(x, target, reduction=_reduction(reduction)).to(top.result_type(x, target))
