"""IDX files, as MNIST comes in: a header of big-endian sizes, then the elements, row by row; plain or gzipped.

Source: LeCun, Cortes and Burges, "The MNIST database of handwritten digits", section on the file formats.
"""

from __future__ import annotations

import gzip
import zlib
from math import prod
from typing import BinaryIO

import numpy as np

from graphwright.files import FileError, StrPath, UnreadableFile

DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
MOST_BYTES = 2**32
_PIECE = 2**20  # read at once, so that a header that lies costs no memory


class CorruptIdx(FileError):
    """A file is no whole IDX file."""


def read_idx(path: StrPath, *, most: int = MOST_BYTES) -> np.ndarray:
    """The array in an IDX file; a gzipped one is recognised by its first bytes.

    Args:
        most: bytes of elements that are read at most.
    Returns: uint8, int8, int16, int32, float32 or float64, of the host's byte order, any number of axes.
    Raises: UnreadableFile; CorruptIdx for another format, a header that lies, missing, damaged or further bytes.
    """
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            if not packed:
                return _array(file, path, most)
            with gzip.GzipFile(fileobj=file) as unpacked:
                return _array(unpacked, path, most)  # pyright: ignore[reportArgumentType]
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise CorruptIdx("this gzip file is damaged", where=path, got=str(error)) from error
    except FileError:
        raise
    except OSError as error:
        raise UnreadableFile("cannot read this file", where=path, cause=error) from error


def _array(file: BinaryIO, path: StrPath, most: int) -> np.ndarray:
    magic = _bytes(file, 4, path)
    if magic[:2] != b"\0\0" or magic[2] not in DTYPES:
        raise CorruptIdx("not an IDX file", where=path, expected=f"0, 0, {_KINDS}, rank", got=magic.hex(" "))
    kind = np.dtype(DTYPES[magic[2]])
    shape = tuple(int.from_bytes(_bytes(file, 4, path), "big") for _ in range(magic[3]))
    size = prod(shape) * kind.itemsize
    if size > most:
        raise CorruptIdx("more elements than are read", where=path, expected=f"at most {most} bytes", got=shape)
    host = np.frombuffer(_bytes(file, size, path), kind).reshape(shape)
    if file.read(1):  # which also makes gzip check its sum
        raise CorruptIdx("bytes follow the last element", where=path, expected=f"{size} bytes of {shape}")
    return host.astype(kind.newbyteorder("="))


def _bytes(file: BinaryIO, count: int, path: StrPath) -> bytearray:
    found = bytearray()
    while len(found) < count:
        piece = file.read(min(_PIECE, count - len(found)))
        if not piece:
            raise CorruptIdx("the file ends early", where=path, expected=f"{count} bytes", got=len(found))
        found += piece
    return found


_KINDS = "/".join(f"{code:02x}" for code in DTYPES)
