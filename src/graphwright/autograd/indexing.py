"""What `tensor[...]` and `tensor[...] = value` mean, as operations; the rules are those of `array.indexing`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import NDArray, from_numpy, int64
from graphwright.array.indexing import IndexPlan, index_plan
from graphwright.autograd.apply import as_tensor
from graphwright.autograd.functions import like
from graphwright.autograd.modes import grad_enabled
from graphwright.autograd.recorder import active
from graphwright.ops import call

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor


def indexed(x: Tensor, index: Any) -> Tensor:
    """`x[index]`: views where the steps are positive, a copy where one is negative, a gather with index arrays.

    Raises: as `index_plan`; TraceError for a traced mask, whose number of entries only a run knows.
    """
    plan = index_plan(x.shape, index)
    part = _view(x, plan)
    return call("index", part, *map(_ids, plan.ids), axis=plan.axis) if plan.ids else part


def _view(x: Any, plan: IndexPlan) -> Any:
    backwards = []
    for axis, (start, size, step) in enumerate(plan.slices):
        if step < 0 and size > 1:
            start, step = start + (size - 1) * step, -step
            backwards.append(axis)
        if (start, size, step) != (0, x.shape[axis], 1):
            x = call("slice", x, axis=axis, start=start, size=size, step=max(step, 1))
    if backwards:
        x = call("flip", x, axes=tuple(backwards))
    if plan.drop:
        x = call("squeeze", x, axes=plan.drop)
    if plan.new:
        x = call("unsqueeze", x, axes=plan.new)
    return x if plan.order is None else call("permute", x, axes=plan.order)


def _ids(ids: Any) -> Tensor:
    return as_tensor(ids).to(int64)


def assign(x: Tensor, index: Any, value: Any) -> None:
    """`x[index] = value`: in its memory, on the tape and in a trace by the rules of `autograd.inplace`.

    Raises: as `index_plan`; ShapeError for a value that does not broadcast; LeafModified, ViewModified, TraceMutation.
    """
    value = like(value, x)
    plan = index_plan(x.shape, index)
    traced = active.get() is not None and any(t.symbolic or t.carried for t in (x, value, *_tensors(plan)))
    if not traced and not (grad_enabled() and (x.requires_grad or value.requires_grad)):
        assert isinstance(value.data, NDArray)
        x.own()[_arrays(index)] = value.data
        return
    while value.ndim > len(plan.shape) and value.shape[0] == 1:
        value = call("squeeze", value, axes=(0,))
    whole = all(part == (0, n, 1) for part, n in zip(plan.slices, x.shape, strict=True))
    if whole and not (plan.ids or plan.drop or plan.new):
        x.copy_(value)
    elif plan.ids and whole and not plan.new and plan.order is None:
        call("index_put", x, value, *map(_ids, plan.ids), axis=plan.axis, out=x)
    else:
        call("index_put", x, value, *(indexed(place, index) for place in _coordinates(x)), axis=0, out=x)


def _coordinates(x: Tensor) -> list[Tensor]:
    """Per axis, the place along it of each entry."""
    grids = np.ogrid[tuple(slice(n) for n in x.shape)]
    return [as_tensor(from_numpy(np.broadcast_to(g, x.shape))) for g in grids]


def _tensors(plan: IndexPlan) -> list[Tensor]:
    return [i for i in plan.ids if hasattr(i, "symbolic")]


def _arrays(index: Any) -> Any:
    """An index with the arrays of its tensors."""
    items = index if isinstance(index, tuple) else (index,)
    return tuple(item.data if hasattr(item, "symbolic") else item for item in items)
