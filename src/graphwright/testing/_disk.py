"""A model of a disk after a power loss: data that was not fsynced may be present or missing in any part.

A file has its present content and its content at the last fsync; a directory likewise has its names. After a crash
each of them is found in either state. A rename is one atomic change of names.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from graphwright.testing._interception import Operation

Tree = dict[str, bytes | None]
"""Relative path -> content of a file; None for a directory."""


def snapshot(root: Path) -> Tree:
    """Read the files and directories under `root`."""
    tree: Tree = {}
    for folder, folders, files in os.walk(root):
        for name in folders:
            tree[os.path.relpath(os.path.join(folder, name), root)] = None
        for name in files:
            path = Path(folder, name)
            tree[os.path.relpath(path, root)] = path.read_bytes()
    return tree


def materialise(tree: Tree, root: Path) -> None:
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
        self.now = self.kept = content


class _Folder:
    def __init__(self) -> None:
        self.now: dict[str, _File | _Folder] = {}
        self.kept: dict[str, _File | _Folder] = {}


class Disk:
    """A disk on which all of `tree` is durable at the start, and which follows the operations applied to it."""

    def __init__(self, tree: Tree) -> None:
        self._root = _Folder()
        self._open: dict[int, _File | _Folder] = {}
        for name in sorted(tree):
            parent, leaf = self._parent(name)
            content = tree[name]
            parent.now[leaf] = parent.kept[leaf] = _Folder() if content is None else _File(content)

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
        """Return possible states after a crash now: the four extremes, torn content, and `seeds` random choices."""

        def whole(_: _File | _Folder) -> bool:
            return True

        def synced(_: _File | _Folder) -> bool:
            return False

        def names(node: _File | _Folder) -> bool:
            return isinstance(node, _Folder)

        def content(node: _File | _Folder) -> bool:
            return isinstance(node, _File)

        yield "everything arrived", self._found(whole)
        yield "only what was fsynced arrived", self._found(synced)
        yield "names arrived, content did not", self._found(names)
        yield "content arrived, names did not", self._found(content)
        yield "names arrived, content is torn", self._found(whole, torn=True)
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
            if isinstance(node, _File):
                node.kept = node.now
            else:
                node.kept = dict(node.now)
        elif isinstance(node, _File):
            if op.name == "write":
                padded = node.now.ljust(op.offset, b"\0")
                node.now = padded[: op.offset] + op.data + padded[op.offset + len(op.data) :]
            else:
                node.now = node.now[: op.offset].ljust(op.offset, b"\0")

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
            for name, node in sorted((folder.now if arrived(folder) else folder.kept).items()):
                if isinstance(node, _Folder):
                    tree[prefix + name] = None
                    visit(node, f"{prefix}{name}{os.sep}")
                elif torn and node.now != node.kept:
                    tree[prefix + name] = node.now[: len(node.now) // 2]
                else:
                    tree[prefix + name] = node.now if arrived(node) else node.kept

        visit(self._root, "")
        return tree
