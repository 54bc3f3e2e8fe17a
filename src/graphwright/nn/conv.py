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
