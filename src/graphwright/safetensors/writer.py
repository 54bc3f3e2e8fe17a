"""Writing one safetensors file: the header, then one tensor after another, so memory holds one tensor at most.

The file appears whole or not at all (`AtomicFile`), in the order given, with the bytes given; its payload starts at a
multiple of 8. A tensor that comes from another file is copied from the file, bit for bit, whatever its dtype.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from graphwright.errors import UsageError
from graphwright.files import AtomicFile, Buffer, DestinationExists, StrPath, UnwritableTarget, atomic_write, flat_bytes
from graphwright.safetensors.checkpoint import INDEX_SUFFIX, Checkpoint
from graphwright.safetensors.errors import HeaderError
from graphwright.safetensors.header import BITS, Header, TensorInfo, build_header, parse_header
from graphwright.safetensors.reader import TensorFile


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes of a tensor that lie in a file already, under `key`."""

    file: TensorFile
    key: str


@dataclass(frozen=True, slots=True, eq=False)  # buffers do not compare
class TensorData:
    """A tensor to write: its key, dtype tag, shape, and where its bytes come from.

    `data` is a C-contiguous buffer (numpy array, bytes, memoryview), a function that makes one when its turn has come,
    or `Stored`. `nbytes` need be given only for a dtype tag that is not in `BITS` when `data` is a function.
    """

    key: str
    tag: str
    shape: tuple[int, ...]
    data: Buffer | Callable[[], Buffer] | Stored
    nbytes: int | None = None

    @classmethod
    def stored(cls, source: Checkpoint | TensorFile, key: str, name: str | None = None) -> TensorData:
        """A tensor of a checkpoint as it is, to be written under `name` (default: the same key). Raises: UnknownKey."""
        file = source.file_of(key) if isinstance(source, Checkpoint) else source
        info = file.info(key)
        return cls(key if name is None else name, info.tag, info.shape, Stored(file, key), info.nbytes)

    @property
    def size(self) -> int:
        """Bytes that the tensor takes in a file. Raises: UsageError if nothing says."""
        if self.nbytes is not None:
            return self.nbytes
        if (bits := BITS.get(self.tag)) is not None:
            return prod(self.shape) * bits // 8
        if isinstance(self.data, Stored):
            return self.data.file.info(self.data.key).nbytes
        if callable(self.data):
            raise UsageError("the size of this tensor is not known", where=self.key, got=self.tag, fix="give nbytes")
        return flat_bytes(self.data).nbytes

    def is_untouched(self, file: TensorFile) -> bool:
        """True if this is the tensor that `file` has under the same key, with nothing changed."""
        if not isinstance(self.data, Stored) or self.data != Stored(file, self.key):
            return False
        info = file.info(self.key)
        return (self.tag, self.shape) == (info.tag, info.shape)

    def chunks(self) -> Iterator[Buffer]:
        """Its bytes, in order."""
        if isinstance(self.data, Stored):
            yield from self.data.file.chunks(self.data.key)
        else:
            yield self.data() if callable(self.data) else self.data


def write_tensors(path: StrPath, items: Iterable[TensorData], metadata: Mapping[str, str] | None = None) -> Header:
    """Write a safetensors file, atomically; returns the header that it has now.

    Args:
        path: the file; one that stands there is replaced when the new one is whole.
        items: the tensors, in the order in which the file shall have them.
        metadata: `__metadata__`; `format: pt` is added if it has no `format`, since transformers asks for it.
    Raises: HeaderError(rule, key) for what no reader would accept, `size` if a buffer is not what shape and tag say;
        UnwritableTarget; UsageError for a buffer that is not contiguous. Nothing is left of a file that failed.
    """
    items = tuple(items)
    start, header = _plan_header(items, metadata or {})
    with AtomicFile(path) as file:
        file.write(start)
        for item in items:
            written = sum(file.write(flat_bytes(chunk)) for chunk in item.chunks())
            if written != item.size:
                raise HeaderError("size", item.key, where=path, expected=item.size, got=written)
    return header


def with_format(metadata: Mapping[str, str]) -> dict[str, str]:
    """`metadata` with `format: pt` unless it names a format."""
    return {**metadata} if "format" in metadata else {**metadata, "format": "pt"}


def _plan_header(items: tuple[TensorData, ...], metadata: Mapping[str, str]) -> tuple[bytes, Header]:
    infos, at = [], 0
    for item in items:
        size = item.size
        infos.append(TensorInfo(item.key, item.tag, item.shape, at, at + size))
        at += size
    start = build_header(infos, with_format(metadata))
    return start, parse_header(start[8:], at)


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a checkpoint to be: its tensors, its `__metadata__`, and the unchanged file that it is a copy of."""

    items: tuple[TensorData, ...]
    metadata: dict[str, str]
    copy_of: TensorFile | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return sum(item.size for item in self.items)


def write_checkpoint(
    directory: StrPath,
    items: Iterable[TensorData],
    max_shard_size: int | str = "5GB",
    metadata: Mapping[str, str] | None = None,
    plan: Checkpoint | None = None,
    *,
    stem: str = "model",
) -> tuple[Path, ...]:
    """Write a checkpoint into a directory; returns the files, the index last if there is one.

    Each file appears whole or not at all; for the directory as a whole, write into the one `atomic_directory` yields.

    Args:
        directory: made if absent; must not hold a checkpoint of this stem, so the source is never written into.
        items: the tensors. Without a plan their order is the order of the files.
        max_shard_size: bytes of payload, or "5GB" (10^9) or "5GiB" (2^30); a larger tensor is a shard of its own.
        metadata: `__metadata__` of every file; None keeps what the planned files have.
        plan: the checkpoint whose layout is kept. A shard of which all tensors are `TensorData.stored` under their own
            key is copied as a file; a touched one keeps order and metadata; new keys follow in the last shard and on.
        stem: file names are `<stem>.safetensors`, or `<stem>-00001-of-00003.safetensors` and an index.
    Raises: DestinationExists, HeaderError, UnwritableTarget, CheckpointChanged, UsageError; nothing is left.
    """
    items = tuple(items)
    limit = parse_size(max_shard_size)
    _refuse_repeated(items)
    shards = plan_shards(items, limit, metadata or {}) if plan is None else plan_like(plan, items, limit, metadata)
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_occupied(folder, stem)
    except FileExistsError as error:
        raise DestinationExists("a checkpoint or file stands here", where=folder, fix="name another place") from error
    except OSError as error:
        raise UnwritableTarget("cannot make this directory", where=folder, cause=error) from error
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
    """Fill shards in the order of `items`; each holds at most `max_bytes` of payload, or a single larger tensor."""
    return _fill([Shard((), with_format(metadata))], items, max_bytes)


def plan_like(
    source: Checkpoint, items: Sequence[TensorData], max_bytes: int, metadata: Mapping[str, str] | None = None
) -> list[Shard]:
    """Lay `items` out as `source` is: shard by shard, in its order; keys that it lacks come last.

    A shard with the same tensors, untouched, is marked as a copy. One that lost all its tensors is left out.
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
    """Bytes of "300MB" (10^6), "2GiB" (2^30) or a number. Raises: UsageError."""
    if isinstance(size, int):
        found = size
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B\s*", str(size), re.IGNORECASE)
        base = 1024 if match and match[3] else 1000
        found = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " ")) if match else 0
    if found <= 0:
        raise UsageError("this is no size of a shard", expected='bytes, or "5GB"', got=size)
    return found


def _fill(shards: list[Shard], items: Sequence[TensorData], max_bytes: int) -> list[Shard]:
    """Put `items` into the last shard while they fit, then into new ones with the same metadata."""
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
    """The index: the planned one as it is while it is true, so that what else it says stays."""
    weight_map = {item.key: name for name, shard in zip(names, shards, strict=True) for item in shard.items}
    total = sum(shard.nbytes for shard in shards)
    if plan is not None and plan.index is not None:
        before = plan.index.read_bytes()
        known = json.loads(before)  # it was read and checked when the checkpoint was opened
        facts = known.get("metadata")
        copied = [shard.copy_of.path.name for shard in shards if shard.copy_of is not None]
        same = known["weight_map"] == weight_map and isinstance(facts, dict) and facts.get("total_size") == total
        if copied == list(names) or same:
            return before
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _refuse_repeated(items: Sequence[TensorData]) -> None:
    seen: set[str] = set()
    for item in items:
        if item.key in seen:
            raise HeaderError("duplicate", item.key)
        seen.add(item.key)


def _refuse_occupied(folder: Path, stem: str) -> None:
    pattern = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")
    for name in os.listdir(folder):
        if pattern.fullmatch(name):
            raise FileExistsError(name)
