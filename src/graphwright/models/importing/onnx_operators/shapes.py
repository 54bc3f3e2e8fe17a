"""Operators that rearrange entries and make tensors of given shapes."""

from __future__ import annotations

from math import ceil, prod
from typing import Any

import numpy as np

from graphwright.array import float32, int64
from graphwright.autograd import Tensor, arange, as_tensor, cat, full, stack, top, zeros
from graphwright.autograd.shapes import broadcast_shapes
from graphwright.models.importing.onnx_operators.table import (
    bounded,
    dtype_of,
    fixed_sizes,
    ints,
    operator,
    text,
)
from graphwright.nn import functional
from graphwright.ops import call
from graphwright.ops.axes import axis_of

_END = 2**31 - 1
"""Bound of a slice from which on it means the end of an axis."""


# -- constants ---------------------------------------------------------------------------------------------------------
@operator("Constant")
def constant(
    *, value: Any = None, value_float: Any = None, value_floats: Any = None, value_int: Any = None,
    value_ints: Any = None,
) -> Tensor:  # fmt: skip
    """Return the attribute as a tensor."""
    if value is not None:
        return value
    if value_float is not None or value_floats is not None:
        return as_tensor(np.array(value_floats if value_float is None else value_float, np.float32))
    return as_tensor(np.array(value_ints if value_int is None else value_int, np.int64))


@operator("ConstantOfShape", known=(0,))
def constant_of_shape(shape: Any, *, value: Any = None) -> Tensor:
    """Return a tensor of one value, by default 0 in float32."""
    number = 0.0 if value is None else value.item()
    return full(bounded(ints(shape)), number, dtype=float32 if value is None else value.dtype)


@operator("Range", known=(0, 1, 2))
def range_(start: Any, limit: Any, delta: Any) -> Tensor:
    """start, start + delta, ... before the limit."""
    if start.dtype.kind == "f":
        count = max(ceil((limit.item() - start.item()) / delta.item()), 0)
        bounded((count,))
        return as_tensor((start + np.arange(count) * delta).astype(start.dtype))
    low, high, step = (ints(v)[0] for v in (start, limit, delta))
    if all(type(v) is int for v in (low, high, step)):
        bounded((max(-(-(high - low) // step), 0),))
        return as_tensor(np.arange(low, high, step).astype(start.dtype))
    return arange(low, high, step)


@operator("EyeLike")
def eye_like(x: Tensor, *, dtype: int = 0, k: int = 0) -> Tensor:
    """Return a matrix of the shape of x with ones on the k-th diagonal."""
    kind = dtype_of(dtype) if dtype else x.dtype
    rows, columns = (arange(n) for n in x.shape)
    return (rows.unsqueeze(1) + k == columns).to(kind)


@operator("Shape")
def shape(x: Tensor, *, start: int = 0, end: int | None = None) -> Any:
    """Return the sizes of axes `start` to `end`."""
    sizes = list(x.shape)[start:end]
    return known_sizes(sizes, (len(sizes),))


@operator("Size")
def size(x: Tensor) -> Any:
    """Return the number of entries."""
    return known_sizes([prod(x.shape)], ())


def known_sizes(sizes: list[Any], shape: tuple[int, ...]) -> Any:
    """Return sizes as an int64 tensor, or as an array of objects if one of them is named."""
    if all(type(n) is int for n in sizes):
        return as_tensor(np.array(sizes, np.int64).reshape(shape))
    made = np.empty(len(sizes), object)
    for i, n in enumerate(sizes):
        made[i] = n
    return made.reshape(shape)


# -- views -------------------------------------------------------------------------------------------------------------
@operator("Reshape", known=(1,))
def reshape(x: Tensor, shape: Any, *, allowzero: int = 0) -> Tensor:
    """Return x in a new shape, in which 0 keeps the size of an axis unless `allowzero`."""
    wanted = ints(shape)
    kept = [x.shape[i] if type(n) is int and n == 0 and not allowzero else n for i, n in enumerate(wanted)]
    return x.reshape(tuple(kept))


@operator("Flatten")
def flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    """Merge the axes before `axis`, and those from it on."""
    at = axis + x.ndim if axis < 0 else axis
    if at == 1 and x.ndim > 1:
        return x.flatten(1)
    return x.reshape((prod(x.shape[:at]), prod(x.shape[at:])))


@operator("Squeeze", known=(1,))
def squeeze(x: Tensor, at: Any = None, *, axes: Any = None) -> Tensor:
    """Remove axes of size 1."""
    given = axes if at is None else ints(at)
    if given is None:
        given = [i for i, n in enumerate(x.spec.shape) if n == 1]
    return call("squeeze", x, axes=tuple(sorted(axis_of(a, x.ndim) for a in given))) if len(given) else x


@operator("Unsqueeze", known=(1,))
def unsqueeze(x: Tensor, at: Any = None, *, axes: Any = None) -> Tensor:
    """Insert axes of size 1 at these indices of the result's shape."""
    given = list(axes or ()) if at is None else ints(at)
    rank = x.ndim + len(given)
    return call("unsqueeze", x, axes=tuple(sorted(axis_of(a, rank) for a in given))) if given else x


@operator("Transpose")
def transpose(x: Tensor, *, perm: Any = None) -> Tensor:
    """Reorder the axes; reverse them by default."""
    order = tuple(range(x.ndim))[::-1] if perm is None else tuple(perm)
    return x if order == tuple(range(x.ndim)) else x.permute(*order)


@operator("Expand", known=(1,))
def expand(x: Tensor, shape: Any) -> Tensor:
    """Broadcast x and a shape."""
    wanted = bounded(broadcast_shapes(x.shape, tuple(ints(shape))))
    return x.expand(*wanted) if wanted else x


@operator("Slice", known=(1, 2, 3, 4))
def slice_(x: Tensor, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Tensor:
    """x[start:end:step] along axes."""
    at = list(range(len(ints(starts)))) if axes is None else ints(axes)
    by = [1] * len(at) if steps is None else ints(steps)
    index: list[Any] = [slice(None)] * x.ndim
    for axis, start, end, step in zip(at, ints(starts), ints(ends), by, strict=True):
        far = type(end) is int and (end >= _END if step > 0 else end <= -_END)
        start = None if type(start) is int and (start <= -_END if step > 0 else start >= _END) else start
        index[axis] = slice(start, None if far else end, step)
    return x[tuple(index)]


@operator("Concat")
def concat(*tensors: Tensor, axis: int) -> Tensor:
    """Join tensors along an axis."""
    return tensors[0] if len(tensors) == 1 else cat(tensors, axis)


@operator("Split", known=(1,))
def split(x: Tensor, sizes: Any = None, *, axis: int = 0, num_outputs: int | None = None, outputs: int) -> Any:
    """Split an axis into parts of given sizes, or into equal ones, of which the last may be smaller."""
    if sizes is not None:
        return tuple(x.split(ints(sizes), axis))
    count = outputs if num_outputs is None else num_outputs
    n = x.shape[axis]
    if type(n) is not int:
        return tuple(x.split(n // count, axis))
    part = -(-n // count)
    return tuple(x.split([max(min(part, n - i * part), 0) for i in range(count)], axis))


@operator("Tile", known=(1,))
def tile(x: Tensor, repeats: Any) -> Tensor:
    """Repeat x along each axis."""
    counts = ints(repeats)
    bounded([n * m for n, m in zip(x.shape, counts, strict=True)])
    return top.tile(x, *counts)


@operator("Trilu", known=(1,))
def trilu(x: Tensor, k: Any = None, *, upper: int = 1) -> Tensor:
    """Keep the entries on and above the k-th diagonal, or below it."""
    at = 0 if k is None else ints(k)[0]
    return top.triu(x, at) if upper else top.tril(x, at)


@operator("Pad", known=(1, 3), fixed=(2,), numbers=True)
def pad(
    x: Tensor, widths: Any, value: Any = None, axes: Any = None, *, mode: Any = "constant"
) -> Tensor:  # fmt: skip
    """Pad, or for negative widths crop, axes."""
    given, at = ints(widths), list(range(x.ndim)) if axes is None else ints(axes)
    pairs = [(0, 0)] * x.ndim
    for i, axis in enumerate(at):
        pairs[axis] = (given[i], given[i + len(at)])
    bounded([n + a + b if type(n) is int else 1 for n, (a, b) in zip(x.shape, pairs, strict=True)])
    first = next((i for i, pair in enumerate(pairs) if pair != (0, 0)), x.ndim)
    flat = [n for pair in reversed(pairs[first:]) for n in pair]
    kind = {"edge": "replicate", "wrap": "circular"}.get(text(mode), text(mode))
    if not flat:
        return x
    if kind == "constant" and (isinstance(value, Tensor) or not x.dtype.is_float):
        fill = as_tensor(0 if value is None else value).to(x.dtype)
        return _filled(x, pairs, fill.reshape(()))
    return functional.pad(x, flat, kind, value)


def _filled(x: Tensor, pairs: list[tuple[int, int]], value: Tensor) -> Tensor:
    """Pad with a value of any dtype, exactly."""
    for axis, (before, after) in enumerate(pairs):
        shape = list(x.shape)
        for n, parts in ((before, lambda w, y: [w, y]), (after, lambda w, y: [y, w])):
            if n > 0:
                shape[axis] = n
                x = cat(parts(value.expand(*shape), x), axis)
        start, end = max(-before, 0), max(-after, 0)
        x = x.narrow(axis, start, x.shape[axis] - start - end) if start or end else x
    return x


@operator("CenterCropPad", known=(1,))
def center_crop_pad(x: Tensor, shape: Any, *, axes: Any = None) -> Tensor:
    """Crop or pad axes with zeros to sizes, the same at both ends."""
    at = list(range(x.ndim)) if axes is None else [axis_of(a, x.ndim) for a in axes]
    pairs = [(0, 0)] * x.ndim
    for axis, n, have in zip(at, ints(shape), fixed_sizes(x, at, "CenterCropPad"), strict=True):
        less, more = have - n, n - have
        pairs[axis] = (-(less // 2), -(less - less // 2)) if less > 0 else (more // 2, more - more // 2)
    bounded(ints(shape))
    return _filled(x, pairs, as_tensor(np.zeros(())).to(x.dtype))


@operator("DepthToSpace")
def depth_to_space(x: Tensor, *, blocksize: int, mode: Any = "DCR") -> Tensor:
    """Move blocks of channels to the spatial axes."""
    n, c, h, w = x.shape
    b, rest = blocksize, c // blocksize**2
    if text(mode) == "CRD":
        return functional.pixel_shuffle(x, b)
    return x.reshape(n, b, b, rest, h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, rest, h * b, w * b)


@operator("SpaceToDepth")
def space_to_depth(x: Tensor, *, blocksize: int) -> Tensor:
    """Move blocks of the spatial axes to channels."""
    n, c, h, w = x.shape
    b = blocksize
    return x.reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4).reshape(n, c * b * b, h // b, w // b)


@operator("ReverseSequence")
def reverse_sequence(x: Tensor, lengths: Tensor, *, batch_axis: int = 1, time_axis: int = 0) -> Tensor:
    """Reverse the first entries of each sequence of a batch."""
    offsets = [1] * x.ndim
    offsets[time_axis] = -1
    steps = arange(x.shape[time_axis]).reshape(offsets)
    offsets[time_axis], offsets[batch_axis] = 1, -1
    ends = lengths.to(int64).reshape(offsets)
    ids = top.where(steps < ends, ends - 1 - steps, steps).expand(*x.shape)
    return top.gather(x, time_axis, ids)


@operator("Col2Im", known=(1, 2))
def col2im(
    x: Tensor, image: Any, block: Any, *, dilations: Any = None, pads: Any = None, strides: Any = None
) -> Tensor:
    """Sum overlapping blocks to an image."""
    sizes, kernel = ints(image), ints(block)
    rank = len(sizes)
    steps, apart, around = strides or [1] * rank, dilations or [1] * rank, pads or [0] * 2 * rank
    if rank == 2 and around[:2] == around[2:]:
        return functional.fold(x, tuple(sizes), tuple(kernel), tuple(apart), tuple(around[:2]), tuple(steps))
    n, channels = x.shape[0], x.shape[1] // prod(kernel)
    wide = [s + a + b for s, a, b in zip(sizes, around[:rank], around[rank:], strict=True)]
    bounded(wide)
    flat = np.arange(prod(wide)).reshape(wide)
    counts = [(w - d * (k - 1) - 1) // s + 1 for w, k, d, s in zip(wide, kernel, apart, steps, strict=True)]
    ids = np.stack([flat[tuple(slice(o * d, o * d + (c - 1) * s + 1, s) for o, d, c, s in
                               zip(at, apart, counts, steps, strict=True))].reshape(-1)
                    for at in np.ndindex(*kernel)])  # fmt: skip
    values = x.reshape(n, channels, -1)
    empty = zeros(n, channels, prod(wide), dtype=x.dtype)
    made = top.index_add(empty, 2, as_tensor(ids.reshape(-1)), values).reshape(n, channels, *wide)
    for axis, (before, size) in enumerate(zip(around[:rank], sizes, strict=True), 2):
        made = made.narrow(axis, before, size)
    return made


# -- sequences ---------------------------------------------------------------------------------------------------------
@operator("SequenceEmpty")
def sequence_empty(*, dtype: int = 1) -> list[Tensor]:
    """Return a sequence without tensors."""
    return []


@operator("SequenceConstruct")
def sequence_construct(*tensors: Tensor) -> list[Tensor]:
    """Return a sequence of tensors."""
    return list(tensors)


@operator("SequenceAt", known=(1,))
def sequence_at(tensors: list[Tensor], position: Any) -> Tensor:
    """Return a tensor of a sequence."""
    return tensors[ints(position)[0]]


@operator("SequenceInsert", known=(2,))
def sequence_insert(tensors: list[Tensor], tensor: Tensor, position: Any = None) -> list[Tensor]:
    """Return a sequence with a tensor more."""
    made, at = list(tensors), len(tensors) if position is None else ints(position)[0]
    made.insert(at, tensor)
    return made


@operator("SequenceErase", known=(1,))
def sequence_erase(tensors: list[Tensor], position: Any = None) -> list[Tensor]:
    """Return a sequence without one of its tensors."""
    made = list(tensors)
    del made[-1 if position is None else ints(position)[0]]
    return made


@operator("SequenceLength")
def sequence_length(tensors: list[Tensor]) -> Tensor:
    """Return the number of tensors."""
    return as_tensor(np.array(len(tensors), np.int64))


@operator("ConcatFromSequence")
def concat_from_sequence(tensors: list[Tensor], *, axis: int, new_axis: int = 0) -> Tensor:
    """Join the tensors of a sequence along an axis, or along a new one."""
    return stack(tensors, axis) if new_axis else cat(tensors, axis)


@operator("SplitToSequence", known=(1,))
def split_to_sequence(x: Tensor, sizes: Any = None, *, axis: int = 0, keepdims: int = 1) -> list[Tensor]:
    """Split an axis into a sequence of tensors."""
    if sizes is None:
        parts = x.split(1, axis)
        return list(parts) if keepdims else [p.squeeze(axis) for p in parts]
    if np.asarray(sizes).ndim == 0:
        return list(x.split(ints(sizes)[0], axis))
    return list(x.split(ints(sizes), axis))
