"""Views of a checkpoint in which tensors are joined: the bytes of several, one after another, under a new key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from graphwright.safetensors.header import TensorInfo
from graphwright.safetensors.reader import Checkpoint, TensorFile


class _JoinedFile(TensorFile):
    """A file whose `infos` name joined tensors where the first part was; bytes are read through `whole`."""

    def __init__(self, file: TensorFile, infos: Sequence[TensorInfo], joined: Mapping[str, Sequence[str]],
                 whole: Checkpoint) -> None:  # fmt: skip
        # no super: the file is open already
        self.file, self.path, self.identity, self._fd = file, file.path, file.identity, file._fd
        self.metadata, self.payload_offset = file.metadata, file.payload_offset
        self.infos = tuple(infos)
        self._by_key = {info.key: info for info in self.infos}
        self._joined, self._whole = joined, whole
        self._map, self._closed, self._release = None, False, file.close

    def bytes(self, key: str) -> memoryview:
        """Return the bytes of a tensor as a [nbytes] uint8 view, as `TensorFile.bytes`; of a joined one, as a copy."""
        if key not in self._joined:
            return super().bytes(key)
        data, at = memoryview(bytearray(self.info(key).nbytes)), 0
        for part in self._joined[key]:
            piece = self._whole.bytes(part)
            data[at : at + len(piece)] = piece
            at += len(piece)
        return data

    def chunks(self, key: str) -> Iterator[bytes]:
        """Yield the bytes of a tensor in pieces. Raises: UnknownKey; CheckpointChanged."""
        if key not in self._joined:
            yield from super().chunks(key)
        for part in self._joined.get(key, ()):
            yield from self._whole.file_of(part).chunks(part)


class JoinedCheckpoint(Checkpoint):
    """A checkpoint with tensors made of others: `joined` has their keys, shapes, and keys of the parts in byte order.

    The parts are not tensors of this view; those of the checkpoint `whole` are.
    """

    def __init__(self, whole: Checkpoint, joined: Mapping[str, tuple[tuple[int, ...], Sequence[str]]]) -> None:
        self.whole, self.path, self.index, self.nbytes = whole, whole.path, whole.index, whole.nbytes
        self.parts = {key: tuple(parts) for key, (_, parts) in joined.items()}
        first = {parts[0]: key for key, parts in self.parts.items()}
        gone = {part for parts in self.parts.values() for part in parts}
        self.files = tuple(_JoinedFile(file, list(self._infos(file, joined, first, gone)), self.parts, whole)
                           for file in whole.files)  # fmt: skip
        self._by_key = {info.key: file for file in self.files for info in file.infos}

    def _infos(
        self, file: TensorFile, joined: Mapping[str, tuple[tuple[int, ...], Sequence[str]]], first: Mapping[str, str],
        gone: set[str],
    ) -> Iterator[TensorInfo]:  # fmt: skip
        for info in file.infos:
            if info.key in first:
                shape, parts = joined[first[info.key]]
                yield TensorInfo(first[info.key], info.tag, shape, 0, sum(self.whole.info(p).nbytes for p in parts))
            elif info.key not in gone:
                yield info
