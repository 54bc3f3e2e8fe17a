"""Write a file atomically: a reader, or a crash at any moment, finds either the old content or the new one.

The new content is written to a hidden name in the same directory, fsynced and renamed onto the target; then the
directory is fsynced. A symbolic link at the target is replaced, not followed.
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
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from graphwright.errors import GraphwrightError, UsageError
from graphwright.files.checksums import Buffer, StrPath, flat_bytes
from graphwright.files.errors import DestinationExists, FileError, UnwritableTarget

try:
    import fcntl
except ImportError:
    fcntl = None

T = TypeVar("T")

CLOEXEC = getattr(os, "O_CLOEXEC", 0)
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # opening a named pipe must not block
BINARY = getattr(os, "O_BINARY", 0)


def target_path(path: StrPath) -> Path:
    """Return a path to write to. Raises: UnwritableTarget if `path` is not a valid path."""
    with suppress(TypeError, UnicodeEncodeError):
        if b"\0" not in os.fsencode(target := Path(path)):
            return target
    raise UnwritableTarget("invalid path", expected="a str without NUL, or a pathlib.Path", got=repr(path))


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Convert an OSError raised inside into `UnwritableTarget`."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise refusal(target, error) from error


def refusal(target: Path, cause: OSError | None = None) -> UnwritableTarget:
    """Return the error for a target that cannot be written, with the obstacle and a fix."""
    folder, code = target.parent, None if cause is None else cause.errno
    if code in (None, errno.ENOENT, errno.ENOTDIR):
        existing = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder)
        if not existing.is_dir():
            what, expected, got = "a parent of the target is a file", f"{existing} to be a directory", "a file"
            return UnwritableTarget(
                what, where=target, expected=expected, got=got, fix="choose another path", cause=cause
            )
        if existing != folder:
            what, fix = "the parent directory does not exist", f"mkdir -p {shlex.quote(str(folder))}"
            return UnwritableTarget(
                what, where=target, expected=f"the directory {folder}", got="nothing", fix=fix, cause=cause
            )
    fixes = {
        **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or choose another disk"),
        **dict.fromkeys(
            (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT),
            f"choose a directory that you may write to; files cannot be created in {folder}",
        ),
        errno.EISDIR: "choose a file name; this path is a directory",
    }
    what = "writing failed; the target still has its complete old or new content"
    return UnwritableTarget(what, where=target, fix=fixes.get(code) if code else None, cause=cause)


def again(call: Callable[..., T], *args: object) -> T:
    """`call(*args)`, repeated while a signal interrupts it."""
    while True:
        try:
            return call(*args)
        except InterruptedError:
            continue


def staging_path(target: Path, suffix: str) -> Path:
    """Return a new hidden name beside `target`; `suffix` is `tmp` (being written) or `old` (moved aside)."""
    return target.with_name(f".{target.name[:48]}.{os.urandom(8).hex()}.{suffix}")


def staged(target: Path, suffix: str) -> list[Path]:
    """Return the existing staging paths of `target` that no running process has locked."""
    pattern = re.compile(rf"\.{re.escape(target.name[:48])}\.[0-9a-f]{{16}}\.{suffix}")
    found = []
    with suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if pattern.fullmatch(entry.name) and _stale(entry.path):
                found.append(Path(entry.path))
    return found


def sweep(target: Path, suffix: str = "tmp") -> None:
    """Remove the staging paths that killed processes left beside `target`; failures are ignored."""
    for path in staged(target, suffix):
        with suppress(OSError):
            remove_tree(path)


def hold(fd: int) -> None:
    """Lock the open file or directory until `fd` is closed; ignored on file systems without locks."""
    if fcntl is not None:
        with suppress(OSError):
            again(fcntl.flock, fd, fcntl.LOCK_EX)


def open_directory(path: Path) -> int:
    """Open a directory, to lock or to fsync it."""
    return again(os.open, path, os.O_RDONLY | CLOEXEC | getattr(os, "O_DIRECTORY", 0))


def fsync_directory(path: Path) -> None:
    """Make the directory entries of `path` survive a power loss, where the system supports it."""
    if os.name == "nt":  # directories cannot be opened on Windows
        return
    fd = open_directory(path)
    try:
        again(os.fsync, fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system does not support fsync of directories
            raise
    finally:
        os.close(fd)


def remove_tree(path: Path) -> None:
    """Remove a file, link or directory tree; links are not followed."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        again(os.unlink, path)
        return
    for folder, folders, files in os.walk(path, topdown=False):
        for name in files:
            again(os.unlink, os.path.join(folder, name))
        for name in folders:
            child = os.path.join(folder, name)
            again(os.unlink if os.path.islink(child) else os.rmdir, child)
    again(os.rmdir, path)


def _stale(path: str) -> bool:
    if fcntl is None:
        return False
    try:
        fd = again(os.open, path, os.O_RDONLY | CLOEXEC | NOFOLLOW | NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        with suppress(OSError):
            os.close(fd)


def atomic_write(path: StrPath, data: bytes | bytearray | memoryview | Iterable[Buffer]) -> None:
    """Replace the content of `path` by `data`: bytes, or several buffers in order.

    Raises: UnwritableTarget, or any error of the iterable; the file then keeps its old content.
    """
    with AtomicFile(path) as file:
        for chunk in [data] if isinstance(data, (bytes, bytearray, memoryview)) else data:
            file.write(chunk)


class AtomicFile:
    """A file written under a hidden name; leaving the `with` block renames it onto the target, an exception removes it.

    Keeps the mode of the file that it replaces; a new file gets 0666 minus the umask.

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
            raise UsageError("an AtomicFile can be entered only once", where=self.path, fix="create another one")
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
        """Append all bytes of `data`; return their number. Raises: UnwritableTarget (disk full, I/O error)."""
        view = flat_bytes(data)
        rest = view
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
            os.close(self._fd)  # another process swept it before it was locked

    def _commit(self) -> None:
        assert self._temp is not None
        if not self._whole:
            raise OSError(errno.EIO, "an earlier write failed and its error was ignored")
        again(os.fsync, self._fd)
        if os.name == "nt":  # Windows cannot rename an open file; elsewhere the lock must last until the rename
            self._close()
        os.replace(self._temp, self.path)
        fsync_directory(self.path.parent)
        self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):  # the content was already fsynced, or is being discarded
                os.close(fd)

    def _discard(self) -> None:
        if self._temp is not None:
            with suppress(OSError):
                again(os.unlink, self._temp)
        self._close()


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
