"""Read safetensors files and sharded checkpoints: headers on opening, bytes through a memory map on first use.

The mapping is private and writable: writable because torch warns about read-only buffers; private so that a write
changes a page of this process and never the file. It reserves no memory, so that files larger than RAM can be mapped.
Tensors copied into other files are read from the file, not from the mapping.
"""

from __future__ import annotations

import mmap
import os
import shlex
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, NamedTuple, Self
from weakref import finalize

from graphwright.errors import check_type
from graphwright.files import JsonError, StrPath, UnreadableFile, read_json
from graphwright.files.regular import READ
from graphwright.safetensors.errors import (
    CheckpointChanged,
    CheckpointClosed,
    CheckpointError,
    CheckpointNotFound,
    HeaderError,
    IndexFileError,
    UnknownKey,
    UnsafeFile,
)
from graphwright.safetensors.header import LENGTH, Header, TensorInfo, header_length, parse_header

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
_ZIP = b"PK\x03\x04"
_CONVERT = (
    "import sys, torch; from safetensors.torch import save_file; "
    "t = torch.load(sys.argv[1], map_location='cpu', weights_only=True); "
    "save_file({k: v.clone().contiguous() for k, v in t.items()}, sys.argv[2])"
)


def conversion_command(path: Path) -> str:
    """Return a shell command that converts a PyTorch file to safetensors with torch's weights-only loader."""
    target = path.with_suffix(".safetensors")
    if target == path:  # a pickle with that suffix: do not overwrite it
        target = path.with_stem(f"{path.stem}-converted")
    return shlex.join(["python", "-c", _CONVERT, str(path), str(target)])


def refuse_by_name(path: Path) -> None:
    """Refuse a path with the suffix of a pickle file. Raises: UnsafeFile."""
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise _unsafe(path, f"a {path.suffix} file")


def refuse_by_magic(path: Path, start: bytes) -> None:
    """Refuse a file whose first bytes `start` (9 or more) begin a pickle or zip archive. Raises: UnsafeFile.

    The length field of a 640-byte header begins like a pickle (80 02), but the `{` of the JSON follows it.
    """
    if start[8:9] == b"{" and start[4:8] == bytes(4):
        return
    if start.startswith(_ZIP):
        raise _unsafe(path, "a zip archive, as torch.save writes")
    if start[:1] == b"\x80" and start[1:2] in (b"\x01", b"\x02", b"\x03", b"\x04", b"\x05"):
        raise _unsafe(path, "a pickle")


def _unsafe(path: Path, got: str) -> UnsafeFile:
    what, fix = "this file may run code when it is loaded, so it is not read", conversion_command(path)
    return UnsafeFile(what, where=path, expected="a safetensors file", got=got, fix=fix)


CHUNK = 4 << 20  # bytes per read when copying: large beside the call overhead, small beside large tensors
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # the value on Linux; in Python from 3.13 on


class FileIdentity(NamedTuple):
    """The identity of an opened file: size in bytes, modification time in ns, inode and device."""

    size: int
    mtime_ns: int
    inode: int
    device: int


def _identity(file: Path | int) -> FileIdentity:
    found = os.stat(file)
    return FileIdentity(found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev)


class _KeyedFile:
    """Base class of readers: `key in reader` tests for a tensor, and a `with` block closes the files at its end."""

    _by_key: Mapping[str, Any]

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError("the subclass does not implement close()")


class TensorFile(_KeyedFile):
    """A safetensors file. Only the header is read at first.

    The file stays open until `close`, so that its bytes can be read after the path was replaced or removed.

    >>> TensorFile("model.safetensors").info("lm_head.weight").shape
    (32000, 2048)

    Raises: CheckpointNotFound; UnsafeFile for a pickle; HeaderError; CheckpointError if the file cannot be read.
    """

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path)
        refuse_by_name(self.path)
        header, self.identity, self._fd = _opened(self.path)
        self._release = finalize(self, os.close, self._fd)
        self.infos: tuple[TensorInfo, ...] = header.infos
        self.metadata: dict[str, str] = header.metadata
        self.payload_offset: int = header.payload_offset
        self._by_key = {info.key: info for info in header.infos}
        self._map: mmap.mmap | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"TensorFile({str(self.path)!r}, {len(self.infos)} tensors, {self.identity.size} bytes)"

    def info(self, key: str) -> TensorInfo:
        """Return the header entry of a tensor. Raises: UnknownKey."""
        try:
            return self._by_key[key]
        except KeyError:
            raise unknown_key(key, self._by_key, self.path) from None

    def bytes(self, key: str) -> memoryview:
        """Return a writable [nbytes] uint8 view of a tensor in the mapping; writes never reach the file.

        The view outlives `close()`. Its alignment depends on the header length of the file.
        The file is checked before mapping. If another process truncates it later, the operating system terminates this
        process at the first access to a missing page, which no check can prevent.
        Raises: UnknownKey; CheckpointChanged; CheckpointClosed.
        """
        info = self.info(key)
        self.check_unchanged()
        if info.nbytes == 0:
            return memoryview(bytearray())
        start = self.payload_offset
        return memoryview(self._mapping())[start + info.begin : start + info.end]

    def chunks(self, key: str) -> Iterator[bytes]:
        """Yield the bytes of a tensor, read from the file in pieces. Raises: UnknownKey; CheckpointChanged."""
        info = self.info(key)
        return self._read(self.payload_offset + info.begin, self.payload_offset + info.end)

    def file_chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the whole file, header included, in pieces. Raises: CheckpointChanged."""
        return self._read(0, self.identity.size)

    def check_unchanged(self) -> None:
        """Check that the opened file was not modified in place. Raises: CheckpointChanged; CheckpointClosed."""
        if self._closed:
            raise CheckpointClosed("the checkpoint was closed before this read", where=self.path, fix="open it again")
        if (now := _identity(self._fd)) != self.identity:
            raise self._changed(now)

    def check_mapped(self) -> None:
        """Check that the mapped file was not modified in place; replacing it is allowed. Raises: CheckpointChanged."""
        try:
            now = _identity(self.path if self._closed else self._fd)
        except OSError:
            return
        if now[2:] == self.identity[2:] and now != self.identity:
            raise self._changed(now)

    def close(self) -> None:
        """Close the file. Returned views stay valid; the memory is freed with the last of them."""
        self._closed = True
        self._map = None
        self._release()

    def _mapping(self) -> mmap.mmap:
        if self._map is None:
            if os.name == "nt":
                self._map = mmap.mmap(self._fd, self.identity.size, access=mmap.ACCESS_COPY)
            else:
                flags = mmap.MAP_PRIVATE | (_NORESERVE if sys.platform == "linux" else 0)
                prot = mmap.PROT_READ | mmap.PROT_WRITE
                self._map = mmap.mmap(self._fd, self.identity.size, flags=flags, prot=prot)
        return self._map

    def _read(self, begin: int, end: int) -> Iterator[bytes]:
        self.check_unchanged()
        while begin < end:
            chunk = _read_at(self._fd, begin, min(CHUNK, end - begin))
            if not chunk:
                raise self._changed("the file is shorter than before")
            begin += len(chunk)
            yield chunk
        if _identity(self._fd) != self.identity:
            raise self._changed("the file was written while it was read")

    def _changed(self, got: object) -> CheckpointChanged:
        fix = "open it again, and write new checkpoints beside the old instead of into it"
        what = "the file changed after it was opened"
        return CheckpointChanged(what, where=self.path, expected=self.identity, got=got, fix=fix)


def unknown_key(key: str, known: Iterable[str], where: object) -> UnknownKey:
    """Return the error for an unknown key, with similar keys."""
    import difflib  # late: only errors need it

    near = difflib.get_close_matches(key, list(known)[:5000], n=3)
    fix = f"use one of the nearest keys: {', '.join(near)}" if near else None
    return UnknownKey("the checkpoint has no tensor with this key", where=where, got=key, fix=fix)


def _opened(path: Path) -> tuple[Header, FileIdentity, int]:
    """Open a file; return its header, its identity and the open descriptor."""
    try:
        fd = os.open(path, READ)
    except OSError as error:
        kind = CheckpointNotFound if isinstance(error, FileNotFoundError) else CheckpointError
        raise kind("cannot open this file", where=path, got=error.strerror) from error
    try:
        return *_read_header(path, fd), fd
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            raise CheckpointError("cannot read this file", where=path, got=error.strerror) from error
        raise


def _read_header(path: Path, fd: int) -> tuple[Header, FileIdentity]:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise CheckpointError("not a regular file", where=path, expected="a safetensors file")
    identity = _identity(fd)
    start = _read_at(fd, 0, LENGTH.size + 1)
    refuse_by_magic(path, start)
    length, text = header_length(start[: LENGTH.size], identity.size, path), b""
    while len(text) < length and (part := _read_at(fd, LENGTH.size + len(text), length - len(text))):
        text += part
    if len(text) < length:
        raise HeaderError("length", where=path, expected=f"{length} bytes", got=f"{len(text)} bytes")
    return parse_header(text, identity.size - LENGTH.size - length, path), identity


_seek = Lock()


def _read_at(fd: int, at: int, nbytes: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(fd, nbytes, at)
    with _seek:  # Windows has no pread, and threads share the position
        os.lseek(fd, at, os.SEEK_SET)
        return os.read(fd, nbytes)


MAX_INDEX = 100_000_000  # bytes
INDEX_SUFFIX = ".safetensors.index.json"


class Checkpoint(_KeyedFile):
    """The tensors at `path`: a `.safetensors` file, an index, or a directory with `<stem>.safetensors` or an index.

    If a directory has both a whole file and an index, the file is used, as in transformers.

    >>> checkpoint = Checkpoint("TinyLlama-1.1B")
    >>> checkpoint.info("model.norm.weight").tag, checkpoint.nbytes
    ('BF16', 2200119296)

    Raises: CheckpointNotFound; UnsafeFile for a pickle; HeaderError; IndexFileError; CheckpointError if reading fails.
    """

    def __init__(self, path: StrPath, *, stem: str = "model") -> None:
        check_type("path", path, (str, os.PathLike), "a path to a checkpoint")
        self.path = Path(path)
        self.index: Path | None = None
        found = _find(self.path, stem)
        if found.name.endswith(INDEX_SUFFIX):
            self.index = found
            self.files: tuple[TensorFile, ...] = _open_shards(found)
        else:
            self.files = (TensorFile(found),)
        self._by_key = {info.key: file for file in self.files for info in file.infos}
        self.nbytes = sum(info.nbytes for file in self.files for info in file.infos)

    def __repr__(self) -> str:
        count = len(self._by_key)
        return f"Checkpoint({str(self.path)!r}, {count} tensors in {len(self.files)} files, {self.nbytes} bytes)"

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_key)

    def __len__(self) -> int:
        return len(self._by_key)

    def keys(self) -> tuple[str, ...]:
        """Return all keys in file order: shards by name, tensors by their offset in the shard."""
        return tuple(self._by_key)

    def infos(self) -> tuple[TensorInfo, ...]:
        """Return the header entries of all tensors, in file order. Offsets are relative to each file."""
        return tuple(info for file in self.files for info in file.infos)

    def file_of(self, key: str) -> TensorFile:
        """Return the file that holds a tensor. Raises: UnknownKey."""
        try:
            return self._by_key[key]
        except KeyError:
            raise unknown_key(key, self._by_key, self.path) from None

    def info(self, key: str) -> TensorInfo:
        """Return the header entry of a tensor: dtype tag, shape and byte range. Raises: UnknownKey."""
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
    expected = f"{stem}.safetensors or {stem}{INDEX_SUFFIX}"
    raise CheckpointNotFound("no checkpoint in this directory", where=path, expected=expected)


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
                both = f"{holder[info.key]} and {name}"
                raise IndexFileError("twice", info.key, where=index, expected="one shard with this key", got=both)
            if info.key not in weight_map:
                got = f"a key of {name} only"
                raise IndexFileError("unlisted", info.key, where=index, expected="a key of weight_map", got=got)
            holder[info.key] = name
        files.append(file)
    for key, name in weight_map.items():
        if holder.get(key) != name:
            got = holder.get(key, "no shard")
            raise IndexFileError("absent", key, where=index, expected=f"in {name}", got=f"in {got}")
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
        raise IndexFileError("weight_map", where=index, expected="a non-empty object")
    for key, name in weight_map.items():
        if not isinstance(name, str):
            raise IndexFileError("weight_map", key, where=index, expected="a shard name", got=type(name).__name__)
    return weight_map


def _check_shard(index: Path, name: str) -> None:
    """Check that a shard is a plain file name in the index's directory; links into the same hub cache are allowed."""
    if "\\" in name or "\0" in name or name != Path(name).name or len(name.encode()) > 255:
        raise IndexFileError("shard_name", name, where=index, expected="a plain file name of at most 255 bytes")
    refuse_by_name(index.parent / name)
    if not name.endswith(".safetensors"):
        raise IndexFileError("shard_name", name, where=index, expected="a name that ends in .safetensors")
    folder = Path(os.path.realpath(index.parent))
    target = Path(os.path.realpath(folder / name))
    in_hub_cache = folder.parent.name == "snapshots" and target.parent == folder.parent.parent / "blobs"
    if target.parent != folder and not in_hub_cache:
        raise IndexFileError("outside", name, where=index, expected=f"a file in {folder}", got=target)
