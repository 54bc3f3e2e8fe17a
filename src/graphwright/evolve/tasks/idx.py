"""IDX files, the format of MNIST: big-endian, a magic number, sizes, data; gzipped or not.

Source: LeCun, Cortes and Burges, "The MNIST database of handwritten digits".
"""

from __future__ import annotations

import gzip
import zlib
from math import prod
from pathlib import Path

import numpy as np

from graphwright.evolve.errors import IdxError
from graphwright.files import StrPath, UnreadableFile

KINDS = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
LIMIT = 2 << 30  # bytes, of what a file unpacks to


def read_idx(path: StrPath) -> np.ndarray:
    """The array of an IDX file, in native byte order. Raises: IdxError with the place, UnreadableFile."""
    raw = _content(Path(path))
    if len(raw) < 4 or raw[0] or raw[1] or raw[2] not in KINDS or not 1 <= raw[3] <= 8:
        raise IdxError("no IDX file: it begins 0, 0, type, rank", where=f"{path}, byte 0", got=raw[:4].hex())
    kind, rank = np.dtype(KINDS[raw[2]]), raw[3]
    start = 4 + 4 * rank
    if len(raw) < start:
        raise IdxError("the sizes are cut off", where=f"{path}, byte 4", expected=f"{start} bytes", got=len(raw))
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", rank, 4))
    if prod(shape) * kind.itemsize != len(raw) - start:
        raise IdxError("sizes and data do not fit", where=f"{path}, byte {start}",
                       expected=f"{prod(shape) * kind.itemsize} bytes for {shape}", got=len(raw) - start)  # fmt: skip
    return np.frombuffer(raw, kind, offset=start).reshape(shape).astype(kind.newbyteorder("="))


def _content(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else open(path, "rb") as file:
            raw = file.read(LIMIT + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise IdxError("the gzip file is damaged", where=path, got=str(error)) from None
    except OSError as error:
        raise UnreadableFile("cannot read this file", where=path, cause=error) from error
    if len(raw) > LIMIT:
        raise IdxError("the file is too large", where=path, expected=f"at most {LIMIT} bytes")
    return raw
