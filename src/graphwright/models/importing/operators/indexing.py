"""Operators that read and write entries by their indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphwright.array import bool_, int64
from graphwright.autograd import Tensor, create, top
from graphwright.autograd.indexing import index_plan
from graphwright.models.importing.operators.table import equal, operator
from graphwright.nn import functional
from graphwright.ops import call

equal(
    top, "gather index_add index_select masked_select scatter scatter_add scatter_reduce take put index_reduce nonzero"
)


@operator("index", "_unsafe_index")
def index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """x[indices], where None stands for a whole axis."""
    return x[tuple(slice(None) if i is None else i for i in indices)]


@operator("index_put", "_unsafe_index_put")
def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """Return x with x[indices] = values, or += values; None stands for a whole axis."""
    axes = [axis for axis, i in enumerate(indices) if i is not None]
    tensors: list[Any] = [i for i in indices if i is not None]
    if len(tensors) == 1 and tensors[0].dtype is bool_ and all(n == 1 for n in values.spec.shape):
        (mask,), (axis,) = tensors, axes
        mask = mask.reshape((*mask.shape, *(1,) * (x.ndim - axis - mask.ndim)))
        one = values.to(x.dtype).reshape(())
        return top.where(mask, x + one if accumulate else one, x)
    if axes == list(range(len(axes))) or any(i.dtype is bool_ for i in tensors):
        return top.index_put(x, tuple(slice(None) if i is None else i for i in indices), values, accumulate)
    if axes[-1] - axes[0] + 1 > len(axes):  # axes of the indices come first, as where they start at the first axis
        front = list(range(len(axes)))
        return top.index_put(x.movedim(axes, front), tuple(tensors), values, accumulate).movedim(front, axes)
    ids = index_plan(x.shape, (*(slice(None) for _ in range(axes[0])), *tensors)).ids
    found = [i.to(int64) if isinstance(i, Tensor) else i for i in ids]
    return call("index_add" if accumulate else "index_put", x, values.to(x.dtype), *found, axis=axes[0])


@operator("embedding")
def embedding(weight: Tensor, ids: Tensor, padding_idx: int = -1, *_: Any) -> Tensor:
    """Rows of a matrix by ids."""
    return functional.embedding(ids, weight, None if padding_idx < 0 else padding_idx)


@operator("embedding_bag")
def embedding_bag(
    weight: Tensor, ids: Tensor, offsets: Tensor, scale_by_count: bool = False, mode: int = 0, sparse: bool = False,
    factors: Tensor | None = None, with_end: bool = False, padding_idx: int | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Reduce bags of rows of a matrix; a negative `padding_idx` counts from the end."""
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return bags_of_rows(weight, ids, offsets, scale_by_count, mode, sparse, factors, with_end, padding)


@operator("_embedding_bag", "_embedding_bag_forward_only")
def bags_of_rows(
    weight: Tensor, ids: Tensor, offsets: Tensor, scale_by_count: bool = False, mode: int = 0, sparse: bool = False,
    factors: Tensor | None = None, with_end: bool = False, padding_idx: int = -1,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Reduce bags of rows of a matrix, each from its offset to the next: by sum (mode 0), mean (1) or maximum (2).

    Rows of `padding_idx` take no part; -1 means none. The tensors that torch's backward pass needs are None.
    """
    count, ids = offsets.shape[0], ids.to(int64)
    ends = create.zeros(ids.shape[0] + 1, dtype=int64).index_add(0, offsets.to(int64), create.ones_like(offsets))
    bags = (ends.cumsum(0) - 1).narrow(0, 0, ids.shape[0])
    rows = functional.embedding(ids, weight)
    kept = (ids != padding_idx).unsqueeze(1)
    none = create.zeros((count, weight.shape[1]), dtype=rows.dtype)
    if mode == 2:
        seen = top.where(kept, rows, float("-inf"))
        best = none.index_reduce(0, bags, seen, "amax", include_self=False)
        made = top.where(best == float("-inf"), 0.0, best)
    else:
        rows = rows if factors is None else rows * factors.unsqueeze(1)
        made = none.index_add(0, bags, top.where(kept, rows, 0.0))
    if mode == 1:
        counts = create.zeros((count, 1), dtype=rows.dtype).index_add(0, bags, kept.to(rows.dtype))
        made = made / counts.clamp(min=1.0)
    return made.narrow(0, 0, count - 1) if with_end else made, None, None, None


@operator("repeat_interleave.self_int", "repeat_interleave.self_Tensor")
def repeat_interleave(x: Tensor, repeats: Any, dim: int | None = None, output_size: int | None = None) -> Tensor:
    """Repeat each entry of an axis."""
    return top.repeat_interleave(x, repeats, dim, output_size=output_size)


@operator("one_hot")
def one_hot(ids: Tensor, classes: int = -1) -> Tensor:
    """Encode ids as one-hot vectors."""
    return functional.one_hot(ids, classes)
