"""Shapes, axes, joining and splitting of tensors, under torch's names."""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from itertools import combinations as subsets
from itertools import combinations_with_replacement as multisets
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import NDArray
from graphwright.array import broadcast_shapes as broadcast
from graphwright.array.sizes import dim_of
from graphwright.autograd.apply import TensorBase, as_tensor, device_of
from graphwright.autograd.functions import cat, stack
from graphwright.autograd.names import METHOD, TOP, named
from graphwright.autograd.recorder import active_recorder
from graphwright.errors import DTypeError, ShapeError, UsageError
from graphwright.ops import call
from graphwright.ops.axes import axes_of, axis_of

if TYPE_CHECKING:
    from graphwright.array.layout import Shape
    from graphwright.autograd.tensor import Tensor

Axes = Any
"""An axis, several, or None for all."""


def ints(values: Sequence[Any]) -> Shape:
    """Return ints as a tuple; `values` is either the ints or a single sequence of them."""
    return tuple(values[0] if len(values) == 1 and isinstance(values[0], Iterable) else values)


# -- facts that need no kernel -----------------------------------------------------------------------------------------
@named(METHOD)
def size(input: Tensor, dim: int | None = None) -> Any:
    """Return the shape, or the size of one axis."""
    return input.shape if dim is None else input.shape[axis_of(dim, input.ndim)]


@named(METHOD, also="ndimension")
def dim(input: Tensor) -> int:
    """Return the number of axes."""
    return len(input.shape)


@named()
def numel(input: Tensor) -> int:
    """Return the number of entries."""
    return prod(input.shape)


@named(METHOD)
def nelement(input: Tensor) -> int:
    """Return the number of entries."""
    return numel(input)


@named(TOP)
def is_tensor(obj: Any) -> bool:
    """Whether an object is a tensor."""
    return isinstance(obj, TensorBase)


@named(METHOD)
def element_size(input: Tensor) -> int:
    """Return the number of bytes of an entry."""
    return input.dtype.itemsize


@named()
def is_floating_point(input: Tensor) -> bool:
    """Whether the dtype is floating."""
    return input.dtype.is_float


@named(METHOD)
def is_contiguous(input: Tensor) -> bool:
    """Whether the entries are row-major in memory."""
    return input.concrete("is_contiguous()").contiguous


@named(METHOD)
def stride(input: Tensor, dim: int | None = None) -> Any:
    """Return the strides in entries, or that of one axis."""
    strides = input.concrete("stride()").layout.strides
    return strides if dim is None else strides[axis_of(dim, input.ndim)]


@named(TOP)
def broadcast_shapes(*shapes: Any) -> Shape:
    """Return the shape of tensors of these shapes broadcast together. Raises: ShapeError."""
    given, recorder = [ints((s,)) for s in shapes], active_recorder.get()
    if recorder is not None and recorder.named is not None:
        return recorder.named.shape(broadcast(*(tuple(map(dim_of, s)) for s in given)))
    return broadcast(*given)


# -- shapes ------------------------------------------------------------------------------------------------------------
@named()
def reshape(input: Tensor, *sizes_: Any, shape: Any = None) -> Tensor:
    """Return the same entries in a new shape; one size may be -1, and is then inferred. Raises: ShapeError."""
    sizes = list(ints(sizes_) if shape is None else shape)
    dims = [dim_of(s) for s in sizes]
    if -1 in dims:
        known = prod(s for s, d in zip(sizes, dims, strict=True) if d != -1)
        if dims.count(-1) > 1 or known == 0 or input.numel() % known:
            expected = f"one -1, and sizes whose product divides {input.numel()}"
            raise ShapeError("cannot infer the size given as -1", expected=expected, got=tuple(sizes))
        sizes[dims.index(-1)] = input.numel() // known
    return call("reshape", input, shape=tuple(sizes))


@named(METHOD)
def view(input: Tensor, *shape: Any) -> Tensor:
    """Reshape without a copy; an eager result shares memory. Raises: ShapeError if that is impossible."""
    result = input.reshape(*shape)
    if isinstance(input.data, NDArray) and isinstance(result.data, NDArray):
        input.data.reshape(*result.shape, copy=False)
    return result


@named(METHOD)
def view_as(input: Tensor, other: Tensor) -> Tensor:
    """Return a view in the shape of `other`."""
    return input.view(*other.shape)


@named(METHOD)
def reshape_as(input: Tensor, other: Tensor) -> Tensor:
    """Reshape to the shape of `other`."""
    return input.reshape(*other.shape)


@named()
def ravel(input: Tensor) -> Tensor:
    """Return the entries as a vector, row-major."""
    return input.reshape(-1)


@named()
def flatten(input: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Merge axes `start_dim` to `end_dim`, inclusive, into one; a 0-d tensor becomes a vector of one entry."""
    return call("flatten", input if input.ndim else input.unsqueeze(0), start=start_dim, end=end_dim)


@named()
def unflatten(input: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Split an axis into several; one size may be -1. Raises: ShapeError."""
    at = axis_of(dim, input.ndim)
    given, dims = list(sizes), [dim_of(s) for s in sizes]
    if -1 in dims:
        known = prod(s for s, d in zip(given, dims, strict=True) if d != -1)
        given[dims.index(-1)] = input.shape[at] // builtins.max(known, 1)
    return call("unflatten", input, axis=at, sizes=tuple(given))


@named()
def permute(input: Tensor, *axes: Any, dims: Any = None) -> Tensor:
    """Reorder the axes."""
    order = ints(axes) if dims is None else tuple(dims)
    return call("permute", input, axes=tuple(axis_of(a, input.ndim) for a in order))


@named(in_place="view", also="swapaxes swapdims")
def transpose(input: Tensor, dim0: int, dim1: int) -> Tensor:
    """Exchange two axes."""
    order = list(range(input.ndim))
    if not order and {dim0, dim1} <= {0, -1}:
        return input
    a, b = axis_of(dim0, input.ndim), axis_of(dim1, input.ndim)
    order[a], order[b] = order[b], order[a]
    return call("permute", input, axes=tuple(order))


@named(in_place="view")
def t(input: Tensor) -> Tensor:
    """Transpose a matrix; tensors of fewer axes are unchanged. Raises: ShapeError for more."""
    if input.ndim > 2:
        raise ShapeError("t() takes at most two axes", expected="[n, m] or [n]", got=input.spec)
    return call("permute", input, axes=(1, 0)) if input.ndim == 2 else input


@named(also="moveaxis")
def movedim(input: Tensor, source: Any, destination: Any) -> Tensor:
    """Move axes to other indices; the other axes keep their order. Raises: ShapeError for repeated axes."""
    moved, to = (tuple(axis_of(a, input.ndim or 1) for a in ints((v,))) for v in (source, destination))
    if len(moved) != len(to) or len(set(moved)) < len(moved) or len(set(to)) < len(to):
        what = "source and destination are not equally many different axes"
        raise ShapeError(what, where="movedim", got=f"{source}, {destination}")
    if not input.ndim:
        return input
    order = [a for a in range(input.ndim) if a not in moved]
    for at, axis in sorted(zip(to, moved, strict=True)):
        order.insert(at, axis)
    return call("permute", input, axes=tuple(order))


@named(in_place="view")
def squeeze(input: Tensor, dim: Axes = None) -> Tensor:
    """Remove axes of size 1: all of them, or the given ones; longer axes are kept."""
    axes = tuple(a for a in axes_of(dim, input.ndim) if input.shape[a] == 1)
    return call("squeeze", input, axes=axes) if axes else input


@named(in_place="view")
def unsqueeze(input: Tensor, dim: int) -> Tensor:
    """Insert an axis of size 1 at this index of the result's shape."""
    return call("unsqueeze", input, axes=(dim,))


@named(METHOD)
def expand(input: Tensor, *sizes: Any) -> Tensor:
    """Broadcast to a shape, sharing memory; -1 keeps the size of an axis that the tensor has."""
    shape = ints(sizes)
    lead = len(shape) - input.ndim
    return call("expand", input, shape=tuple(input.shape[i - lead] if dim_of(n) == -1 and i >= lead else n
                                             for i, n in enumerate(shape)))  # fmt: skip


@named(METHOD)
def expand_as(input: Tensor, other: Tensor) -> Tensor:
    """Broadcast to the shape of `other`, sharing memory."""
    return input.expand(*other.shape)


@named()
def broadcast_to(input: Tensor, *size: Any) -> Tensor:
    """Broadcast to a shape, sharing memory."""
    return input.expand(*ints(size))


@named(TOP)
def broadcast_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Broadcast tensors together, sharing memory."""
    shape = broadcast_shapes(*(t.shape for t in tensors))
    return tuple(t.expand(*shape) for t in tensors)


def _at_least(count: int) -> None:
    def atleast(*tensors: Any) -> Any:
        made, several = [], len(tensors) == 1 and isinstance(tensors[0], list | tuple)
        for x in map(as_tensor, tensors[0] if several else tensors):
            while x.ndim < count:
                x = x.unsqueeze(-1 if x.ndim == 2 else 0)
            made.append(x)
        return made[0] if len(made) == 1 and not several else tuple(made)

    atleast.__name__, atleast.__doc__ = f"atleast_{count}d", f"Return tensors with at least {count} axes."
    named(TOP)(atleast)


for _count in (1, 2, 3):
    _at_least(_count)


# -- order and repetition ----------------------------------------------------------------------------------------------
@named(METHOD)
def sum_to_size(input: Tensor, *size: Any) -> Tensor:
    """Sum over the axes along which the shape `size` was broadcast to this one. Raises: ShapeError."""
    wanted = ints(size)
    lead = input.ndim - len(wanted)
    axes = [*range(lead), *(lead + i for i, n in enumerate(wanted) if n == 1 != input.shape[lead + i])]
    kept = tuple(n if n == 1 else m for n, m in zip(wanted, input.shape[builtins.max(lead, 0) :], strict=False))
    if lead < 0 or kept != wanted:
        raise ShapeError("the shape does not broadcast to that of the tensor", expected=input.shape, got=wanted)
    if not wanted:
        return input.sum()
    return input.sum(tuple(axes), True).reshape(wanted) if axes else input


@named()
def flip(input: Tensor, *axes: Any, dims: Any = None) -> Tensor:
    """Reverse the order of entries along axes."""
    return call("flip", input, axes=ints(axes) if dims is None else tuple(dims))


@named()
def fliplr(input: Tensor) -> Tensor:
    """Reverse the columns."""
    return input.flip(1)


@named()
def flipud(input: Tensor) -> Tensor:
    """Reverse the rows. Raises: ShapeError for a 0-d tensor."""
    return input.flip(axis_of(0, input.ndim))


@named()
def rot90(input: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """Rotate by k·90 degrees in the plane of two axes, from the first towards the second. Raises: ShapeError."""
    if len(dims) != 2 or axis_of(dims[0], input.ndim) == axis_of(dims[1], input.ndim):
        raise ShapeError("the plane of a rotation needs two axes", where="rot90", got=tuple(dims))
    a, b = dims
    if k % 2 == 0:
        return input.flip(a, b) if k % 4 else input
    return input.flip(b if k % 4 == 1 else a).transpose(a, b)


@named()
def roll(input: Tensor, shifts: Any, dims: Axes = None) -> Tensor:
    """Shift entries cyclically along axes, or in the flattened array without axes."""
    if dims is None:
        return roll(input.reshape(-1), shifts, 0).reshape(input.shape)
    return call("roll", input, shifts=ints((shifts,)), axes=ints((dims,)))


@named()
def tile(input: Tensor, *dims: Any) -> Tensor:
    """Repeat the tensor along each axis: a b -> a b a b; missing leading counts are 1."""
    counts = ints(dims)
    return call("tile", input, repeats=(*(1,) * (input.ndim - len(counts)), *counts))


@named(METHOD)
def repeat(input: Tensor, *repeats: Any) -> Tensor:
    """Like `tile`, but with at least one count per axis. Raises: ShapeError for fewer."""
    return call("tile", input, repeats=ints(repeats))


# -- parts -------------------------------------------------------------------------------------------------------------
@named()
def narrow(input: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Return a view of `length` entries of an axis from `start`. Raises: ShapeError past the end."""
    at = axis_of(dim, input.ndim)
    kind = start.dtype.kind if isinstance(start, TensorBase) else np.asarray(start).dtype.kind[:1]
    if kind not in ("i", "u", "int", "uint"):
        raise DTypeError("the start is not an integer", where="narrow", expected="an integer", got=start)
    n, first = input.shape[at], int(start)
    if not -n <= first <= n:
        raise ShapeError("the start is out of range", where="narrow", expected=f"-{n}..{n}", got=first)
    return call("slice", input, axis=at, start=first + n if first < 0 else first, size=length)


@named()
def select(input: Tensor, dim: int, index: int) -> Tensor:
    """Return a view of one entry of an axis, without the axis. Raises: IndexOutOfRange."""
    return input[(builtins.slice(None),) * axis_of(dim, input.ndim) + (index,)]


@named()
def unbind(input: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    """Return views of all entries of an axis, without the axis."""
    return tuple(select(input, dim, i) for i in range(input.shape[axis_of(dim, input.ndim)]))


@named()
def split(input: Tensor, split_size: Any, dim: int = 0) -> tuple[Tensor, ...]:
    """Return views along an axis with `split_size` entries each (the last may have fewer), or with the given sizes.

    Raises: ShapeError unless the given sizes sum to the size of the axis.
    """
    total = input.shape[axis_of(dim, input.ndim)]
    if isinstance(split_size, Sequence):
        sizes = list(split_size)
    else:
        if split_size < 1 and (total or split_size < 0):
            raise ShapeError("the split size is not positive", expected=">= 1", got=split_size)
        sizes = [builtins.min(split_size, total - at) for at in range(0, total, split_size)] if total else [0]
    if sum(sizes) != total or builtins.min(sizes, default=0) < 0:
        raise ShapeError("the split sizes do not sum to the size of the axis", expected=total, got=tuple(sizes))
    return tuple(input.narrow(dim, end - n, n) for end, n in zip(accumulate(sizes), sizes, strict=True))


@named()
def chunk(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Return at most `chunks` views of equal size along an axis; the last may be smaller."""
    if chunks < 1:
        raise ShapeError("the number of chunks is not positive", expected=">= 1", got=chunks)
    n = input.shape[axis_of(dim, input.ndim)]
    return split(input, -(-n // chunks) if n else [0] * chunks, dim)


@named()
def tensor_split(input: Tensor, indices_or_sections: Any, dim: int = 0) -> tuple[Tensor, ...]:
    """Return views along an axis: this many of nearly equal size, or those between the given indices, as slices.

    Raises: ShapeError for a number of parts below 1.
    """
    at, k = axis_of(dim, input.ndim), indices_or_sections
    k = k.tolist() if isinstance(k, TensorBase) else k  # pyright: ignore[reportAttributeAccessIssue]  # a Tensor
    if not isinstance(k, Iterable):
        if k < 1:
            raise ShapeError("the number of parts is not positive", where="tensor_split", expected=">= 1", got=k)
        n = input.shape[at]
        return split(input, [n // k + (i < n % k) for i in range(k)], dim)
    return tuple(input[(slice(None),) * at + (slice(a, b),)] for a, b in pairwise((0, *k, None)))


@named(METHOD)
def split_with_sizes(input: Tensor, split_sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Return views along an axis with the given sizes."""
    return split(input, list(split_sizes), dim)


def _split_along(name: str, axis: int, least: int) -> None:
    def along(input: Tensor, indices_or_sections: Any) -> tuple[Tensor, ...]:
        if input.ndim < least:
            raise ShapeError("the tensor has too few axes", where=name, expected=f"{least} or more", got=input.spec)
        at = 0 if input.ndim == 1 else axis
        whole = not isinstance(indices_or_sections, Iterable)
        if whole and (indices_or_sections < 1 or input.shape[at] % indices_or_sections):
            got, expected = indices_or_sections, f"a divisor of {input.shape[at]}"
            raise ShapeError("the parts would have different sizes", where=name, expected=expected, got=got)
        return tensor_split(input, indices_or_sections, at)

    along.__name__, along.__doc__ = name, f"Return views along axis {axis}, like `tensor_split`, of equal sizes."
    named()(along)


for _name, _axis, _least in (("vsplit", 0, 2), ("hsplit", 1, 1), ("dsplit", 2, 3)):
    _split_along(_name, _axis, _least)


@named()
def diagonal(input: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Return a view in which the entries (i, i + offset) of two axes, as a new last axis, replace both."""
    return call("diagonal", input, offset=offset, axes=(dim1, dim2))


@named(METHOD, differs="`gw.trace` records a program")
def trace(input: Tensor) -> Tensor:
    """Return the sum of the diagonal of a matrix. Raises: ShapeError."""
    if input.ndim != 2:
        raise ShapeError("not a matrix", where="trace", expected="[n, m]", got=input.spec)
    return input.diagonal().sum()


@named()
def diag_embed(input: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """Write the last axis to a diagonal of square matrices of zeros, on two new axes. Raises: ShapeError."""
    new = axis_of(dim1, input.ndim + 1), axis_of(dim2, input.ndim + 1)
    if new[0] == new[1]:
        raise ShapeError("the axes of the matrices are one", where="diag_embed", got=f"{dim1}, {dim2}")
    n = input.shape[-1] + builtins.abs(offset)
    whole = call("pad", input.unsqueeze(-1), widths=((0, 0), (0, n)), mode="constant", value=0.0).flatten(-2)
    lead = builtins.max(-offset, 0) * n + builtins.max(offset, 0)  # entry i of the diagonal is at lead + i(n + 1)
    rest = n * n - whole.shape[-1] - lead
    whole = whole.narrow(-1, 0, whole.shape[-1] + builtins.min(rest, 0))
    whole = call("pad", whole, widths=((lead, builtins.max(rest, 0)),), mode="constant", value=0.0)
    made = call("unflatten", whole, axis=whole.ndim - 1, sizes=(n, n))
    return movedim(made, (-2, -1), new) if new != (made.ndim - 2, made.ndim - 1) else made


@named()
def diag(input: Tensor, diagonal: int = 0) -> Tensor:
    """Return a diagonal of a matrix, or the matrix with a vector on a diagonal. Raises: ShapeError."""
    if input.ndim not in (1, 2):
        raise ShapeError("neither a vector nor a matrix", where="diag", expected="[n] or [n, m]", got=input.spec)
    return diag_embed(input, diagonal) if input.ndim == 1 else call("diagonal", input, offset=diagonal, axes=(0, 1))


@named()
def diagflat(input: Tensor, offset: int = 0) -> Tensor:
    """Return a matrix with the entries, row-major, on a diagonal."""
    return diag_embed(input.reshape(-1), offset)


@named(METHOD)
def unfold(input: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Return windows of `size` entries along an axis, `step` apart, as a new last axis. Raises: ShapeError."""
    if size < 0 or step < 1:
        raise ShapeError("invalid windows", where="unfold", expected="size >= 0, step >= 1", got=f"{size}, {step}")
    if not input.ndim:
        return unfold(input.unsqueeze(0), dimension, size, step).squeeze(0)
    at = axis_of(dimension, input.ndim)
    count = (input.shape[at] - size) // step + 1
    if count < 1:
        raise ShapeError("the axis is shorter than a window", expected=f"{size} or more", got=input.shape[at])
    ids = (np.arange(count) * step)[:, None] + np.arange(size)
    return movedim(call("index", input, as_tensor(ids, device=device_of(input)), axis=at), at + 1, -1)


# -- joining -----------------------------------------------------------------------------------------------------------
def _joined(name: str, axis: int, axes: int, doc: str) -> None:
    def join(tensors: Sequence[Any]) -> Tensor:
        parts = [as_tensor(x) for x in tensors]
        if not parts:
            raise UsageError("there are no tensors to join", where=name, expected="at least one tensor")
        if axes == 1:  # hstack
            parts = [x if x.ndim else x.reshape(1) for x in parts]
            return cat(parts, 0 if parts[0].ndim == 1 else 1)
        lifted = [x.reshape(1, -1) if axes == 2 and x.ndim < 2 else x for x in parts]
        if axes == 3:
            lifted = [x.reshape(1, -1, 1) if x.ndim < 2 else x.unsqueeze(-1) if x.ndim == 2 else x for x in parts]
        return cat(lifted, axis)

    join.__name__, join.__doc__ = name, doc
    named(TOP)(join)


_joined("hstack", 1, 1, "Concatenate along axis 1, vectors along axis 0.")
_joined("vstack", 0, 2, "Concatenate along axis 0; vectors are rows.")
_joined("dstack", 2, 3, "Concatenate along axis 2.")


@named(TOP)
def column_stack(tensors: Sequence[Any]) -> Tensor:
    """Concatenate along axis 1; vectors are columns."""
    return cat([x.reshape(-1, 1) if x.ndim < 2 else x for x in map(as_tensor, tensors)], 1)


@named(TOP)
def meshgrid(*tensors: Any, indexing: str = "ij") -> tuple[Tensor, ...]:
    """Return the coordinates of the grid of vectors; `indexing` `xy` exchanges the first two axes.

    Raises: UsageError for another `indexing`, ShapeError for tensors of more axes than one.
    """
    one = len(tensors) == 1 and isinstance(tensors[0], list | tuple)
    parts = _vectors("meshgrid", tensors[0] if one else tensors)
    shape = tuple(x.shape[0] for x in parts)
    made = [x.reshape(*(-1 if a == i else 1 for a in range(len(parts)))).expand(*shape) for i, x in enumerate(parts)]
    if indexing not in ("ij", "xy"):
        raise UsageError("unknown indexing", where="meshgrid", expected="ij or xy", got=indexing)
    return tuple(x.transpose(0, 1) if indexing == "xy" and len(parts) > 1 else x for x in made)


@named(TOP)
def cartesian_prod(*tensors: Tensor) -> Tensor:
    """Return all combinations of entries of vectors, one per row. Raises: UsageError for none, ShapeError."""
    parts = _vectors("cartesian_prod", tensors)
    return stack([x.reshape(-1) for x in meshgrid(*parts)], -1) if len(parts) > 1 else parts[0]


def _vectors(where: str, tensors: Sequence[Any]) -> list[Tensor]:
    """Return tensors as vectors; 0-d ones have one entry. Raises: UsageError for none, ShapeError for more axes."""
    parts = [as_tensor(x) for x in tensors]
    if not parts:
        raise UsageError("there are no vectors", where=where, expected="at least one")
    if wrong := next((x for x in parts if x.ndim > 1), None):
        raise ShapeError("a tensor is not a vector", where=where, expected="[n]", got=wrong.spec)
    return [x.reshape(-1) for x in parts]


@named(TOP)
def combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """Return all subsets of r entries of a vector, one per row, in order. Raises: ShapeError."""
    if input.ndim != 1 or r < 0:
        raise ShapeError("no such subsets", where="combinations", expected="[n], r >= 0", got=f"{input.spec}, r = {r}")
    if not r:
        return input.new_empty(0)
    pick = multisets if with_replacement else subsets
    ids = np.array([*pick(range(input.shape[0]), r)], np.int64).reshape(-1, r)
    return call("index", input, as_tensor(ids), axis=0)


@named(TOP)
def block_diag(*tensors: Any) -> Tensor:
    """Return the matrix with these matrices along its diagonal, and zeros elsewhere; vectors are rows.

    Raises: ShapeError for more than two axes, UsageError for no tensors.
    """
    parts = [x.reshape(1, -1) if x.ndim < 2 else x for x in map(as_tensor, tensors)]
    if wrong := next((x for x in parts if x.ndim > 2), None):
        raise ShapeError("a tensor has too many axes", where="block_diag", expected="at most 2", got=wrong.spec)
    widths, at, rows = [x.shape[1] for x in parts], 0, []
    for x in parts:
        rest = sum(widths) - at - x.shape[1]
        rows.append(call("pad", x, widths=((0, 0), (at, rest)), mode="constant", value=0.0))
        at += x.shape[1]
    return cat(rows, 0)


def _indices(name: str, numpy_name: str) -> None:
    def indices(row: int, col: int, offset: int = 0, *, dtype: Any = None, device: Any = None) -> Tensor:
        if row < 0 or col < 0:
            raise ShapeError("a size is negative", where=name, expected=">= 0", got=f"{row}, {col}")
        made = as_tensor(np.stack(getattr(np, numpy_name)(row, offset, col)).astype(np.int64))
        return made.to(dtype=dtype, device=device) if dtype is not None or device is not None else made

    indices.__name__ = name
    indices.__doc__ = f"Return row and column indices, int64 [2, count], of the {name[:4]} of a matrix [row, col]."
    named(TOP)(indices)


_indices("tril_indices", "tril_indices")
_indices("triu_indices", "triu_indices")
