"""Write a directory of files atomically: it appears complete or not at all, and replaces an older one in one step.

It is built beside its target, every file in it is fsynced, and it is renamed. An older directory is
exchanged with it in one system call where the system has one, so that a reader or a crash always finds one of them.
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
        target: must not exist, or be an empty directory, unless `overwrite`. Its parent must exist. A link is followed.
        overwrite: replace an existing directory at `target`, keeping its mode.
    Raises: DestinationExists; UnwritableTarget, also if the block cannot write into the directory; any other error of
        the block. The target is then unchanged.

    >>> with atomic_directory("out") as folder:
    ...     (folder / "config.json").write_text("{}")
    """
    path = Path(os.path.realpath(target_path(target)))
    lock = -1
    temp: Path | None = None
    try:
        with writing(path):
            _recover(path)
            sweep(path)
            sweep(path, "old")
            check_free(path, overwrite)
            temp, lock = _create(path)
        try:
            yield temp
        except OSError as error:
            cause = error.__cause__ if _saving(error, temp) else error
            if not isinstance(cause, OSError) or isinstance(cause, GraphwrightError) or not _concerns(cause, temp):
                raise
            raise UnwritableTarget("writing failed; the target is unchanged", where=path, cause=cause) from error
        with writing(path):
            if path.is_dir():
                os.chmod(temp, stat.S_IMODE(os.stat(path).st_mode))
            _fsync_tree(temp)
            _put(temp, path, overwrite)
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
    """Return True if `error` is about a file inside `folder`, a staging directory that the user does not know."""
    return isinstance(error, UnwritableTarget) and str(error.where).startswith(str(folder))


def _concerns(error: OSError, folder: Path) -> bool:
    """Return True if an OSError is about a file in `folder`; errors of open files carry no name."""
    names = [n for n in (error.filename, error.filename2) if isinstance(n, str | bytes | os.PathLike)]
    return not names or any(os.fsdecode(n).startswith(str(folder)) for n in names)


def exchange(first: StrPath, second: StrPath) -> bool:
    """Exchange two existing paths of one file system in one step; return False where the system does not support it.

    Raises: OSError if it is supported but failed.
    """
    if not sys.platform.startswith("linux"):
        return False
    import ctypes  # late: reading files does not need it

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


def _create(path: Path) -> tuple[Path, int]:
    while True:
        temp = staging_path(path, "tmp")
        again(os.mkdir, temp)
        if os.name == "nt":
            return temp, -1
        try:
            lock = open_directory(temp)
        except FileNotFoundError:  # another process swept it before it was locked
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
    """Check a destination before a long job starts. Raises: DestinationExists, UnwritableTarget without a parent."""
    path = Path(os.path.realpath(target_path(target)))
    if not path.parent.is_dir():
        raise refusal(path)
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise DestinationExists("the destination directory is a file", where=path, fix="choose another path")
    if not overwrite and os.listdir(path):
        raise DestinationExists(
            "the directory exists and is not empty", where=path, fix="overwrite=True (--overwrite) replaces it"
        )


def _put(temp: Path, path: Path, overwrite: bool) -> None:
    if overwrite and path.is_dir():
        if exchange(temp, path):
            fsync_directory(path.parent)  # before deleting the old one: a crash must not bring back its name
            with suppress(OSError):  # the new one is in place; the next save sweeps leftovers
                remove_tree(temp)
        else:
            _put_in_two_steps(temp, path)
        return
    try:
        os.rename(temp, path)  # also onto an empty directory
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise DestinationExists("the destination appeared while the directory was built", where=path) from error
        raise
    fsync_directory(path.parent)


def _put_in_two_steps(temp: Path, path: Path) -> None:
    """Move the old directory aside, then the new one in; `_recover` repairs a crash in between at the next save."""
    aside = staging_path(path, "old")
    lock = open_directory(path) if os.name != "nt" else -1
    try:
        if lock >= 0:
            hold(lock)
        os.rename(path, aside)
        try:
            os.rename(temp, path)
        except BaseException:
            os.rename(aside, path)
            raise
        fsync_directory(path.parent)
        with suppress(OSError):
            remove_tree(aside)
    finally:
        if lock >= 0:
            with suppress(OSError):
                os.close(lock)


def _recover(path: Path) -> None:
    if not os.path.lexists(path):
        for aside in staged(path, "old")[:1]:
            os.rename(aside, path)
            fsync_directory(path.parent)


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
