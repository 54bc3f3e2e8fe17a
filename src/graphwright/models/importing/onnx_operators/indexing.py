"""Operators that read and write entries by their indices."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from graphwright.array import int64
from graphwright.autograd import Parameter, Tensor, arange, as_tensor, top
from graphwright.models.importing.onnx_operators.table import NotExpressible, bounded, ints, operator, text
from graphwright.nn import functional
from graphwright.ops import call
from graphwright.ops.axes import axis_of

_COMBINED = {"mul": "prod", "max": "amax", "min": "amin"}


def known(x: Any) -> bool:
    """Return True for a tensor whose entries are known, other than a parameter."""
    return not (isinstance(x, Tensor) and (x.symbolic or x.is_variable))


def _wrapped(ids: Tensor, n: int) -> Tensor:
    """Return int64 indices 0 to n - 1 for indices that may count from the end."""
    wide = ids.to(int64)
    if known(ids) and not (ids.numpy() < 0).any():
        return wide
    return top.where(wide < 0, wide + n, wide)


# -- reading -----------------------------------------------------------------------------------------------------------
@operator("Gather")
def gather(x: Tensor, ids: Tensor, *, axis: int = 0) -> Tensor:
    """Entries of an axis by their indices; rows of a weight matrix are an embedding."""
    at = axis_of(axis, x.ndim)
    if known(ids) and not ids.ndim:
        return x[(slice(None),) * at + (int(ids.item()),)]
    if at == 0 and isinstance(x, Parameter) and x.ndim == 2 and not known(ids):
        return functional.embedding(ids, x)
    return call("index", x, ids.to(int64), axis=at)


@operator("GatherElements")
def gather_elements(x: Tensor, ids: Tensor, *, axis: int = 0) -> Tensor:
    """y[i, j] = x[ids[i, j], j] for axis 0."""
    return top.gather(x, axis, _wrapped(ids, x.shape[axis]))


@operator("GatherND")
def gather_nd(x: Tensor, ids: Tensor, *, batch_dims: int = 0) -> Tensor:
    """Entries by coordinates along the first axes, which the last axis of the indices holds."""
    depth = _depth(ids)
    lead = [arange(n).reshape([-1 if i == a else 1 for i in range(ids.ndim - 1)])
            for a, n in enumerate(x.shape[:batch_dims])]  # fmt: skip
    return x[(*lead, *(ids.select(-1, i).to(int64) for i in range(depth)))]


def _depth(ids: Tensor) -> int:
    depth = ids.spec.shape[-1]
    if isinstance(depth, str):
        raise NotExpressible("the number of coordinates is a named size", expected="an int", got=ids.spec)
    return int(depth)


@operator("OneHot", known=(1,))
def one_hot(ids: Tensor, depth: Any, values: Tensor, *, axis: int = -1) -> Tensor:
    """The second value where an entry's index along a new axis is its id, else the first."""
    n = ints(depth)[0]
    bounded((n, *(m for m in ids.shape if type(m) is int)))
    at = axis_of(axis, ids.ndim + 1)
    whole = ids.to(int64).unsqueeze(at)
    offsets = arange(n).reshape([-1 if i == at else 1 for i in range(ids.ndim + 1)])
    return top.where(top.where(whole < 0, whole + n, whole) == offsets, values.select(0, 1), values.select(0, 0))


@operator("Compress", known=(1,))
def compress(x: Tensor, condition: Any, *, axis: int | None = None) -> Tensor:
    """The entries of an axis, or of all axes row-major, at which the condition is true."""
    ids = as_tensor(np.flatnonzero(condition))
    return call("index", x.reshape(-1) if axis is None else x, ids, axis=0 if axis is None else axis_of(axis, x.ndim))


@operator("NonZero", known=(0,))
def nonzero(x: Any) -> Tensor:
    """The indices of the entries that are not 0, one axis a row."""
    return as_tensor(np.array(np.nonzero(x), np.int64))


@operator("Unique", known=(0,))
def unique(x: Any, *, axis: int | None = None, sorted: int = 1) -> tuple[Tensor, ...]:
    """The different entries, the index of the first of each, the entry of each, and counts."""
    found, first, inverse, counts = np.unique(x, return_index=True, return_inverse=True, return_counts=True, axis=axis)
    inverse = inverse.reshape(-1)
    if not sorted:
        order = np.argsort(first)
        offset = np.empty_like(order)
        offset[order] = np.arange(len(order))
        found = np.take(found, order, 0 if axis is None else axis)
        first, inverse, counts = first[order], offset[inverse], counts[order]
    return tuple(
        as_tensor(np.ascontiguousarray(v)) for v in (found, *(v.astype(np.int64) for v in (first, inverse, counts)))
    )


# -- writing -----------------------------------------------------------------------------------------------------------
@operator("ScatterElements")
def scatter_elements(x: Tensor, ids: Tensor, values: Tensor, *, axis: int = 0, reduction: Any = "none") -> Tensor:
    """Return x with y[ids[i, j], j] = values[i, j] for axis 0, or combined with the entry there."""
    return _scattered(x, axis_of(axis, x.ndim), _wrapped(ids, x.shape[axis]), values, text(reduction))


def _scattered(x: Tensor, axis: int, ids: Tensor, values: Tensor, how: str) -> Tensor:
    if how == "none":
        return top.scatter(x, axis, ids, values)
    if how == "add":
        return top.scatter_add(x, axis, ids, values)
    return top.scatter_reduce(x, axis, ids, values, _COMBINED[how])


@operator("ScatterND")
def scatter_nd(x: Tensor, ids: Tensor, values: Tensor, *, reduction: Any = "none") -> Tensor:
    """Return x with values at coordinates along the first axes, which the last axis of the indices holds."""
    how, depth = text(reduction), _depth(ids)
    parts = [_wrapped(ids.select(-1, i), x.shape[i]) for i in range(depth)]
    if depth == 1 and how in ("none", "add"):
        return top.index_put(x, (parts[0],), values, how == "add")
    offset = parts[0]
    for part, n in zip(parts[1:], x.shape[1:depth], strict=True):
        offset = offset * n + part
    rest = prod(x.shape[depth:])
    flat = x.reshape(prod(x.shape[:depth]), rest)
    rows = offset.reshape(-1, 1)
    spread = rows.expand(rows.shape[0], rest) if type(rest) is not int or rest != 1 else rows
    return _scattered(flat, 0, spread, values.reshape(rows.shape[0], rest), how).reshape(*x.shape)


@operator("TensorScatter")
def tensor_scatter(
    x: Tensor, update: Tensor, starts: Tensor | None = None, *, axis: int = -2, mode: Any = "linear"
) -> Tensor:
    """Return a cache x with new entries along an axis from the index of each sample on."""
    at = axis_of(axis, x.ndim)
    steps = arange(update.shape[at]).reshape([-1 if i == at else 1 for i in range(x.ndim)])
    first = as_tensor(0) if starts is None else starts.to(int64).reshape(-1, *(1,) * (x.ndim - 1))
    offset = first + steps
    if text(mode) == "circular":
        offset = top.remainder(offset, x.shape[at])
    return top.scatter(x, at, offset.expand(*update.shape), update)
