"""Layers: linear maps, tables, norms and reshapes, with torch's definitions, parameters and buffers."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Self

import numpy as np

from graphwright.array import NDArray, from_numpy
from graphwright.autograd import Parameter, Tensor, as_tensor, no_grad
from graphwright.errors import ShapeError, UsageError
from graphwright.nn import functional, initial
from graphwright.nn.module import Buffer, Module
from graphwright.ops import call


# -- linear maps -------------------------------------------------------------------------------------------------------
class Identity(Module):
    """The argument itself; arguments of the class are ignored."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def forward(self, x: Any) -> Any:
        """Return x."""
        return x


class Linear(Module):
    """x · wᵀ + b: [..., in_features] to [..., out_features], weight [out, in]; `name` and `seed` fix its values."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, name: str = "", seed: int | None = None
    ) -> None:
        key = f"{name}linear.{in_features}.{out_features}." if name else ""
        drawn = partial(initial.kaiming_uniform, fan_in=in_features, seed=seed)
        self.weight = Parameter(drawn((out_features, in_features), key and f"{key}weight"))
        self.bias = Parameter(drawn((out_features,), key and f"{key}bias")) if bias else None

    @property
    def in_features(self) -> int:
        """Size of the last axis of the input."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """Size of the last axis of the output."""
        return self.weight.shape[0]

    def reset_parameters(self) -> None:
        """Draw initial values again, from the default generator."""
        initial.redraw(self.in_features, self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return x · weightᵀ + bias, [..., out_features], for x [..., in_features]."""
        return functional.linear(x, self.weight, self.bias)


class Bilinear(Module):
    """Σ_ij a[..., i]·w[o, i, j]·b[..., j] + bias[o]; initially uniform within ±1/√in1_features."""

    def __init__(self, in1_features: int, in2_features: int, out_features: int, bias: bool = True) -> None:
        drawn = partial(initial.kaiming_uniform, fan_in=in1_features)
        self.weight = Parameter(drawn((out_features, in1_features, in2_features)))
        self.bias = Parameter(drawn((out_features,))) if bias else None

    @property
    def in1_features(self) -> int:
        """Size of the last axis of the first input."""
        return self.weight.shape[1]

    @property
    def in2_features(self) -> int:
        """Size of the last axis of the second input."""
        return self.weight.shape[2]

    @property
    def out_features(self) -> int:
        """Size of the last axis of the output."""
        return self.weight.shape[0]

    def reset_parameters(self) -> None:
        """Draw initial values again, from the default generator."""
        initial.redraw(self.in1_features, self.weight, self.bias)

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """Map [..., in1_features] and [..., in2_features] to [..., out_features]."""
        return functional.bilinear(input1, input2, self.weight, self.bias)


# -- tables ------------------------------------------------------------------------------------------------------------
class _Table(Module):
    """Base of look-ups in a table [num_embeddings, embedding_dim], initially N(0, 1); row `padding_idx` is 0."""

    def __init__(
        self, num: int, dim: int, padding_idx: int | None, weight: Any, trained: bool, name: str, seed: int | None
    ) -> None:
        where = type(self).__name__
        if padding_idx is not None and not -num <= padding_idx < num:
            expected = f"an index of one of {num} rows"
            raise UsageError("padding_idx is out of range", where=where, expected=expected, got=padding_idx)
        self.num_embeddings, self.embedding_dim = num, dim
        self.padding_idx = None if padding_idx is None else padding_idx % num
        if weight is None:
            table = self._drawn((num, dim), name and f"{name}embedding.{num}.{dim}", seed)
        else:
            table = as_tensor(weight).concrete("a table")
        if table.shape != (num, dim):
            raise ShapeError("the table has a wrong shape", where=where, expected=(num, dim), got=table.shape)
        self.weight = Parameter(table, trained)

    def _drawn(self, shape: tuple[int, ...], name: str = "", seed: int | None = None) -> NDArray:
        table = initial.normal(shape, name, std=1.0, seed=seed)
        if self.padding_idx is not None:
            table.to_numpy()[self.padding_idx] = 0
        return table

    def reset_parameters(self) -> None:
        """Draw initial values again, from the default generator."""
        initial.set_values(self.weight, self._drawn(self.weight.shape))

    @classmethod
    def from_pretrained(cls, embeddings: Any, freeze: bool = True, **options: Any) -> Self:
        """Make the module of a given table [num_embeddings, embedding_dim], which is trained unless `freeze`."""
        table = as_tensor(embeddings)
        if table.ndim != 2:
            raise ShapeError("this is no table", where=cls.__name__, expected="two axes", got=table.spec)
        return cls(*table.shape, **options, _weight=table, _freeze=freeze)  # pyright: ignore[reportCallIssue]


class Embedding(_Table):
    """Look-up of rows of a table by integer ids of any shape; for the options see `functional.embedding`."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False, _weight: Any = None,
        _freeze: bool = False, *, name: str = "", seed: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_embeddings, embedding_dim, padding_idx, _weight, not _freeze, name, seed)
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the rows of ids [...]; return [..., embedding_dim]."""
        options = self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        return functional.embedding(ids, self.weight, *options)


class EmbeddingBag(_Table):
    """Sums, means or maxima of bags of rows of a table; for the options see `functional.embedding_bag`."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, max_norm: float | None = None, norm_type: float = 2.0,
        scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, _weight: Any = None,
        include_last_offset: bool = False, padding_idx: int | None = None, *, _freeze: bool = False, name: str = "",
        seed: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_embeddings, embedding_dim, padding_idx, _weight, not _freeze, name, seed)
        self.max_norm, self.norm_type, self.scale_grad_by_freq = max_norm, norm_type, scale_grad_by_freq
        self.mode, self.sparse, self.include_last_offset = mode, sparse, include_last_offset

    def forward(self, ids: Tensor, offsets: Any = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Reduce the bags of ids [B, n], or of ids [n] that begin at `offsets` [B]; return [B, embedding_dim]."""
        options = self.max_norm, self.norm_type, self.scale_grad_by_freq, self.mode, self.sparse
        rest = per_sample_weights, self.include_last_offset, self.padding_idx
        return functional.embedding_bag(ids, self.weight, offsets, *options, *rest)


# -- norms -------------------------------------------------------------------------------------------------------------
class _Scaled(Module):
    """Base of norms with optional weight and bias; `ranks` are the allowed numbers of axes, by default any."""

    ranks: ClassVar[tuple[int, ...]] = ()
    weight: Any  # a parameter, or None without `affine`; so is the bias
    bias: Any

    def __init_subclass__(cls, ranks: tuple[int, ...] = ()) -> None:
        cls.ranks = ranks or cls.ranks

    def __init__(self, shape: tuple[int, ...], affine: bool, bias: bool, eps: float | None) -> None:
        self.eps = eps
        self.weight = Parameter(initial.full(shape, 1.0)) if affine else None
        self.bias = Parameter(initial.full(shape, 0.0)) if affine and bias else None

    def reset_parameters(self) -> None:
        """Set the weight to ones and the bias to zeros."""
        for p, value in ((self.weight, 1.0), (self.bias, 0.0)):
            if p is not None:
                initial.set_values(p, initial.full(p.shape, value))

    def _check_rank(self, x: Tensor) -> None:
        if self.ranks and x.ndim not in self.ranks:
            expected, where = f"rank {' or '.join(map(str, self.ranks))}", type(self).__name__
            raise ShapeError("the operand has a wrong number of axes", where=where, expected=expected, got=x.spec)


class RMSNorm(_Scaled):
    """Root-mean-square norm over the last axes, times a weight (Zhang and Sennrich 2019)."""

    def __init__(
        self, normalized_shape: int | tuple[int, ...], eps: float | None = None, elementwise_affine: bool = True
    ) -> None:
        self.normalized_shape = _sizes(normalized_shape)
        super().__init__(self.normalized_shape, elementwise_affine, False, eps)

    @property
    def elementwise_affine(self) -> bool:
        """Whether there is a weight."""
        return self.weight is not None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x over its last axes; the shape is kept. For `eps` None see `functional.rms_norm`."""
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class LayerNorm(_Scaled):
    """Normalise over the last axes, of sizes `normalized_shape` (Ba, Kiros and Hinton 2016)."""

    eps: float

    def __init__(
        self, normalized_shape: int | tuple[int, ...], eps: float = 1e-5, elementwise_affine: bool = True,
        bias: bool = True,
    ) -> None:  # fmt: skip
        self.normalized_shape = _sizes(normalized_shape)
        super().__init__(self.normalized_shape, elementwise_affine, bias, eps)

    @property
    def elementwise_affine(self) -> bool:
        """Whether there is a weight."""
        return self.weight is not None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x over its last axes; the shape is kept. Raises: ShapeError for other sizes."""
        return functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


def _sizes(shape: int | tuple[int, ...]) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


class GroupNorm(_Scaled):
    """Normalise [N, C, ...] over each of `num_groups` groups of channels and all positions (Wu and He 2018)."""

    eps: float

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, *, bias: bool = True
    ) -> None:
        if num_groups < 1 or num_channels % num_groups:
            expected = f"a divisor of {num_channels}"
            raise UsageError("invalid number of groups", where="GroupNorm", expected=expected, got=num_groups)
        self.num_groups, self.num_channels = num_groups, num_channels
        super().__init__((num_channels,), affine, bias, eps)

    @property
    def affine(self) -> bool:
        """Whether there is a weight."""
        return self.weight is not None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [N, num_channels, ...]; the shape is kept."""
        return functional.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class _Tracked(_Scaled):
    """Base of norms of channels with optional running statistics: buffers that only a training call changes.

    Args:
        momentum: the fraction by which they change; None for the mean of all calls.
    """

    eps: float
    running_mean: Any  # a buffer, or None without `track_running_stats`; so are the others
    running_var: Any
    num_batches_tracked: Any

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
        track_running_stats: bool = True, *, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__((num_features,), affine, bias, eps)
        self.num_features, self.momentum, self.track_running_stats = num_features, momentum, track_running_stats
        self.running_mean = self.running_var = self.num_batches_tracked = None
        if track_running_stats:
            self.running_mean, self.running_var = (
                Buffer(initial.zeros(num_features)),
                Buffer(initial.ones(num_features)),
            )
            self.num_batches_tracked = Buffer(from_numpy(np.zeros((), np.int64)))

    @property
    def affine(self) -> bool:
        """Whether there is a weight."""
        return self.weight is not None

    def reset_running_stats(self) -> None:
        """Set the running means to 0, the variances to 1 and the count to 0."""
        if self.running_mean is not None:
            initial.set_values(self.running_mean, initial.full(self.running_mean.shape, 0.0))
            initial.set_values(self.running_var, initial.full(self.running_var.shape, 1.0))
            self.num_batches_tracked.assign(self.num_batches_tracked.detach() * 0)

    def reset_parameters(self) -> None:
        """Reset the running statistics, the weight and the bias."""
        self.reset_running_stats()
        super().reset_parameters()


class _BatchNorm(_Tracked):
    """Normalise per channel over batch and positions; in evaluation by running statistics (Ioffe and Szegedy 2015)."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [N, C, ...]; the shape is kept.

        Raises: ShapeError for a wrong number of axes, or when training on one value per channel.
        """
        self._check_rank(x)
        mean, var, count = self.running_mean, self.running_var, self.num_batches_tracked
        if mean is None:
            return functional.batch_norm(x, None, None, self.weight, self.bias, True, eps=self.eps)
        if not self.trains:
            return functional.batch_norm(x, mean, var, self.weight, self.bias, eps=self.eps)
        scale = [p for p in (self.weight, self.bias) if p is not None]
        share = 1.0 if self.momentum is None else self.momentum
        y, *moved = call("batch_norm_train", x, mean, var, *scale, momentum=share, eps=self.eps)
        with no_grad():
            seen = count + 1
            for buffer, value in zip((mean, var), moved, strict=True):
                buffer.assign(value if self.momentum is not None else buffer + (value - buffer) / seen.to(buffer.dtype))
            count.assign(seen)
        return y


class BatchNorm1d(_BatchNorm, ranks=(2, 3)):
    """Batch normalisation of [N, C] or [N, C, L]."""


class BatchNorm2d(_BatchNorm, ranks=(4,)):
    """Batch normalisation of [N, C, H, W]."""


class BatchNorm3d(_BatchNorm, ranks=(5,)):
    """Batch normalisation of [N, C, D, H, W]."""


class _InstanceNorm(_Tracked):
    """Normalise each channel of each sample over its positions (Ulyanov, Vedaldi and Lempitsky 2016)."""

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = False,
        track_running_stats: bool = False, *, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(num_features, eps, momentum, affine, track_running_stats, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [N, C, spatial...] or [C, spatial...]; the shape is kept. Raises: ShapeError."""
        self._check_rank(x)
        if x.ndim == self.ranks[0]:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        used, share = self.trains or not self.track_running_stats, self.momentum or 0.0
        statistics = self.running_mean, self.running_var
        return functional.instance_norm(x, *statistics, self.weight, self.bias, used, share, self.eps)


class InstanceNorm1d(_InstanceNorm, ranks=(2, 3)):
    """Instance normalisation of [N, C, L] or [C, L]."""


class InstanceNorm2d(_InstanceNorm, ranks=(3, 4)):
    """Instance normalisation of [N, C, H, W] or [C, H, W]."""


class InstanceNorm3d(_InstanceNorm, ranks=(4, 5)):
    """Instance normalisation of [N, C, D, H, W] or [C, D, H, W]."""


# -- shapes ------------------------------------------------------------------------------------------------------------
class Flatten(Module):
    """Merge axes `start_dim` to `end_dim` into one; by default all but the batch axis."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, x: Tensor) -> Tensor:
        """Return x with axes `start_dim` to `end_dim` merged into one."""
        return x.flatten(self.start_dim, self.end_dim)


class Unflatten(Module):
    """Split axis `dim` into axes of the sizes `unflattened_size`, of which one may be -1."""

    def __init__(self, dim: int, unflattened_size: tuple[int, ...]) -> None:
        self.dim, self.unflattened_size = dim, tuple(unflattened_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return x with axis `dim` split."""
        return x.unflatten(self.dim, self.unflattened_size)
