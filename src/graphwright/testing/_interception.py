"""Intercept every file operation under one folder, to record it and to inject faults: `os` calls, and `open`.

Calls made through `from os import write` or C code (`mmap`, `shutil.copyfile`) are not intercepted.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from graphwright.errors import UsageError
from graphwright.files import atomic as directory


class RawFile(io.RawIOBase):
    """An unbuffered file on top of the `os` calls, like the one that `open` creates in C."""

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


PATH_CALLS = ("mkdir", "rmdir", "unlink", "remove", "chmod")
PAIR_CALLS = ("rename", "replace")
HANDLE_CALLS = ("fsync", "fdatasync", "ftruncate", "fchmod", "read")
# Operations that each fault can hit: only writing runs out of space, and POSIX does not let signals interrupt a rename.
KINDS: dict[str, frozenset[str]] = {
    "EIO": frozenset({"open", "write", "close", "exchange", *PATH_CALLS, *PAIR_CALLS, *HANDLE_CALLS}),
    "ENOSPC": frozenset({"open", "write", "mkdir", "fsync", "fdatasync", "ftruncate", "rename", "replace", "exchange"}),
    "EINTR": frozenset({"open", "write", "read", "fsync", "fdatasync", "ftruncate"}),
    "short": frozenset({"write"}),
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One file operation. Paths are relative to the watched folder.

    `handle` numbers the open files from 0 and is never reused; `offset` and `data` belong to a write or a truncation;
    `fault` is the kind of fault that hit the operation, which then had no effect, or for a write half of it.
    """

    name: str
    path: str = ""
    other: str = ""
    handle: int = -1
    offset: int = 0
    data: bytes = b""
    created: bool = False
    truncated: bool = False
    fault: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, [self.name, self.path, self.other]))


class Interceptor:
    """Wraps the system's calls. `strike(name)` returns the kind of fault for this call, or "" for none."""

    def __init__(self, root: Path, strike: Callable[[str], str]) -> None:
        self.root = os.path.realpath(root)
        self.strike = strike
        self.log: list[Operation] = []
        self._real: dict[str, Callable[..., Any]] = {}
        self._real_open = builtins.open
        self._handles: dict[int, tuple[int, str]] = {}
        self._opened = 0

    @contextmanager
    def installed(self) -> Iterator[list[Operation]]:
        """Intercept until the block ends; yield the growing list of operations."""
        stubs = {"open": self.open, "close": self.close, "write": self.write}
        stubs |= {name: self._path_call(name) for name in PATH_CALLS}
        stubs |= {name: self._pair_call(name) for name in PAIR_CALLS}
        stubs |= {name: self._handle_call(name) for name in HANDLE_CALLS if hasattr(os, name)}
        with ExitStack() as stack:
            for name, stub in stubs.items():
                self._real[name] = getattr(os, name)
                stack.enter_context(patch.object(os, name, stub))
            self._real["exchange"] = directory.exchange
            stack.enter_context(patch.object(directory, "exchange", self._pair_call("exchange")))
            for module in (builtins, io):
                stack.enter_context(patch.object(module, "open", self.open_stream))
            yield self.log

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """`os.open`."""
        where = self._relative(path, dir_fd)
        if where is None:
            return self._real["open"](path, flags, mode, dir_fd=dir_fd)
        created, truncated = bool(flags & os.O_CREAT) and not os.path.lexists(path), bool(flags & os.O_TRUNC)
        if fault := self.strike("open"):
            self._record(Operation("open", where, fault=fault))
        fd = self._real["open"](path, flags, mode)
        self._handles[fd] = (self._opened, where)
        self.log.append(Operation("open", where, handle=self._opened, created=created, truncated=truncated))
        self._opened += 1
        return fd

    def close(self, fd: int) -> None:
        """`os.close`: the descriptor is closed even if the call fails."""
        handle, where = self._handles.pop(fd, (-1, ""))
        self._real["close"](fd)
        if handle >= 0:
            fault = self.strike("close")
            self._record(Operation("close", where, handle=handle, fault=fault))

    def write(self, fd: int, data: Any) -> int:
        """`os.write`: a fault writes half of the bytes, or reports fewer than were given."""
        if fd not in self._handles:
            return self._real["write"](fd, data)
        handle, where = self._handles[fd]
        fault = self.strike("write")
        content = bytes(data)
        if fault:
            content = content[: len(content) // 2 or (fault == "short")]
        offset = os.lseek(fd, 0, os.SEEK_CUR)
        done = self._real["write"](fd, content) if fault != "EINTR" else 0
        self._record(Operation("write", where, handle=handle, offset=offset, data=content[:done], fault=fault))
        return done

    def open_stream(self, file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
        """`open`: under the folder, built on the calls above."""
        if isinstance(file, int) or kwargs.get("opener") or self._relative(file) is None:
            return self._real_open(file, mode, buffering, *args, **kwargs)
        raw = RawFile(file, mode)
        if buffering == 0:
            return raw
        kind = io.BufferedRandom if "+" in mode else io.BufferedReader if "r" in mode else io.BufferedWriter
        stream = kind(raw)  # a RawIOBase, whatever its class
        return stream if "b" in mode else io.TextIOWrapper(stream, *args, **kwargs)

    def _path_call(self, name: str) -> Callable[..., Any]:
        def call(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            where = self._relative(path, dir_fd)
            if where is None:
                extra = {} if dir_fd is None else {"dir_fd": dir_fd}
                return self._real[name](path, *args, **extra, **kwargs)
            fault = self.strike(name)
            result = None if fault else self._real[name](path, *args, **kwargs)
            self._record(Operation(name, where, fault=fault))
            return result

        return call

    def _pair_call(self, name: str) -> Callable[..., Any]:
        def call(src: Any, dst: Any) -> Any:
            where, other = self._relative(src), self._relative(dst)
            if where is None or other is None:
                return self._real[name](src, dst)
            fault = self.strike(name)
            result = None if fault else self._real[name](src, dst)
            if result is not False:  # an unsupported exchange had no effect
                self._record(Operation(name, where, other, fault=fault))
            return result

        return call

    def _handle_call(self, name: str) -> Callable[..., Any]:
        def call(fd: int, *args: Any) -> Any:
            if fd not in self._handles:
                return self._real[name](fd, *args)
            handle, where = self._handles[fd]
            fault = self.strike(name)
            synced = name in ("fsync", "fdatasync")  # recorded only: the disk model decides what is durable
            done = None if fault or synced else self._real[name](fd, *args)
            offset = args[0] if name == "ftruncate" else 0
            self._record(Operation(name, where, handle=handle, offset=offset, fault=fault))
            return done

        return call

    def _relative(self, path: Any, dir_fd: int | None = None) -> str | None:
        if isinstance(path, int):
            return None
        if dir_fd is not None:
            fix = "do not use dir_fd in the code under test"
            raise UsageError("the fault harness needs full paths", got="dir_fd", fix=fix)
        full = os.path.abspath(os.fsdecode(path))
        return full[len(self.root) + 1 :] if full.startswith(self.root + os.sep) or full == self.root else None

    def _record(self, operation: Operation) -> None:
        self.log.append(operation)
        if operation.fault not in ("", "short"):
            code = getattr(errno, operation.fault)
            raise OSError(code, f"{os.strerror(code)} (injected into {operation})")
