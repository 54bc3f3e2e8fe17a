"""The functions behind the layers with weights and windows; names, orders and defaults are torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphwright.autograd import Tensor, training
from graphwright.autograd import dropout as drop
from graphwright.errors import ShapeError, UsageError
from graphwright.ops import call

Sizes = int | Sequence[int]


# -- weights -----------------------------------------------------------------------------------------------------------
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X · wᵀ + b: [..., in] with weight [out, in] to [..., out]. Raises: ShapeError."""
    return call("linear", x, weight) if bias is None else call("linear", x, weight, bias)


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Rows of a table [num, dim]: [...] to [..., dim]; row `padding_idx` gets no gradient. Raises: IndexOutOfRange."""
    rows = call("embedding", weight, ids)
    if padding_idx is None:
        return rows
    padding = (ids == padding_idx % weight.shape[0]).reshape(*ids.shape, 1)
    return call("where", padding, call("stop_gradient", rows), rows)


def dropout(x: Tensor, p: float = 0.5, train: bool = True) -> Tensor:
    """X / (1 - p) with probability 1 - p, else 0; x itself outside training, which `gw.mode` decides over `train`."""
    return drop(x, p) if p and training(train) else x


# -- convolutions ------------------------------------------------------------------------------------------------------
def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """Cross-correlation of [N, C, L] with weight [out, C / groups, k]. Raises: ShapeError."""
    return _conv("conv", 1, x, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """Cross-correlation of [N, C, H, W] with weight [out, C / groups, kh, kw]. Raises: ShapeError."""
    return _conv("conv", 2, x, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)


def conv_transpose1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Tensor:
    """The transpose of `conv1d`; weight [C, out / groups, k]. Raises: ShapeError."""
    slide = {"stride": stride, "padding": padding, "dilation": dilation, "output_padding": output_padding}
    return _conv("conv_transpose", 1, x, weight, bias, groups=groups, **slide)


def conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Tensor:
    """The transpose of `conv2d`; weight [C, out / groups, kh, kw]. Raises: ShapeError."""
    slide = {"stride": stride, "padding": padding, "dilation": dilation, "output_padding": output_padding}
    return _conv("conv_transpose", 2, x, weight, bias, groups=groups, **slide)


def _conv(op: str, rank: int, x: Tensor, weight: Tensor, bias: Tensor | None, **attrs: Any) -> Tensor:
    if weight.ndim != rank + 2:
        raise ShapeError(f"a weight of {rank + 2} axes", where=op, got=weight.spec)
    sizes = {k: v if isinstance(v, int) else tuple(v) for k, v in attrs.items()}
    return call(op, x, weight, *(() if bias is None else (bias,)), **sizes)


# -- pools and resampling ----------------------------------------------------------------------------------------------
def max_pool1d(
    x: Tensor, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, dilation: Sizes = 1
) -> Tensor:
    """Largest entry of each window of the last axis. Raises: ShapeError."""
    return call("max_pool", x, **_window(1, kernel_size, stride, padding), dilation=_each(1, dilation))[0]


def max_pool2d(
    x: Tensor, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, dilation: Sizes = 1
) -> Tensor:
    """Largest entry of each window of the last two axes. Raises: ShapeError."""
    return call("max_pool", x, **_window(2, kernel_size, stride, padding), dilation=_each(2, dilation))[0]


def avg_pool1d(
    x: Tensor, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, count_include_pad: bool = True
) -> Tensor:
    """Mean of each window of the last axis. Raises: ShapeError."""
    return call("avg_pool", x, **_window(1, kernel_size, stride, padding), count_include_pad=count_include_pad)


def avg_pool2d(
    x: Tensor, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, count_include_pad: bool = True
) -> Tensor:
    """Mean of each window of the last two axes. Raises: ShapeError."""
    return call("avg_pool", x, **_window(2, kernel_size, stride, padding), count_include_pad=count_include_pad)


def adaptive_avg_pool1d(x: Tensor, output_size: Sizes) -> Tensor:
    """Means over windows that share out the last axis. Raises: ShapeError."""
    return call("adaptive_avg_pool", x, sizes=_each(1, output_size))


def adaptive_avg_pool2d(x: Tensor, output_size: Sizes) -> Tensor:
    """Means over windows that share out the last two axes. Raises: ShapeError."""
    return call("adaptive_avg_pool", x, sizes=_each(2, output_size))


def interpolate(x: Tensor, size: Sizes, mode: str = "nearest", align_corners: bool = False) -> Tensor:
    """[N, C, L] or [N, C, H, W] resampled to `size`.

    Args:
        mode: `nearest`, `linear` for one spatial axis or `bilinear` for two.
        align_corners: the outermost entries keep their places.
    Raises: ShapeError, UsageError for another mode.
    """
    rank = x.ndim - 2
    named = {"nearest": "nearest", ("linear", "bilinear")[min(max(rank, 1), 2) - 1]: "linear"}
    if mode not in named:
        raise UsageError(
            "no mode for this rank", where="interpolate", expected=", ".join(named), got=f"{mode}, {x.spec}"
        )
    return call("interpolate", x, sizes=_each(rank, size), mode=named[mode], align_corners=align_corners)


def _window(rank: int, kernel: Sizes, stride: Sizes | None, padding: Sizes) -> dict[str, Any]:
    slide = None if stride is None else _each(rank, stride)
    return {"kernel": _each(rank, kernel), "stride": slide, "padding": _each(rank, padding)}


def _each(rank: int, given: Sizes) -> tuple[int, ...]:
    return (given,) * rank if isinstance(given, int) else tuple(given)
