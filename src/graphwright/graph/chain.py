"""An append-only hash chain of JSON entries, one line each: the format of a journal file.

hash = sha256(previous hash + canonical JSON of the entry). A line is the canonical JSON of {entry, hash, prev}, so all
bytes of the file are covered: `read` and `verify` report the line of a single flipped byte. A chain alone cannot detect
a truncated end; compare `head` with a hash stored elsewhere, such as in a receipt.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, cast

from ..errors import UsageError
from ..files import atomic_write, open_regular
from .errors import JournalCorrupt

GENESIS = "0" * 64  # the hash before the first entry
MAX_LINE = 64 * 2**20  # bytes
MAX_DEPTH = 64
_TEXT = frozenset({str})
_LEAVES = frozenset({str, int, bool, type(None)})
_NESTING = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]')


@dataclass(frozen=True, slots=True)
class Link:
    """One entry of the chain, with its hash and `prev`, the hash of the entry before it."""

    entry: Any
    prev: str
    hash: str

    @property
    def line(self) -> str:
        """The entry as a line of a journal file, without the newline."""
        return _line(canonical_json(self.entry), self.hash, self.prev)


@dataclass(slots=True)
class Chain:
    """A list of entries with their hashes that only grows at the end.

    >>> chain = Chain()
    >>> chain.append({"why": "first"}).prev == GENESIS
    True
    """

    links: list[Link] = field(default_factory=list[Link])
    base: str = GENESIS
    """The hash before the first entry: the head of the chain that this one continues."""

    @property
    def head(self) -> str:
        """The hash of the last entry, which covers the whole chain."""
        return self.links[-1].hash if self.links else self.base

    def append(self, entry: Any) -> Link:
        """Add an entry. Raises: UsageError if it is not a JSON value or is too large for a line."""
        prev, text = self.head, canonical_json(entry)
        link = Link(entry, prev, _hash(prev, text))
        if (size := len(_line(text, link.hash, prev))) >= MAX_LINE:
            raise UsageError("the entry is too large for a journal line", expected=f"< {MAX_LINE} bytes", got=size)
        self.links.append(link)
        return link

    def lines(self) -> list[str]:
        """Return the lines of the journal file."""
        return [link.line for link in self.links]

    def verify(self) -> None:
        """Recompute all hashes. Raises: JournalCorrupt if an entry was changed in memory."""
        verify(self.lines(), base=self.base)

    def __len__(self) -> int:
        return len(self.links)

    def __iter__(self) -> Iterator[Any]:
        return (link.entry for link in self.links)


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical_json(value: Any) -> str:
    """Return the canonical JSON text of a value: sorted keys, no spaces, ASCII, shortest floats, tuples as lists.

    Raises: UsageError for NaN and infinities, keys that are not strings, other types, nesting beyond 64.
    """
    _check(value)
    return _ENCODER.encode(value)


def _hash(prev: str, text: str) -> str:
    return hashlib.sha256((prev + text).encode()).hexdigest()


def _line(text: str, own: str, prev: str) -> str:
    return f'{{"entry":{text},"hash":"{own}","prev":"{prev}"}}'


def verify(lines: Iterable[str | bytes], *, head: str | None = None, base: str = GENESIS) -> list[Link]:
    """Parse lines and check every hash; `base` is the hash before the first line, `head` the expected last hash.

    Raises: JournalCorrupt with the first bad line, counted from 1.
    """
    links = list(_links(lines, base))
    _check_head(links, head, base)
    return links


def read(path: str | os.PathLike[str], *, recover: bool = False, head: str | None = None, base: str = GENESIS) -> Chain:
    """Read and verify a journal file; only its valid lines are held in memory.

    With `recover`, return the entries before the first invalid line. `head` is the expected hash of the last entry,
    `base` the hash before the first one. Raises: JournalCorrupt, OSError.
    """
    chain = Chain(base=base)
    with open_regular(path) as file:
        try:
            for link in _links(_bounded(file), base):
                chain.links.append(link)
            _check_head(chain.links, head, base)
        except JournalCorrupt:
            if not recover:
                raise
    return chain


def write(path: str | os.PathLike[str], chain: Chain) -> None:
    """Write a chain to a journal file, replacing the file atomically. Raises: UnwritableTarget."""
    atomic_write(path, (link.line.encode() + b"\n" for link in chain.links))


def _links(lines: Iterable[str | bytes], base: str) -> Iterator[Link]:
    prev = base
    for number, text in enumerate(lines, 1):
        line = text.encode("utf-8", "replace") if isinstance(text, str) else text
        link = _parse(line, number)
        if link.prev != prev:
            raise JournalCorrupt(number, f"`prev` is {link.prev[:12]}, but the line before it has hash {prev[:12]}")
        prev = link.hash
        yield link


def _parse(line: bytes, number: int) -> Link:
    if len(line) >= MAX_LINE:
        raise JournalCorrupt(number, f"the line is longer than {MAX_LINE} bytes")
    if _depth(line) > MAX_DEPTH + 1:
        raise JournalCorrupt(number, f"the JSON is nested deeper than {MAX_DEPTH} levels")
    try:
        data = json.loads(line)
        link = Link(data["entry"], data["prev"], data["hash"])
        same = link.line.encode() == line and len(data) == 3
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise JournalCorrupt(number, f"invalid journal line: {error}") from error
    if not same:
        raise JournalCorrupt(number, "the line is not the canonical JSON of entry, hash and prev")
    if _hash(link.prev, canonical_json(link.entry)) != link.hash:
        raise JournalCorrupt(number, "the stored hash does not match the entry")
    return link


def _bounded(file: IO[bytes]) -> Iterator[bytes]:
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if not line.endswith(b"\n"):
            too_long = f"the line is longer than {MAX_LINE} bytes" if len(line) > MAX_LINE else None
            raise JournalCorrupt(number, too_long or "the last line is incomplete")
        yield line[:-1]


def _check_head(links: list[Link], head: str | None, base: str) -> None:
    last = links[-1].hash if links else base
    if head is not None and last != head:
        what = f"the last hash is {last[:12]}, expected {head[:12]}: lines are missing or were added"
        raise JournalCorrupt(len(links), what)


def _depth(line: bytes) -> int:
    if line.count(b"[") + line.count(b"{") <= MAX_DEPTH:
        return 0  # the nesting cannot exceed the number of brackets
    depth = deepest = 0
    for token in _NESTING.finditer(line):
        mark = token.group()
        if mark in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif mark in b"]}":
            depth -= 1
    return deepest


def _check(value: Any) -> None:
    level: list[Any] = [value]
    depth = 0
    while level:
        below: list[Any] = []
        for item in level:
            if depth == MAX_DEPTH and isinstance(item, dict | list | tuple):
                raise UsageError("the JSON value is nested too deeply", expected=f"at most {MAX_DEPTH} levels")
            if isinstance(item, dict):
                fields = cast("dict[Any, Any]", item)
                if not _TEXT.issuperset(map(type, fields)) and not all(isinstance(key, str) for key in fields):
                    keys = list(fields)[:6]
                    raise UsageError("a key of a JSON object is not a string", expected="strings as keys", got=keys)
                below.extend(fields.values())
            elif isinstance(item, list | tuple):
                below.extend(cast("Iterable[Any]", item))
            elif isinstance(item, float):
                if not math.isfinite(item):
                    raise UsageError("JSON cannot represent this number", expected="a finite number", got=item)
            elif item is not None and not isinstance(item, str | int):
                kinds = "dict, list, str, number, bool, None"
                raise UsageError("not a JSON value", got=type(item).__name__, expected=kinds)
        level, depth = [item for item in below if type(item) not in _LEAVES], depth + 1
