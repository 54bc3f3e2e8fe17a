"""Prove that a save is atomic: after a fault at any file operation, or a power loss, the old or new state is complete.

`check_atomic` runs the save once per possible fault, and once more after each; `inject` injects a single fault. Every
`os` call and `open` under one folder is intercepted; calls made through `from os import write` or C code (`mmap`,
`shutil.copyfile`) are not. `Disk` models a power loss: after it, each file has its latest content or that of its last
fsync, and each directory its latest names or those of its last fsync. A rename is one atomic change of names.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from graphwright.errors import GraphwrightError, UsageError
from graphwright.files import StrPath
from graphwright.files import atomic as directory


class _RawFile(io.RawIOBase):
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

    `other` is the second path of a rename or exchange. `handle` numbers the opened files from 0 and is never reused, -1
    means none; `offset` and `data` belong to a write or a truncation, `created` and `truncated` to an open.
    `fault` is the kind of fault that hit the operation: a write then wrote only `data`, others changed no file.
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


class _Interceptor:
    """Replacements of `os` calls and `open`.

    They record each call on a file under `root`. `strike(name)` returns the fault for a call of `name`, or "" for none.
    """

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
        """Replace `os.open`."""
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
        """Replace `os.close`: the descriptor is closed even if the call fails."""
        handle, where = self._handles.pop(fd, (-1, ""))
        self._real["close"](fd)
        if handle >= 0:
            self._record(Operation("close", where, handle=handle, fault=self.strike("close")))

    def write(self, fd: int, data: Any) -> int:
        """Replace `os.write`: a fault writes half of the bytes (EINTR none), then raises unless it is `short`."""
        if fd not in self._handles:
            return self._real["write"](fd, data)
        (handle, where), fault, content = self._handles[fd], self.strike("write"), bytes(data)
        if fault:
            content = content[: len(content) // 2 or (fault == "short")]
        offset = os.lseek(fd, 0, os.SEEK_CUR)
        done = self._real["write"](fd, content) if fault != "EINTR" else 0
        self._record(Operation("write", where, handle=handle, offset=offset, data=content[:done], fault=fault))
        return done

    def open_stream(self, file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
        """Replace `open`: streams of files under `root` call the replaced `os` functions."""
        if isinstance(file, int) or kwargs.get("opener") or self._relative(file) is None:
            return self._real_open(file, mode, buffering, *args, **kwargs)
        raw = _RawFile(file, mode)
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
            return self._struck(Operation(name, where), path, *args, **kwargs)

        return call

    def _pair_call(self, name: str) -> Callable[..., Any]:
        def call(src: Any, dst: Any) -> Any:
            where, other = self._relative(src), self._relative(dst)
            if where is None or other is None:
                return self._real[name](src, dst)
            return self._struck(Operation(name, where, other), src, dst)

        return call

    def _handle_call(self, name: str) -> Callable[..., Any]:
        def call(fd: int, *args: Any) -> Any:
            if fd not in self._handles:
                return self._real[name](fd, *args)
            handle, where = self._handles[fd]
            return self._struck(Operation(name, where, "", handle, args[0] if name == "ftruncate" else 0), fd, *args)

        return call

    def _struck(self, operation: Operation, *args: Any, **kwargs: Any) -> Any:
        """Record an operation, and run it unless a fault hits it; an fsync is only recorded, and modelled by `Disk`."""
        fault, name = self.strike(operation.name), operation.name
        result = None if fault or name in ("fsync", "fdatasync") else self._real[name](*args, **kwargs)
        if result is not False:  # an unsupported exchange had no effect
            self._record(replace(operation, fault=fault))
        return result

    def _relative(self, path: Any, dir_fd: int | None = None) -> str | None:
        if isinstance(path, int):
            return None
        if dir_fd is not None:
            fix = "do not use dir_fd in the code under test"
            raise UsageError("the fault harness does not support dir_fd", expected="full paths", got="dir_fd", fix=fix)
        full = os.path.abspath(os.fsdecode(path))
        return full[len(self.root) + 1 :] if full.startswith(self.root + os.sep) or full == self.root else None

    def _record(self, operation: Operation) -> None:
        self.log.append(operation)
        if operation.fault not in ("", "short"):
            code = getattr(errno, operation.fault)
            raise OSError(code, f"{os.strerror(code)} (injected into {operation})")


Tree = dict[str, bytes | None]
"""Relative path -> content of a file; None for a directory."""


def snapshot(root: Path) -> Tree:
    """Return a dict from the relative path of each file under `root` to its content, and of each directory to None."""
    return {str(p.relative_to(root)): None if p.is_dir() else p.read_bytes() for p in root.rglob("*")}


def _materialise(tree: Tree, root: Path) -> None:
    """Create the files and directories of `tree` under the new directory `root`."""
    root.mkdir()
    for name in sorted(tree):
        content = tree[name]
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)


class _File:
    def __init__(self, content: bytes = b"") -> None:
        self.now = self.durable = content

    def sync(self) -> None:
        self.durable = self.now


class _Folder:
    def __init__(self) -> None:
        self.now: dict[str, _File | _Folder] = {}
        self.durable: dict[str, _File | _Folder] = {}

    def sync(self) -> None:
        self.durable = dict(self.now)


class Disk:
    """A model of a disk: `tree` (path -> content, None for a directory) is durable at the start; `apply` changes it."""

    def __init__(self, tree: Tree) -> None:
        self._root = _Folder()
        self._open: dict[int, _File | _Folder] = {}
        for name in sorted(tree):
            parent, leaf = self._parent(name)
            content = tree[name]
            parent.now[leaf] = parent.durable[leaf] = _Folder() if content is None else _File(content)

    def apply(self, operation: Operation) -> None:
        """Apply one operation; those that change neither content nor names are ignored."""
        op = operation
        if op.fault and op.name != "write":
            return
        match op.name:
            case "open":
                self._apply_open(op)
            case "write" | "ftruncate" | "fsync" | "fdatasync":
                self._apply_handle(op)
            case "mkdir":
                parent, leaf = self._parent(op.path)
                parent.now[leaf] = _Folder()
            case "unlink" | "remove" | "rmdir":
                parent, leaf = self._parent(op.path)
                del parent.now[leaf]
            case "rename" | "replace":
                (src, old), (dst, new) = self._parent(op.path), self._parent(op.other)
                dst.now[new] = src.now.pop(old)
            case "exchange":
                (src, old), (dst, new) = self._parent(op.path), self._parent(op.other)
                src.now[old], dst.now[new] = dst.now[new], src.now[old]

    def states(self, seeds: int = 2) -> Iterator[tuple[str, Tree]]:
        """Yield possible states after a crash now, as (description, files).

        Unsynced names and contents either all persist or all do not, which gives four states; then one with torn
        content, and `seeds` states in which a random part persists.
        """
        arrived: dict[str, Callable[[_File | _Folder], bool]] = {
            "everything arrived": lambda _: True,
            "only what was fsynced arrived": lambda _: False,
            "names arrived, content did not": lambda node: isinstance(node, _Folder),
            "content arrived, names did not": lambda node: isinstance(node, _File),
        }
        for story, which in arrived.items():
            yield story, self._found(which)
        yield "names arrived, content is torn", self._found(lambda _: True, torn=True)
        for seed in range(seeds):
            toss = random.Random(seed)
            yield f"random part {seed} arrived", self._found(lambda _, toss=toss: toss.random() < 0.5)

    def _apply_open(self, op: Operation) -> None:
        parent, leaf = self._parent(op.path)
        if op.created:
            parent.now[leaf] = _File()
        node = parent.now[leaf] if leaf else self._root
        if op.truncated and isinstance(node, _File):
            node.now = b""
        self._open[op.handle] = node

    def _apply_handle(self, op: Operation) -> None:
        node = self._open[op.handle]
        if op.name in ("fsync", "fdatasync"):
            node.sync()
        elif isinstance(node, _File):
            padded = node.now.ljust(op.offset, b"\0")
            rest = padded[op.offset + len(op.data) :] if op.name == "write" else b""
            node.now = padded[: op.offset] + op.data + rest

    def _parent(self, path: str) -> tuple[_Folder, str]:
        folder = self._root
        *parts, leaf = path.split(os.sep)
        for part in parts:
            child = folder.now[part]
            assert isinstance(child, _Folder)
            folder = child
        return folder, leaf

    def _found(self, arrived: Callable[[_File | _Folder], bool], torn: bool = False) -> Tree:
        tree: Tree = {}

        def visit(folder: _Folder, prefix: str) -> None:
            for name, node in sorted((folder.now if arrived(folder) else folder.durable).items()):
                if isinstance(node, _Folder):
                    tree[prefix + name] = None
                    visit(node, f"{prefix}{name}{os.sep}")
                elif torn and node.now != node.durable:
                    kept = (
                        0 if not node.now.startswith(node.durable) else len(node.durable)
                    )  # an append harms no old byte
                    tree[prefix + name] = node.now[: kept + (len(node.now) - kept) // 2]
                else:
                    tree[prefix + name] = node.now if arrived(node) else node.durable

        visit(self._root, "")
        return tree


class NotAtomic(GraphwrightError, AssertionError):
    """A fault left a mixed state, lost data or left a staging file; `where` is the fault, `got` the state found."""


@dataclass(frozen=True, slots=True)
class Survival:
    """Counts of a passed check: operations of one save, faults injected, distinct states after a crash."""

    operations: int
    faults: int
    crashes: int


@contextmanager
def record(folder: StrPath) -> Iterator[list[Operation]]:
    """Yield the list of file operations under `folder` as it grows. Nothing is really fsynced meanwhile."""
    with _Interceptor(Path(folder), lambda name: "").installed() as log:
        yield log


@contextmanager
def inject(folder: StrPath, kind: str, at: int) -> Iterator[list[Operation]]:
    """Make one operation under `folder` fail: number `at`, counted from 0 over the operations that `kind` can hit.

    `kind` is a key of `KINDS`: EIO, ENOSPC and EINTR raise `OSError` (a write has then written half, or for EINTR
    nothing), `short` makes a write partial. Yields the list of operations; the one that failed has `fault` set.
    """
    if kind not in KINDS:
        raise UsageError("unknown kind of fault", expected=", ".join(KINDS), got=kind)
    left = at

    def strike(name: str) -> str:
        nonlocal left
        if name not in KINDS[kind]:
            return ""
        left -= 1
        return kind if left == -1 else ""

    with _Interceptor(Path(folder), strike).installed() as log:
        yield log


def check_atomic(
    work: StrPath, before: Callable[[Path], object], save: Callable[[Path], object], *,
    kinds: Sequence[str] = tuple(KINDS), seeds: int = 2,
) -> Survival:  # fmt: skip
    """Prove that `save` leaves the old or the new state after any fault, and that the next save cleans up.

    Args:
        work: an empty directory for the copies.
        before: fills a directory with the old state.
        save: changes that directory to the new state; may be called again, and reaches files through `os` or `open`.
        kinds: faults to inject at each operation in turn.
        seeds: number of random crash states per operation, besides the extreme ones.
    Raises: NotAtomic at the first fault that leaves neither the old nor the new state; UsageError if nothing changes.
    """
    trial = _Trial(Path(work), before, save)
    faults = sum(trial.inject_everywhere(kind) for kind in kinds)
    return Survival(len(trial.operations), faults, trial.crash_everywhere(seeds))


class _Trial:
    def __init__(self, work: Path, before: Callable[[Path], object], save: Callable[[Path], object]) -> None:
        self.work, self.before, self.save = work, before, save
        self.made = 0
        folder = self._fresh()
        self.old = snapshot(folder)
        with record(folder) as self.operations:
            save(folder)
        self.new = snapshot(folder)
        if self.old == self.new:
            raise UsageError("the save under test changes nothing", got=f"{len(self.operations)} file operations")
        if not self.operations:
            raise UsageError("the calls of the save under test are not intercepted", fix="use os.* calls and open")
        self.tops = {_top(path) for path in (*self.old, *self.new)}

    def inject_everywhere(self, kind: str) -> int:
        at = 0
        while True:
            folder = self._fresh()
            failed = False
            with inject(folder, kind, at) as log:
                try:
                    self.save(folder)
                except (OSError, GraphwrightError):
                    failed = True
            hit = next((op for op in log if op.fault), None)
            if hit is None:
                return at
            fault = f"{kind} at operation {at}: {hit}"
            self._expect_whole(snapshot(folder), fault, (self.old, self.new) if failed else (self.new,))
            self._expect_clean_after_next_save(folder, fault)
            at += 1

    def crash_everywhere(self, seeds: int) -> int:
        disk = Disk(self.old)
        seen: set[tuple[frozenset[tuple[str, bytes | None]], bool]] = set()
        for done in range(len(self.operations) + 1):
            last = "start" if done == 0 else str(self.operations[done - 1])
            returned = done == len(self.operations)
            for story, tree in disk.states(seeds):
                mark = (frozenset(tree.items()), returned)
                if mark in seen:
                    continue
                seen.add(mark)
                crash = f"power loss after operation {done} ({last}): {story}"
                self._expect_whole(tree, crash, (self.new,) if returned else (self.old, self.new))
                folder = self._folder()
                _materialise(tree, folder)
                self._expect_clean_after_next_save(folder, crash)
            if not returned:
                disk.apply(self.operations[done])
        return len(seen)

    def _expect_whole(self, tree: Tree, fault: str, allowed: tuple[Tree, ...]) -> None:
        visible = {path: content for path, content in tree.items() if _top(path) in self.tops}
        if visible not in allowed:
            expected = "old or new, whole" if len(allowed) > 1 else "the new state, since the save returned"
            raise NotAtomic("the fault left an invalid state", where=fault, expected=expected, got=_describe(visible))

    def _expect_clean_after_next_save(self, folder: Path, fault: str) -> None:
        with record(folder):
            self.save(folder)
        if (found := snapshot(folder)) != self.new:
            raise NotAtomic("the next save does not clean up after the fault", where=fault,
                            expected=_describe(self.new), got=_describe(found))  # fmt: skip

    def _fresh(self) -> Path:
        folder = self._folder()
        folder.mkdir()
        self.before(folder)
        return folder

    def _folder(self) -> Path:
        self.made += 1
        return self.work / f"{self.made:05d}"


def _top(path: str) -> str:
    return path.split(os.sep, 1)[0]


def _describe(tree: Tree) -> str:
    sizes = (f"{path} {'directory' if content is None else len(content)}" for path, content in sorted(tree.items()))
    return ", ".join(sizes) or "nothing"
