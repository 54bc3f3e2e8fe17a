"""Views of a checkpoint in which parts of tensors are tensors: byte ranges under keys of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from graphwright.safetensors.header import TensorInfo
from graphwright.safetensors.reader import Checkpoint, TensorFile

Parts = Sequence[tuple[str, tuple[int, ...]]]
"""(key, shape) of the parts of a tensor, in the order of their bytes; together they have all of its elements."""


class _DividedFile(TensorFile):
    """A file whose `infos` name parts of its tensors; bytes are read through the file `whole`."""

    def __init__(self, whole: TensorFile, parts: Mapping[str, Parts]) -> None:  # no super: the file is open already
        self.whole, self.path, self.identity, self._fd = whole, whole.path, whole.identity, whole._fd
        self.metadata, self.payload_offset = whole.metadata, whole.payload_offset
        self.infos = tuple(part for info in whole.infos for part in _divided(info, parts.get(info.key)))
        self._by_key = {info.key: info for info in self.infos}
        self._map, self._closed, self._release = None, False, whole.close


class DividedCheckpoint(Checkpoint):
    """A checkpoint whose tensors in `parts` are divided; the others are as in the checkpoint `whole`."""

    def __init__(self, whole: Checkpoint, parts: Mapping[str, Parts]) -> None:
        self.whole, self.path, self.index, self.nbytes = whole, whole.path, whole.index, whole.nbytes
        self.files = tuple(_DividedFile(file, parts) for file in whole.files)
        self._by_key = {info.key: file for file in self.files for info in file.infos}


def _divided(info: TensorInfo, parts: Parts | None) -> list[TensorInfo]:
    if parts is None:
        return [info]
    at = [info.begin]
    for _, shape in parts:
        part = TensorInfo("", info.tag, shape, 0, 0)
        at.append(at[-1] + info.nbytes * part.numel // max(info.numel, 1))
    return [TensorInfo(key, info.tag, shape, *ends) for (key, shape), ends in zip(parts, pairwise(at), strict=True)]
