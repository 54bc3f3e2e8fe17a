"""Operators that reduce or scan axes, and sort them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphwright.array import float32, uint8
from graphwright.autograd import Tensor, create, top
from graphwright.models.importing.operators.table import equal, operator
from graphwright.nn import functional

equal(top, """
    amax amin argmax argmin argsort bincount cummax cummin cumprod cumsum diff logcumsumexp logsumexp max mean
    min
    kthvalue median nanmedian
    prod sort std sum topk var var_mean std_mean
""")  # fmt: skip


def _of_bools(name: str) -> Callable[..., Tensor]:
    reduce = getattr(top, name)

    def of(x: Tensor, *axes: Any, **options: Any) -> Tensor:
        made = reduce(x, *axes, **options)
        return made.to(uint8) if x.dtype is uint8 else made

    return of


operator("all")(_of_bools("all"))
operator("any")(_of_bools("any"))


@operator("linalg_vector_norm")
def linalg_vector_norm(
    x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:  # fmt: skip
    """(Σ |x|^ord)^(1/ord) over axes."""
    return top.norm(x, ord, dim, keepdim, dtype=dtype)


@operator("softmax", "_softmax")
def softmax(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """exp(x) / Σ exp(x) along an axis."""
    return functional.softmax(x, dim, dtype=dtype if not isinstance(dtype, bool) else None)


@operator("log_softmax", "_log_softmax")
def log_softmax(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """Logarithm of the softmax along an axis."""
    return functional.log_softmax(x, dim, dtype=dtype if not isinstance(dtype, bool) else None)


@operator("_safe_softmax")
def safe_softmax(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """Softmax, which is 0 where every entry of the axis is -∞."""
    made = functional.softmax(x, dim, dtype=dtype)
    return top.where((x == float("-inf")).all(dim, keepdim=True), made.new_zeros(()), made)


@operator("histc")
def histc(x: Tensor, bins: int = 100, low: float = 0, high: float = 0) -> Tensor:
    """Count the entries in `bins` equal parts of [low, high]; entries outside are not counted."""
    if low == high:
        return top.histc(x, bins)
    flat = x.reshape((-1,)).to(float32)
    part = ((flat - low) * (bins / (high - low))).floor()
    part = top.where(flat == high, part - 1, part)
    inside = (flat >= low) & (flat <= high)
    return ((create.arange(bins, dtype=float32).unsqueeze(1) == part) & inside).sum(1).to(x.dtype)
