"""Views of a checkpoint in which parts of tensors are tensors: byte ranges, or columns, under keys of their own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise

from graphwright.safetensors.header import TensorInfo
from graphwright.safetensors.reader import Checkpoint, TensorFile

Parts = Sequence[tuple[str, tuple[int, ...]]]
"""(key, shape) of the parts of a tensor, in the order of their bytes; together they have all of its elements."""


class _DividedFile(TensorFile):
    """A file whose `infos` name parts of its tensors; bytes are read through the file `whole`.

    A part of a tensor in `transposed` is some of its columns, transposed: its bytes are a copy.
    """

    def __init__(self, whole: TensorFile, parts: Mapping[str, Parts], transposed: Collection[str]) -> None:
        # no super: the file is open already
        self.whole, self.path, self.identity, self._fd = whole, whole.path, whole.identity, whole._fd
        self.metadata, self.payload_offset = whole.metadata, whole.payload_offset
        self.infos = tuple(part for info in whole.infos for part in _divided(info, parts.get(info.key)))
        self._by_key = {info.key: info for info in self.infos}
        self._columns = {key: at for k in transposed if k in whole for key, at in _columns(k, parts[k])}
        self._map, self._closed, self._release = None, False, whole.close

    def bytes(self, key: str) -> memoryview:
        """Return the bytes of a tensor as a [nbytes] uint8 view, as `TensorFile.bytes`; of columns, as a copy."""
        if key not in self._columns:
            return super().bytes(key)
        import numpy as np  # late: reading headers needs no arrays

        name, columns = self._columns[key]
        stored = np.frombuffer(self.whole.bytes(name), np.uint8).reshape(*self.whole.info(name).shape, -1)
        return np.ascontiguousarray(stored[:, columns].swapaxes(0, 1)).reshape(-1).data

    def chunks(self, key: str) -> Iterator[bytes]:
        """Yield the bytes of a tensor in pieces. Raises: UnknownKey; CheckpointChanged."""
        return iter([bytes(self.bytes(key))]) if key in self._columns else super().chunks(key)


class DividedCheckpoint(Checkpoint):
    """A checkpoint whose tensors in `parts` are divided; the others are as in the checkpoint `whole`.

    The parts of a tensor [m, n] in `transposed` are some of its n columns each, transposed.
    """

    def __init__(self, whole: Checkpoint, parts: Mapping[str, Parts], transposed: Collection[str] = ()) -> None:
        self.whole, self.path, self.index, self.nbytes = whole, whole.path, whole.index, whole.nbytes
        self.files = tuple(_DividedFile(file, parts, transposed) for file in whole.files)
        self._by_key = {info.key: file for file in self.files for info in file.infos}


def _columns(whole: str, parts: Parts) -> Iterator[tuple[str, tuple[str, slice]]]:
    """Yield (key of a part, (key of the tensor, columns that the part has)) of a transposed tensor."""
    first = 0
    for key, shape in parts:
        yield key, (whole, slice(first, first + shape[0]))
        first += shape[0]


def _divided(info: TensorInfo, parts: Parts | None) -> list[TensorInfo]:
    if parts is None:
        return [info]
    at = [info.begin]
    for _, shape in parts:
        part = TensorInfo("", info.tag, shape, 0, 0)
        at.append(at[-1] + info.nbytes * part.numel // max(info.numel, 1))
    return [TensorInfo(key, info.tag, shape, *ends) for (key, shape), ends in zip(parts, pairwise(at), strict=True)]
