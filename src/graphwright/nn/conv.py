"""Convolutions and their transposes over one or two spatial axes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from graphwright.autograd import Parameter, Tensor
from graphwright.nn import init
from graphwright.nn.module import Module
from graphwright.ops import call

Sizes = int | Sequence[int]


class _Conv(Module):
    """What all four share; initial values are uniform in ±1/√fan_in, as in torch."""

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
        kernel = (kernel_size,) * self.rank if isinstance(kernel_size, int) else tuple(kernel_size)
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
        """[N, in_channels, spatial...] to [N, out_channels, places...]."""
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
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            name=name,
            seed=seed,
        )
        self.attrs["output_padding"] = _sizes(output_padding)

    @staticmethod
    def _shape(inner: int, outer: int, groups: int, kernel: tuple[int, ...]) -> tuple[int, ...]:
        return (inner, outer // groups, *kernel)


class ConvTranspose1d(_ConvTranspose):
    """The transpose of Conv1d: [N, C, places] to [N, C', L]; weight [in, out / groups, k]."""

    rank = 1


class ConvTranspose2d(_ConvTranspose):
    """The transpose of Conv2d: [N, C, places...] to [N, C', H, W]; weight [in, out / groups, kh, kw]."""

    rank = 2


def _sizes(given: Sizes) -> int | tuple[int, ...]:
    return given if isinstance(given, int) else tuple(given)


class _Pool(Module):
    rank = 0

    def _sizes(self, given: Sizes) -> tuple[int, ...]:
        return (given,) * self.rank if isinstance(given, int) else tuple(given)


class _MaxPool(_Pool):
    def __init__(
        self, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, dilation: Sizes = 1
    ) -> None:
        self.attrs = {
            "kernel": self._sizes(kernel_size),
            "stride": None if stride is None else self._sizes(stride),
            "padding": self._sizes(padding),
            "dilation": self._sizes(dilation),
        }

    def forward(self, x: Tensor) -> Tensor:
        """[..., spatial...] to [..., places...]; the gradient goes to the first of equals."""
        return call("max_pool", x, **self.attrs)[0]


class MaxPool1d(_MaxPool):
    """Largest entry of each window of the last axis."""

    rank = 1


class MaxPool2d(_MaxPool):
    """Largest entry of each window of the last two axes."""

    rank = 2


class _AvgPool(_Pool):
    def __init__(
        self, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, count_include_pad: bool = True
    ) -> None:
        self.attrs = {
            "kernel": self._sizes(kernel_size),
            "stride": None if stride is None else self._sizes(stride),
            "padding": self._sizes(padding),
            "count_include_pad": count_include_pad,
        }

    def forward(self, x: Tensor) -> Tensor:
        """[..., spatial...] to [..., places...]."""
        return call("avg_pool", x, **self.attrs)


class AvgPool1d(_AvgPool):
    """Mean of each window of the last axis."""

    rank = 1


class AvgPool2d(_AvgPool):
    """Mean of each window of the last two axes."""

    rank = 2


class _AdaptiveAvgPool(_Pool):
    def __init__(self, output_size: Sizes) -> None:
        self.sizes = self._sizes(output_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., spatial...] to [..., output_size...]."""
        return call("adaptive_avg_pool", x, sizes=self.sizes)


class AdaptiveAvgPool1d(_AdaptiveAvgPool):
    """Means over windows that share out the last axis."""

    rank = 1


class AdaptiveAvgPool2d(_AdaptiveAvgPool):
    """Means over windows that share out the last two axes."""

    rank = 2
