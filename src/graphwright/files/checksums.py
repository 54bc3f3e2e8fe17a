"""Checksums: BLAKE2b-128 of a tensor's bytes, SHA-256 of a whole file as `sha256sum` prints it."""

from __future__ import annotations

import hashlib

from graphwright.files.buffers import Buffer, StrPath, flat_bytes
from graphwright.files.errors import UnreadableFile


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
