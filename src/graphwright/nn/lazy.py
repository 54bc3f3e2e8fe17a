"""Modules that take the size of their input from the first call, under torch's names; then they are ordinary ones."""

from __future__ import annotations

from inspect import signature
from typing import Any, ClassVar

from graphwright.autograd import Tensor, active_recorder
from graphwright.errors import ShapeError, UsageError
from graphwright.nn.layers import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    Linear,
)
from graphwright.nn.module import Module
from graphwright.nn.spatial_modules import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)

__all__ = [
    "LazyBatchNorm1d", "LazyBatchNorm2d", "LazyBatchNorm3d", "LazyConv1d", "LazyConv2d", "LazyConv3d",
    "LazyConvTranspose1d", "LazyConvTranspose2d", "LazyConvTranspose3d", "LazyInstanceNorm1d", "LazyInstanceNorm2d",
    "LazyInstanceNorm3d", "LazyLinear",
]  # fmt: skip


class _Lazy(Module):
    """Base of lazy modules; before the first call they have no parameters, so that optimizers are made after it.

    Args:
        of: the class that the module gets, whose arguments after the first it takes.
        axis: the axis of the input whose size is the first argument.
        defaults: arguments with other defaults than those of the class.
    """

    kind: ClassVar[Any]
    axis: ClassVar[int]
    defaults: ClassVar[dict[str, Any]]

    def __init_subclass__(cls, of: type[Module], axis: int, **defaults: Any) -> None:
        cls.kind, cls.axis, cls.defaults = of, axis, defaults

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = list(signature(self.kind).bind(1, *args, **kwargs).arguments.items())[1:]
        self._given = {**self.defaults, **dict(bound)}

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Become a module for inputs like x, and run it. Raises: ShapeError without the axis; UsageError in a trace."""
        where = type(self).__name__
        if active_recorder.get() is not None:
            raise UsageError("a lazy module has no parameters yet", where=where, fix="call the network once before")
        if not -x.ndim <= self.axis < x.ndim:
            raise ShapeError("the input has too few axes", where=where, expected=f"axis {self.axis}", got=x.spec)
        made = self.kind(x.shape[self.axis], **self._given).train(self.training)
        del self._given
        vars(self).update({name: v for name, v in vars(made).items() if name not in vars(self)})
        self.__class__ = self.kind  # as torch does, so that no wrapper is left
        return self.forward(x, *args, **kwargs)


class LazyLinear(_Lazy, of=Linear, axis=-1):
    """`Linear` without `in_features`."""


class LazyConv1d(_Lazy, of=Conv1d, axis=-2):
    """`Conv1d` without `in_channels`."""


class LazyConv2d(_Lazy, of=Conv2d, axis=-3):
    """`Conv2d` without `in_channels`."""


class LazyConv3d(_Lazy, of=Conv3d, axis=-4):
    """`Conv3d` without `in_channels`."""


class LazyConvTranspose1d(_Lazy, of=ConvTranspose1d, axis=-2):
    """`ConvTranspose1d` without `in_channels`."""


class LazyConvTranspose2d(_Lazy, of=ConvTranspose2d, axis=-3):
    """`ConvTranspose2d` without `in_channels`."""


class LazyConvTranspose3d(_Lazy, of=ConvTranspose3d, axis=-4):
    """`ConvTranspose3d` without `in_channels`."""


class LazyBatchNorm1d(_Lazy, of=BatchNorm1d, axis=1):
    """`BatchNorm1d` without `num_features`."""


class LazyBatchNorm2d(_Lazy, of=BatchNorm2d, axis=1):
    """`BatchNorm2d` without `num_features`."""


class LazyBatchNorm3d(_Lazy, of=BatchNorm3d, axis=1):
    """`BatchNorm3d` without `num_features`."""


class LazyInstanceNorm1d(_Lazy, of=InstanceNorm1d, axis=-2, affine=True, track_running_stats=True):
    """`InstanceNorm1d` without `num_features`, by default with parameters and running statistics."""


class LazyInstanceNorm2d(_Lazy, of=InstanceNorm2d, axis=-3, affine=True, track_running_stats=True):
    """`InstanceNorm2d` without `num_features`, by default with parameters and running statistics."""


class LazyInstanceNorm3d(_Lazy, of=InstanceNorm3d, axis=-4, affine=True, track_running_stats=True):
    """`InstanceNorm3d` without `num_features`, by default with parameters and running statistics."""
