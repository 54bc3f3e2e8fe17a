"""Operators that read and write entries by their indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphwright.autograd import Tensor, top
from graphwright.models.importing.operators.table import equal, operator
from graphwright.nn import functional

equal(top, "gather index_add index_select masked_select scatter scatter_add scatter_reduce take nonzero")


@operator("index", "_unsafe_index")
def index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """x[indices], where None stands for a whole axis."""
    return x[tuple(slice(None) if i is None else i for i in indices)]


@operator("index_put", "_unsafe_index_put")
def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """Return x with x[indices] = values, or += values."""
    return top.index_put(x, tuple(slice(None) if i is None else i for i in indices), values, accumulate)


@operator("embedding")
def embedding(weight: Tensor, ids: Tensor, padding_idx: int = -1, *_: Any) -> Tensor:
    """Rows of a matrix by ids."""
    return functional.embedding(ids, weight, None if padding_idx < 0 else padding_idx)


@operator("repeat_interleave.self_int", "repeat_interleave.self_Tensor")
def repeat_interleave(x: Tensor, repeats: Any, dim: int | None = None, output_size: int | None = None) -> Tensor:
    """Repeat each entry of an axis."""
    return top.repeat_interleave(x, repeats, dim, output_size=output_size)


@operator("one_hot")
def one_hot(ids: Tensor, classes: int = -1) -> Tensor:
    """Encode ids as one-hot vectors."""
    return functional.one_hot(ids, classes)
