"""Open regular files only: opening a named pipe would wait for its writer, and a device may have no end."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from typing import TYPE_CHECKING

from graphwright.files.errors import UnreadableFile

if TYPE_CHECKING:
    from graphwright.files.checksums import StrPath

READ = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
"""Flags to open a file for reading without waiting for the writer of a named pipe."""


def open_regular(path: StrPath) -> BufferedReader:
    """Open a regular file to read its bytes.

    Raises: OSError, at once, if it cannot be opened or is a directory, named pipe, socket or device.
    """
    try:
        fd = os.open(path, READ)
    except (TypeError, ValueError) as error:  # not a path, or one with a NUL
        raise OSError(errno.EINVAL, f"this is not a path: {error}") from error
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
            raise OSError(code, "this is not a regular file", os.fspath(path))
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_file(path: StrPath) -> bytes:
    """Return the bytes of a regular file. Raises: UnreadableFile, at once, if it cannot be read or is not regular."""
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise UnreadableFile("cannot read the file", where=path, cause=error) from error
