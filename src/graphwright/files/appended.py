"""Append to a file at a known length, overwriting what an earlier attempt left after that length."""

from __future__ import annotations

import os
from pathlib import Path

from graphwright.files.atomic import NOFOLLOW, again, fsync_directory, writing


def append_at(path: Path, length: int, data: bytes, *, durable: bool = True) -> int:
    """Cut a file to `length` bytes, append `data`, and fsync if `durable`; return the new length.

    Raises: UnwritableTarget; the first `length` bytes are unchanged then.
    """
    with writing(path):
        new = not os.path.lexists(path)
        fd = again(os.open, path, os.O_RDWR | os.O_CREAT | NOFOLLOW | getattr(os, "O_BINARY", 0), 0o666)
        try:
            again(os.ftruncate, fd, length)
            os.lseek(fd, length, os.SEEK_SET)
            rest = memoryview(data)
            while rest:
                rest = rest[again(os.write, fd, rest) :]  # may be a partial write
            if durable:
                again(os.fsync, fd)
        finally:
            os.close(fd)
        if new and durable:
            fsync_directory(path.parent)
    return length + len(data)
