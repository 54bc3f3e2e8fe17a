"""Normalisations; modules with torch's names have torch's definitions, parameters and buffers."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array import from_numpy
from graphwright.autograd import Parameter, Tensor, no_grad
from graphwright.errors import ShapeError
from graphwright.nn import init
from graphwright.nn.module import Buffer, Module
from graphwright.ops import call


class RMSNorm(Module):
    """Root-mean-square norm over the last axis, times a weight (Zhang and Sennrich 2019)."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        self.weight = Parameter(init.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] to the same shape."""
        return call("rms_norm", x, self.weight, eps=self.eps)


class _Scaled(Module):
    """A norm with an optional weight and bias."""

    op = ""

    def __init__(self, shape: tuple[int, ...], affine: bool, bias: bool = True, **attrs: Any) -> None:
        self.weight = Parameter(init.full(shape, 1.0)) if affine else None
        self.bias = Parameter(init.full(shape, 0.0)) if affine and bias else None
        self.attrs = attrs

    def _scale(self) -> list[Parameter]:
        return [p for p in (self.weight, self.bias) if p is not None]

    def forward(self, x: Tensor) -> Tensor:
        """[...] to the same shape."""
        return call(self.op, x, *self._scale(), **self.attrs)


class LayerNorm(_Scaled):
    """Normalise over the last axes, of sizes `shape` (Ba, Kiros and Hinton 2016)."""

    op = "layer_norm"

    def __init__(self, shape: int | tuple[int, ...], eps: float = 1e-5, affine: bool = True, bias: bool = True) -> None:
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        super().__init__(sizes, affine, bias, rank=len(sizes), eps=eps)


class GroupNorm(_Scaled):
    """Normalise [N, C, ...] over each of `groups` groups of channels and all positions (Wu and He 2018)."""

    op = "group_norm"

    def __init__(self, groups: int, channels: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__((channels,), affine, groups=groups, eps=eps)


class _InstanceNorm(_Scaled):
    op = "group_norm"
    rank = 0

    def __init__(self, channels: int, eps: float = 1e-5, affine: bool = False) -> None:
        super().__init__((channels,), affine, groups=channels, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, ...] to the same shape. Raises: ShapeError for another rank."""
        return super().forward(_of_rank(x, self.rank))


class InstanceNorm1d(_InstanceNorm):
    """Normalise each channel of [N, C, L] over its positions (Ulyanov, Vedaldi and Lempitsky 2016)."""

    rank = 3


class InstanceNorm2d(_InstanceNorm):
    """Normalise each channel of [N, C, H, W] over its positions."""

    rank = 4


class _BatchNorm(_Scaled):
    """Normalise per channel over batch and positions; in evaluation by running statistics (Ioffe and Szegedy 2015).

    Running statistics are buffers; only a training call changes them, by `momentum`.
    """

    ranks: tuple[int, ...] = ()

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True) -> None:
        super().__init__((channels,), affine, eps=eps)
        self.momentum = momentum
        self.running_mean, self.running_var = Buffer(init.zeros(channels)), Buffer(init.ones(channels))
        self.num_batches_tracked = Buffer(from_numpy(np.zeros((), np.int64)))

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, ...] to the same shape. Raises: ShapeError for another rank, or one value per channel in training."""
        x = _of_rank(x, *self.ranks)
        statistics = self.running_mean, self.running_var
        if not self.trains:
            return call("batch_norm", x, *statistics, *self._scale(), **self.attrs)
        y, *moved = call("batch_norm_train", x, *statistics, *self._scale(), momentum=self.momentum, **self.attrs)
        with no_grad():
            for buffer, value in zip(statistics, moved, strict=True):
                buffer.assign(value)
            self.num_batches_tracked.assign(self.num_batches_tracked + 1)
        return y


class BatchNorm1d(_BatchNorm):
    """Batch normalisation of [N, C] or [N, C, L]."""

    ranks = (2, 3)


class BatchNorm2d(_BatchNorm):
    """Batch normalisation of [N, C, H, W]."""

    ranks = (4,)


def _of_rank(x: Tensor, *ranks: int) -> Tensor:
    if x.ndim not in ranks:
        raise ShapeError("wrong rank for this norm", expected=" or ".join(map(str, ranks)), got=x.spec)
    return x
