"""Read the files of a directory that another process may replace meanwhile.

A reader holds a shared lock on the directory; `atomic_directory` waits a while for an exclusive one before it replaces
the directory. Where a file system has no locks, or one of them takes longer, the reader starts again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import TypeVar

from graphwright.files.errors import UnreadableFile

try:
    import fcntl
except ImportError:
    fcntl = None

T = TypeVar("T")
ATTEMPTS = 20
PATIENCE = 0.5
"""Seconds that a writer waits for readers, and a reader for a writer."""


def read_whole(folder: Path, read: Callable[[], T]) -> T:
    """Return `read()`, a value made from files in `folder`; if the directory was replaced meanwhile, read it again.

    An error of `read` counts only if the directory was not replaced while `read` ran.
    Raises: the errors of `read`; UnreadableFile if the directory was replaced during each of 20 attempts.
    """
    for _ in range(ATTEMPTS):
        fd = -1
        with suppress(OSError, ValueError):  # a path that cannot be encoded
            fd = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))  # open, so its inode is not used again
        if fd < 0:
            return read()
        try:
            _lock(fd, shared=True)
            if not _same(folder, fd):
                continue
            found = read()
            if _same(folder, fd):
                return found
        except Exception:
            if _same(folder, fd):
                raise
        finally:
            os.close(fd)
    raise UnreadableFile(f"the directory was replaced during each of {ATTEMPTS} attempts to read it", where=folder,
                         fix="read it between two saves, or save less often")  # fmt: skip


def wait_for_readers(fd: int) -> None:
    """Lock the open directory until `fd` is closed; give up after 0.5 s, or where there are no locks."""
    _lock(fd, shared=False)


def _lock(fd: int, *, shared: bool) -> None:
    end = monotonic() + PATIENCE
    while fcntl is not None and fd >= 0:
        try:
            return fcntl.flock(fd, fcntl.LOCK_NB | (fcntl.LOCK_SH if shared else fcntl.LOCK_EX))
        except BlockingIOError:  # a directory that is being written is locked by its writer, perhaps this thread
            if monotonic() > end:
                return
            sleep(0.0005)
        except OSError:
            return


def _same(folder: Path, fd: int) -> bool:
    """Return True if the path still is the open directory."""
    with suppress(OSError):
        return os.path.samestat(os.stat(folder), os.fstat(fd))
    return False
