"""Checkpoints that hold several matrices of a layer in one tensor: read as separate ones, and written back.

Some classes have q, k and v in one matrix, or gate and up; `save_pretrained(save_original_format=False)` of
transformers writes all experts of a layer in one. Each matrix is a byte range of the tensor, or some of its columns,
so a program has the same parameters, under the same keys, whichever form the file has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.files import flat_bytes
from graphwright.safetensors import Checkpoint, DividedCheckpoint, Stored, TensorData
from graphwright.safetensors.divided import Parts

if TYPE_CHECKING:
    from graphwright.models.architectures.architecture import Architecture, Stack
    from graphwright.safetensors import TensorInfo

Shapes = Mapping[str, tuple[int, ...]]
"""Key of the weights of a family, with `{i}` -> their shape."""


def divide(checkpoint: Checkpoint, family: Architecture, dims: Any) -> Checkpoint:
    """Return a view of a checkpoint in which the stacked tensors of the family are separate; itself if it has none.

    `dims` are the sizes of the model. A tensor that cannot be divided, or whose matrices are also tensors of their own,
    is left as it is.
    """
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
