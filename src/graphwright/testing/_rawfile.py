"""What `open` stands on while file operations are intercepted."""

from __future__ import annotations

import io
import os
from typing import Any


class RawFile(io.RawIOBase):
    """An unbuffered file on the calls of `os`, as `open` would make one in C."""

    def __init__(self, path: Any, mode: str) -> None:
        self._fd = -1
        way = os.O_RDWR if "+" in mode else os.O_RDONLY if "r" in mode else os.O_WRONLY
        make = {"r": 0, "w": os.O_CREAT | os.O_TRUNC, "x": os.O_CREAT | os.O_EXCL, "a": os.O_CREAT | os.O_APPEND}
        self._readable, self._writable = "r" in mode or "+" in mode, "r" not in mode or "+" in mode
        self.name, self.mode = path, mode
        self._fd = os.open(path, way | make[mode.strip("bt+")], 0o666)

    def readable(self) -> bool:
        return self._readable

    def writable(self) -> bool:
        return self._writable

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def readinto(self, buffer: Any) -> int:
        data = os.read(self._fd, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        return os.write(self._fd, data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return os.lseek(self._fd, offset, whence)

    def truncate(self, size: int | None = None) -> int:
        size = self.tell() if size is None else size
        os.ftruncate(self._fd, size)
        return size

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        try:
            super().close()
        finally:
            if fd >= 0:
                os.close(fd)
