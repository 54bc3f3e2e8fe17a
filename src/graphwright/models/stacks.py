"""Checkpoints that hold the matrices of all experts of a layer in one tensor: read as separate ones, and written back.

`save_pretrained(save_original_format=False)` of transformers writes such files. Each matrix is a byte range of the
tensor, so a program has the same parameters, under the same keys, whichever form the file has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from graphwright.files import flat_bytes
from graphwright.safetensors import Checkpoint, DividedCheckpoint, Stored, TensorData
from graphwright.safetensors.divided import Parts

if TYPE_CHECKING:
    from graphwright.models.architectures.architecture import Architecture, Stack
    from graphwright.safetensors import TensorInfo


def divide(checkpoint: Checkpoint, family: Architecture) -> Checkpoint:
    """Return a view of a checkpoint in which the stacked tensors of the family are separate; itself if it has none.

    A tensor that cannot be divided, or whose matrices are also tensors of their own, is left as it is.
    """
    parts: dict[str, Parts] = {}
    for stack in family.stacks:
        pattern = _pattern(stack.key, family.prefix)
        for info in checkpoint.infos():
            if (found := pattern.fullmatch(info.key)) is not None:
                named = [(found["start"] + key, shape) for key, shape in _parts(stack, info, found["i"], family.prefix)]
                if named and not any(key in checkpoint for key, _ in named if key != info.key):
                    parts[info.key] = named
    return DividedCheckpoint(checkpoint, parts) if parts else checkpoint


def _parts(stack: Stack, info: TensorInfo, layer: str, prefix: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return (key, shape) of each matrix in a tensor; none if its shape is not that of a stack."""
    keys, shape = [key.removeprefix(prefix) for key in stack.parts], info.shape
    if not any("{e}" in key for key in keys):
        return [(keys[0].format(i=layer), shape)]
    if len(shape) != 3 or shape[1] % len(keys):
        return []
    inner = (shape[1] // len(keys), shape[2])
    return [(key.format(i=layer, e=e), inner) for e in range(shape[0]) for key in keys]


def join(items: Iterable[TensorData], family: Architecture, source: DividedCheckpoint) -> Iterator[TensorData]:
    """Join separate matrices to the tensors that the divided source has.

    Matrices of unequal shape, or that are not all there, stay separate.
    """
    owners = [(_pattern(key, family.prefix), stack, n) for stack in family.stacks for n, key in enumerate(stack.parts)]
    found: dict[str, tuple[Stack | None, dict[tuple[int, int], TensorData]]] = {}
    for item in items:
        key, of, at = item.key, None, (0, 0)
        for pattern, stack, n in owners:
            if (match := pattern.fullmatch(item.key)) is not None:
                key = match["start"] + stack.key.removeprefix(family.prefix).format(i=match["i"])
                of, at = stack, (int(match.groupdict().get("e", 0)), n)
        found.setdefault(key, (of, {}))[1][at] = item
    for key, (stack, parts) in found.items():
        ordered = [parts[at] for at in sorted(parts)]
        if stack is None or not _fit(stack, parts):
            yield from (_of_whole(item, source.whole) for item in ordered)
        else:
            yield _joined(key, stack, ordered, source.whole)


def _fit(stack: Stack, parts: dict[tuple[int, int], TensorData]) -> bool:
    """Return whether all matrices of a stack are there, of one dtype and shape."""
    wanted = {(e, n) for e in range(max(parts)[0] + 1) for n in range(len(stack.parts))}
    return parts.keys() == wanted and len({(item.tag, item.shape) for item in parts.values()}) == 1


def _joined(key: str, stack: Stack, parts: list[TensorData], whole: Checkpoint) -> TensorData:
    """Return one tensor of matrices in their order: a reference to that of the file if all are as they were there."""
    first, each = parts[0], len(stack.parts)
    experts = [len(parts) // each] if any("{e}" in part for part in stack.parts) else []
    shape = (*experts, first.shape[0] * each, *first.shape[1:])
    kept = all(isinstance(item.data, Stored) and item.data.key == item.key for item in parts)
    if kept and key in whole and (info := whole.info(key)).shape == shape and info.tag == first.tag:
        return TensorData.stored(whole, key)

    def data() -> np.ndarray:
        return np.concatenate([np.frombuffer(flat_bytes(chunk), np.uint8) for item in parts for chunk in item.chunks()])

    return TensorData(key, first.tag, shape, data, sum(item.size for item in parts))


def _of_whole(item: TensorData, whole: Checkpoint) -> TensorData:
    """Return an item that refers to the file itself, if it refers to a whole tensor of a divided one."""
    if isinstance(item.data, Stored) and item.data.key in whole:
        return TensorData.stored(whole, item.data.key, item.key)
    return item


def _pattern(key: str, prefix: str) -> re.Pattern[str]:
    """Return a pattern for a key with `{i}` and `{e}`, before which a file may lack or repeat the prefix."""
    text = re.escape(key.removeprefix(prefix)).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{e\}", r"(?P<e>\d+)")
    return re.compile(f"(?P<start>(?:{re.escape(prefix)})*){text}")
