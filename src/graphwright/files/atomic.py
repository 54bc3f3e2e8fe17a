"""One file, written so that a reader at any moment, and after any crash, finds the old content or the new, whole.

The new content goes to a hidden name in the same directory, is fsynced, takes the target's name, and the directory is
fsynced. A link at the target is replaced, not followed.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from graphwright.errors import UsageError
from graphwright.files.checksums import Buffer, StrPath, flat_bytes
from graphwright.files.errors import FileError, UnwritableTarget

try:
    import fcntl
except ImportError:
    fcntl = None

T = TypeVar("T")

CLOEXEC = getattr(os, "O_CLOEXEC", 0)
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # a named pipe must not make anybody wait
BINARY = getattr(os, "O_BINARY", 0)


def target_path(path: StrPath) -> Path:
    """A path to write to. Raises: UnwritableTarget for what is no path, or holds what no system's paths hold."""
    with suppress(TypeError, UnicodeEncodeError):
        if b"\0" not in os.fsencode(place := Path(path)):
            return place
    raise UnwritableTarget("this is no path", expected="a text without NUL, or a pathlib.Path", got=repr(path))


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Turn what the system says inside into `UnwritableTarget`."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise refusal(target, error) from error


def refusal(target: Path, cause: OSError | None = None) -> UnwritableTarget:
    """The error for a place that cannot be written to: what is in the way, and the way out."""
    folder, code = target.parent, None if cause is None else cause.errno
    if code in (None, errno.ENOENT, errno.ENOTDIR):
        there = next((place for place in (folder, *folder.parents) if os.path.lexists(place)), folder)
        if not there.is_dir():
            what, way = "a file stands where a folder should be", "name a place in a folder"
            return UnwritableTarget(
                what, where=target, expected=f"{there}, a folder", got="a file", fix=way, cause=cause
            )
        if there != folder:
            what, way = "there is no folder to put this into", f"mkdir -p {shlex.quote(str(folder))}"
            return UnwritableTarget(
                what, where=target, expected=f"{folder}, a folder", got="nothing", fix=way, cause=cause
            )
    ways = {
        **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or name a place on another disk"),
        **dict.fromkeys(
            (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT),
            f"name a folder that you may write to: the system makes nothing in {folder}",
        ),
        errno.EISDIR: "name a file: a folder stands here",
    }
    what = "writing failed; what stands here is whole, old or new"
    return UnwritableTarget(what, where=target, fix=ways.get(code) if code else None, cause=cause)


def again(call: Callable[..., T], *args: object) -> T:
    """`call(*args)`, repeated while a signal interrupts it."""
    while True:
        try:
            return call(*args)
        except InterruptedError:
            continue


def staging_path(target: Path, suffix: str) -> Path:
    """A fresh hidden name beside `target`; `suffix` is `tmp` (being built) or `old` (moved out of the way)."""
    return target.with_name(f".{target.name[:48]}.{os.urandom(8).hex()}.{suffix}")


def staged(target: Path, suffix: str) -> list[Path]:
    """Staging names of `target` that exist and that no living process holds."""
    pattern = re.compile(rf"\.{re.escape(target.name[:48])}\.[0-9a-f]{{16}}\.{suffix}")
    found = []
    with suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if pattern.fullmatch(entry.name) and _stale(entry.path):
                found.append(Path(entry.path))
    return found


def sweep(target: Path, suffix: str = "tmp") -> None:
    """Remove what killed processes left beside `target`; failing to is no error."""
    for path in staged(target, suffix):
        with suppress(OSError):
            remove_tree(path)


def hold(fd: int) -> None:
    """Lock the open file or directory until `fd` is closed; a file system without locks is left without."""
    if fcntl is not None:
        with suppress(OSError):
            again(fcntl.flock, fd, fcntl.LOCK_EX)


def open_directory(path: Path) -> int:
    """A descriptor of the directory, to lock or to fsync."""
    return again(os.open, path, os.O_RDONLY | CLOEXEC | getattr(os, "O_DIRECTORY", 0))


def fsync_directory(path: Path) -> None:
    """Make the names in `path` survive a power loss, where the system can."""
    if os.name == "nt":  # a directory cannot be opened there
        return
    fd = open_directory(path)
    try:
        again(os.fsync, fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has no such call
            raise
    finally:
        os.close(fd)


def remove_tree(path: Path) -> None:
    """Remove a file, link or whole directory; links are not followed."""
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
