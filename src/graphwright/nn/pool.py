"""Pooling over one or two spatial axes."""

from __future__ import annotations

from collections.abc import Sequence

from graphwright.autograd import Tensor
from graphwright.nn.module import Module
from graphwright.ops import call

Sizes = int | Sequence[int]


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
