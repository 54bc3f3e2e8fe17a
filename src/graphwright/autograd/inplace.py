"""Writing over tensors: what may be overwritten while a tape or a trace relies on it.

A taped write is a new entry of the tape: what the vjp reads of the old value is copied before. Memory that another
tensor shows as well is refused, since that tensor's tape would describe a value that is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from sys import getrefcount
from typing import TYPE_CHECKING, Any

from graphwright.array import NDArray
from graphwright.autograd.errors import LeafModified, ViewModified
from graphwright.autograd.modes import grad_enabled
from graphwright.autograd.recorder import Symbol, TraceMutation
from graphwright.errors import ShapeError
from graphwright.ops import Op, compute

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor


def write_over(
    row: Op, data: Sequence[NDArray], attrs: Mapping[str, Any], outs: Sequence[Tensor], taped: bool
) -> list[NDArray]:
    """Run an op into the memory of tensors; returns the operands as its vjp should find them.

    Raises: LeafModified, ViewModified, ReadOnlyArray, AliasError, ShapeError, all before anything is written.
    """
    arrays = []
    for out in outs:
        _leaf_stays(out)
        array = out.own()
        if grad_enabled() and (taped or out.node is not None) and getrefcount(array.storage) > _ALONE:
            raise ViewModified(
                "another tensor shows this memory, and its gradient would be of a value that is gone",
                where=row.name,
                got=out.spec,
                fix="write to a clone(), or under no_grad()",
            )
        arrays.append(array)
    old = list(data)
    if taped:
        stores = {id(a.storage) for a in arrays}
        for i in row.saves.inputs:
            if i < len(old) and id(old[i].storage) in stores:
                old[i] = old[i].copy()
    compute(row, data, attrs, arrays)
    return old


def rebind(outs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """While tracing nothing is written: a tensor stands for the new value from here on.

    Raises: LeafModified; TraceMutation if a view of the old value lives, which would not follow; ShapeError.
    """
    for out, value in zip(outs, values, strict=True):
        _leaf_stays(out)
        if out.carried:
            out.assign(value)  # pyright: ignore[reportAttributeAccessIssue]  # a Variable
            continue
        if out.spec != value.spec:
            raise ShapeError("a value written over keeps its spec", expected=out.spec, got=value.spec)
        symbol = out.data
        if not isinstance(symbol, Symbol):
            raise TraceMutation(
                "a tensor from outside the trace would be written over",
                got=out.spec,
                fix="make it a Variable: its value is carried from step to step",
            )
        if any(other is not None and other is not symbol for other in (r() for r in symbol.family)):
            raise TraceMutation(
                "a view of this value lives, and a trace has no memory by which it would follow",
                got=out.spec,
                fix="write to a clone(), or take the view afterwards",
            )
        out.data, out.node, out.port, out.requires_grad = value.data, value.node, value.port, value.requires_grad


def _leaf_stays(out: Tensor) -> None:
    if grad_enabled() and out.requires_grad and out.node is None:
        raise LeafModified(
            "a leaf that wants a gradient cannot be written over while operations are taped",
            where=out.name or None,
            got=out.spec,
            fix="with gw.no_grad(): ...",
        )


_ALONE = 2
"""References to a storage that one array alone shows, as `getrefcount` counts: the array's and the argument's."""
