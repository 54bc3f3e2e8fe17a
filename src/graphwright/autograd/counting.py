"""Counts, sets and bins of entries under torch's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import bool_, float64, int32, int64
from graphwright.autograd.apply import as_tensor, device_of
from graphwright.autograd.indexing import HOST, index_add
from graphwright.autograd.names import TOP, named
from graphwright.errors import ShapeError, UsageError
from graphwright.ops import call
from graphwright.ops.axes import axis_of

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor


# -- counts ------------------------------------------------------------------------------------------------------------
@named(TOP, differs="`F.one_hot` in torch, which exists too")
def one_hot(ids: Any, classes: int | None = None, *, out: Tensor | None = None) -> Tensor:
    """Encode ids as one-hot vectors along a new last axis, int64.

    Args:
        classes: size of that axis; the largest id + 1 by default, required in a trace.
    Raises: IndexOutOfRange.
    """
    ids = as_tensor(ids)
    return call("one_hot", ids, classes=_count(ids) if classes is None else classes, out=out)


@named()
def bincount(input: Any, weights: Any = None, minlength: int = 0, *, length: int | None = None) -> Tensor:
    """Count how often each of 0 .. length - 1 occurs among the ids, int64; or sum their `weights`.

    Args:
        length: by default the largest id + 1, at least `minlength`; required in a trace.
    Raises: IndexOutOfRange, ShapeError for other weights than one per id; UsageError for a negative `minlength`.
    """
    if minlength < 0:
        raise UsageError("minlength is negative", where="bincount", expected=">= 0", got=minlength)
    ids = as_tensor(input)
    length = max(_count(ids), minlength) if length is None else length
    if weights is None:
        return call("bincount", ids, length=length)
    values = as_tensor(weights)
    values = values if values.dtype.is_float else values.to(float64)
    return index_add(values.new_zeros(length), 0, ids, values)


def _count(ids: Tensor) -> int:
    host = ids.numpy()
    return int(host.max()) + 1 if host.size else 0


@named(differs=HOST)
def histc(input: Any, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Count entries in equal bins from min to max, or, if these are equal, over the range of the entries.

    Outside traces. Raises: UsageError for bins < 1, exchanged bounds, or bounds that are not finite.
    """
    x = as_tensor(input)
    host = _host(x).ravel()
    low, high = (host.min(), host.max()) if min == max and host.size else (min, max)
    if bins < 1 or not -np.inf < low <= high < np.inf:
        expected = "bins >= 1, and finite min <= max"
        raise UsageError("an argument is out of range", where="histc", expected=expected, got=f"{bins}, {low}, {high}")
    return as_tensor(np.histogram(host, bins, (low, high))[0].astype(np.float32), x.dtype, device_of(x))


# -- sets --------------------------------------------------------------------------------------------------------------
@named(differs=HOST)
def unique(
    input: Any, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """Return the different values in ascending order, the index of each entry's value, and counts. Outside traces.

    Each NaN differs from the others.

    Args:
        sorted: ignored, values are always sorted.
        dim: axis along which to compare slices, instead of all entries.
    """
    x = as_tensor(input)
    axis = None if dim is None else axis_of(dim, x.ndim)
    values, inverse, counts = np.unique(_host(x), return_inverse=True, return_counts=True, axis=axis, equal_nan=False)
    inverse = inverse.reshape(x.shape) if dim is None else inverse.reshape(-1)
    return _parts(as_tensor(values, x.dtype, device_of(x)), inverse, counts, return_inverse, return_counts)


@named(differs=HOST)
def unique_consecutive(
    input: Any, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """Return the entries that differ from the entry before, with run indices and run lengths. Outside traces.

    Args:
        dim: axis along which to compare slices, instead of all entries.
    """
    x = as_tensor(input)
    host = _host(x).reshape(-1) if dim is None else np.moveaxis(_host(x), axis_of(dim, x.ndim), 0)
    rows = host.reshape(len(host), int(np.prod(host.shape[1:])))
    starts = np.flatnonzero(np.concatenate([np.ones(min(len(rows), 1), bool), (rows[1:] != rows[:-1]).any(1)]))
    counts = np.diff(np.append(starts, len(rows)))
    inverse = np.repeat(np.arange(len(starts)), counts)
    values = host[starts] if dim is None else np.moveaxis(host[starts], 0, axis_of(dim, x.ndim))
    inverse = inverse.reshape(x.shape) if dim is None else inverse
    return _parts(as_tensor(values, x.dtype, device_of(x)), inverse, counts, return_inverse, return_counts)


def _parts(values: Tensor, inverse: np.ndarray, counts: np.ndarray, with_inverse: bool, with_counts: bool) -> Any:
    wanted = [part for part, asked in ((inverse, with_inverse), (counts, with_counts)) if asked]
    extra = [as_tensor(part.astype(np.int64), device=device_of(values)) for part in wanted]
    return (values, *extra) if extra else values


def _host(x: Any) -> np.ndarray:
    return as_tensor(x).detach().numpy()


@named(TOP)
def isin(elements: Any, test_elements: Any, *, invert: bool = False) -> Tensor:
    """True where an entry equals one of the test elements; or, with `invert`, none."""
    x, known = as_tensor(elements), as_tensor(test_elements).reshape(-1).sort()[0]
    last = known.shape[0] - 1
    if last < 0:
        found = call("full_like", x, value=0.0).to(bool_)
    else:
        at = _leading(known, x, lambda entry: entry < x).clamp(max=last)
        found = call("index", known, at, axis=0) == x
    return ~found if invert else found


# -- bins --------------------------------------------------------------------------------------------------------------
def _leading(ordered: Tensor, x: Tensor, before: Callable[[Tensor], Tensor]) -> Tensor:
    """Return how many leading entries of the last axis of a sequence come before each of x, by binary search."""
    n = ordered.shape[-1]
    count, step = call("full_like", x, value=0.0).to(int64), 1 << n.bit_length() >> 1
    while step:
        at = (count + (step - 1)).clamp(max=n - 1)
        entry = call("index", ordered, at, axis=0) if ordered.ndim == 1 else ordered.gather(-1, at)
        count = call("where", (count <= n - step) & before(entry), count + step, count)
        step //= 2
    return count


@named(TOP)
def searchsorted(
    sorted_sequence: Any, input: Any, *, out_int32: bool = False, right: bool = False, side: str | None = None,
    sorter: Any = None,
) -> Tensor:  # fmt: skip
    """Return the index before which each value keeps the last axis of a sorted sequence in order, int64.

    Args:
        out_int32: give int32.
        right: after equal entries instead of before them; `side` says it as `left` or `right`.
        sorter: indices that sort the sequence.
    Raises: UsageError for another `side`, or one that contradicts `right`; ShapeError.
    """
    if side not in (None, "left", "right") or (side == "left" and right):
        raise UsageError("unknown side", where="searchsorted", expected="left or right", got=side)
    ordered, x = as_tensor(sorted_sequence), as_tensor(input)
    if ordered.ndim > 1 and ordered.shape[:-1] != x.shape[:-1]:
        expected = f"leading axes {ordered.shape[:-1]}"
        raise ShapeError("the values do not fit the sequence", where="searchsorted", expected=expected, got=x.spec)
    if sorter is not None:
        ids = as_tensor(sorter)
        if ids.shape != ordered.shape or ids.dtype is not int64:
            expected = f"int64 {ordered.shape}"
            raise ShapeError("invalid sorter", where="searchsorted", expected=expected, got=ids.spec)
        ordered = ordered.gather(-1, ids)
    after = "gt" if right or side == "right" else "ge"
    found = _leading(ordered, x, lambda entry: ~call(after, entry, x))  # NaN comes after all numbers
    return found.to(int32) if out_int32 else found


@named(TOP)
def bucketize(input: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Tensor:
    """Return the index of the bucket of each value, between ascending boundaries. Raises: ShapeError."""
    edges = as_tensor(boundaries)
    if edges.ndim != 1:
        raise ShapeError("the boundaries are not a vector", where="bucketize", expected="[n]", got=edges.spec)
    return searchsorted(edges, input, out_int32=out_int32, right=right)
