"""Checkpoints that divide the weights of a layer in another way: read as the program's, and written back.

Some classes have q, k and v in one matrix, or gate and up; `save_pretrained(save_original_format=False)` of
transformers writes all experts of a layer in one. Each matrix is a byte range of the tensor, or some of its columns,
so a program has the same parameters, under the same keys, whichever form the file has. The other way round,
files have a tensor per expert where the program of a class of transformers has one for all; its bytes are copied at
first use.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, takewhile
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.files import flat_bytes
from graphwright.safetensors import Checkpoint, DividedCheckpoint, JoinedCheckpoint, Stored, TensorData
from graphwright.safetensors.divided import Parts

if TYPE_CHECKING:
    from graphwright.models.architectures.architecture import Architecture, Join, Stack
    from graphwright.safetensors import TensorInfo

Shapes = Mapping[str, tuple[int, ...]]
"""Key of the weights of a family, with `{i}` -> their shape."""


def divide(checkpoint: Checkpoint, family: Architecture, dims: Any) -> Checkpoint:
    """Return a view of a checkpoint in which the stacked tensors of the family are separate; itself if it has none.

    `dims` are the sizes of the model. A tensor that cannot be divided, or whose matrices are also tensors of their own,
    is left as it is. In turn, tensors that are one weight of the family are joined, if they fit together.
    """
    joined = {join.key: found for join in family.joins if (found := _parts_of(join, checkpoint)) is not None}
    if joined:
        checkpoint = JoinedCheckpoint(checkpoint, joined)
    parts: dict[str, Parts] = {}
    transposed: set[str] = set()
    shapes = family.shapes(dims) if family.stacks else {}
    for stack in family.stacks:
        pattern = _pattern(stack.key, family.prefix)
        for info in checkpoint.infos():
            if (found := pattern.fullmatch(info.key)) is not None:
                layer = found.groupdict().get("i", "")
                own = _parts(stack, info, layer, shapes) if int(layer or 0) < dims.layers else []
                named = [(found["start"] + key.removeprefix(family.prefix), shape) for key, shape in own]
                if named and not any(key in checkpoint for key, _ in named if key != info.key):
                    parts[info.key] = named
                    transposed |= {info.key} if stack.transposed else set()
    return DividedCheckpoint(checkpoint, parts, transposed) if parts else checkpoint


def _parts_of(join: Join, files: Checkpoint) -> tuple[tuple[int, ...], list[str]] | None:
    """Return (shape, keys of the parts in byte order) of a weight that the files have as tensors; None if they do not.

    Tensors of several dtypes or shapes stay separate; they are then reported as unexpected.
    """
    has = (all(part.replace("{e}", str(e)) in files for part in join.parts) for e in count())
    experts = sum(1 for _ in takewhile(bool, has)) if join.stacked else int(next(has))
    if join.key in files or not experts:
        return None
    keys = join.keys(experts)
    infos, each = [files.info(key) for key in keys], len(join.parts)
    first = 0 if join.stacked else 1  # axis from which on all parts have the same sizes
    if len({(info.tag, info.shape[first:]) for info in infos}) > 1 or not infos[0].shape:
        return None
    inner = infos[0].shape
    if join.stacked:
        return (experts, inner[0] * each, *inner[1:]), keys
    return (sum(info.shape[0] for info in infos), *inner[1:]), keys


def _parts(stack: Stack, info: TensorInfo, layer: str, shapes: Shapes) -> list[tuple[str, tuple[int, ...]]]:
    """Return (the family's key, shape) of each matrix in a tensor; none if its shape is not that of a stack."""
    shape, count = info.shape, len(stack.parts)
    if any("{e}" in key for key in stack.parts):
        if len(shape) != 3 or shape[1] % count:
            return []
        inner = (shape[1] // count, shape[2])
        return [(key.format(i=layer, e=e), inner) for e in range(shape[0]) for key in stack.parts]
    if count == 1 and not stack.transposed:
        return [(stack.parts[0].format(i=layer), shape)]
    known = [(key.format(i=layer), shapes[key]) for key in stack.parts]
    return known if stacked_shape(stack, [s for _, s in known]) == shape else []


def stacked_shape(stack: Stack, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of the tensor that has matrices of these shapes, one below the other."""
    shape = (sum(rows for rows, *_ in shapes), *shapes[0][1:])
    return shape[::-1] if stack.transposed else shape


def stack_of(family: Architecture, key: str) -> tuple[Stack, str] | None:
    """Return (stack, key of the tensor) of a weight that the family's class has as part of a tensor; else None."""
    for stack in family.stacks:
        for part in stack.parts if stack.own else ():
            if (match := _pattern(part, "").fullmatch(key)) is not None:
                return stack, stack.key.format(**{k: v for k, v in match.groupdict().items() if k == "i"})
    return None


def join(items: Iterable[TensorData], family: Architecture, source: DividedCheckpoint | None) -> Iterator[TensorData]:
    """Join separate matrices to tensors: those of the family's class, and all that a divided source has.

    Matrices of unequal widths, or that are not all there, stay separate.
    """
    owners = [(_pattern(key, family.prefix), stack, n) for stack in family.stacks if stack.own or source is not None
              for n, key in enumerate(stack.parts)]  # fmt: skip
    found: dict[str, tuple[Stack | None, dict[tuple[int, int], TensorData]]] = {}
    for item in items:
        key, of, at = item.key, None, (0, 0)
        for pattern, stack, n in owners:
            if (match := pattern.fullmatch(item.key)) is not None:
                given = match.groupdict()
                key = match["start"] + stack.key.removeprefix(family.prefix).format(i=given.get("i"))
                of, at = stack, (int(given.get("e", 0)), n)
        found.setdefault(key, (of, {}))[1][at] = item
    whole = None if source is None else source.whole
    for key, (stack, parts) in found.items():
        ordered = [parts[at] for at in sorted(parts)]
        if stack is None or not _fit(stack, parts):
            yield from (_of_whole(item, whole) for item in ordered)
        else:
            yield _joined(key, stack, ordered, whole)


def split(items: Iterable[TensorData], joins: Iterable[Join], source: JoinedCheckpoint) -> Iterator[TensorData]:
    """Yield the tensors of files that have several instead of one weight; the others refer to the files themselves.

    A weight of another size whose parts may be of unequal sizes stays one tensor; transformers reads that, too.
    """
    known = {join.key: join for join in joins if join.key in source.parts}
    for item in items:
        join = known.get(item.key)
        keys = join.keys(item.shape[0]) if join is not None else []
        if isinstance(item.data, Stored) and item.data.key in source.parts:  # untouched
            parts = source.parts[item.data.key]
            if len(parts) == len(keys):
                yield from (TensorData.stored(source.whole, *names) for names in zip(parts, keys, strict=True))
            else:
                yield item
        elif join is not None and (join.stacked or item.shape == source.info(item.key).shape):
            yield from _pieces(item, join, keys, source.whole)
        else:
            yield _of_whole(item, source.whole)


def _pieces(item: TensorData, join: Join, keys: list[str], files: Checkpoint) -> Iterator[TensorData]:
    """Yield the parts of a changed weight; its bytes are computed once, for the first of the parts that is written."""
    if join.stacked:
        rows = item.shape[1] // len(join.parts)
        shapes = [(rows, *item.shape[2:])] * len(keys)
    else:
        shapes = [files.info(key).shape for key in keys]
    held: list[np.ndarray] = []
    left = set(keys)
    first = 0
    for key, shape in zip(keys, shapes, strict=True):
        size = item.size * prod(shape) // max(prod(item.shape), 1)

        def data(key: str = key, first: int = first, size: int = size) -> np.ndarray:
            if not held:
                held.append(np.concatenate([np.frombuffer(flat_bytes(c), np.uint8) for c in item.chunks()]))
            piece = held[0][first : first + size]
            left.discard(key)
            if not left:
                held.clear()
                left.update(keys)
            return piece

        yield TensorData(key, item.tag, shape, data, size)
        first += size


def _fit(stack: Stack, parts: dict[tuple[int, int], TensorData]) -> bool:
    """Return whether all matrices of a stack are there, of one dtype, and of one shape or at least width."""
    wanted = {(e, n) for e in range(max(parts)[0] + 1) for n in range(len(stack.parts))}
    first = 0 if any("{e}" in part for part in stack.parts) else 1
    return parts.keys() == wanted and len({(item.tag, item.shape[first:]) for item in parts.values()}) == 1


def _joined(key: str, stack: Stack, parts: list[TensorData], whole: Checkpoint | None) -> TensorData:
    """Return one tensor of matrices in their order: a reference to that of the file if all are as they were there."""
    first, each = parts[0], len(stack.parts)
    shape = stacked_shape(stack, [item.shape for item in parts])
    if any("{e}" in part for part in stack.parts):
        shape = (len(parts) // each, first.shape[0] * each, *first.shape[1:])
    kept = whole is not None and all(isinstance(item.data, Stored) and item.data.key == item.key for item in parts)
    if whole is not None and kept and key in whole:
        info = whole.info(key)
        if (info.shape, info.tag) == (shape, first.tag):
            return TensorData.stored(whole, key)

    def data() -> np.ndarray:
        stored = np.concatenate([np.frombuffer(flat_bytes(c), np.uint8) for item in parts for c in item.chunks()])
        return np.ascontiguousarray(stored.reshape(*shape[::-1], -1).swapaxes(0, 1)) if stack.transposed else stored

    return TensorData(key, first.tag, shape, data, sum(item.size for item in parts))


def _of_whole(item: TensorData, whole: Checkpoint | None) -> TensorData:
    """Return an item that refers to the file itself, if it refers to a whole tensor of a divided one."""
    if whole is not None and isinstance(item.data, Stored) and item.data.key in whole:
        return TensorData.stored(whole, item.data.key, item.key)
    return item


def _pattern(key: str, prefix: str) -> re.Pattern[str]:
    """Return a pattern for a key with `{i}` and `{e}`, before which a file may lack or repeat the prefix."""
    text = re.escape(key.removeprefix(prefix)).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{e\}", r"(?P<e>\d+)")
    return re.compile(f"(?P<start>(?:{re.escape(prefix)})*){text}")
