"""Write files and directories atomically: a reader, or a crash at any moment, finds the old content or the new one.

The new content is written under a hidden name beside the target, fsynced, and renamed onto it; then the parent
directory is fsynced. A symbolic link at the target is replaced by a new file, but followed for a new directory. An
existing directory is exchanged with the new one in one system call where the system has such a call.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from time import time
from types import TracebackType
from typing import TypeVar

from graphwright.errors import GraphwrightError, UsageError
from graphwright.files.checksums import Buffer, StrPath, flat_bytes
from graphwright.files.errors import DestinationExists, FileError, UnwritableTarget
from graphwright.files.replaced import wait_for_readers

try:
    import fcntl
except ImportError:
    fcntl = None

T = TypeVar("T")
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_DAY = 86400.0  # seconds
DIRECTORY = getattr(os, "O_DIRECTORY", 0)


def target_path(path: StrPath) -> Path:
    """Return a path to write to. Raises: UnwritableTarget if `path` is not a valid path."""
    with suppress(TypeError, UnicodeEncodeError):
        if not (isinstance(path, str) and not path) and b"\0" not in os.fsencode(target := Path(path)):
            return target
    expected = "a str or pathlib.Path, not empty, encodable and without NUL"
    raise UnwritableTarget("invalid path", expected=expected, got=repr(path))


def _real_path(path: StrPath) -> Path:
    """Return the absolute path without links. Raises: UnwritableTarget, also if the working directory was removed."""
    target = target_path(path)
    with writing(target):
        return Path(os.path.realpath(target))


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Convert an OSError raised in the `with` block, which writes `target`, into `UnwritableTarget`."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise _refusal(target, error) from error


def _refusal(target: Path, cause: OSError | None = None) -> UnwritableTarget:
    """Return the error for a target that cannot be written, with the obstacle and a fix."""
    folder, code = target.parent, None if cause is None else cause.errno
    refused = partial(UnwritableTarget, where=target, cause=cause)
    if code in (None, errno.ENOENT, errno.ENOTDIR):
        existing = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder)
        if not existing.is_dir():
            expected, fix = f"{existing} to be a directory", "choose another path"
            return refused("a parent of the target is a file", expected=expected, got="a file", fix=fix)
        if existing != folder:
            expected, fix = f"the directory {folder}", f"mkdir -p {shlex.quote(str(folder))}"
            return refused("the parent directory does not exist", expected=expected, got="nothing", fix=fix)
    fix = None
    if code in (errno.ENOSPC, errno.EDQUOT):
        fix = "free some space, or choose another disk"
    elif code in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT):
        fix = f"choose a directory that you may write to; files cannot be created in {folder}"
    elif code == errno.EISDIR:
        fix = "choose a file name; this path is a directory"
    return refused("writing failed; the target still has its complete old or new content", fix=fix)


# -- staging paths -----------------------------------------------------------------------------------------------------
def _staging_path(target: Path, suffix: str) -> Path:
    """Return a new hidden name beside `target`; `suffix` is `tmp` (being written) or `old` (moved aside)."""
    return target.with_name(f".{target.name[:48]}.{os.urandom(8).hex()}.{suffix}")


def _staged(target: Path, suffix: str) -> list[Path]:
    """Return the existing hidden paths that saves of `target` made and that no running process has locked."""
    pattern = re.compile(rf"\.{re.escape(target.name[:48])}\.[0-9a-f]{{16}}\.{suffix}")
    with suppress(OSError), os.scandir(target.parent) as entries:
        return [Path(entry.path) for entry in entries if pattern.fullmatch(entry.name) and _stale(entry.path)]
    return []


def _stale(path: str) -> bool:
    """Return whether no running process writes a path: it is not locked or, without locks, unchanged for a day."""
    for access in (os.O_RDWR, os.O_RDONLY):  # network file systems lock only what is open for writing
        try:
            with _opened(path, access | NOFOLLOW | getattr(os, "O_NONBLOCK", 0)) as fd:
                if fcntl is not None:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return True
        except BlockingIOError:
            return False
        except OSError:
            continue
    with suppress(OSError):
        return time() - os.lstat(path).st_mtime > _DAY
    return False


def _sweep(target: Path, suffix: str = "tmp") -> None:
    """Remove the hidden files and directories that killed processes left beside `target`; failures are ignored."""
    for path in _staged(target, suffix):
        with suppress(OSError):
            _remove_tree(path)


def sweep_files(folder: Path, names: re.Pattern[str]) -> None:
    """Remove the hidden files that killed processes left in `folder` when they wrote files with such names."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            found = re.fullmatch(r"\.(.+)\.[0-9a-f]{16}\.tmp", entry.name)
            if found and names.fullmatch(found[1]) and _stale(entry.path):
                with suppress(OSError):
                    _remove_tree(Path(entry.path))


def _stage(target: Path, make: Callable[[Path], int | None]) -> tuple[Path, int]:
    """Make a hidden file or directory beside `target`, and lock it; return its path and descriptor.

    `make` creates and opens a path; it returns None if another process removed the path before it was opened. If one
    removes it before it is locked, a new one is made.
    """
    while True:
        path = _staging_path(target, "tmp")
        fd = make(path)
        if fd is not None:
            _lock(fd)
            if os.path.lexists(path):
                return path, fd
            _close(fd)


def _lock(fd: int) -> None:
    """Lock the open file or directory until `fd` is closed; ignored on file systems without locks."""
    if fcntl is not None:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)


def _close(fd: int) -> None:
    """Close a descriptor unless it is -1, ignoring errors: its content was already fsynced, or is being discarded."""
    if fd >= 0:
        with suppress(OSError):
            os.close(fd)


# -- system calls ------------------------------------------------------------------------------------------------------
def again(call: Callable[..., T], *args: object) -> T:
    """Return `call(*args)`, repeating the call each time a signal interrupts it."""
    while True:
        try:
            return call(*args)
        except InterruptedError:
            continue


@contextmanager
def _opened(path: StrPath, flags: int) -> Iterator[int]:
    fd = again(os.open, path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def _open_directory(path: Path) -> int:
    """Open a directory in order to lock it; return -1 on Windows, where directories cannot be opened."""
    return -1 if os.name == "nt" else again(os.open, path, os.O_RDONLY | DIRECTORY)


def fsync_directory(path: Path) -> None:
    """Make the directory entries of `path` survive a power loss, where the system supports it."""
    if os.name == "nt":
        return
    with _opened(path, os.O_RDONLY | DIRECTORY) as fd:
        try:
            again(os.fsync, fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # the file system does not support fsync of directories
                raise


def _fsync_tree(path: Path) -> None:
    for folder, _, files in os.walk(path, topdown=False):
        for file in (Path(folder, name) for name in files):
            if stat.S_ISREG(os.lstat(file).st_mode):
                with _opened(file, (os.O_RDWR if os.name == "nt" else os.O_RDONLY) | NOFOLLOW) as fd:
                    again(os.fsync, fd)
        fsync_directory(Path(folder))


def _remove_tree(path: Path) -> None:
    """Remove a file, link or directory tree; links are not followed."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return
    for folder, _, _ in os.walk(path):
        if not os.access(folder, os.W_OK | os.X_OK):  # a saved directory keeps the mode of the one that it replaces
            os.chmod(folder, 0o700)
    for folder, folders, files in os.walk(path, topdown=False):
        for child in (os.path.join(folder, name) for name in (*files, *folders)):
            (os.rmdir if os.path.isdir(child) and not os.path.islink(child) else os.unlink)(child)
    os.rmdir(path)


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


# -- files -------------------------------------------------------------------------------------------------------------
def atomic_write(
    path: StrPath, data: bytes | bytearray | memoryview | Iterable[Buffer], *, durable: bool = True
) -> None:
    """Replace the content of `path` by `data`: bytes, or several buffers in order. See `AtomicFile` for `durable`.

    Raises: UnwritableTarget, or any error that the iterable raises; the file then keeps its old content.
    """
    with AtomicFile(path, durable=durable) as file:
        for chunk in [data] if isinstance(data, (bytes, bytearray, memoryview)) else data:
            file.write(chunk)


class AtomicFile:
    """A file written under a hidden name; leaving the `with` block renames it onto the target, an exception removes it.

    Keeps the mode of the file that it replaces; a new file gets 0666 minus the umask. Without `durable` nothing is
    fsynced: the file survives the death of the process, but perhaps not a power loss.

    >>> with AtomicFile("model.safetensors") as file:
    ...     file.write(header)
    """

    def __init__(self, path: StrPath, *, durable: bool = True) -> None:
        self.path, self.durable = target_path(path), durable
        self._temp: Path | None = None
        self._fd = -1
        self._whole = True
        self._mode: int | None = None  # of the file that is replaced

    def __enter__(self) -> AtomicFile:
        if self._temp is not None:
            raise UsageError("an AtomicFile can be entered only once", where=self.path, fix="create another one")
        with writing(self.path):
            _sweep(self.path)
            self._check_kind()
            try:
                self._temp, self._fd = _stage(self.path, self._create)
                with suppress(FileNotFoundError):  # readable until it is complete, so that a later save can sweep it
                    self._mode = stat.S_IMODE(os.stat(self.path).st_mode)
                    os.fchmod(self._fd, self._mode | 0o600)
            except BaseException:
                self._discard()
                raise
        return self

    def write(self, data: Buffer) -> int:
        """Append all bytes of `data`; return their number. Raises: UnwritableTarget (disk full, I/O error)."""
        rest = view = flat_bytes(data)
        whole, self._whole = self._whole, False
        with writing(self.path):
            while rest:
                taken = again(os.write, self._fd, rest)  # may be a partial write
                if taken == 0:
                    raise OSError(errno.EIO, "write returned 0 bytes without an error")
                rest = rest[taken:]
        self._whole = whole
        return len(view)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None:
                with writing(self.path):
                    self._commit()
        finally:
            self._discard()

    def _check_kind(self) -> None:
        """Raise OSError if the target is a directory, which would fail at the end, or a pipe, socket or device."""
        with suppress(FileNotFoundError):
            mode = os.lstat(self.path).st_mode
            if stat.S_ISDIR(mode):
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
                raise OSError(errno.EINVAL, "the target is a pipe, socket or device")

    def _create(self, temp: Path) -> int:
        self._temp = temp
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | NOFOLLOW | getattr(os, "O_BINARY", 0)
        return again(os.open, temp, flags, 0o666)

    def _commit(self) -> None:
        assert self._temp is not None
        if not self._whole:
            raise OSError(errno.EIO, "an earlier write failed and its error was ignored")
        if self.durable:
            again(os.fsync, self._fd)
        if os.name == "nt":  # Windows cannot rename an open file; elsewhere the lock must last until the rename
            _close(self._fd)
            self._fd = -1
        if self._mode is not None and self._mode != self._mode | 0o600:
            os.chmod(self._temp, self._mode)
        os.replace(self._temp, self.path)
        if self.durable:
            fsync_directory(self.path.parent)

    def _discard(self) -> None:
        """Remove the hidden file, if it was not renamed, and close it."""
        if self._temp is not None and os.path.lexists(self._temp):
            with suppress(OSError):
                os.unlink(self._temp)
        _close(self._fd)
        self._fd = -1


# -- directories -------------------------------------------------------------------------------------------------------
@contextmanager
def atomic_directory(target: StrPath, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty directory; when the block ends without an exception, it is renamed to `target`.

    Args:
        target: must not exist, or be an empty directory, unless `overwrite`. Its parent must exist. A link is followed.
        overwrite: replace an existing directory at `target`, keeping its mode.
    Raises: DestinationExists; UnwritableTarget, also if the block cannot write into the directory; any other error of
        the block. The target is then unchanged.

    >>> with atomic_directory("out") as folder:
    ...     (folder / "config.json").write_text("{}")
    """
    path = _real_path(target)
    lock = -1
    temp: Path | None = None
    try:
        with writing(path):
            _recover(path)
            _sweep(path)
            _sweep(path, "old")
            check_free(path, overwrite)
            temp, lock = _stage(path, _create_directory)
        try:
            yield temp
        except OSError as error:  # a save inside the block names the staging directory, which users do not know
            saving = isinstance(error, UnwritableTarget) and str(error.where).startswith(str(temp))
            cause = error.__cause__ if saving else error
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
                _remove_tree(temp)
        raise
    finally:
        _close(lock)


def check_free(target: StrPath, overwrite: bool = False, *, file: bool = False) -> None:
    """Check a destination before a long job.

    Args:
        target: path of a directory to make, or of a file if `file`.
        overwrite: admit an existing directory or file at `target`.
    Raises: DestinationExists; UnwritableTarget if its parent is missing.
    """
    path = _real_path(target)
    if not path.parent.is_dir():
        raise _refusal(path)
    if not os.path.lexists(path):
        return
    fix = "overwrite=True (--overwrite) replaces it"
    if path.is_dir() == file:
        kind = "a directory" if file else "not a directory"
        raise DestinationExists(f"the destination exists and is {kind}", where=path, fix="choose another path")
    if not overwrite and file:
        raise DestinationExists("the file exists", where=path, fix=fix)
    if not overwrite and os.listdir(path):
        raise DestinationExists("the directory exists and is not empty", where=path, fix=fix)


def _concerns(error: OSError, folder: Path) -> bool:
    """Return True if an OSError names a path in `folder`, or names no path, which is so for errors of open files."""
    names = [n for n in (error.filename, error.filename2) if isinstance(n, str | bytes | os.PathLike)]
    return not names or any(os.fsdecode(n).startswith(str(folder)) for n in names)


def _create_directory(temp: Path) -> int | None:
    os.mkdir(temp)
    try:
        return _open_directory(temp)
    except FileNotFoundError:  # another process swept it
        return None
    except OSError:
        with suppress(OSError):
            os.rmdir(temp)
        raise


def _put(temp: Path, path: Path, overwrite: bool) -> None:
    if overwrite and path.is_dir():
        lock = _open_directory(path)
        try:
            wait_for_readers(lock)
            exchanged = exchange(temp, path)
        finally:
            _close(lock)
        if exchanged:
            fsync_directory(path.parent)  # before deleting the old one: a crash must not bring back its name
            with suppress(OSError):  # the new one is in place; the next save sweeps leftovers
                _remove_tree(temp)
        else:
            _put_in_two_steps(temp, path)
        return
    try:
        os.rename(temp, path)  # also onto an empty directory
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            what = "the destination appeared while the directory was built"
            raise DestinationExists(what, where=path, fix="choose another path") from error
        raise
    fsync_directory(path.parent)


def _put_in_two_steps(temp: Path, path: Path) -> None:
    """Rename the old directory aside, then `temp` to `path`; after a crash in between, the next save moves it back."""
    aside = _staging_path(path, "old")
    lock = _open_directory(path)
    try:
        wait_for_readers(lock)
        os.rename(path, aside)
        try:
            os.rename(temp, path)
        except BaseException:
            os.rename(aside, path)
            raise
        fsync_directory(path.parent)
        with suppress(OSError):
            _remove_tree(aside)
    finally:
        _close(lock)


def _recover(path: Path) -> None:
    """If `path` is missing, rename the old directory, which a crash in `_put_in_two_steps` left aside, to `path`."""
    if not os.path.lexists(path):
        for aside in _staged(path, "old")[:1]:
            os.rename(aside, path)
            fsync_directory(path.parent)
