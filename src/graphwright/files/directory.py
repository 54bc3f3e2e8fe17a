"""A directory of files that appears whole or not at all, and replaces an older one in a single step.

It is built beside its target, everything in it is fsynced, and it is renamed into place. An older directory changes
places with it in one system call where the system has one, so that no reader and no crash ever finds neither.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from graphwright.errors import GraphwrightError
from graphwright.files.atomic import (
    CLOEXEC,
    NOFOLLOW,
    again,
    fsync_directory,
    hold,
    open_directory,
    refusal,
    remove_tree,
    staged,
    staging_path,
    sweep,
    target_path,
    writing,
)
from graphwright.files.checksums import StrPath
from graphwright.files.errors import DestinationExists, UnwritableTarget


@contextmanager
def atomic_directory(target: StrPath, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty directory; when the block ends without an exception, it stands at `target`.

    Args:
        target: must not exist, or be an empty directory, unless `overwrite`. Its parent exists. A link is followed.
        overwrite: replace a directory that stands at `target`, keeping its mode.
    Raises: DestinationExists; UnwritableTarget, also where the block could not write into the directory; whatever else
        the block raises. The target is then as it was.

    >>> with atomic_directory("out") as folder:
    ...     (folder / "config.json").write_text("{}")
    """
    place = Path(os.path.realpath(target_path(target)))
    lock = -1
    temp: Path | None = None
    try:
        with writing(place):
            _recover(place)
            sweep(place)
            sweep(place, "old")
            check_free(place, overwrite)
            temp, lock = _create(place)
        try:
            yield temp
        except OSError as error:
            cause = error.__cause__ if _saving(error, temp) else error
            if not isinstance(cause, OSError) or isinstance(cause, GraphwrightError) or not _concerns(cause, temp):
                raise
            raise UnwritableTarget("writing failed; what stands here is as it was", where=place, cause=cause) from error
        with writing(place):
            if place.is_dir():
                os.chmod(temp, stat.S_IMODE(os.stat(place).st_mode))
            _fsync_tree(temp)
            _put(temp, place, overwrite)
    except BaseException:
        if temp is not None:
            with suppress(OSError):
                remove_tree(temp)
        raise
    finally:
        if lock >= 0:
            with suppress(OSError):
                os.close(lock)


def _saving(error: OSError, folder: Path) -> bool:
    """Whether a file could not be saved into this folder, which nobody will find."""
    return isinstance(error, UnwritableTarget) and str(error.where).startswith(str(folder))


def _concerns(error: OSError, folder: Path) -> bool:
    """Whether the system speaks of a file in this folder; of an open file it gives no name."""
    names = [n for n in (error.filename, error.filename2) if isinstance(n, str | bytes | os.PathLike)]
    return not names or any(os.fsdecode(n).startswith(str(folder)) for n in names)


def exchange(first: StrPath, second: StrPath) -> bool:
    """Let two existing paths of one file system change places in one step; False where the system cannot.

    Raises: OSError if it can but did not.
    """
    if not sys.platform.startswith("linux"):
        return False
    import ctypes  # late: looking at a file needs no foreign calls

    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE (linux/fcntl.h, linux/fs.h)
    if rename(here, os.fsencode(first), here, os.fsencode(second), swap) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), os.fspath(first))


def _create(place: Path) -> tuple[Path, int]:
    while True:
        temp = staging_path(place, "tmp")
        again(os.mkdir, temp)
        if os.name == "nt":
            return temp, -1
        try:
            lock = open_directory(temp)
        except FileNotFoundError:  # another process swept it in the moment before it was locked
            continue
        except OSError:
            with suppress(OSError):
                os.rmdir(temp)
            raise
        hold(lock)
        if temp.exists():
            return temp, lock
        os.close(lock)


def check_free(target: StrPath, overwrite: bool = False) -> None:
    """For a long job to ask before it starts. Raises: DestinationExists, UnwritableTarget without a parent."""
    place = Path(os.path.realpath(target_path(target)))
    if not place.parent.is_dir():
        raise refusal(place)
    if not os.path.lexists(place):
        return
    if not place.is_dir():
        raise DestinationExists("a file stands where the directory should go", where=place, fix="name another place")
    if not overwrite and os.listdir(place):
        raise DestinationExists(
            "the directory exists and is not empty", where=place, fix="overwrite=True (--overwrite) replaces it"
        )


def _put(temp: Path, place: Path, overwrite: bool) -> None:
    if overwrite and place.is_dir():
        if exchange(temp, place):
            fsync_directory(place.parent)  # before the old one goes: its name must not be what a crash brings back
            with suppress(OSError):  # the new one stands; the next save clears what is left
                remove_tree(temp)
        else:
            _put_in_two_steps(temp, place)
        return
    try:
        os.rename(temp, place)  # also onto an empty directory
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise DestinationExists("something appeared here while the directory was built", where=place) from error
        raise
    fsync_directory(place.parent)


def _put_in_two_steps(temp: Path, place: Path) -> None:
    """Move the old one aside, then the new one in; a crash in between is mended by `_recover` at the next save."""
    aside = staging_path(place, "old")
    lock = open_directory(place) if os.name != "nt" else -1
    try:
        if lock >= 0:
            hold(lock)
        os.rename(place, aside)
        try:
            os.rename(temp, place)
        except BaseException:
            os.rename(aside, place)
            raise
        fsync_directory(place.parent)
        with suppress(OSError):
            remove_tree(aside)
    finally:
        if lock >= 0:
            with suppress(OSError):
                os.close(lock)


def _recover(place: Path) -> None:
    if not os.path.lexists(place):
        for aside in staged(place, "old")[:1]:
            os.rename(aside, place)
            fsync_directory(place.parent)


def _fsync_tree(path: Path) -> None:
    for folder, _, files in os.walk(path, topdown=False):
        for name in files:
            file = Path(folder, name)
            if not stat.S_ISREG(os.lstat(file).st_mode):
                continue
            fd = again(os.open, file, (os.O_RDWR if os.name == "nt" else os.O_RDONLY) | CLOEXEC | NOFOLLOW)
            try:
                again(os.fsync, fd)
            finally:
                os.close(fd)
        fsync_directory(Path(folder))
