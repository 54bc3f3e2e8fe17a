"""Indexing: what `tensor[...]` means, as operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import ShapeError, UsageError
from graphwright.ops import call

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor


def indexed(x: Tensor, index: Any) -> Tensor:
    """Ints, slices with positive step, `...` and None; results are views."""
    index = index if isinstance(index, tuple) else (index,)
    used = sum(1 for i in index if i is not None and i is not Ellipsis)
    if index.count(Ellipsis) > 1 or used > x.ndim:
        raise ShapeError("too many indices", expected=f"at most {x.ndim}", got=index)
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = (*index[:at], *[slice(None)] * (x.ndim - used), *index[at + 1 :])
    result: Any = x
    axis, kept = 0, []
    for i in index:
        if i is None:
            kept.append(1)
        elif isinstance(i, slice):
            start, stop, step = i.indices(result.shape[axis])
            size = len(range(start, stop, step))
            if step < 1:
                raise ShapeError("a slice's step must be positive", got=i)
            if (start, size, step) != (0, result.shape[axis], 1):
                result = call("slice", result, axis=axis, start=start, size=size, step=step)
            kept.append(size)
            axis += 1
        elif isinstance(i, int | np.integer):
            size = result.shape[axis]
            if not -size <= i < size:
                raise ShapeError("index out of range", where=f"axis {axis}", expected=f"-{size}..{size - 1}", got=i)
            result = call("slice", result, axis=axis, start=int(i) % size, size=1)
            axis += 1
        else:
            raise UsageError("indices are ints, slices, ... and None", got=type(i).__name__)
    kept += result.shape[axis:]
    return result if tuple(kept) == result.shape else call("reshape", result, shape=tuple(kept))
