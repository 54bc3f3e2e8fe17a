"""A checkpoint: a file, or a directory with one file or an index and shards, seen as one set of keys.

Opening reads every header and no payload. The index is not trusted: a shard must be a plain file of the same
directory, and every key must be in exactly the shard that the index names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from graphwright.files import JsonError, StrPath, UnreadableFile, read_json
from graphwright.safetensors.errors import CheckpointError, CheckpointNotFound, IndexFileError
from graphwright.safetensors.header import TensorInfo
from graphwright.safetensors.reader import PICKLE_SUFFIXES, TensorFile, refuse_by_name, unknown_key

MAX_INDEX = 100_000_000  # bytes
INDEX_SUFFIX = ".safetensors.index.json"


class Checkpoint:
    """The tensors at `path`: a `.safetensors` file, an index, or a directory with `<stem>.safetensors` or an index.

    If a directory has both a whole file and an index, the file is used, as in transformers.

    >>> checkpoint = Checkpoint("TinyLlama-1.1B")
    >>> checkpoint.info("model.norm.weight").tag, checkpoint.nbytes
    ('BF16', 2200119296)

    Raises: CheckpointNotFound, UnsafeFile, HeaderError, IndexFileError, CheckpointError.
    """

    def __init__(self, path: StrPath, *, stem: str = "model") -> None:
        self.path = Path(path)
        self.index: Path | None = None
        found = _find(self.path, stem)
        if found.name.endswith(INDEX_SUFFIX):
            self.index = found
            self.files: tuple[TensorFile, ...] = _open_shards(found)
        else:
            self.files = (TensorFile(found),)
        self._file_of = {info.key: file for file in self.files for info in file.infos}
        self.nbytes = sum(info.nbytes for file in self.files for info in file.infos)

    def __repr__(self) -> str:
        count = len(self._file_of)
        return f"Checkpoint({str(self.path)!r}, {count} tensors in {len(self.files)} files, {self.nbytes} bytes)"

    def __contains__(self, key: object) -> bool:
        return key in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def keys(self) -> tuple[str, ...]:
        """Return all keys in file order: shards by name, tensors by their offset in the shard."""
        return tuple(self._file_of)

    def infos(self) -> tuple[TensorInfo, ...]:
        """Return the header entries of all tensors, in file order. Offsets are relative to each file."""
        return tuple(info for file in self.files for info in file.infos)

    def file_of(self, key: str) -> TensorFile:
        """Return the file that holds a tensor. Raises: UnknownKey."""
        try:
            return self._file_of[key]
        except KeyError:
            raise unknown_key(key, {info.key: info for info in self.infos()}, self.path) from None

    def info(self, key: str) -> TensorInfo:
        """Return dtype tag, shape and byte range of a tensor. Raises: UnknownKey."""
        return self.file_of(key).info(key)

    def bytes(self, key: str) -> memoryview:
        """Return a [nbytes] uint8 view of a tensor, as `TensorFile.bytes`. Raises: UnknownKey, CheckpointChanged."""
        return self.file_of(key).bytes(key)

    def close(self) -> None:
        """Close all files; returned views stay valid."""
        for file in self.files:
            file.close()


def _find(path: Path, stem: str) -> Path:
    if not path.is_dir():
        if not path.exists():
            raise CheckpointNotFound("the path does not exist", where=path)
        refuse_by_name(path)
        return path
    for name in (f"{stem}.safetensors", stem + INDEX_SUFFIX):
        if os.path.lexists(path / name):
            return path / name
    for name in sorted(os.listdir(path)):
        if Path(name).suffix.lower() in PICKLE_SUFFIXES:
            refuse_by_name(path / name)
    raise CheckpointNotFound(
        "no checkpoint in this directory", where=path, expected=f"{stem}.safetensors or {stem}{INDEX_SUFFIX}"
    )


def _open_shards(index: Path) -> tuple[TensorFile, ...]:
    weight_map = _read_weight_map(index)
    files = []
    holder: dict[str, str] = {}
    for name in sorted(set(weight_map.values())):
        _check_shard(index, name)
        try:
            file = TensorFile(index.parent / name)
        except CheckpointNotFound as error:
            raise IndexFileError("missing", name, where=index, fix="download the shard again") from error
        for info in file.infos:
            if info.key in holder:
                raise IndexFileError("twice", info.key, where=index, got=f"{holder[info.key]} and {name}")
            if info.key not in weight_map:
                raise IndexFileError("unlisted", info.key, where=index, got=name)
            holder[info.key] = name
        files.append(file)
    for key, name in weight_map.items():
        if holder.get(key) != name:
            raise IndexFileError("absent", key, where=index, expected=name, got=holder.get(key, "no shard"))
    return tuple(files)


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        content: Any = read_json(index, MAX_INDEX)
    except JsonError as error:
        raise IndexFileError(error.rule, error.key, where=index, expected=error.expected, got=error.got) from error
    except UnreadableFile as error:
        raise CheckpointError("cannot read the checkpoint index", where=index, got=error.got) from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise IndexFileError("weight_map", where=index)
    for key, name in weight_map.items():
        if not isinstance(name, str):
            raise IndexFileError("weight_map", key, where=index, got=type(name).__name__)
    return weight_map


def _check_shard(index: Path, name: str) -> None:
    """Check that a shard is a plain file name in the index's directory; links into the same hub cache are allowed."""
    if "\\" in name or "\0" in name or name != Path(name).name or len(name.encode()) > 255:
        raise IndexFileError("shard_name", name, where=index)
    refuse_by_name(index.parent / name)
    if not name.endswith(".safetensors"):
        raise IndexFileError("shard_name", name, where=index)
    folder = Path(os.path.realpath(index.parent))
    target = Path(os.path.realpath(folder / name))
    if target.parent == folder:
        return
    in_hub_cache = folder.parent.name == "snapshots" and target.parent == folder.parent.parent / "blobs"
    if not in_hub_cache:
        raise IndexFileError("outside", name, where=index, got=target)
