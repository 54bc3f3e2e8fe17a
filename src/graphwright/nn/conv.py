"""Convolutions, their transposes, and pools over one or two spatial axes."""

from __future__ import annotations

from math import prod

from graphwright.autograd import Parameter, Tensor
from graphwright.nn import init
from graphwright.nn.functional import Sizes, per_axis
from graphwright.nn.module import Module
from graphwright.ops import call


class _Conv(Module):
    """Base of the convolutions; initial values are uniform in ±1/√fan_in, as in torch."""

    rank = 0
    op = "conv"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        name: str = "",
        seed: int | None = None,
    ) -> None:
        kernel = per_axis(self.rank, kernel_size)
        shape = self._shape(in_channels, out_channels, groups, kernel)
        fan_in = shape[1] * prod(kernel)
        self.weight = Parameter(init.kaiming_uniform(shape, name and f"{name}conv.weight", fan_in=fan_in, seed=seed))
        drawn = init.kaiming_uniform((out_channels,), name and f"{name}conv.bias", fan_in=fan_in, seed=seed)
        self.bias = Parameter(drawn) if bias else None
        self.attrs = {
            "stride": _sizes(stride),
            "padding": _sizes(padding),
            "dilation": _sizes(dilation),
            "groups": groups,
        }

    @staticmethod
    def _shape(inner: int, outer: int, groups: int, kernel: tuple[int, ...]) -> tuple[int, ...]:
        return (outer, inner // groups, *kernel)

    def forward(self, x: Tensor) -> Tensor:
        """[N, in_channels, spatial...] to [N, out_channels, spatial...]."""
        operands = (x, self.weight) if self.bias is None else (x, self.weight, self.bias)
        return call(self.op, *operands, **self.attrs)


class Conv1d(_Conv):
    """Cross-correlation over [N, C, L]; weight [out, in / groups, k]."""

    rank = 1


class Conv2d(_Conv):
    """Cross-correlation over [N, C, H, W]; weight [out, in / groups, kh, kw]."""

    rank = 2


class _ConvTranspose(_Conv):
    op = "conv_transpose"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Sizes = 1,
        *,
        name: str = "",
        seed: int | None = None,
    ) -> None:
        shape = (in_channels, out_channels, kernel_size)
        super().__init__(*shape, stride, padding, dilation, groups, bias, name=name, seed=seed)
        self.attrs["output_padding"] = _sizes(output_padding)

    @staticmethod
    def _shape(inner: int, outer: int, groups: int, kernel: tuple[int, ...]) -> tuple[int, ...]:
        return (inner, outer // groups, *kernel)


class ConvTranspose1d(_ConvTranspose):
    """Transpose of Conv1d: [N, C, L] to [N, C', L']; weight [in, out / groups, k]."""

    rank = 1


class ConvTranspose2d(_ConvTranspose):
    """Transpose of Conv2d: [N, C, H, W] to [N, C', H', W']; weight [in, out / groups, kh, kw]."""

    rank = 2


def _sizes(given: Sizes) -> int | tuple[int, ...]:
    return given if isinstance(given, int) else tuple(given)


class _Pool(Module):
    """Base of the pools."""

    rank = 0
    op = ""

    def __init__(self, kernel_size: Sizes, stride: Sizes | None, padding: Sizes, **attrs: object) -> None:
        self.attrs = {
            "kernel": per_axis(self.rank, kernel_size),
            "stride": None if stride is None else per_axis(self.rank, stride),
            "padding": per_axis(self.rank, padding),
            **attrs,
        }

    def forward(self, x: Tensor) -> Tensor:
        """[..., spatial...] to [..., number of windows...]."""
        found = call(self.op, x, **self.attrs)
        return found[0] if isinstance(found, tuple) else found


class _MaxPool(_Pool):
    op = "max_pool"

    def __init__(
        self, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, dilation: Sizes = 1
    ) -> None:
        super().__init__(kernel_size, stride, padding, dilation=per_axis(self.rank, dilation))


class MaxPool1d(_MaxPool):
    """Maximum over windows of the last axis; of equal entries the first one gets the gradient."""

    rank = 1


class MaxPool2d(_MaxPool):
    """Maximum over windows of the last two axes; of equal entries the first one gets the gradient."""

    rank = 2


class _AvgPool(_Pool):
    op = "avg_pool"

    def __init__(
        self, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, count_include_pad: bool = True
    ) -> None:
        super().__init__(kernel_size, stride, padding, count_include_pad=count_include_pad)


class AvgPool1d(_AvgPool):
    """Mean over windows of the last axis."""

    rank = 1


class AvgPool2d(_AvgPool):
    """Mean over windows of the last two axes."""

    rank = 2


class _AdaptiveAvgPool(Module):
    rank = 0

    def __init__(self, output_size: Sizes) -> None:
        self.sizes = per_axis(self.rank, output_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., spatial...] to [..., output_size...]."""
        return call("adaptive_avg_pool", x, sizes=self.sizes)


class AdaptiveAvgPool1d(_AdaptiveAvgPool):
    """Mean over `output_size` windows that cover the last axis."""

    rank = 1


class AdaptiveAvgPool2d(_AdaptiveAvgPool):
    """Mean over `output_size` windows that cover the last two axes."""

    rank = 2
