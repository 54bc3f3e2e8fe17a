"""In-place writes to tensors on a tape or in a trace.

A taped write is a new tape node; old values that its vjp reads are copied first. A write to memory that another tensor
shares raises, since that tensor's tape would describe a value that no longer exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from sys import getrefcount
from typing import TYPE_CHECKING, Any

from graphwright.array import NDArray
from graphwright.autograd.errors import LeafModified, TraceMutation, ViewModified
from graphwright.autograd.modes import is_grad_enabled
from graphwright.autograd.recorder import Symbol, active_recorder
from graphwright.errors import ShapeError
from graphwright.ops import Op, compute

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor


def write_over(
    row: Op, data: Sequence[NDArray], attrs: Mapping[str, Any], outs: Sequence[Tensor], taped: bool
) -> list[NDArray]:
    """Run an op on the arrays `data`, write its results into the memory of `outs`, and return the operands for the vjp.

    If the op is `taped`, operands that the vjp reads and the results overwrite are returned as copies made before.
    Raises: LeafModified, ViewModified, ReadOnlyArray, AliasError, ShapeError, all before anything is written.
    """
    arrays = []
    for out in outs:
        _refuse_leaf(out)
        array = out.own()
        if array.storage.shared and not out.is_variable:
            what = "cannot write in place to a view of a weight, because a fork or an undo entry reads the same memory"
            fix = "write to the weight itself, which copies it first: w[0] = value, w += value or w.copy_(value)"
            raise ViewModified(what, where=row.name, got=out.spec, fix=fix)
        if is_grad_enabled() and (taped or out.node is not None) and getrefcount(array.storage) > _ALONE:
            what = "cannot write in place: another tensor or backward uses the same memory and may need the old value"
            raise ViewModified(what, where=row.name, got=out.spec, fix="write to a clone(), or under no_grad()")
        arrays.append(array)
    old = list(data)
    if taped:
        stores = {id(a.storage) for a in arrays}
        for i in row.saves.reads(len(old)):
            if id(old[i].storage) in stores:
                old[i] = old[i].copy()
    compute(row, data, attrs, arrays)
    return old


def rebind(outs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Make tensors refer to new values, because an in-place write in a trace changes no memory.

    Raises: LeafModified; ShapeError; TraceMutation if the old value has a view, which would keep the old entries. The
        recorder raises TraceMutation at the end of the trace for a tensor that was made outside of it.
    """
    for out, value in zip(outs, values, strict=True):
        _refuse_leaf(out)
        if out.is_variable:
            out.assign(value)  # pyright: ignore[reportAttributeAccessIssue]  # a Variable
            continue
        if out.spec != value.spec:
            raise ShapeError("an in-place write would change the spec of the tensor", expected=out.spec, got=value.spec)
        held = out.data
        if isinstance(held, Symbol):
            viewed = any(other is not None and other is not held for other in (r() for r in held.aliases))
        else:  # a constant made in the trace, such as zeros
            viewed = getrefcount(held.storage) > _ALONE
        if viewed:
            what = "a trace cannot write in place to a value that has a view, as the view would keep the old entries"
            raise TraceMutation(what, got=out.spec, fix="write to a clone(), or make the view after the write")
        if isinstance(held, NDArray) and (recorder := active_recorder.get()) is not None:
            recorder.before_write(out)
        out.data, out.node, out.port, out.requires_grad = value.data, value.node, value.port, value.requires_grad


def _refuse_leaf(out: Tensor) -> None:
    if is_grad_enabled() and out.requires_grad and out.node is None:
        what, fix = "in-place write to a leaf that requires a gradient", "write inside `with gw.no_grad():`"
        raise LeafModified(what, where=out.name or None, got=out.spec, fix=fix)


_ALONE = 2
"""`getrefcount` of a storage that a single array uses: the array's reference and the argument's."""
