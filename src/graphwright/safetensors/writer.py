"""Write safetensors files: the header, then one tensor after another, so that memory holds one tensor at most.

A file appears complete or not at all (`AtomicFile`), with tensors in the given order; its payload starts at a multiple
of 8. Tensors from another file are copied bit for bit, whatever their dtype.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from graphwright.errors import UsageError
from graphwright.files import (
    AtomicFile,
    Buffer,
    DestinationExists,
    StrPath,
    UnwritableTarget,
    atomic_write,
    flat_bytes,
    read_file,
    sweep_files,
)
from graphwright.safetensors.errors import HeaderError
from graphwright.safetensors.header import BITS, Header, TensorInfo, build_header
from graphwright.safetensors.reader import INDEX_SUFFIX, Checkpoint, TensorFile

_SMALL = 1 << 16  # bytes, below which chunks are joined


@dataclass(frozen=True, slots=True)
class Stored:
    """A reference to the bytes of the tensor `key` in a file."""

    file: TensorFile
    key: str


@dataclass(frozen=True, slots=True, eq=False)  # buffers do not compare
class TensorData:
    """A tensor to write: its key, dtype tag, shape, and the source of its bytes.

    `data` is a C-contiguous buffer (numpy array, bytes, memoryview), a function that returns one when it is written,
    or `Stored`. `nbytes` is needed only for a dtype tag that is not in `BITS` when `data` is a function.
    """

    key: str
    tag: str
    shape: tuple[int, ...]
    data: Buffer | Callable[[], Buffer] | Stored
    nbytes: int | None = None

    @classmethod
    def stored(cls, source: Checkpoint | TensorFile, key: str, name: str | None = None) -> TensorData:
        """Return data that copies a tensor of a checkpoint, under `name` (default: its key). Raises: UnknownKey."""
        file = source.file_of(key) if isinstance(source, Checkpoint) else source
        info = file.info(key)
        return cls(key if name is None else name, info.tag, info.shape, Stored(file, key), info.nbytes)

    @property
    def size(self) -> int:
        """Size of the tensor in the file, in bytes. Raises: UsageError if the size cannot be determined."""
        if self.nbytes is not None:
            return self.nbytes
        if (bits := BITS.get(self.tag)) is not None:
            return prod(self.shape) * bits // 8
        if isinstance(self.data, Stored):
            return self.data.file.info(self.data.key).nbytes
        if callable(self.data):
            raise UsageError("the size of this dtype is unknown", where=self.key, expected="a known tag, or nbytes",
                             got=self.tag, fix="pass nbytes: TensorData(..., nbytes=...)")  # fmt: skip
        return flat_bytes(self.data).nbytes

    def is_untouched(self, file: TensorFile) -> bool:
        """Return True if this copies the tensor of `file` with the same key, dtype tag and shape."""
        if not isinstance(self.data, Stored) or self.data != Stored(file, self.key):
            return False
        info = file.info(self.key)
        return (self.tag, self.shape) == (info.tag, info.shape)

    def chunks(self) -> Iterator[Buffer]:
        """Yield the bytes of the tensor in order, as one or more buffers."""
        if isinstance(self.data, Stored):
            yield from self.data.file.chunks(self.data.key)
        else:
            yield self.data() if callable(self.data) else self.data


def write_tensors(
    path: StrPath, items: Iterable[TensorData], metadata: Mapping[str, str] | None = None, *, durable: bool = True
) -> Header:
    """Write a safetensors file atomically; return its header.

    Args:
        path: the file; an existing one is replaced once the new one is complete.
        items: the tensors, in file order.
        metadata: `__metadata__`; `format: pt` is added if it has no `format`, because transformers requires it.
        durable: fsync the file and its directory; see `AtomicFile`.
    Raises: HeaderError for an invalid header, with the rule `size` if a buffer does not match shape and dtype tag;
        UnwritableTarget; UsageError for a buffer that is not contiguous. After an error, no new file is left.
    """
    items = tuple(items)
    start, header = plan_header(items, metadata or {})
    write_planned(path, items, start, durable=durable)
    return header


def write_planned(path: StrPath, items: Sequence[TensorData], start: bytes, *, durable: bool = True) -> None:
    """Write a safetensors file atomically, given its first bytes from `plan_header`; raises as `write_tensors`."""
    with AtomicFile(path, durable=durable) as file:
        file.write(start)
        for buffer in _joined(_payload(items, path)):
            file.write(buffer)


def _payload(items: Sequence[TensorData], path: StrPath) -> Iterator[memoryview]:
    """Yield the bytes of tensors in order. Raises: HeaderError if a tensor has another number of bytes."""
    for item in items:
        written = 0
        for chunk in map(flat_bytes, item.chunks()):
            yield chunk
            written += chunk.nbytes
        if written != item.size:
            raise HeaderError("size", item.key, where=path, expected=f"{item.size} bytes", got=f"{written} bytes")


def _joined(chunks: Iterable[memoryview]) -> Iterator[Buffer]:
    """Yield the same bytes with small chunks joined: of many small tensors, system calls would take the most time."""
    small = bytearray()
    for chunk in chunks:
        large = len(chunk) >= _SMALL
        if not large:
            small += chunk
        if small and (large or len(small) >= _SMALL):
            yield small
            small = bytearray()
        if large:
            yield chunk
    if small:
        yield small


def with_format(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of `metadata`, with `format: pt` added if it names no format."""
    return {**metadata} if "format" in metadata else {**metadata, "format": "pt"}


def plan_header(items: Sequence[TensorData], metadata: Mapping[str, str]) -> tuple[bytes, Header]:
    """Return the first bytes of a file of tensors, and its header. Raises: HeaderError."""
    infos, at = [], 0
    for item in items:
        size = item.size
        infos.append(TensorInfo(item.key, item.tag, item.shape, at, at + size))
        at += size
    metadata = with_format(metadata)
    start = build_header(infos, metadata)  # has read it again
    return start, Header(tuple(infos), metadata, len(start))


@dataclass(frozen=True, slots=True)
class Shard:
    """One planned file of a checkpoint: tensors, `__metadata__`, and the unchanged file that it copies, if any."""

    items: tuple[TensorData, ...]
    metadata: dict[str, str]
    copy_of: TensorFile | None = None

    @property
    def nbytes(self) -> int:
        """Size of the payload in bytes."""
        return sum(item.size for item in self.items)


def write_checkpoint(
    directory: StrPath, items: Iterable[TensorData], max_shard_size: int | str = "5GB",
    metadata: Mapping[str, str] | None = None, plan: Checkpoint | None = None, *, stem: str = "model",
) -> tuple[Path, ...]:  # fmt: skip
    """Write a checkpoint into a directory; return the files, the index last if there is one.

    Each file appears complete or not at all. To make the whole directory atomic, use `atomic_directory`.

    Args:
        directory: created if missing; must not hold a checkpoint of this stem, so a source is never overwritten.
        items: the tensors. Without a plan, files follow their order.
        max_shard_size: bytes of payload, or "5GB" (10^9) or "5GiB" (2^30); a larger tensor becomes its own shard.
        metadata: `__metadata__` of every file; None keeps that of the planned files.
        plan: a checkpoint whose layout is kept. A shard of which all tensors are `TensorData.stored` under their own
            key is copied as a file; a changed shard keeps its order and metadata; new keys come last.
        stem: file names are `<stem>.safetensors`, or `<stem>-00001-of-00003.safetensors` and an index.
    Raises: DestinationExists, HeaderError, UnwritableTarget, CheckpointChanged, UsageError; then no file is left.
    """
    items = tuple(items)
    limit = parse_size(max_shard_size)
    for key, count in Counter(item.key for item in items).items():
        if count > 1:
            raise HeaderError("duplicate", key, expected="one tensor with this key", got=f"{count} tensors")
    shards = plan_shards(items, limit, metadata or {}) if plan is None else plan_like(plan, items, limit, metadata)
    folder = Path(directory)
    known = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = any(map(known.fullmatch, os.listdir(folder)))
    except FileExistsError as error:
        raise DestinationExists("the destination is a file", where=folder, fix="choose another path") from error
    except OSError as error:
        raise UnwritableTarget("cannot create the directory", where=folder, cause=error) from error
    if taken:
        raise DestinationExists("the directory holds a checkpoint already", where=folder, fix="choose another path")
    sweep_files(folder, known)  # of another number of shards, too
    names = _names(shards, plan, stem)
    written: list[Path] = []
    try:
        for name, shard in zip(names, shards, strict=True):
            written.append(folder / name)
            if shard.copy_of is not None:
                atomic_write(folder / name, shard.copy_of.file_chunks())
            else:
                write_tensors(folder / name, shard.items, shard.metadata)
        if names != [f"{stem}.safetensors"]:
            written.append(folder / (stem + INDEX_SUFFIX))
            atomic_write(written[-1], _index(names, shards, plan))
    except BaseException:
        for path in written:
            with suppress(OSError):
                path.unlink()
        raise
    return tuple(written)


def plan_shards(items: Sequence[TensorData], max_bytes: int, metadata: Mapping[str, str]) -> list[Shard]:
    """Distribute `items` to shards, in order; each has at most `max_bytes` of payload, or a single larger tensor."""
    return _fill([Shard((), with_format(metadata))], items, max_bytes)


def plan_like(
    source: Checkpoint, items: Sequence[TensorData], max_bytes: int, metadata: Mapping[str, str] | None = None
) -> list[Shard]:
    """Plan shards for `items` with the layout and order of `source`; keys that `source` lacks come last.

    A shard whose tensors are all unchanged is marked as a copy of its file. A shard without a tensor left is omitted.
    """
    rest = {item.key: item for item in items}
    shards = []
    for file in source.files:
        kept = tuple(rest.pop(info.key) for info in file.infos if info.key in rest)
        shard = Shard(kept, with_format(file.metadata if metadata is None else metadata))
        if len(kept) == len(file.infos) and shard.metadata == with_format(file.metadata):
            shard = replace(shard, copy_of=file if all(item.is_untouched(file) for item in kept) else None)
        if kept or not file.infos:
            shards.append(shard)
    return _fill(shards or [Shard((), with_format(metadata or {}))], tuple(rest.values()), max_bytes)


def parse_size(size: int | str) -> int:
    """Return a size in bytes, given as a number or as text: "300MB" (10^6), "2GiB" (2^30). Raises: UsageError."""
    if isinstance(size, int):
        found = size
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B\s*", str(size), re.IGNORECASE)
        base = 1024 if match and match[3] else 1000
        found = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " ")) if match else 0
    if found <= 0:
        raise UsageError("invalid shard size", expected='a positive number of bytes, or "5GB"', got=size)
    return found


def _fill(shards: list[Shard], items: Sequence[TensorData], max_bytes: int) -> list[Shard]:
    """Append `items` to the last shard up to `max_bytes`, then to new shards with the same metadata."""
    last = shards[-1]
    groups, filled = [list(last.items)], last.nbytes
    for item in items:
        if groups[-1] and filled + item.size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += item.size
    if len(groups[0]) > len(last.items):
        last = Shard(tuple(groups[0]), last.metadata)
    return [*shards[:-1], last, *(Shard(tuple(group), last.metadata) for group in groups[1:])]


def _names(shards: Sequence[Shard], plan: Checkpoint | None, stem: str) -> list[str]:
    if plan is not None and plan.index is not None and len(plan.files) == len(shards):
        return [file.path.name for file in plan.files]
    if len(shards) == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]


def _index(names: Sequence[str], shards: Sequence[Shard], plan: Checkpoint | None) -> bytes:
    """Return the index file as JSON: the one of `plan`, with all its fields, if it is still correct, else a new one."""
    weight_map = {item.key: name for name, shard in zip(names, shards, strict=True) for item in shard.items}
    total = sum(shard.nbytes for shard in shards)
    if plan is not None and plan.index is not None:
        before = read_file(plan.index)
        known = json.loads(before)  # validated when the checkpoint was opened
        facts = known.get("metadata")
        copied = [shard.copy_of.path.name for shard in shards if shard.copy_of is not None]
        same = known["weight_map"] == weight_map and isinstance(facts, dict) and facts.get("total_size") == total
        if copied == list(names) or same:
            return before
    return index_file(weight_map, total)


def index_file(weight_map: Mapping[str, str], total: int) -> bytes:
    """Return an index: the file of each key, and the bytes of all tensors."""
    content = {"metadata": {"total_size": total}, "weight_map": dict(weight_map)}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
