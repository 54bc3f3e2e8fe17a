"""Open regular files only: opening a named pipe would wait for its writer, and a device may have no end."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

from graphwright.files.checksums import StrPath

READ = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
"""Flags to open a file for reading without waiting for the writer of a named pipe."""


def open_regular(path: StrPath) -> BinaryIO:
    """Open a regular file to read its bytes.

    Raises: OSError, at once, if it cannot be opened or is a directory, named pipe, socket or device.
    """
    fd = os.open(path, READ)
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
            raise OSError(code, "this is not a regular file", os.fspath(path))
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise
