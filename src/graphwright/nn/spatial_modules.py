"""Modules of images, signals and volumes [N, C, spatial...], under torch's names: convolutions, pools, padding.

All accept an input without the axis N. Those without weights call one function of `nn.functional`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import ClassVar

from graphwright.autograd import Parameter, Tensor
from graphwright.errors import ShapeError, UsageError
from graphwright.nn import functional, initial
from graphwright.nn.function_modules import FunctionModule
from graphwright.nn.module import Module
from graphwright.nn.spatial import Sizes, per_axis

_MAX = "kernel_size stride padding dilation return_indices ceil_mode"
_AVG1D = "kernel_size stride padding ceil_mode count_include_pad"
_SLIDE = "kernel_size stride padding"
_UPSAMPLE = "size scale_factor mode align_corners recompute_scale_factor"
_MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}
"""Padding mode of a convolution -> mode of `functional.pad`."""


class _OverAxes(Module):
    """Base of modules whose classes fix the number of spatial axes."""

    rank: ClassVar[int] = 0

    def __init_subclass__(cls, rank: int = 0) -> None:
        cls.rank = rank or cls.rank


# -- convolutions ------------------------------------------------------------------------------------------------------
class _Conv(_OverAxes):
    """Base of the convolutions; initial values are uniform within ±1/√fan_in, as in torch."""

    transposed: ClassVar[bool] = False

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Sizes, stride: Sizes = 1, padding: Sizes | str = 0,
        dilation: Sizes = 1, groups: int = 1, bias: bool = True, padding_mode: str = "zeros", *,
        name: str = "", seed: int | None = None,
    ) -> None:  # fmt: skip
        where = type(self).__name__
        if groups < 1 or in_channels % groups or out_channels % groups:
            expected = f"a divisor of {in_channels} and {out_channels}"
            raise UsageError("cannot divide the channels into groups", where=where, expected=expected, got=groups)
        if padding_mode not in _MODES:
            raise UsageError("unknown padding mode", where=where, expected=", ".join(_MODES), got=padding_mode)
        strides = {*per_axis(self.rank, stride)}
        if isinstance(padding, str) and padding != "valid" and (padding != "same" or strides != {1}):
            expected = "numbers, valid, or same with stride 1"
            raise UsageError("unsupported padding", where=where, expected=expected, got=f"{padding}, stride {stride}")
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride, self.dilation = (per_axis(self.rank, v) for v in (kernel_size, stride, dilation))
        self.padding = padding if isinstance(padding, str) else per_axis(self.rank, padding)
        self.padding_mode, self.output_padding = padding_mode, (0,) * self.rank
        shape = self._shape(in_channels, out_channels)
        drawn = partial(initial.kaiming_uniform, fan_in=shape[1] * prod(self.kernel_size), seed=seed)
        self.weight = Parameter(drawn((*shape, *self.kernel_size), name and f"{name}conv.weight"))
        values = drawn((out_channels,), name and f"{name}conv.bias")  # also advances the stream without a bias
        self.bias = Parameter(values) if bias else None

    def _shape(self, inner: int, outer: int) -> tuple[int, int]:
        return outer, inner // self.groups

    def reset_parameters(self) -> None:
        """Draw initial values again, from the default generator."""
        initial.redraw(prod(self.weight.shape[1:]), self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the convolution to x [N, in_channels, spatial...]; return [N, out_channels, spatial...]."""
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = functional.pad(x, self._around(), _MODES[self.padding_mode]), 0
        run = getattr(functional, f"conv{self.rank}d")
        return run(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)

    def _around(self) -> list[int]:
        """Return (before, after) of each spatial axis, the last axis first."""
        if self.padding == "same":
            whole = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
            pairs = [(n // 2, n - n // 2) for n in whole]
        else:
            pairs = [(n, n) for n in ((0,) * self.rank if isinstance(self.padding, str) else self.padding)]
        return [n for pair in reversed(pairs) for n in pair]


class Conv1d(_Conv, rank=1):
    """Cross-correlation over [N, C, L]; weight [out, in / groups, k]."""


class Conv2d(_Conv, rank=2):
    """Cross-correlation over [N, C, H, W]; weight [out, in / groups, kh, kw]."""


class Conv3d(_Conv, rank=3):
    """Cross-correlation over [N, C, D, H, W]; weight [out, in / groups, kd, kh, kw]."""


class _ConvTranspose(_Conv):
    transposed = True

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Sizes, stride: Sizes = 1, padding: Sizes = 0,
        output_padding: Sizes = 0, groups: int = 1, bias: bool = True, dilation: Sizes = 1,
        padding_mode: str = "zeros", *, name: str = "", seed: int | None = None,
    ) -> None:  # fmt: skip
        if padding_mode != "zeros" or isinstance(padding, str):
            where, expected = type(self).__name__, "numbers, with padding_mode zeros"
            raise UsageError("unsupported padding", where=where, expected=expected, got=f"{padding}, {padding_mode}")
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, name=name,
                         seed=seed)  # fmt: skip
        self.output_padding = per_axis(self.rank, output_padding)

    def _shape(self, inner: int, outer: int) -> tuple[int, int]:
        return inner, outer // self.groups

    def forward(self, x: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """Apply the transposed convolution to x [N, in_channels, spatial...]; return [N, out_channels, spatial...].

        Args:
            output_size: the spatial sizes of the result, instead of `output_padding`.
        Raises: ShapeError for sizes that no `output_padding` gives.
        """
        rest = self.output_padding if output_size is None else self._rest(x, output_size)
        run = getattr(functional, f"conv_transpose{self.rank}d")
        return run(x, self.weight, self.bias, self.stride, self.padding, rest, self.groups, self.dilation)

    def _rest(self, x: Tensor, output_size: Sequence[int]) -> tuple[int, ...]:
        slide = zip(x.shape[-self.rank :], self.stride, self.padding, self.dilation, self.kernel_size, strict=True)
        least = [(n - 1) * s - 2 * int(p) + d * (k - 1) + 1 for n, s, p, d, k in slide]
        rest = tuple(w - n for w, n in zip(tuple(output_size)[-self.rank :], least, strict=False))
        if len(rest) != self.rank or any(not 0 <= r < s for r, s in zip(rest, self.stride, strict=True)):
            expected = ", ".join(f"{n} to {n + s - 1}" for n, s in zip(least, self.stride, strict=True))
            raise ShapeError("the convolution has no such output", where=type(self).__name__, expected=expected,
                             got=tuple(output_size))  # fmt: skip
        return rest


class ConvTranspose1d(_ConvTranspose, rank=1):
    """Transpose of Conv1d: [N, C, L] to [N, C', L']; weight [in, out / groups, k]."""


class ConvTranspose2d(_ConvTranspose, rank=2):
    """Transpose of Conv2d: [N, C, H, W] to [N, C', H', W']; weight [in, out / groups, kh, kw]."""


class ConvTranspose3d(_ConvTranspose, rank=3):
    """Transpose of Conv3d: [N, C, D, H, W] to [N, C', D', H', W']; weight [in, out / groups, kd, kh, kw]."""


# -- pools -------------------------------------------------------------------------------------------------------------
class MaxPool1d(FunctionModule, of=functional.max_pool1d, arguments=_MAX):
    """`functional.max_pool1d` as a module."""


class MaxPool2d(FunctionModule, of=functional.max_pool2d, arguments=_MAX):
    """`functional.max_pool2d` as a module."""


class MaxPool3d(FunctionModule, of=functional.max_pool3d, arguments=_MAX):
    """`functional.max_pool3d` as a module."""


class MaxUnpool1d(FunctionModule, of=functional.max_unpool1d, operands=2, arguments=_SLIDE):
    """`functional.max_unpool1d` as a module."""


class MaxUnpool2d(FunctionModule, of=functional.max_unpool2d, operands=2, arguments=_SLIDE):
    """`functional.max_unpool2d` as a module."""


class MaxUnpool3d(FunctionModule, of=functional.max_unpool3d, operands=2, arguments=_SLIDE):
    """`functional.max_unpool3d` as a module."""


class AvgPool1d(FunctionModule, of=functional.avg_pool1d, arguments=_AVG1D):
    """`functional.avg_pool1d` as a module."""


class AvgPool2d(FunctionModule, of=functional.avg_pool2d):
    """`functional.avg_pool2d` as a module."""


class AvgPool3d(FunctionModule, of=functional.avg_pool3d):
    """`functional.avg_pool3d` as a module."""


class LPPool1d(FunctionModule, of=functional.lp_pool1d):
    """`functional.lp_pool1d` as a module."""


class LPPool2d(FunctionModule, of=functional.lp_pool2d):
    """`functional.lp_pool2d` as a module."""


class LPPool3d(FunctionModule, of=functional.lp_pool3d):
    """`functional.lp_pool3d` as a module."""


class AdaptiveAvgPool1d(FunctionModule, of=functional.adaptive_avg_pool1d):
    """`functional.adaptive_avg_pool1d` as a module."""


class AdaptiveAvgPool2d(FunctionModule, of=functional.adaptive_avg_pool2d):
    """`functional.adaptive_avg_pool2d` as a module."""


class AdaptiveAvgPool3d(FunctionModule, of=functional.adaptive_avg_pool3d):
    """`functional.adaptive_avg_pool3d` as a module."""


class AdaptiveMaxPool1d(FunctionModule, of=functional.adaptive_max_pool1d):
    """`functional.adaptive_max_pool1d` as a module."""


class AdaptiveMaxPool2d(FunctionModule, of=functional.adaptive_max_pool2d):
    """`functional.adaptive_max_pool2d` as a module."""


class AdaptiveMaxPool3d(FunctionModule, of=functional.adaptive_max_pool3d):
    """`functional.adaptive_max_pool3d` as a module."""


# -- padding -----------------------------------------------------------------------------------------------------------
class _Pad(_OverAxes):
    """Base of modules that pad, or for negative widths crop, the last axes.

    Args:
        padding: one width for all ends, or (before, after) of the last axis, then of the one before it, ...
    """

    mode: ClassVar[str] = "constant"
    value: float = 0.0

    def __init__(self, padding: Sizes) -> None:
        self.padding = per_axis(2 * self.rank, padding)

    def forward(self, x: Tensor) -> Tensor:
        """Pad x [N, C, spatial...]; only the spatial axes change."""
        return functional.pad(x, self.padding, self.mode, self.value)


class _ConstantPad(_Pad):
    def __init__(self, padding: Sizes, value: float) -> None:
        super().__init__(padding)
        self.value = value


class _ReflectionPad(_Pad):
    mode = "reflect"


class _ReplicationPad(_Pad):
    mode = "replicate"


class _CircularPad(_Pad):
    mode = "circular"


class ZeroPad1d(_Pad, rank=1):
    """Pad the last axis by zeros."""


class ZeroPad2d(_Pad, rank=2):
    """Pad each of the last two axes by zeros."""


class ZeroPad3d(_Pad, rank=3):
    """Pad each of the last three axes by zeros."""


class ConstantPad1d(_ConstantPad, rank=1):
    """Pad the last axis by one value."""


class ConstantPad2d(_ConstantPad, rank=2):
    """Pad each of the last two axes by one value."""


class ConstantPad3d(_ConstantPad, rank=3):
    """Pad each of the last three axes by one value."""


class ReflectionPad1d(_ReflectionPad, rank=1):
    """Pad the last axis by the entries mirrored at its ends."""


class ReflectionPad2d(_ReflectionPad, rank=2):
    """Pad each of the last two axes by the entries mirrored at its ends."""


class ReflectionPad3d(_ReflectionPad, rank=3):
    """Pad each of the last three axes by the entries mirrored at its ends."""


class ReplicationPad1d(_ReplicationPad, rank=1):
    """Pad the last axis by its first and last entries."""


class ReplicationPad2d(_ReplicationPad, rank=2):
    """Pad each of the last two axes by its first and last entries."""


class ReplicationPad3d(_ReplicationPad, rank=3):
    """Pad each of the last three axes by its first and last entries."""


class CircularPad1d(_CircularPad, rank=1):
    """Pad the last axis by the entries of its other end."""


class CircularPad2d(_CircularPad, rank=2):
    """Pad each of the last two axes by the entries of its other end."""


class CircularPad3d(_CircularPad, rank=3):
    """Pad each of the last three axes by the entries of its other end."""


# -- resampling, and windows and channels as positions -----------------------------------------------------------------
class Upsample(FunctionModule, of=functional.interpolate, arguments=_UPSAMPLE):
    """`functional.interpolate` as a module."""


class UpsamplingNearest2d(FunctionModule, of=functional.upsample_nearest):
    """`functional.upsample_nearest` as a module."""


class UpsamplingBilinear2d(FunctionModule, of=functional.upsample_bilinear):
    """`functional.upsample_bilinear` as a module."""


class PixelShuffle(FunctionModule, of=functional.pixel_shuffle):
    """`functional.pixel_shuffle` as a module."""


class PixelUnshuffle(FunctionModule, of=functional.pixel_unshuffle):
    """`functional.pixel_unshuffle` as a module."""


class ChannelShuffle(FunctionModule, of=functional.channel_shuffle):
    """`functional.channel_shuffle` as a module."""


class Unfold(FunctionModule, of=functional.unfold):
    """`functional.unfold` as a module."""


class Fold(FunctionModule, of=functional.fold):
    """`functional.fold` as a module."""


class LocalResponseNorm(FunctionModule, of=functional.local_response_norm):
    """`functional.local_response_norm` as a module."""
