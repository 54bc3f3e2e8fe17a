"""Checksums: BLAKE2b-128 of a tensor's bytes, SHA-256 of a whole file as `sha256sum` prints it."""

from __future__ import annotations

import hashlib
import os
import sys
from typing import TYPE_CHECKING, Any

from graphwright.errors import UsageError
from graphwright.files.errors import UnreadableFile
from graphwright.files.regular import open_regular

if TYPE_CHECKING:
    from numpy import ndarray
    from typing_extensions import Buffer as _Buffer

    Buffer = _Buffer | ndarray  # numpy's stubs declare arrays as buffers only from Python 3.12 on
elif sys.version_info >= (3, 12):
    from collections.abc import Buffer
else:
    Buffer = Any  # the protocol has no name before Python 3.12

StrPath = str | os.PathLike[str]


def flat_bytes(data: Buffer) -> memoryview:
    """Return a [nbytes] uint8 view of `data` in memory order, without a copy.

    Raises: UsageError if `data` is not a C-contiguous buffer in native byte order (such as a transposed array).
    """
    try:
        view = memoryview(data)  # pyright: ignore[reportArgumentType]  # see the import
        if view.nbytes == 0:  # cast refuses a zero in the shape
            return memoryview(b"")
        if view.format.startswith((">", "!")):  # cast accepts it, but every file here is little-endian
            raise TypeError(f"big-endian format {view.format}")
        return view.cast("B")
    except TypeError as error:
        raise UsageError("the buffer is not C-contiguous in native byte order",
                         expected="a C-contiguous buffer, native byte order", got=f"{type(data).__name__}: {error}",
                         fix='np.ascontiguousarray(x, x.dtype.newbyteorder("=")).view("u1")') from error  # fmt: skip


def blake2b_128(data: Buffer) -> str:
    """Return the 32 hex digits of BLAKE2b-128 over the bytes of `data`, without shape and dtype."""
    return hashlib.blake2b(flat_bytes(data), digest_size=16).hexdigest()


def sha256_file(path: StrPath) -> str:
    """Return the 64 hex digits of SHA-256 over the content of a file, read in pieces. Raises: UnreadableFile."""
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UnreadableFile("cannot read this file for its checksum", where=path, cause=error) from error
