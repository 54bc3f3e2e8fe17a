"""Operators that reduce or scan axes, and sort them."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from graphwright.array import iinfo
from graphwright.autograd import Tensor, arange, cat, full_like, top
from graphwright.models.importing.onnx_operators.table import ints, operator
from graphwright.nn import functional
from graphwright.ops.axes import axis_of


# -- reductions --------------------------------------------------------------------------------------------------------
def _reduction(name: str, run: Callable[[Tensor, tuple[int, ...], bool], Tensor]) -> None:
    def reduced(
        x: Tensor, at: Any = None, *, axes: Any = None, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> Any:
        given = ints(at) if at is not None else list(axes or ())
        if not given and noop_with_empty_axes:
            return x if name not in _ELEMENTWISE else _ELEMENTWISE[name](x)
        wanted = tuple(axis_of(a, x.ndim) for a in given) or tuple(range(x.ndim))
        made = run(x, wanted, bool(keepdims)) if wanted else run(x.reshape(1), (0,), False)
        return made.to(x.dtype)

    operator(name, known=(1,))(reduced)


_ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "ReduceL1": top.abs, "ReduceL2": top.abs, "ReduceLogSum": top.log, "ReduceSumSquare": top.square
}  # fmt: skip


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype.is_float else x.to("float64")


def _extreme(name: str, truth: str, sign: int) -> Callable[[Tensor, tuple[int, ...], bool], Tensor]:
    def run(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
        if x.dtype.kind == "bool":
            return getattr(top, truth)(x, axes, keep)
        if 0 in [x.spec.shape[a] for a in axes]:
            least = -inf * sign if x.dtype.is_float else getattr(iinfo(x.dtype), "min" if sign > 0 else "max")
            return top.sum(x, axes, keep).to(x.dtype) + least
        return getattr(top, name)(x, axes, keep)

    return run


_reduction("ReduceSum", top.sum)
_reduction("ReduceMean", lambda x, axes, keep: top.mean(_wide(x), axes, keep))
_reduction("ReduceProd", top.prod)
_reduction("ReduceL1", lambda x, axes, keep: top.sum(top.abs(x), axes, keep))
_reduction("ReduceL2", lambda x, axes, keep: top.norm(_wide(x), 2, axes, keep))
_reduction("ReduceSumSquare", lambda x, axes, keep: top.sum(x * x, axes, keep))
_reduction("ReduceLogSum", lambda x, axes, keep: top.log(_wide(top.sum(x, axes, keep))))
_reduction("ReduceLogSumExp", lambda x, axes, keep: top.logsumexp(_wide(x), axes, keep))
_reduction("ReduceMax", _extreme("amax", "any", 1))
_reduction("ReduceMin", _extreme("amin", "all", -1))


def _extremum(name: str, run: Callable[..., Tensor]) -> None:
    @operator(name)
    def index(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
        if not select_last_index:
            return run(x, axis, bool(keepdims))
        return (x.shape[axis] - 1) - run(top.flip(x, axis), axis, bool(keepdims))


_extremum("ArgMax", top.argmax)
_extremum("ArgMin", top.argmin)


# -- normalised along an axis ------------------------------------------------------------------------------------------
operator("Softmax")(lambda x, *, axis=-1: functional.softmax(x, axis))
operator("LogSoftmax")(lambda x, *, axis=-1: functional.log_softmax(x, axis))


@operator("Hardmax")
def hardmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """1 at the first largest entry of the axis, else 0."""
    at = axis_of(axis, x.ndim)
    offsets = arange(x.shape[at]).reshape([-1 if i == at else 1 for i in range(x.ndim)])
    return (top.argmax(x, at, True) == offsets).to(x.dtype)


@operator("LpNormalization")
def lp_normalization(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    """x / ‖x‖ₚ along an axis; 0 where the norm is 0."""
    norm = top.norm(x, p, axis, True)
    return top.where(norm == 0.0, x * 0.0, x / norm)


@operator("MeanVarianceNormalization")
def mean_variance(x: Tensor, *, axes: Any = (0, 2, 3)) -> Tensor:
    """(x - mean) / (√var + 1e-9) over axes."""
    rest = x - top.mean(x, tuple(axes), True)
    return rest / (top.sqrt(top.mean(rest * rest, tuple(axes), True)) + 1e-9)


# -- scans and order ---------------------------------------------------------------------------------------------------
@operator("CumSum", known=(1,))
def cumsum(x: Tensor, axis: Any, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """Sums of the entries up to each, or from each on with `reverse`; without the entry itself if `exclusive`."""
    return _scan(x, ints(axis)[0], exclusive, reverse, lambda y, at: top.cumsum(y, at), 0)


@operator("CumProd", known=(1,))
def cumprod(x: Tensor, axis: Any, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """Products of the entries up to each, or from each on with `reverse`; without the entry itself if `exclusive`."""
    return _scan(x, ints(axis)[0], exclusive, reverse, lambda y, at: top.cumprod(y, at), 1)


def _scan(x: Tensor, axis: int, exclusive: int, reverse: int, run: Any, first: int) -> Tensor:
    at = axis_of(axis, x.ndim)
    y = top.flip(x, at) if reverse else x
    if exclusive:
        lead = full_like(y.narrow(at, 0, 1), first)
        y = cat([lead, y.narrow(at, 0, y.shape[at] - 1)], at)
    made = run(y, at).to(x.dtype)
    return top.flip(made, at) if reverse else made


@operator("TopK", known=(1,))
def topk(x: Tensor, k: Any, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Tensor, Tensor]:
    """The k largest or smallest entries of an axis in order, and their indices."""
    values, indices = top.topk(x, ints(k)[0], axis, bool(largest))
    return values, indices
