"""Products of matrices, convolutions, pools, norms and losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import inf, prod
from typing import Any

import numpy as np

from graphwright.array import float32, int64
from graphwright.autograd import Tensor, as_tensor, einsum, top, zeros
from graphwright.models.importing.onnx_operators.table import NotExpressible, fixed_sizes, operator, text
from graphwright.nn import functional
from graphwright.ops import call
from graphwright.ops.axes import axis_of


# -- products ----------------------------------------------------------------------------------------------------------
@operator("MatMul")
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b."""
    return exact(top.matmul, a, b)


def exact(run: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """Run a function of floats; of integers in float64, exactly below 2⁵³."""
    kind = operands[0].dtype
    return run(*operands) if kind.is_float else run(*(x.to("float64") for x in operands)).to(kind)


LINEAR = "Linear "
"""Name of the row for a product by a transposed weight, which no operator of ONNX has."""


@operator(LINEAR)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b."""
    return functional.linear(x, weight, bias)


@operator("Gemm")
def gemm(
    a: Tensor, b: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0,
    transB: int = 0,
) -> Tensor:  # fmt: skip
    """alpha·A B + beta·C, with A and B transposed if so wanted."""
    a = a.T if transA else a
    if (
        transB
        and alpha == 1.0
        and a.dtype.is_float
        and (c is None or (beta == 1.0 and c.ndim == 1 and c.spec.shape == b.spec.shape[:1]))
    ):
        return functional.linear(a, b, c)
    made = exact(top.matmul, a, b.T if transB else b)
    made = made if alpha == 1.0 else (made * alpha).to(made.dtype)
    return made if c is None else made + (c if beta == 1.0 else (c * beta).to(c.dtype))


@operator("Einsum")
def einsum_(*operands: Tensor, equation: Any) -> Tensor:
    """Einstein's sum of products."""
    return einsum(text(equation), *operands)


# -- windows -----------------------------------------------------------------------------------------------------------
def _ends(
    x: Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], pads: Any, auto_pad: Any
) -> tuple[list[int], list[int]]:
    """Return the padding before and after each spatial axis."""
    rank, mode = len(kernel), text(auto_pad)
    if mode in ("NOTSET", ""):
        given = list(pads or [0] * 2 * rank)
        return given[:rank], given[rank:]
    if mode == "VALID":
        return [0] * rank, [0] * rank
    whole = []
    for axis, (k, s, d) in enumerate(zip(kernel, strides, dilations, strict=True), 2):
        extent = d * (k - 1) + 1
        if s == 1:
            whole.append(extent - 1)
        else:
            (n,) = fixed_sizes(x, [axis], f"{mode} with a stride")
            whole.append(max((-(-n // s) - 1) * s + extent - n, 0))
    low, high = [n // 2 for n in whole], [n - n // 2 for n in whole]
    return (low, high) if mode == "SAME_UPPER" else (high, low)


def _padded(x: Tensor, before: Sequence[int], after: Sequence[int], value: float = 0.0) -> Tensor:
    if not any((*before, *after)):
        return x
    widths = ((0, 0),) * (x.ndim - len(before)) + tuple(zip(before, after, strict=True))
    return call("pad", x, widths=widths, mode="constant", value=value)


@operator("Conv")
def conv(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, auto_pad: Any = "NOTSET", dilations: Any = None,
    group: int = 1, kernel_shape: Any = None, pads: Any = None, strides: Any = None,
) -> Tensor:  # fmt: skip
    """Cross-correlation over the axes after channels."""
    rank = w.ndim - 2
    kernel = [int(n) for n in w.spec.sizes[2:]]
    steps, apart = tuple(strides or [1] * rank), tuple(dilations or [1] * rank)
    before, after = _ends(x, kernel, steps, apart, pads, auto_pad)
    if rank > 3 or not rank:
        raise NotExpressible("convolution over this number of axes", expected="1 to 3", got=rank)
    run = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]
    if before == after:
        return run(x, w, bias, steps, tuple(before), apart, group)
    return run(_padded(x, before, after), w, bias, steps, 0, apart, group)


@operator("ConvTranspose")
def conv_transpose(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, auto_pad: Any = "NOTSET", dilations: Any = None,
    group: int = 1, kernel_shape: Any = None, output_padding: Any = None, output_shape: Any = None, pads: Any = None,
    strides: Any = None,
) -> Tensor:  # fmt: skip
    """The transpose of convolution."""
    rank, mode = w.ndim - 2, text(auto_pad)
    kernel = [int(n) for n in w.spec.sizes[2:]]
    steps, apart = tuple(strides or [1] * rank), tuple(dilations or [1] * rank)
    rest = tuple(output_padding or [0] * rank)
    if rank > 3 or not rank:
        raise NotExpressible("convolution over this number of axes", expected="1 to 3", got=rank)
    run = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[rank - 1]
    if output_shape is not None or mode.startswith("SAME"):
        sizes = fixed_sizes(x, range(2, x.ndim), "a transposed convolution to a given shape")
        wanted = list(output_shape or [n * s for n, s in zip(sizes, steps, strict=True)])[-rank:]
        grown = [
            (n - 1) * s + r + d * (k - 1) + 1 for n, s, r, d, k in zip(sizes, steps, rest, apart, kernel, strict=True)
        ]
        total = [g - n for g, n in zip(grown, wanted, strict=True)]
        low, high = [n // 2 for n in total], [n - n // 2 for n in total]
        before, after = (low, high) if mode == "SAME_UPPER" else (high, low)
    else:
        given = list(pads or [0] * 2 * rank) if mode in ("NOTSET", "") else [0] * 2 * rank
        before, after = given[:rank], given[rank:]
    if before == after and min(before) >= 0:
        return run(x, w, bias, steps, tuple(before), rest, group, apart)
    whole = run(x, w, bias, steps, 0, rest, group, apart)
    return functional.pad(whole, [n for b, a in zip(before[::-1], after[::-1], strict=True) for n in (-b, -a)])


def _counts(
    x: Tensor,
    extent: Sequence[int],
    strides: Sequence[int],
    before: Sequence[int],
    after: Sequence[int],
    ceil_mode: int,
) -> list[int]:
    """Return the number of windows along each spatial axis."""
    sizes = fixed_sizes(x, range(2, x.ndim), "this pooling")
    found = []
    for n, e, s, b, a in zip(sizes, extent, strides, before, after, strict=True):
        room = n + b + a - e
        count = (-(-room // s) if ceil_mode else room // s) + 1
        found.append(count - 1 if ceil_mode and (count - 1) * s >= n + b else count)
    return found


def _windows(
    x: Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], before: Sequence[int],
    counts: Sequence[int], value: float,
) -> list[Tensor]:  # fmt: skip
    """Return, for each entry of the kernel, the entries of x under it in all windows."""
    extent = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    sizes = fixed_sizes(x, range(2, x.ndim), "this pooling")
    after = [
        max((c - 1) * s + e - n - b, 0) for c, s, e, n, b in zip(counts, strides, extent, sizes, before, strict=True)
    ]
    wide = _padded(x, before, after, value)
    return [wide[(slice(None), slice(None), *(slice(o * d, o * d + (c - 1) * s + 1, s) for o, d, c, s in
                                              zip(at, dilations, counts, strides, strict=True)))]
            for at in product(*map(range, kernel))]  # fmt: skip


@operator("MaxPool")
def max_pool(
    x: Tensor, *, kernel_shape: Any, auto_pad: Any = "NOTSET", ceil_mode: int = 0, dilations: Any = None,
    pads: Any = None, storage_order: int = 0, strides: Any = None, outputs: int,
) -> Any:  # fmt: skip
    """Largest entries of windows, and their indices among all entries of x."""
    rank, kernel = len(kernel_shape), tuple(kernel_shape)
    steps, apart = tuple(strides or [1] * rank), tuple(dilations or [1] * rank)
    before, after = _ends(x, kernel, steps, apart, pads, auto_pad)
    plain = before == after and all(2 * b <= k for b, k in zip(before, kernel, strict=True)) and not ceil_mode
    if plain and rank < 4 and outputs == 1:
        run = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[rank - 1]
        return run(x, kernel, steps, tuple(before), apart)
    extent = [d * (k - 1) + 1 for d, k in zip(apart, kernel, strict=True)]
    counts = _counts(x, extent, steps, before, after, ceil_mode)
    wide = x if x.dtype.is_float else x.to("float64")
    parts = top.stack(_windows(wide, kernel, steps, apart, before, counts, -inf), 0)
    values, best = parts.max(0)
    values = values.to(x.dtype)
    if outputs == 1:
        return values
    sizes = [int(n) for n in x.spec.sizes]
    offsets = np.arange(prod(sizes[2:])).reshape(sizes[2:])
    if storage_order:
        offsets = np.arange(prod(sizes[2:])).reshape(sizes[2:][::-1]).T
    whole = offsets[None, None] + np.arange(prod(sizes[:2])).reshape(*sizes[:2], *(1,) * rank) * prod(sizes[2:])
    numbers = _windows(as_tensor(whole.astype(np.float64)), kernel, steps, apart, before, counts, -1.0)
    return values, top.gather(top.stack(numbers, 0), 0, best.unsqueeze(0)).squeeze(0).to(int64)


@operator("AveragePool")
def average_pool(
    x: Tensor, *, kernel_shape: Any, auto_pad: Any = "NOTSET", ceil_mode: int = 0, count_include_pad: int = 0,
    dilations: Any = None, pads: Any = None, strides: Any = None,
) -> Tensor:  # fmt: skip
    """Means of windows."""
    rank, kernel = len(kernel_shape), tuple(kernel_shape)
    steps, apart = tuple(strides or [1] * rank), tuple(dilations or [1] * rank)
    before, after = _ends(x, kernel, steps, apart, pads, auto_pad)
    plain = before == after and all(2 * b <= k for b, k in zip(before, kernel, strict=True)) and set(apart) == {1}
    if plain and rank < 4 and not ceil_mode and (rank < 3 or count_include_pad or not any(before)):
        run = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[rank - 1]
        return run(x, kernel, steps, tuple(before), False, bool(count_include_pad))
    extent = [d * (k - 1) + 1 for d, k in zip(apart, kernel, strict=True)]
    counts = _counts(x, extent, steps, before, after, ceil_mode)
    parts = _windows(x, kernel, steps, apart, before, counts, 0.0)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    sizes = [int(n) for n in x.spec.sizes[2:]]
    seen = np.ones([n + b + a if count_include_pad else n for n, b, a in zip(sizes, before, after, strict=True)])
    start = [0] * rank if count_include_pad else before
    shares = _windows(as_tensor(seen[None, None]), kernel, steps, apart, start, counts, 0.0)
    number = shares[0]
    for share in shares[1:]:
        number = number + share
    return total / number.to(total.dtype)


@operator("LpPool")
def lp_pool(
    x: Tensor, *, kernel_shape: Any, auto_pad: Any = "NOTSET", ceil_mode: int = 0, dilations: Any = None, p: int = 2,
    pads: Any = None, strides: Any = None,
) -> Tensor:  # fmt: skip
    """(Σ |x|ᵖ)^(1/p) of windows."""
    rank, kernel = len(kernel_shape), tuple(kernel_shape)
    steps, apart = tuple(strides or [1] * rank), tuple(dilations or [1] * rank)
    before, after = _ends(x, kernel, steps, apart, pads, auto_pad)
    extent = [d * (k - 1) + 1 for d, k in zip(apart, kernel, strict=True)]
    counts = _counts(x, extent, steps, before, after, ceil_mode)
    total: Any = 0.0
    for part in _windows(x, kernel, steps, apart, before, counts, 0.0):
        total = total + part.abs() ** float(p)
    return total ** (1.0 / p)


def _spatial(x: Tensor) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


operator("GlobalAveragePool")(lambda x: top.mean(x, _spatial(x), True))
operator("GlobalMaxPool")(lambda x: top.amax(x, _spatial(x), True))
operator("GlobalLpPool")(lambda x, *, p=2: top.norm(x, p, _spatial(x), True))


@operator("MaxUnpool", known=(2,))
def max_unpool(
    x: Tensor, indices: Tensor, shape: Any = None, *, kernel_shape: Any, pads: Any = None, strides: Any = None
) -> Tensor:
    """Put maxima back to their indices among all entries of the result, with zeros elsewhere."""
    rank = len(kernel_shape)
    steps, around = strides or [1] * rank, pads or [0] * 2 * rank
    sizes = fixed_sizes(x, range(x.ndim), "MaxUnpool")
    windows = zip(sizes[2:], steps, around[:rank], around[rank:], kernel_shape, strict=True)
    natural = [*sizes[:2], *((n - 1) * s - a - b + k for n, s, a, b, k in windows)]
    wanted = natural if shape is None else [int(n) for n in shape]
    offset = indices.to(int64).reshape(-1)
    if wanted != natural:  # the indices are those of the natural shape
        coordinates, rest = [], offset
        for n in natural[::-1]:
            coordinates.append(top.remainder(rest, n))
            rest = top.floor_divide(rest, n)
        offset = as_tensor(0)
        for n, part in zip(wanted, coordinates[::-1], strict=True):
            offset = offset * n + part
    empty = zeros(prod(wanted), dtype=x.dtype)
    return top.scatter(empty, 0, offset, x.reshape(-1)).reshape(*wanted)


# -- norms -------------------------------------------------------------------------------------------------------------
@operator("BatchNormalization", fixed=(3, 4))
def batch_norm(
    x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor, *, epsilon: float = 1e-5, momentum: float = 0.9,
    training_mode: int = 0, spatial: int = 1, outputs: int,
) -> Any:  # fmt: skip
    """Normalise channels by running statistics, or by those of the batch."""
    if not training_mode:
        return call("batch_norm", x, mean, var, scale, bias, eps=epsilon)
    axes = (0, *range(2, x.ndim))
    wide = x.to(float32) if x.dtype.is_low else x
    center, spread = wide.mean(axes), wide.var(axes, False)
    made = call("batch_norm", x, center.to(mean.dtype), spread.to(var.dtype), scale, bias, eps=epsilon)
    moved = [old * momentum + new.to(old.dtype) * (1.0 - momentum) for old, new in ((mean, center), (var, spread))]
    return (made, *moved)[:outputs] if outputs > 1 else made


@operator("InstanceNormalization")
def instance_norm(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    """Normalise the positions of each channel of each sample."""
    return call("group_norm", x, scale, bias, groups=int(scale.spec.sizes[0]), eps=epsilon)


@operator("GroupNormalization")
def group_norm(
    x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1, opset: int
) -> Tensor:
    """Normalise groups of channels; until opset 20 scale and bias have an entry per group."""
    if opset < 21:
        each = int(x.spec.shape[1]) // num_groups
        scale, bias = (top.repeat_interleave(t, each, 0, output_size=each * num_groups) for t in (scale, bias))
    return call("group_norm", x, scale, bias, groups=num_groups, eps=epsilon)


def _fits(weight: Tensor, shape: Sequence[Any]) -> bool:
    return tuple(weight.spec.shape) == tuple(shape)


@operator("LayerNormalization")
def layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor | None = None, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1,
    outputs: int,
) -> Any:  # fmt: skip
    """Normalise the last axes; the second and third result are mean and 1/√(var + epsilon)."""
    at = axis_of(axis, x.ndim)
    if all(w is None or _fits(w, x.spec.shape[at:]) for w in (scale, bias)):
        made = functional.layer_norm(x, x.shape[at:], scale, bias, epsilon)
    else:
        made = functional.layer_norm(x, x.shape[at:], None, None, epsilon) * scale
        made = made if bias is None else made + bias
    if outputs == 1:
        return made
    axes, wide = tuple(range(at, x.ndim)), x.to(float32) if stash_type == 1 else x
    center = wide.mean(axes, True)
    return (made, center, top.rsqrt(((wide - center) ** 2.0).mean(axes, True) + epsilon))[:outputs]


@operator("RMSNormalization")
def rms_norm(x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> Tensor:
    """x / √(mean x² + epsilon) · scale over the last axes."""
    at = axis_of(axis, x.ndim)
    if _fits(scale, x.spec.shape[at:]):
        return functional.rms_norm(x, x.shape[at:], scale, epsilon)
    return functional.rms_norm(x, x.shape[at:], None, epsilon) * scale


@operator("LRN")
def local_response_norm(x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Tensor:
    """x / (bias + alpha/size·Σ x² over neighbouring channels)^beta."""
    if size % 2:
        return functional.local_response_norm(x, size, alpha, beta, bias)
    squares = _padded((x * x).movedim(1, -1), [(size - 1) // 2], [size // 2])
    total = squares.unfold(-1, size, 1).sum(-1).movedim(-1, 1)
    return x / (total * (alpha / size) + bias) ** beta


# -- losses ------------------------------------------------------------------------------------------------------------
@operator("NegativeLogLikelihoodLoss")
def nll_loss(
    scores: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int | None = None,
    reduction: Any = "mean",
) -> Tensor:  # fmt: skip
    """-weight·score of each target's class, combined."""
    ids = target.to(int64)
    seen = None if ignore_index is None else ids != ignore_index
    safe = ids if seen is None else top.where(seen, ids, 0)
    terms = -top.gather(scores, 1, safe.unsqueeze(1)).squeeze(1)
    share = None if weight is None else call("index", weight, safe, axis=0)
    if seen is not None:
        share = seen.to(scores.dtype) if share is None else share * seen.to(share.dtype)
    terms = terms if share is None else terms * share
    how = text(reduction)
    if how == "none":
        return terms
    if how == "sum":
        return terms.sum()
    return terms.mean() if share is None else terms.sum() / share.sum()


@operator("SoftmaxCrossEntropyLoss")
def cross_entropy(
    scores: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int | None = None,
    reduction: Any = "mean", outputs: int,
) -> Any:  # fmt: skip
    """Cross-entropy of scores and classes; the second result are the logarithms of the probabilities."""
    logs = functional.log_softmax(scores, 1)
    loss = nll_loss(logs, target, weight, ignore_index=ignore_index, reduction=reduction)
    return (loss, logs) if outputs > 1 else loss
