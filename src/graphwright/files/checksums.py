"""Checksums: BLAKE2b-128 of a tensor's bytes, SHA-256 of a whole file as `sha256sum` prints it."""

from __future__ import annotations

import hashlib
import os
import sys
from typing import TYPE_CHECKING, Any

from graphwright.errors import UsageError
from graphwright.files.errors import UnreadableFile

if TYPE_CHECKING:
    from numpy import ndarray
    from typing_extensions import Buffer as _Buffer

    Buffer = _Buffer | ndarray  # an array is one, though numpy's stubs say so only from 3.12 on
elif sys.version_info >= (3, 12):
    from collections.abc import Buffer
else:
    Buffer = Any  # the protocol has no name before Python 3.12

StrPath = str | os.PathLike[str]


def flat_bytes(data: Buffer) -> memoryview:
    """[nbytes] uint8 view of `data` in memory order; nothing is copied.

    Raises: UsageError if `data` is not a C-contiguous buffer of native numbers (a transposed or byte-swapped array).
    """
    try:
        view = memoryview(data)  # pyright: ignore[reportArgumentType]  # see the import
        if view.nbytes == 0:  # cast refuses a zero in the shape
            return memoryview(b"")
        if view.format.startswith((">", "!")):  # cast does not mind, and every file here is little-endian
            raise TypeError(f"big-endian format {view.format}")
        return view.cast("B")
    except TypeError as error:
        raise UsageError(
            "these are not plain bytes in memory order",
            expected="a C-contiguous buffer of native numbers",
            got=f"{type(data).__name__}: {error}",
            fix="np.ascontiguousarray(x).view(np.uint8)",
        ) from error


def blake2b_128(data: Buffer) -> str:
    """32 hex digits over the bytes of `data` in memory order; shape and dtype do not enter."""
    return hashlib.blake2b(flat_bytes(data), digest_size=16).hexdigest()


def sha256_file(path: StrPath) -> str:
    """64 hex digits over the content of the file, read in small pieces. Raises: UnreadableFile."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UnreadableFile("cannot read this file for its checksum", where=path, cause=error) from error
