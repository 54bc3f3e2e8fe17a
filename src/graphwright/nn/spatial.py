"""Functions of images, signals and volumes [N, C, spatial...] under torch's names: convolutions, pools, windows.

An input without the batch axis N is accepted, as in torch. All raise ShapeError for a wrong shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import ceil, prod
from typing import Any

import numpy as np

from graphwright.array import float64
from graphwright.array.layout import Window
from graphwright.autograd import Tensor, as_tensor
from graphwright.autograd.create import device_of
from graphwright.errors import ShapeError, UsageError
from graphwright.ops import call

__all__ = [
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
    "adaptive_max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "channel_shuffle", "conv1d", "conv2d",
    "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "fold", "local_response_norm",
    "lp_pool1d", "lp_pool2d", "lp_pool3d", "max_pool1d", "max_pool2d", "max_pool3d", "max_unpool1d", "max_unpool2d",
    "max_unpool3d", "pixel_shuffle", "pixel_unshuffle", "unfold",
]  # fmt: skip
Sizes = int | Sequence[int]


def per_axis(rank: int, given: Any) -> tuple[Any, ...]:
    """Return one value per spatial axis; a single one is repeated `rank` times."""
    values = tuple(given) if isinstance(given, list | tuple) else (given,)
    if len(values) not in (1, rank):
        raise ShapeError("wrong number of values for the spatial axes", expected=f"1 or {rank}", got=values)
    return values * rank if len(values) == 1 else values


def window(rank: int, kernel: Sizes, stride: Sizes | None, padding: Sizes) -> dict[str, Any]:
    """Return the attributes of a pooling op that describe its windows."""
    slide = None if stride in (None, (), []) else per_axis(rank, stride)
    return {"kernel": per_axis(rank, kernel), "stride": slide, "padding": per_axis(rank, padding)}


def _batched(x: Tensor, rank: int, where: str, run: Callable[[Tensor], Any]) -> Any:
    """Run a function of [N, C, spatial...] on an input that may lack N."""
    if x.ndim == rank + 2:
        return run(x)
    if x.ndim != rank + 1:
        expected = f"[N, C, ...] or [C, ...] with {rank} spatial axes"
        raise ShapeError("the input has a wrong number of axes", where=where, expected=expected, got=x.spec)
    found = run(x.unsqueeze(0))
    return tuple(t.squeeze(0) for t in found) if isinstance(found, tuple) else found.squeeze(0)


def _padded(x: Tensor, after: Sequence[int], value: float = 0.0) -> Tensor:
    """Append entries to the last axes."""
    if not any(after):
        return x
    widths = ((0, 0),) * (x.ndim - len(after)) + tuple((0, n) for n in after)
    return call("pad", x, widths=widths, mode="constant", value=value)


# -- convolutions and pools --------------------------------------------------------------------------------------------
class _Spatial:
    """The functions over `rank` spatial axes."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def conv(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Sizes = 1, padding: Sizes | str = 0,
        dilation: Sizes = 1, groups: int = 1,
    ) -> Tensor:  # fmt: skip
        """Cross-correlate the input with weight [out, C / groups, kernel...].

        Args:
            padding: zeros at both ends of each axis; `valid` for none, `same` for a result of the input's size.
        Raises: UsageError for `same` with a stride, or another name.
        """
        self._check_weight("conv", weight)
        around, after = per_axis(self.rank, 0 if isinstance(padding, str) else padding), (0,) * self.rank
        if isinstance(padding, str) and padding != "valid":
            if padding != "same" or set(per_axis(self.rank, stride)) != {1}:
                expected = "valid, or same with stride 1"
                raise UsageError("unsupported padding", where=f"conv{self.rank}d", expected=expected, got=padding)
            whole = [d * (k - 1) for d, k in zip(per_axis(self.rank, dilation), weight.shape[2:], strict=True)]
            around, after = tuple(n // 2 for n in whole), tuple(n % 2 for n in whole)
        slide = {"stride": stride, "padding": around, "dilation": dilation}
        return self._conv("conv", _padded(input, after), weight, bias, groups, slide)

    def conv_transpose(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Sizes = 1, padding: Sizes = 0,
        output_padding: Sizes = 0, groups: int = 1, dilation: Sizes = 1,
    ) -> Tensor:  # fmt: skip
        """Apply the transpose of `conv`; weight [C, out / groups, kernel...]."""
        self._check_weight("conv_transpose", weight)
        given = (stride, padding, dilation, output_padding)
        steps, around, apart, rest = (per_axis(self.rank, v) for v in given)
        slide = {"stride": steps, "padding": around, "dilation": apart, "output_padding": rest}
        if all(r < s for r, s in zip(rest, steps, strict=True)):
            return self._conv("conv_transpose", input, weight, bias, groups, slide)
        if any(r >= max(s, d) for r, s, d in zip(rest, steps, apart, strict=True)):
            where, expected = f"conv_transpose{self.rank}d", "less than the stride or the dilation"
            raise ShapeError("invalid output_padding", where=where, expected=expected, got=rest)
        # the op knows paddings below the stride: compute without any, and cut the ends
        whole = self._conv("conv_transpose", input, weight, None, groups, slide | {"padding": 0, "output_padding": 0})
        whole = _padded(whole, [max(r - p, 0) for r, p in zip(rest, around, strict=True)])
        for axis, (r, p) in enumerate(zip(rest, around, strict=True), -self.rank):
            whole = whole.narrow(axis, p, whole.shape[axis] - p - max(p - r, 0))
        return whole if bias is None else whole + bias.reshape(-1, *(1,) * self.rank)

    def _check_weight(self, name: str, weight: Tensor) -> None:
        if weight.ndim != self.rank + 2:
            where, expected = f"{name}{self.rank}d", f"rank {self.rank + 2}"
            raise ShapeError("the weight has the wrong rank", where=where, expected=expected, got=weight.spec)

    def _conv(
        self, op: str, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, slide: dict[str, Any]
    ) -> Tensor:
        sizes = {k: per_axis(self.rank, v) for k, v in slide.items()}
        rest = () if bias is None else (bias,)
        where = f"{op}{self.rank}d"
        return _batched(x, self.rank, where, lambda y: call(op, y, weight, *rest, groups=groups, **sizes))

    def max_pool(
        self, input: Tensor, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, dilation: Sizes = 1,
        ceil_mode: bool = False, return_indices: bool = False,
    ) -> Any:  # fmt: skip
        """Return the maximum of each window; `stride` is the kernel size by default.

        Args:
            ceil_mode: also take the last, incomplete window of each axis.
            return_indices: return the index of each maximum among the spatial entries too.
        """
        attrs = {**window(self.rank, kernel_size, stride, padding), "dilation": per_axis(self.rank, dilation)}
        sizes = self._sizes(input, "max_pool")
        after = _overhang(sizes, attrs) if ceil_mode else (0,) * self.rank
        x = input if input.dtype.is_float else input.to(float64)  # exact below 2⁵³
        values, index = _max_pool(_padded(x, after, float("-inf")), attrs)
        values = values if x is input else values.to(input.dtype)
        if not return_indices:
            return values
        return values, _on_grid(index, [n + m for n, m in zip(sizes, after, strict=True)], sizes)

    def max_unpool(
        self, input: Tensor, indices: Tensor, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0,
        output_size: Sequence[int] | None = None,
    ) -> Tensor:  # fmt: skip
        """Put maxima back to the indices that `max_pool` returned, with zeros elsewhere."""
        slide = window(self.rank, kernel_size, stride, padding)
        rule, counts = Window.of(slide["kernel"], slide), self._sizes(input, "max_unpool")
        natural = tuple(
            (n - 1) * s - 2 * p + k for n, s, p, k in zip(counts, rule.stride, rule.padding, rule.kernel, strict=True)
        )
        sizes = natural if output_size is None else tuple(output_size)[-self.rank :]
        lead = input.shape[: -self.rank]
        zeros = as_tensor(np.zeros((*lead, prod(sizes)), np.float32), input.dtype, device_of(input))
        flat = [t.reshape(*lead, -1) for t in (indices, input)]
        return call("scatter", zeros, *flat, axis=-1).reshape(*lead, *sizes)

    def avg_pool(
        self, input: Tensor, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0,
        ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the mean of each window; `stride` is the kernel size by default.

        Args:
            ceil_mode: also take the last, incomplete window of each axis.
            count_include_pad: count padding as entries of 0.
            divisor_override: number by which sums are divided instead of the number of entries.
        """
        attrs, sizes = window(self.rank, kernel_size, stride, padding), self._sizes(input, "avg_pool")
        if divisor_override == 0:
            raise UsageError("the divisor is 0", where=f"avg_pool{self.rank}d", expected="another number", got=0)
        if not ceil_mode and divisor_override is None and self.rank < 3:
            return call("avg_pool", input, **attrs, count_include_pad=count_include_pad)
        after = _overhang(sizes, attrs) if ceil_mode else (0,) * self.rank
        rule = Window.of(attrs["kernel"], attrs)
        made = _by_axes(_padded(input, after), attrs, lambda y, own: call("avg_pool", y, **own, count_include_pad=True))
        if divisor_override is not None:
            return made * (rule.entries / divisor_override)
        for axis, (n, k, s, p) in enumerate(zip(sizes, rule.kernel, rule.stride, rule.padding, strict=True)):
            start = np.arange(made.shape[axis - self.rank]) * s - p
            end = np.minimum(start + k, n + p)
            counted = end - start if count_include_pad else np.minimum(end, n) - np.maximum(start, 0)
            if (counted != k).any():
                scale = (k / counted).reshape(-1, *(1,) * (self.rank - 1 - axis))
                made = made * as_tensor(scale).to(made.dtype)
        return made

    def lp_pool(
        self, input: Tensor, norm_type: float, kernel_size: Sizes, stride: Sizes | None = None, ceil_mode: bool = False
    ) -> Tensor:
        """Return (Σ xᵖ)^(1/p) of each window, of the absolute value of the sum."""
        entries = prod(per_axis(self.rank, kernel_size))
        total = self.avg_pool(input**norm_type, kernel_size, stride, 0, ceil_mode) * float(entries)
        return (total.sign() * total.abs().relu()) ** (1.0 / norm_type)

    def adaptive_avg_pool(self, input: Tensor, output_size: Any) -> Tensor:
        """Return the means of `output_size` windows that cover the spatial axes; None keeps the size of an axis."""
        sizes = self._outputs(input, output_size, "adaptive_avg_pool")
        if self._whole(input, sizes):
            return input.mean(tuple(range(-self.rank, 0)), keepdim=True)
        if self.rank < 3:
            return call("adaptive_avg_pool", input, sizes=sizes)
        flat = call("adaptive_avg_pool", input, sizes=sizes[1:]).movedim(-3, -1)
        return call("adaptive_avg_pool", flat, sizes=sizes[:1]).movedim(-1, -3)

    def adaptive_max_pool(self, input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
        """Return the maxima of `output_size` windows that cover the spatial axes; None keeps the size of an axis."""
        sizes, shape = self._outputs(input, output_size, "adaptive_max_pool"), input.shape[-self.rank :]
        if self._whole(input, sizes):
            best = input.flatten(-self.rank).max(-1)
            value, index = (t.reshape(*input.shape[: -self.rank], *sizes) for t in best)
            return (value, index) if return_indices else value
        value, index = input, None
        for axis in range(-1, -self.rank - 1, -1):
            n, m = shape[axis], sizes[axis]
            starts, ends = np.arange(m) * n // m, -(-np.arange(1, m + 1) * n // m)
            ids = np.minimum(starts[:, None] + np.arange((ends - starts).max()), ends[:, None] - 1)
            picked = call("index", value, as_tensor(ids), axis=axis % value.ndim)  # [..., m, window, ...]
            at = picked.ndim + axis
            best = picked.max(at)
            column = best.indices.unsqueeze(at)
            here = as_tensor(ids).reshape(m, -1, *(1,) * (-axis - 1)).expand(*picked.shape).gather(at, column)
            here = here.squeeze(at) * prod(shape[axis:][1:])
            if index is not None:
                inner = call("index", index, as_tensor(ids), axis=axis % value.ndim)
                here = here + inner.gather(at, column).squeeze(at)
            value, index = best.values, here
        return (value, index) if return_indices else value

    def _whole(self, x: Tensor, sizes: tuple[int, ...]) -> bool:
        """Return True if one window covers all axes and a size is named, so that it has no numbered entries."""
        named = any(isinstance(d, str) for d in x.spec.shape[-self.rank :])
        return named and all(type(n) is int and n == 1 for n in sizes)

    def _outputs(self, x: Tensor, output_size: Any, name: str) -> tuple[int, ...]:
        sizes = self._sizes(x, name)
        made = tuple(n if m is None else m for n, m in zip(sizes, per_axis(self.rank, output_size), strict=True))
        if min(made) < 1:
            where = f"{name}{self.rank}d"
            raise ShapeError("an output size is not positive", where=where, expected=">= 1", got=made)
        return made

    def _sizes(self, x: Tensor, name: str) -> tuple[int, ...]:
        if x.ndim not in (self.rank + 1, self.rank + 2):
            expected, where = f"[N, C, ...] or [C, ...] with {self.rank} spatial axes", f"{name}{self.rank}d"
            raise ShapeError("the input has a wrong number of axes", where=where, expected=expected, got=x.spec)
        if 0 in x.spec.shape[-self.rank - 1 :]:
            where = f"{name}{self.rank}d"
            raise ShapeError("an axis other than the batch is empty", where=where, expected="sizes >= 1", got=x.spec)
        return x.shape[-self.rank :]


def _overhang(sizes: Sequence[int], attrs: dict[str, Any]) -> tuple[int, ...]:
    """Return how many entries the last windows miss, which begin in the input or its padding before it.

    Raises: ShapeError if an axis has no window.
    """
    rule, missing = Window.of(attrs["kernel"], attrs), []
    for n, e, s, p in zip(sizes, rule.extent, rule.stride, rule.padding, strict=True):
        if (count := ceil((n + 2 * p - e) / s) + 1) < 1:
            raise ShapeError("the window is larger than the padded axis", expected=f"at most {n + 2 * p}", got=e)
        count -= (count - 1) * s >= n + p
        missing.append(max((count - 1) * s + e - n - 2 * p, 0))
    return tuple(missing)


def _on_grid(index: Tensor, wide: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Convert flat indices in an array of sizes `wide` to those in one of sizes `sizes`."""
    if tuple(wide) == tuple(sizes):
        return index
    made, rest = None, index
    for axis in range(len(sizes) - 1, -1, -1):
        here = (rest % wide[axis]) * prod(sizes[axis + 1 :])
        made, rest = here if made is None else made + here, rest // wide[axis]
    assert made is not None
    return made


def _by_axes(x: Tensor, attrs: dict[str, Any], pool: Callable[[Tensor, dict[str, Any]], Tensor]) -> Tensor:
    """Pool three axes as two and one, since the ops pool at most two; otherwise all at once."""
    if len(attrs["kernel"]) < 3:
        return pool(x, attrs)
    inner, outer = ({k: None if v is None else v[part] for k, v in attrs.items()} for part in (slice(1, 3), slice(1)))
    return pool(pool(x, inner).movedim(-3, -1), outer).movedim(-1, -3)


def _max_pool(x: Tensor, attrs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    if len(attrs["kernel"]) < 3:
        return call("max_pool", x, **attrs)
    inner, outer = ({k: None if v is None else v[part] for k, v in attrs.items()} for part in (slice(1, 3), slice(1)))
    planes, plane_index = call("max_pool", x, **inner)
    values, depth = (t.movedim(-1, -3) for t in call("max_pool", planes.movedim(-3, -1), **outer))
    return values, depth * prod(x.shape[-2:]) + plane_index.gather(plane_index.ndim - 3, depth)


_LINE, _PLANE, _VOLUME = _Spatial(1), _Spatial(2), _Spatial(3)
conv1d, conv2d, conv3d = _LINE.conv, _PLANE.conv, _VOLUME.conv
conv_transpose1d, conv_transpose2d = _LINE.conv_transpose, _PLANE.conv_transpose
conv_transpose3d = _VOLUME.conv_transpose
max_pool1d, max_pool2d, max_pool3d = _LINE.max_pool, _PLANE.max_pool, _VOLUME.max_pool
max_unpool1d, max_unpool2d, max_unpool3d = _LINE.max_unpool, _PLANE.max_unpool, _VOLUME.max_unpool
avg_pool1d, avg_pool2d, avg_pool3d = _LINE.avg_pool, _PLANE.avg_pool, _VOLUME.avg_pool
lp_pool1d, lp_pool2d, lp_pool3d = _LINE.lp_pool, _PLANE.lp_pool, _VOLUME.lp_pool
adaptive_avg_pool1d, adaptive_avg_pool2d = _LINE.adaptive_avg_pool, _PLANE.adaptive_avg_pool
adaptive_avg_pool3d = _VOLUME.adaptive_avg_pool
adaptive_max_pool1d, adaptive_max_pool2d = _LINE.adaptive_max_pool, _PLANE.adaptive_max_pool
adaptive_max_pool3d = _VOLUME.adaptive_max_pool


def local_response_norm(input: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    """x / (k + alpha·mean of x² over `size` neighbouring channels)ᵝ (Krizhevsky et al. 2012)."""
    if input.ndim < 3:
        name, expected = "local_response_norm", "[N, C, ...]"
        raise ShapeError("the input has too few axes", where=name, expected=expected, got=input.spec)
    squares, channels = input * input, input.shape[1]
    widths = ((0, 0), (size // 2, (size - 1) // 2), *((0, 0),) * (input.ndim - 2))
    wide = call("pad", squares, widths=widths, mode="constant", value=0.0)
    total = reduce(lambda a, b: a + b, [wide.narrow(1, at, channels) for at in range(size)])
    return input / (total * (alpha / size) + k) ** beta


# -- windows as columns, channels as positions -------------------------------------------------------------------------
def unfold(
    input: Tensor, kernel_size: Sizes, dilation: Sizes = 1, padding: Sizes = 0, stride: Sizes = 1
) -> Tensor:  # fmt: skip
    """Return the windows of [N, C, H, W] as columns [N, C · kernel entries, positions], with 0 for padding."""
    slide = {"dilation": dilation, "padding": padding, "stride": stride, "kernel": kernel_size}
    attrs = {k: per_axis(2, v) for k, v in slide.items()}
    return _batched(input, 2, "unfold", lambda x: call("unfold", x, **attrs))


def fold(
    input: Tensor, output_size: Sizes, kernel_size: Sizes, dilation: Sizes = 1, padding: Sizes = 0, stride: Sizes = 1
) -> Tensor:
    """Add each column of [N, C · kernel entries, positions] to its window of the result [N, C, H, W]."""
    slide = {"dilation": dilation, "padding": padding, "stride": stride, "kernel": kernel_size, "sizes": output_size}
    attrs = {k: per_axis(2, v) for k, v in slide.items()}
    return _batched(input, 1, "fold", lambda x: call("fold", x, **attrs))


def pixel_shuffle(input: Tensor, upscale_factor: int) -> Tensor:
    """Move channels to positions: [..., C·r², H, W] to [..., C, H·r, W·r] (Shi et al. 2016). Raises: ShapeError."""
    r = upscale_factor
    _divides(input, "pixel_shuffle", -3, r * r)
    *lead, channels, height, width = input.shape
    parts = input.reshape(*lead, channels // (r * r), r, r, height, width).movedim((-4, -3), (-3, -1))
    return parts.reshape(*lead, channels // (r * r), height * r, width * r)


def pixel_unshuffle(input: Tensor, downscale_factor: int) -> Tensor:
    """Move positions to channels, the inverse of `pixel_shuffle`. Raises: ShapeError."""
    r = downscale_factor
    for axis in (-1, -2):
        _divides(input, "pixel_unshuffle", axis, r)
    *lead, channels, height, width = input.shape
    parts = input.reshape(*lead, channels, height // r, r, width // r, r).movedim((-3, -1), (-4, -3))
    return parts.reshape(*lead, channels * r * r, height // r, width // r)


def channel_shuffle(input: Tensor, groups: int) -> Tensor:
    """Interleave the channels of `groups` groups of [N, C, ...] (Zhang et al. 2018). Raises: ShapeError."""
    _divides(input, "channel_shuffle", 1, groups)
    split = input.reshape(input.shape[0], groups, input.shape[1] // groups, *input.shape[2:])
    return split.transpose(1, 2).reshape(*input.shape)


def _divides(x: Tensor, name: str, axis: int, factor: int) -> None:
    if x.ndim < 3 or factor < 1 or x.shape[axis] % factor:
        expected = f"3 or more axes, axis {axis} divisible by {factor}"
        raise ShapeError("cannot regroup the axes", where=name, expected=expected, got=x.spec)
