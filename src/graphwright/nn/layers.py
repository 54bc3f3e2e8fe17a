"""Layers: activations, linear maps, norms, convolutions and pools, and the containers that combine modules.

Activations that are one elementwise op are generated from its definition, see `op_modules.py`. Modules with torch's
names have torch's definitions, parameters and buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from math import prod
from typing import Any, ClassVar

import numpy as np

from graphwright.array import from_numpy
from graphwright.autograd import Parameter, Tensor, dropout, no_grad
from graphwright.errors import ShapeError, UsageError
from graphwright.nn import functional, init
from graphwright.nn.module import Buffer, Module
from graphwright.nn.op_modules import *  # noqa: F403
from graphwright.nn.op_modules import Activation
from graphwright.nn.spatial import Sizes, per_axis, window
from graphwright.ops import call


# -- activations -------------------------------------------------------------------------------------------------------
class _OneAxis(Activation):
    def __init__(self, axis: int = -1) -> None:
        super().__init__(axis=axis)


class Softmax(_OneAxis):
    """eˣ / Σ eˣ along one axis."""

    op = "softmax"


class LogSoftmax(_OneAxis):
    """x - ln Σ eˣ along one axis."""

    op = "log_softmax"


class Dropout(Module):
    """In training x / (1 - p) with probability 1 - p, else 0; in evaluation x (Srivastava et al. 2014).

    Random numbers come from the default generator (`gw.manual_seed`).
    """

    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p <= 1:
            raise UsageError("p is not a probability", where="Dropout", expected="0 to 1", got=p)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout; the shape of x is kept."""
        return dropout(x, self.p) if self.trains and self.p else x


# -- linear maps -------------------------------------------------------------------------------------------------------
class Linear(Module):
    """x · wᵀ + b: [..., in_features] to [..., out_features], weight [out, in]; `name` and `seed` fix its values."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, name: str = "", seed: int | None = None
    ) -> None:
        key = f"{name}linear.{in_features}.{out_features}." if name else ""
        drawn = partial(init.kaiming_uniform, fan_in=in_features, seed=seed)
        self.weight = Parameter(drawn((out_features, in_features), key and f"{key}weight"))
        self.bias = Parameter(drawn((out_features,), key and f"{key}bias")) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return x · weightᵀ + bias, [..., out_features], for x [..., in_features]."""
        return functional.linear(x, self.weight, self.bias)


class Embedding(Module):
    """Look-up of rows of a table [num, dim], initially N(0, 1), by integer ids of any shape.

    Args:
        padding_idx: id of a row that is initially 0 and gets no gradient.
    """

    def __init__(
        self, num: int, dim: int, padding_idx: int | None = None, *, name: str = "", seed: int | None = None
    ) -> None:
        table = init.normal((num, dim), name and f"{name}embedding.{num}.{dim}", std=1.0, seed=seed)
        self.padding_idx = None if padding_idx is None else padding_idx % num
        if self.padding_idx is not None:
            table.to_numpy()[self.padding_idx] = 0
        self.weight = Parameter(table)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the rows of ids [...]; return [..., dim]."""
        return functional.embedding(ids, self.weight, self.padding_idx)


# -- norms -------------------------------------------------------------------------------------------------------------
class RMSNorm(Module):
    """Root-mean-square norm over the last axis, times a weight (Zhang and Sennrich 2019)."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        self.weight = Parameter(init.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., dim] over its last axis; the shape is kept."""
        return call("rms_norm", x, self.weight, eps=self.eps)


class _Scaled(Module):
    """Base of norms with optional weight and bias; `ranks` are the allowed numbers of axes, by default any."""

    op = ""
    ranks: ClassVar[tuple[int, ...]] = ()

    def __init_subclass__(cls, ranks: tuple[int, ...] = ()) -> None:
        cls.ranks = ranks or cls.ranks

    def __init__(self, shape: tuple[int, ...], affine: bool, bias: bool = True, **attrs: Any) -> None:
        self.weight = Parameter(init.full(shape, 1.0)) if affine else None
        self.bias = Parameter(init.full(shape, 0.0)) if affine and bias else None
        self.attrs = attrs

    def _scale(self) -> list[Parameter]:
        return [p for p in (self.weight, self.bias) if p is not None]

    def _check_rank(self, x: Tensor) -> None:
        if self.ranks and x.ndim not in self.ranks:
            expected, where = f"rank {' or '.join(map(str, self.ranks))}", type(self).__name__
            raise ShapeError("the operand has a wrong number of axes", where=where, expected=expected, got=x.spec)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x; the shape is kept. Raises: ShapeError for a wrong number of axes."""
        self._check_rank(x)
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

    def __init__(self, channels: int, eps: float = 1e-5, affine: bool = False) -> None:
        super().__init__((channels,), affine, groups=channels, eps=eps)


class InstanceNorm1d(_InstanceNorm, ranks=(3,)):
    """Normalise each channel of [N, C, L] over its positions (Ulyanov, Vedaldi and Lempitsky 2016)."""


class InstanceNorm2d(_InstanceNorm, ranks=(4,)):
    """Normalise each channel of [N, C, H, W] over its positions."""


class _BatchNorm(_Scaled):
    """Normalise per channel over batch and positions; in evaluation by running statistics (Ioffe and Szegedy 2015).

    Running statistics are buffers; only a training call changes them, by the fraction `momentum`.
    """

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True) -> None:
        super().__init__((channels,), affine, eps=eps)
        self.momentum = momentum
        self.running_mean, self.running_var = Buffer(init.zeros(channels)), Buffer(init.ones(channels))
        self.num_batches_tracked = Buffer(from_numpy(np.zeros((), np.int64)))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [N, C, ...]; the shape is kept.

        Raises: ShapeError for a wrong number of axes, or when training on one value per channel.
        """
        self._check_rank(x)
        statistics = self.running_mean, self.running_var
        if not self.trains:
            return call("batch_norm", x, *statistics, *self._scale(), **self.attrs)
        y, *moved = call("batch_norm_train", x, *statistics, *self._scale(), momentum=self.momentum, **self.attrs)
        with no_grad():
            for buffer, value in zip(statistics, moved, strict=True):
                buffer.assign(value)
            self.num_batches_tracked.assign(self.num_batches_tracked + 1)
        return y


class BatchNorm1d(_BatchNorm, ranks=(2, 3)):
    """Batch normalisation of [N, C] or [N, C, L]."""


class BatchNorm2d(_BatchNorm, ranks=(4,)):
    """Batch normalisation of [N, C, H, W]."""


# -- convolutions and pools --------------------------------------------------------------------------------------------
class _SpatialOp(Module):
    """Base of modules that apply one op with fixed attributes to `rank` spatial axes."""

    op = ""
    rank: ClassVar[int] = 0

    def __init_subclass__(cls, rank: int = 0) -> None:
        cls.rank = rank or cls.rank

    def __init__(self, **attrs: object) -> None:
        self.attrs = attrs

    def forward(self, x: Tensor) -> Tensor:
        """Apply the op to x [..., spatial...]; only the spatial axes change."""
        found = call(self.op, x, **self.attrs)
        return found[0] if isinstance(found, tuple) else found


class _Conv(_SpatialOp):
    """Base of the convolutions; initial values are uniform within ±1/√fan_in, as in torch."""

    op = "conv"

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Sizes, stride: Sizes = 1, padding: Sizes = 0,
        dilation: Sizes = 1, groups: int = 1, bias: bool = True, *, name: str = "", seed: int | None = None,
    ) -> None:  # fmt: skip
        kernel = per_axis(self.rank, kernel_size)
        shape = self._shape(in_channels, out_channels, groups, kernel)
        drawn = partial(init.kaiming_uniform, fan_in=shape[1] * prod(kernel), seed=seed)
        self.weight = Parameter(drawn(shape, name and f"{name}conv.weight"))
        values = drawn((out_channels,), name and f"{name}conv.bias")  # also advances the stream without a bias
        self.bias = Parameter(values) if bias else None
        slide = {"stride": stride, "padding": padding, "dilation": dilation}
        super().__init__(**{k: v if isinstance(v, int) else tuple(v) for k, v in slide.items()}, groups=groups)

    @staticmethod
    def _shape(inner: int, outer: int, groups: int, kernel: tuple[int, ...]) -> tuple[int, ...]:
        return (outer, inner // groups, *kernel)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the convolution to x [N, in_channels, spatial...]; return [N, out_channels, spatial...]."""
        operands = (x, self.weight) if self.bias is None else (x, self.weight, self.bias)
        return call(self.op, *operands, **self.attrs)


class Conv1d(_Conv, rank=1):
    """Cross-correlation over [N, C, L]; weight [out, in / groups, k]."""


class Conv2d(_Conv, rank=2):
    """Cross-correlation over [N, C, H, W]; weight [out, in / groups, kh, kw]."""


class _ConvTranspose(_Conv):
    op = "conv_transpose"

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Sizes, stride: Sizes = 1, padding: Sizes = 0,
        output_padding: Sizes = 0, groups: int = 1, bias: bool = True, dilation: Sizes = 1, *,
        name: str = "", seed: int | None = None,
    ) -> None:  # fmt: skip
        shape = (in_channels, out_channels, kernel_size)
        super().__init__(*shape, stride, padding, dilation, groups, bias, name=name, seed=seed)
        self.attrs["output_padding"] = output_padding if isinstance(output_padding, int) else tuple(output_padding)

    @staticmethod
    def _shape(inner: int, outer: int, groups: int, kernel: tuple[int, ...]) -> tuple[int, ...]:
        return (inner, outer // groups, *kernel)


class ConvTranspose1d(_ConvTranspose, rank=1):
    """Transpose of Conv1d: [N, C, L] to [N, C', L']; weight [in, out / groups, k]."""


class ConvTranspose2d(_ConvTranspose, rank=2):
    """Transpose of Conv2d: [N, C, H, W] to [N, C', H', W']; weight [in, out / groups, kh, kw]."""


class _MaxPool(_SpatialOp):
    op = "max_pool"

    def __init__(
        self, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, dilation: Sizes = 1
    ) -> None:
        windows = window(self.rank, kernel_size, stride, padding)
        super().__init__(**windows, dilation=per_axis(self.rank, dilation))


class MaxPool1d(_MaxPool, rank=1):
    """Maximum over windows of the last axis; of equal entries the first one gets the gradient."""


class MaxPool2d(_MaxPool, rank=2):
    """Maximum over windows of the last two axes; of equal entries the first one gets the gradient."""


class _AvgPool(_SpatialOp):
    op = "avg_pool"

    def __init__(
        self, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, count_include_pad: bool = True
    ) -> None:
        windows = window(self.rank, kernel_size, stride, padding)
        super().__init__(**windows, count_include_pad=count_include_pad)


class AvgPool1d(_AvgPool, rank=1):
    """Mean over windows of the last axis."""


class AvgPool2d(_AvgPool, rank=2):
    """Mean over windows of the last two axes."""


class _AdaptiveAvgPool(_SpatialOp):
    op = "adaptive_avg_pool"

    def __init__(self, output_size: Sizes) -> None:
        super().__init__(sizes=per_axis(self.rank, output_size))


class AdaptiveAvgPool1d(_AdaptiveAvgPool, rank=1):
    """Mean over `output_size` windows that cover the last axis."""


class AdaptiveAvgPool2d(_AdaptiveAvgPool, rank=2):
    """Mean over `output_size` windows that cover the last two axes."""


# -- containers --------------------------------------------------------------------------------------------------------
class ModuleList(Module):
    """A list of modules; an ordinary list as an attribute works as well."""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        self.items = list(modules)

    def _members(self) -> Iterator[tuple[str, Any]]:
        return ((str(i), m) for i, m in enumerate(self.items))

    def append(self, module: Module) -> None:
        """Append a module."""
        self.items.append(module)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Module:
        return self.items[index]

    def __iter__(self) -> Iterator[Module]:
        return iter(self.items)


class ModuleDict(Module):
    """A dict of modules; an ordinary dict as an attribute works as well."""

    def __init__(self, modules: Mapping[str, Module] | None = None) -> None:
        self.items = dict(modules or {})

    def _members(self) -> Iterator[tuple[str, Any]]:
        return iter(self.items.items())

    def __setitem__(self, name: str, module: Module) -> None:
        self.items[name] = module

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, name: str) -> Module:
        return self.items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items)


class Sequential(ModuleList):
    """Modules applied one after another."""

    def __init__(self, *layers: Module) -> None:
        super().__init__(layers)

    def forward(self, x: Any) -> Any:
        """Apply all modules in order."""
        for layer in self.items:
            x = layer(x)
        return x


class Residual(Module):
    """x + inner(x); the sum is a junction, so edits can cut or add branches."""

    def __init__(self, inner: Module) -> None:
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Return x + inner(x)."""
        return call("junction", x, self.inner(x))


class Flatten(Module):
    """Merge axes `start` to `end` into one; by default all but the batch axis."""

    def __init__(self, start: int = 1, end: int = -1) -> None:
        self.start, self.end = start, end

    def forward(self, x: Tensor) -> Tensor:
        """Return x with axes `start` to `end` merged into one."""
        return call("flatten", x, start=self.start % x.ndim, end=self.end % x.ndim)
