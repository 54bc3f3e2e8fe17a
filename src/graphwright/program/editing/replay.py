"""Replaying a journal on another program: edits find their targets by path, port and checkpoint key, not by handle.

Undone edits are not replayed, unless they were redone. Values of weights come from the undo of the entries, from the
`history` of a saved program, or from `payloads`; an entry whose values are missing is refused. A replayed entry warns
if it brings weight values to another program than it was made on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import Spec, dtype, empty, from_numpy
from graphwright.errors import GraphwrightError
from graphwright.graph import chain
from graphwright.program.editing.edits import RecordReader
from graphwright.program.editing.journal import Entry, Journal
from graphwright.program.errors import ProgramFileError, ReplayConflict
from graphwright.program.files.load import load
from graphwright.program.fork import abstract_fork
from graphwright.program.program import Program
from graphwright.program.weights import array_digest

if TYPE_CHECKING:
    from graphwright.array import DType, NDArray
    from graphwright.files import StrPath


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a replay: the new entries, and with `strict=False` the conflicts of the skipped ones."""

    entries: tuple[Entry, ...]
    conflicts: tuple[ReplayConflict, ...]


def replay(
    journal: Sequence[Entry] | Program | StrPath,
    onto: Program,
    strict: bool = True,
    *,
    payloads: Mapping[str, NDArray] | None = None,
    cast: object = None,
) -> Replayed:
    """Repeat the edits of a journal on another program, one entry each.

    Args:
        journal: entries, a program, the directory of a saved one, or a `journal.jsonl`.
        onto: the program to edit.
        strict: raise at the first entry that does not fit and leave `onto` unchanged; else skip such entries.
        payloads: arrays by the `blake2b` digest that the journal gives them.
        cast: floating dtype of new weights; an existing weight that is set keeps its dtype.
    Raises: ReplayConflict with entry, edit, path and the nearest names; JournalCorrupt, ProgramFileError for files.
    """
    entries = in_force(_entries(journal))
    kind = None if cast is None else dtype(cast)
    if strict and entries:  # first on an abstract fork: a conflict in a late entry must leave `onto` unchanged
        _play(entries, abstract_fork(onto), True, payloads or {}, kind)
    return _play(entries, onto, strict, payloads or {}, kind)


def in_force(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries that are not undone, in order. Raises: ReplayConflict if one undoes an entry not given."""
    stack: list[Entry] = []
    known = {e.seq: e for e in entries}
    for entry in entries:
        other = entry.undoes if entry.undoes is not None else entry.redoes
        if other is None:
            stack.append(entry)
        elif other not in known or (entry.undoes is not None and (not stack or stack[-1].seq != other)):
            raise ReplayConflict(
                "the entry undoes or redoes one that is not replayed", where=f"entry {entry.seq}", got=f"entry {other}"
            )
        elif entry.undoes is not None:
            stack.pop()
        else:
            stack.append(known[other])
    return stack


def _entries(journal: Sequence[Entry] | Program | StrPath) -> Sequence[Entry]:
    if isinstance(journal, Program):
        return journal.journal
    if not isinstance(journal, str | os.PathLike):
        entries = list(journal) if isinstance(journal, Sequence) else [None]
        if all(isinstance(entry, Entry) for entry in entries):
            return journal
    elif "\0" not in os.fspath(journal):
        return _read(journal)
    raise ReplayConflict("not a journal", expected="entries, a program, or a path", got=repr(journal)[:80])


def _read(journal: StrPath) -> Sequence[Entry]:
    if Path(journal).is_dir():
        return load(journal, check=False).journal
    try:
        return Journal(chain.read(journal))
    except chain.JournalCorrupt as error:
        error.where = f"{journal}, {error.where}"
        raise
    except (OSError, UnicodeEncodeError) as error:
        raise ProgramFileError("cannot read the journal", where=repr(journal), got=str(error)) from error


def _play(
    entries: Sequence[Entry], p: Program, strict: bool, payloads: Mapping[str, NDArray], kind: DType | None
) -> Replayed:
    made: list[Entry] = []
    conflicts: list[ReplayConflict] = []
    ports: dict[tuple[str, int], int] = {}
    arrays = PayloadFinder(entries, payloads)
    for entry in entries:
        at = f"entry {entry.seq} ({entry.why})"
        before, saved = len(p.journal), dict(ports)
        brings = any("payload" in r for r in entry.edits)
        foreign = _own_values(entry) if brings and p.state_hash() != entry.before else []
        try:
            with p.edit(entry.why, author=entry.author, tool=entry.tool or "replay") as e:
                if foreign:
                    more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
                    e.warnings.append(f"{foreign[0]}{more}: the values are those of the program that was recorded")
                for i, record in enumerate(entry.edits):
                    at = f"entry {entry.seq} ({entry.why}), edit {i}: {_label(record)}"
                    e.do(RecordReader(p, partial(arrays.find, entry, i), ports, kind).edit(record))
                at = f"entry {entry.seq} ({entry.why}), at its end"
        except (GraphwrightError, LookupError, TypeError) as error:
            conflict = conflict_of(error, at)
            if strict:
                raise conflict from error
            conflicts.append(conflict)
            ports = saved
        made += p.journal[before:]
    return Replayed(tuple(made), tuple(conflicts))


def conflict_of(error: Exception, where: str) -> ReplayConflict:
    """Return the conflict that an error at an entry or a step stands for."""
    if not isinstance(error, GraphwrightError):
        return ReplayConflict(f"cannot be read: {error}", where=where)
    got = ": ".join(str(fact) for fact in (error.where, error.got) if fact is not None) or None
    return ReplayConflict(f"the edit does not fit: {error.what}", where=where, got=got, fix=error.fix)


def _own_values(entry: Entry) -> list[str]:
    """Return the keys of the floating weights whose values an entry brings itself."""
    brought = [r for r in entry.edits if r["edit"] in ("SetWeight", "AddNode") and "payload" in r]
    records = [r for r in brought if "values" not in r["payload"]]
    return [r["key"] if r["edit"] == "SetWeight" else r["attrs"]["key"] for r in records]


def _label(record: Mapping[str, Any]) -> str:
    axes = ", ".join(str(row.get("axis")) for row in record.get("axes", ()))
    port = f"{record.get('dst', '')} port {record.get('port', '')}"
    return f"{record.get('edit')} {record.get('path') or record.get('key') or axes or port}"


class PayloadFinder:
    """Finds the arrays that entries bring, in their undo or by digest; a variable may have changed since."""

    def __init__(self, entries: Sequence[Entry], payloads: Mapping[str, NDArray]) -> None:
        self._entries, self._known = entries, dict(payloads)
        self._searched = False

    def find(self, entry: Entry, i: int, named: Mapping[str, Any]) -> NDArray:
        """Return the array of edit `i` of an entry. Raises: ReplayConflict if it is nowhere."""
        own = entry.undo.forward[i].payloads if entry.undo is not None else ()
        digest = named.get("blake2b")
        if "values" in named:
            return _inline_array(named)
        for array in own:
            if (digest is None and len(own) == 1) or array_digest(array) == digest:
                return array
        if digest not in self._known and not self._searched:
            self._searched = True
            for undo in (e.undo for e in self._entries if e.undo is not None):
                self._known = {**{array_digest(a): a for a in undo.arrays()}, **self._known}
        if digest not in self._known:
            what = "the values of this weight are not in the history"
            raise ReplayConflict(what, got=str(dict(named)), fix="save(history='full'), or replay(..., payloads=...)")
        return self._known[digest]


def _inline_array(named: Mapping[str, Any]) -> NDArray:
    """Return the array whose values a journal line holds. Raises: ReplayConflict if its digest is another."""
    spec = Spec.from_json(named["spec"])
    values = np.asarray(named["values"], np.int64).reshape(spec.sizes)
    array = empty(spec.sizes, spec.dtype).copy_from(from_numpy(values))
    if array_digest(array) != named.get("blake2b"):
        raise ReplayConflict("the values of this record do not match its digest", got=str(named)[:200])
    return array
