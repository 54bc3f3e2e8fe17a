"""Normalisations; those of torch's names have torch's definitions, parameters and buffers."""

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
        """[..., dim] to the same."""
        return call("rms_norm", x, self.weight, eps=self.eps)


class _Scaled(Module):
    """A norm with a weight and a bias, or without."""

    op = ""

    def __init__(self, shape: tuple[int, ...], affine: bool, bias: bool = True, **attrs: Any) -> None:
        self.weight = Parameter(init.full(shape, 1.0)) if affine else None
        self.bias = Parameter(init.full(shape, 0.0)) if affine and bias else None
        self.attrs = attrs

    def _scale(self) -> list[Parameter]:
        return [p for p in (self.weight, self.bias) if p is not None]

    def forward(self, x: Tensor) -> Tensor:
        """The shape stays."""
        return call(self.op, x, *self._scale(), **self.attrs)


class LayerNorm(_Scaled):
    """Norm over the last axes, which have `shape` (Ba, Kiros and Hinton 2016)."""

    op = "layer_norm"

    def __init__(self, shape: int | tuple[int, ...], eps: float = 1e-5, affine: bool = True, bias: bool = True) -> None:
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        super().__init__(sizes, affine, bias, rank=len(sizes), eps=eps)


class GroupNorm(_Scaled):
    """Norm of [N, C, ...] over each of `groups` runs of channels and all places (Wu and He 2018)."""

    op = "group_norm"

    def __init__(self, groups: int, channels: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__((channels,), affine, groups=groups, eps=eps)


class _InstanceNorm(_Scaled):
    op = "group_norm"
    rank = 0

    def __init__(self, channels: int, eps: float = 1e-5, affine: bool = False) -> None:
        super().__init__((channels,), affine, groups=channels, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """The shape stays. Raises: ShapeError for another rank."""
        return super().forward(_of_rank(x, self.rank))


class InstanceNorm1d(_InstanceNorm):
    """Norm of each channel of [N, C, L] over its places (Ulyanov, Vedaldi and Lempitsky 2016)."""

    rank = 3


class InstanceNorm2d(_InstanceNorm):
    """Norm of each channel of [N, C, H, W] over its places."""

    rank = 4


class _BatchNorm(_Scaled):
    """Norm per channel over the batch and all places; in evaluation with running statistics (Ioffe and Szegedy 2015).

    Running values are buffers: they move by `momentum` in each training call, and by nothing else.
    """

    ranks: tuple[int, ...] = ()

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True) -> None:
        super().__init__((channels,), affine, eps=eps)
        self.momentum = momentum
        self.running_mean, self.running_var = Buffer(init.zeros(channels)), Buffer(init.ones(channels))
        self.num_batches_tracked = Buffer(from_numpy(np.zeros((), np.int64)))

    def forward(self, x: Tensor) -> Tensor:
        """The shape stays. Raises: ShapeError for another rank, or one value per channel while training."""
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
    """See above; of [N, C] or [N, C, L]."""

    ranks = (2, 3)


class BatchNorm2d(_BatchNorm):
    """See above; of [N, C, H, W]."""

    ranks = (4,)


def _of_rank(x: Tensor, *ranks: int) -> Tensor:
    if x.ndim not in ranks:
        raise ShapeError("this norm takes another rank", expected=" or ".join(map(str, ranks)), got=x.spec)
    return x
