"""Data files: IDX (the format of MNIST) and packed token ids.

Source: LeCun, Cortes and Burges, "The MNIST database of handwritten digits", section on the file formats.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Sequence
from math import prod
from typing import BinaryIO

import numpy as np

from graphwright.arguments import checked
from graphwright.array import from_numpy
from graphwright.autograd import Tensor
from graphwright.data.loader import Dataset
from graphwright.errors import IndexOutOfRange, UsageError
from graphwright.files import FileError, StrPath, UnreadableFile, open_regular

DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
MOST_BYTES = 2**32
_PIECE = 2**20  # bytes read at once, so that a header with a wrong size costs no memory


class CorruptIdx(FileError):
    """A file is not a valid IDX file."""


@checked
def read_idx(path: StrPath, *, most: int = MOST_BYTES) -> np.ndarray:
    """Read the array in an IDX file; gzip is recognised by the first bytes.

    Args:
        most: maximum size of the array in bytes, to refuse larger files.
    Returns: uint8, int8, int16, int32, float32 or float64 in the host's byte order, with any number of axes.
    Raises: UnreadableFile; CorruptIdx if the file is not an IDX file, or has missing, damaged or extra bytes.
    """
    try:
        with open_regular(path) as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            if not packed:
                return _array(file, path, most)
            with gzip.GzipFile(fileobj=file) as unpacked:
                return _array(unpacked, path, most)  # pyright: ignore[reportArgumentType]
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise CorruptIdx("the gzip file is damaged", where=path, got=str(error)) from error
    except FileError:
        raise
    except OSError as error:
        raise UnreadableFile("cannot read the file", where=path, cause=error) from error


def _array(file: BinaryIO, path: StrPath, most: int) -> np.ndarray:
    magic = _bytes(file, 4, path)
    if magic[:2] != b"\0\0" or magic[2] not in DTYPES:
        expected = f"the bytes 00 00, a dtype code ({_KINDS}) and the number of axes"
        raise CorruptIdx("this is not an IDX file", where=path, expected=expected, got=magic.hex(" "))
    kind = np.dtype(DTYPES[magic[2]])
    shape = tuple(int.from_bytes(_bytes(file, 4, path), "big") for _ in range(magic[3]))
    size = prod(shape) * kind.itemsize
    if size > most:
        got, fix = f"{size} bytes for shape {shape}", "pass read_idx(..., most=) if the file can be trusted"
        raise CorruptIdx("the array is too large", where=path, expected=f"at most {most} bytes", got=got, fix=fix)
    host = np.frombuffer(_bytes(file, size, path), kind).reshape(shape)
    if file.read(1):  # reading to the end makes gzip verify its checksum
        raise CorruptIdx("extra bytes after the last element", where=path, expected=f"{size} bytes for shape {shape}")
    return host.astype(kind.newbyteorder("="))


def _bytes(file: BinaryIO, count: int, path: StrPath) -> bytearray:
    found = bytearray()
    while len(found) < count:
        piece = file.read(min(_PIECE, count - len(found)))
        if not piece:
            expected, got = f"{count} bytes from byte {file.tell() - len(found)} on", f"{len(found)} bytes"
            raise CorruptIdx("the file is truncated", where=path, expected=expected, got=got)
        found += piece
    return found


_KINDS = "/".join(f"{code:02x}" for code in DTYPES)


@checked
class TokenWindows(Dataset):
    """A dataset of windows of token ids: item i is the pair (ids, the ids one position later), each int64 [window].

    A window starts every `stride` ids and never spans two files.

    Args:
        paths: files of packed little-endian ids, without header.
        window: number of ids per window.
        stride: distance between starts of windows; `window` by default, so that each id is predicted once.
        dtype: dtype of the ids in the files: `uint16`, `uint32`, `int32` or `int64`.
    Raises: UnreadableFile; UsageError if a file ends in a partial id or has at most `window` ids.
    """

    def __init__(
        self, paths: StrPath | Sequence[StrPath], window: int, *, stride: int | None = None, dtype: str = "uint16"
    ) -> None:
        self.window, self.stride = window, window if stride is None else stride
        if window < 1 or self.stride < 1 or dtype not in ("uint16", "uint32", "int32", "int64"):
            expected = "window and stride >= 1, dtype uint16, uint32, int32 or int64"
            got = f"window {window}, stride {self.stride}, dtype {dtype}"
            raise UsageError("invalid window, stride or dtype", where="TokenWindows", expected=expected, got=got)
        kind = np.dtype(dtype).newbyteorder("<")
        self.files: list[np.ndarray] = []
        for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
            try:
                with open_regular(path) as file:
                    raw = np.memmap(file, np.uint8, "r")
            except (OSError, ValueError) as error:  # an empty file cannot be mapped
                cause = error if isinstance(error, OSError) else None
                got = (cause and cause.strerror) or str(error)
                raise UnreadableFile("cannot map the token file", where=path, got=got, cause=cause) from error
            if raw.size % kind.itemsize:
                expected, got = f"a multiple of {kind.itemsize} bytes, for ids of dtype {dtype}", f"{raw.size} bytes"
                raise UsageError("the token file ends in a partial id", where=path, expected=expected, got=got)
            if raw.size // kind.itemsize <= window:
                expected, got = f"more than {window} ids", f"{raw.size // kind.itemsize} ids"
                raise UsageError("the token file is too short for one window", where=path, expected=expected, got=got)
            self.files.append(raw.view(kind))
        if not self.files:
            raise UsageError("no token files were given", expected="a path, or a list of paths", got=repr(paths))
        counts = [(len(ids) - window - 1) // self.stride + 1 for ids in self.files]
        self._ends = np.cumsum(counts)

    def __len__(self) -> int:
        """Return the number of windows in all files."""
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and targets of one window."""
        if not 0 <= index < len(self):
            raise IndexOutOfRange("window index out of range", expected=f"0..{len(self) - 1}", got=index)
        file = int(np.searchsorted(self._ends, index, side="right"))
        start = (index - int(self._ends[file - 1] if file else 0)) * self.stride
        ids = self.files[file][start : start + self.window + 1].astype(np.int64)
        return ids[:-1], ids[1:]

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return ids and targets of several windows, each int64 [len(indices), window]."""
        pairs = [self[int(i)] for i in indices]
        ids, targets = (np.stack(column) for column in zip(*pairs, strict=True))
        return Tensor(from_numpy(ids)), Tensor(from_numpy(targets))
