"""The diary of a life: `life.jsonl`, a hash chain of events that only grows.

A line has {seq, time, step, kind, facts}. Lines are appended and synced before the commit that names their head; lines
after the head of the newest commit do not belong to the life, and the next writer cuts them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphwright.errors import UsageError
from graphwright.files import UnreadableFile, append_at, read_file
from graphwright.graph import Chain, JournalCorrupt, chain
from graphwright.lifecycle.errors import LogCorrupt
from graphwright.lifecycle.identity import now

KINDS = (
    "birth", "segment_start", "segment_end", "expert_born", "expert_died", "expert_reborn", "expert_retired", "alarm",
    "edit", "restore", "fork", "merge", "rename", "compaction", "export", "fault",
)  # fmt: skip
"""Kinds of events."""
_FIELDS = {"seq", "time", "step", "kind", "facts"}


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a file of lines counts: its number of lines, its length in bytes, and the hash of its last line."""

    lines: int
    bytes: int
    head: str

    def form(self) -> list[Any]:
        """Return the mark as JSON: [lines, bytes, head]."""
        return [self.lines, self.bytes, self.head]


@dataclass(frozen=True, slots=True)
class ChainFile:
    """A file of lines of a hash chain."""

    path: Path

    def append(self, mark: Mark, lines: Sequence[str], head: str, *, durable: bool) -> Mark:
        """Append lines after `mark`, in place of whatever an unfinished append left there; return the new mark."""
        if not lines:
            return mark
        text = "".join(f"{line}\n" for line in lines).encode()
        length = append_at(self.path, mark.bytes, text, durable=durable)
        return Mark(mark.lines + len(lines), length, head)

    def read(self, mark: Mark, base: str) -> tuple[Chain, int]:
        """Return the chain up to `mark`, and the number of lines after it. Raises: LogCorrupt; UnreadableFile."""
        content = read_file(self.path) if mark.bytes or self.path.exists() else b""
        lines, rest = content[: mark.bytes].split(b"\n"), content[mark.bytes :]
        try:
            links = chain.verify(lines[:-1], head=None, base=base)
        except JournalCorrupt as error:
            raise LogCorrupt(error.what, where=self.path, line=error.line) from error
        found = Chain(links, base)
        if len(links) != mark.lines or found.head != mark.head or lines[-1]:
            raise LogCorrupt("the file does not end where the newest commit says", where=self.path, line=len(links),
                             expected=f"{mark.lines} lines", got=f"{len(links)} lines")  # fmt: skip
        return found, rest.count(b"\n") + (not rest.endswith(b"\n") and bool(rest))


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the log.

    Attributes:
        seq: number of the line, from 0.
        time: UTC, ISO 8601.
        step: age of the life.
        kind: one of `KINDS`.
        facts: further JSON values.
    """

    seq: int
    time: str
    step: int
    kind: str
    facts: Mapping[str, Any]

    def __str__(self) -> str:
        shown = {k: f"{v:.4g}" if isinstance(v, float) else str(v)[:24] for k, v in self.facts.items()
                 if isinstance(v, str | int | float) and v != ""}  # fmt: skip
        facts = ", ".join(f"{name} {text}" for name, text in shown.items())
        return f"{self.step:>8}  {self.time[:19]}  {self.kind:<14} {facts}"[:160]


class LifeLog(Sequence[Event]):
    """The events of a life in order."""

    def __init__(self, links: Chain) -> None:
        self.chain = links
        self._events = [_event(entry, i) for i, entry in enumerate(links)]

    def __getitem__(self, index: Any) -> Any:
        return self._events[index]

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def add(self, kind: str, step: int, facts: Mapping[str, Any]) -> Event:
        """Append an event. Raises: UsageError for an unknown kind or facts that are not JSON."""
        if kind not in KINDS:
            raise UsageError("unknown kind of event", expected=", ".join(KINDS), got=kind)
        entry = {"seq": len(self), "time": now(), "step": step, "kind": kind, "facts": dict(facts)}
        self.chain.append(entry)
        self._events.append(Event(**entry))
        return self._events[-1]

    def tail(self, n: int = 10) -> str:
        """Return the last `n` events as text, one a line."""
        return "\n".join(map(str, self._events[max(len(self) - n, 0) :]))

    def of(self, *kinds: str) -> list[Event]:
        """Return the events of some kinds."""
        return [event for event in self if event.kind in kinds]

    def counts(self) -> dict[str, int]:
        """Return the number of events by kind."""
        return dict(Counter(event.kind for event in self))

    def __repr__(self) -> str:
        return self.tail() or "empty log"


def _event(entry: Any, i: int) -> Event:
    wrong = not isinstance(entry, dict) or entry.keys() != _FIELDS or entry["seq"] != i or entry["kind"] not in KINDS
    if wrong or type(entry["step"]) is not int or not isinstance(entry["facts"], dict):
        raise LogCorrupt("the line is not an event", where="life.jsonl", line=i + 1, got=str(entry)[:80])
    return Event(**entry)


def read_lines(file: ChainFile, mark: Mark, base: str) -> tuple[Chain, int]:
    """As `ChainFile.read`, with a missing file as a missing line. Raises: LogCorrupt."""
    try:
        return file.read(mark, base)
    except UnreadableFile as error:
        raise LogCorrupt("the file is missing", where=file.path, line=1, expected=f"{mark.lines} lines") from error
