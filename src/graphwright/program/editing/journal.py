"""The journal: every committed edit, undo and redo, as a hash chain that can be read, verified and replayed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from graphwright.graph.chain import Chain, Link
from graphwright.program.errors import ReplayConflict
from graphwright.program.files import forms
from graphwright.report import MOST, ShortTuple, wrapped

if TYPE_CHECKING:
    from graphwright.array import NDArray, Spec
    from graphwright.graph import NodeId, Relabelled
    from graphwright.program.editing.edits import Edit


AUTHORS = ("human", "gate", "evolution", "pass", "lifecycle")
"""Kinds of author; `tool` names the program."""
_PACKAGE = str(Path(__file__).parents[2])


@dataclass(frozen=True, slots=True)
class Undo:
    """The data needed to undo and redo a journal entry. `save(history="full")` stores it.

    Attributes:
        forward, inverse: the primitive edits that redo and undo the entry, each in the order in which they are applied.
        specs: dict from each node whose specs the edit changed to (specs before, specs after).
        valid: whether the program was valid (before the edit, after it).
        labels: changes of the topological order, in the order in which the next undo or redo reverts them. That step
            replaces them by the changes that the opposite step must revert.
    """

    forward: tuple[Edit, ...]
    inverse: tuple[Edit, ...]
    specs: dict[NodeId, tuple[tuple[Spec, ...], tuple[Spec, ...]]]
    valid: tuple[bool, bool] = (True, True)
    labels: list[Relabelled[NodeId]] = field(default_factory=list)

    @property
    def edits(self) -> tuple[Edit, ...]:
        """All primitive edits: those of `inverse`, then those of `forward`."""
        return (*self.inverse, *self.forward)

    def arrays(self) -> Iterator[NDArray]:
        """Yield the arrays that the primitive edits hold."""
        return (array for edit in self.edits for array in edit.payloads)


@dataclass(frozen=True, slots=True)
class Entry:
    """A journal entry: one committed edit, undo or redo, and one line of `journal.jsonl`.

    Attributes:
        seq: index in the journal.
        time: UTC, ISO 8601.
        why, author, tool, line: the arguments of `Program.edit`, and file:line of the user's code that called it.
        base_version: version of the program before the edit.
        edits: JSON forms of the primitive edits.
        before, after: hashes of the program before and after. Unread weights of an opened file are hashed by reference.
        undoes, redoes: `seq` of the entry that this entry undoes or redoes; None if it is an edit.
        warnings: texts about legal changes that are probably not intended.
        prev, hash: the hash of the previous entry, and hash = sha256(prev + canonical JSON of the other fields).
        undo: the data to undo and redo the entry; None if it was not stored.
        cone: nodes that spec inference visited; not saved.
    """

    seq: int
    time: str
    why: str
    author: str
    tool: str | None
    line: str | None
    base_version: int
    edits: tuple[dict[str, Any], ...]
    before: str
    after: str
    undoes: int | None
    redoes: int | None
    warnings: tuple[str, ...]
    prev: str
    hash: str
    undo: Undo | None = field(default=None, repr=False, compare=False)
    cone: tuple[NodeId, ...] = field(default=(), repr=False, compare=False)

    def annotations(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return the annotations in the entry as dicts with `name` and the facts; only those about `name` if given."""
        found = [record for record in self.edits if record["edit"] == "Annotation"]
        return [{"name": r["name"], **r["facts"]} for r in found if name in (None, r["name"])]

    def to_json(self) -> dict[str, Any]:
        """Return the entry as a dict, as it is written in `journal.jsonl`."""
        return {name: _as_json(getattr(self, name)) for name in _FIELDS}

    @staticmethod
    def from_json(data: dict[str, Any], undo: Undo | None = None, cone: tuple[NodeId, ...] = ()) -> Entry:
        """Return the entry from a dict that `to_json` returned. Raises: ProgramFileError for an invalid one."""
        of = f"of entry {data.get('seq')!r:.20} in the journal"
        values = forms.table(data, _FIELDS, f"fields {of}")
        for name in ("seq", "base_version"):
            forms.integer(values[name], field=f"{name} {of}")
        for name in ("time", "why", "author", "before", "after", "prev", "hash"):
            forms.text(values[name], f"{name} {of}")
        for name in ("tool", "line"):
            forms.optional_text(values[name], f"{name} {of}")
        for name in ("undoes", "redoes"):
            if values[name] is not None:
                forms.integer(values[name], field=f"{name} {of}")
        for record in forms.array(values["edits"], None, f"edits {of}"):
            forms.text(forms.table(record, None, f"edits {of}").get("edit"), f"edits {of}")
        for warning in forms.array(values["warnings"], None, f"warnings {of}"):
            forms.text(warning, f"warnings {of}")
        values = dict(values)
        values["edits"], values["warnings"] = ShortTuple(values["edits"]), tuple(values["warnings"])
        return Entry(**values, undo=undo, cone=cone)

    def __str__(self) -> str:
        kind = f" (undoes {self.undoes})" if self.undoes is not None else ""
        kind += f" (redoes {self.redoes})" if self.redoes is not None else ""
        edits = "edit " if len(self.edits) == 1 else "edits"
        return f"{self.seq:>4}  {self.time[11:19]}  {self.author:<9} {len(self.edits):>3} {edits}  {self.why}{kind}"


def in_force(entries: Sequence[Entry]) -> list[Entry]:
    """Return the edits among `entries` that are not undone. Raises: ReplayConflict if an undone entry is missing."""
    stack: list[Entry] = []
    known = {e.seq: e for e in entries}
    for entry in entries:
        other = entry.undoes if entry.undoes is not None else entry.redoes
        if other is None:
            stack.append(entry)
        elif other not in known:
            raise ReplayConflict("the entry undoes or redoes an entry that is not in the replay",
                                 where=f"entry {entry.seq}", got=f"entry {other}")  # fmt: skip
        elif entry.undoes is not None:
            if not stack or stack[-1].seq != other:
                raise ReplayConflict("the entry undoes an edit that is not the latest edit before it",
                                     where=f"entry {entry.seq}", got=f"entry {other}")  # fmt: skip
            stack.pop()
        else:
            stack.append(known[other])
    return stack


_FIELDS = tuple(name for name in Entry.__slots__ if name not in ("undo", "cone"))


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _entry(link: Link, undo: Undo | None = None, cone: tuple[NodeId, ...] = ()) -> Entry:
    return Entry.from_json({**link.entry, "prev": link.prev, "hash": link.hash}, undo, cone)


class Journal(Sequence[Entry]):
    """The journal entries of a program in order, as a hash chain. `hash` identifies the whole history."""

    def __init__(self, chain: Chain | None = None) -> None:
        self.chain = Chain() if chain is None else chain
        self._entries = [_entry(link) for link in self.chain.links]

    def __getitem__(self, index: Any) -> Any:
        return self._entries[index]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    @property
    def hash(self) -> str:
        """Hash of the last entry. An empty journal has the hash of the journal that it continues, or 64 zeros."""
        return self.chain.head

    def put(self, entry: Entry) -> None:
        """Replace the entry that has the same `seq` by `entry`, a copy with other undo data."""
        self._entries[entry.seq] = entry

    def append(
        self, why: str, author: str, *, base_version: int, edits: Sequence[dict[str, Any]], before: str, after: str,
        tool: str | None = None, line: str | None = None, undoes: int | None = None, redoes: int | None = None,
        warnings: Sequence[str] = (), undo: Undo | None = None, cone: tuple[NodeId, ...] = (),
    ) -> Entry:  # fmt: skip
        """Append an entry with these fields and return it; this method sets its `seq`, `time`, `prev` and `hash`."""
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        link = self.chain.append({
            "seq": len(self._entries), "time": time, "why": why, "author": author, "tool": tool, "line": line,
            "base_version": base_version, "edits": list(edits), "before": before, "after": after, "undoes": undoes,
            "redoes": redoes, "warnings": list(warnings),
        })  # fmt: skip
        self._entries.append(_entry(link, undo, cone))
        return self._entries[-1]

    def verify(self) -> None:
        """Recompute all hashes. Raises: JournalCorrupt naming the first line whose hash does not match."""
        self.chain.verify()

    def __repr__(self) -> str:
        if not self._entries:
            return "Journal (empty)"
        earlier = max(len(self._entries) - MOST, 0)
        first = [f"... {earlier} earlier entries"] if earlier else []
        return wrapped("\n".join(["Journal:", *first, *map(str, self._entries[earlier:])]))


def caller() -> str | None:
    """Return file:line of the innermost stack frame that is outside this package and contextlib."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGE) and "contextlib" not in file:
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return None
