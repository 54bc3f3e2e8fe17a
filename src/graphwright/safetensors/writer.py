"""Writing one safetensors file: the header, then one tensor after another, so memory holds one tensor at most.

The file appears whole or not at all (`AtomicFile`), in the order given, with the bytes given; its payload starts at a
multiple of 8. A tensor that comes from another file is copied from the file, bit for bit, whatever its dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from graphwright.errors import UsageError
from graphwright.files import AtomicFile, Buffer, StrPath, flat_bytes
from graphwright.safetensors.checkpoint import Checkpoint
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
