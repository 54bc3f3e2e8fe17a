"""One file, written so that a reader at any moment, and after any crash, finds the old content or the new, whole.

The new content goes to a hidden name in the same directory, is fsynced, takes the target's name, and the directory is
fsynced. A link at the target is replaced, not followed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from graphwright.errors import UsageError
from graphwright.files._staging import (
    BINARY,
    CLOEXEC,
    NOFOLLOW,
    again,
    fsync_directory,
    hold,
    staging_path,
    sweep,
    target_path,
    writing,
)
from graphwright.files.buffers import Buffer, StrPath, flat_bytes


def atomic_write(path: StrPath, data: bytes | bytearray | memoryview | Iterable[Buffer]) -> None:
    """Replace the content of `path` by `data`: bytes, or several buffers in order.

    Raises: UnwritableTarget, and whatever the iterable raises; the file is then as it was.
    """
    with AtomicFile(path) as file:
        for chunk in [data] if isinstance(data, (bytes, bytearray, memoryview)) else data:
            file.write(chunk)


class AtomicFile:
    """A file being written under a hidden name; leaving the `with` block puts it in place, an exception removes it.

    Keeps the mode of the file it replaces; a new file gets 0666 minus the umask.

    >>> with AtomicFile("model.safetensors") as file:
    ...     file.write(header)
    """

    def __init__(self, path: StrPath) -> None:
        self.path = target_path(path)
        self._temp: Path | None = None
        self._fd = -1
        self._whole = True

    def __enter__(self) -> AtomicFile:
        if self._temp is not None:
            raise UsageError("an AtomicFile is entered once", where=self.path, fix="make another one")
        with writing(self.path):
            sweep(self.path)
            try:
                self._create()
                with suppress(FileNotFoundError):
                    os.fchmod(self._fd, stat.S_IMODE(os.stat(self.path).st_mode))
            except BaseException:
                self._discard()
                raise
        return self

    def write(self, data: Buffer) -> int:
        """Append all bytes of `data`; returns their number. Raises: UnwritableTarget (disk full, broken disk)."""
        view = flat_bytes(data)
        rest = view
        whole, self._whole = self._whole, False
        with writing(self.path):
            while rest:
                taken = again(os.write, self._fd, rest)  # may take fewer than it was given
                if taken == 0:
                    raise OSError(errno.EIO, "the system wrote no byte and gave no reason")
                rest = rest[taken:]
        self._whole = whole
        return len(view)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self._discard()
            return
        try:
            with writing(self.path):
                self._commit()
        except BaseException:
            self._discard()
            raise

    def _create(self) -> None:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | CLOEXEC | NOFOLLOW | BINARY
        while True:
            self._temp = staging_path(self.path, "tmp")
            self._fd = again(os.open, self._temp, flags, 0o666)
            hold(self._fd)
            if os.path.lexists(self._temp):
                return
            os.close(self._fd)  # another process swept it in the moment before it was locked

    def _commit(self) -> None:
        assert self._temp is not None
        if not self._whole:
            raise OSError(errno.EIO, "a write failed earlier, and its error was swallowed")
        again(os.fsync, self._fd)
        if os.name == "nt":  # an open file cannot be renamed there; elsewhere the lock must last until the rename
            self._close()
        os.replace(self._temp, self.path)
        fsync_directory(self.path.parent)
        self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):  # the content was fsynced, or is being thrown away
                os.close(fd)

    def _discard(self) -> None:
        if self._temp is not None:
            with suppress(OSError):
                again(os.unlink, self._temp)
        self._close()
