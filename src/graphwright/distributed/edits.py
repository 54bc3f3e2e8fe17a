"""Edits while several ranks train: those of rank 0 are applied by all ranks, or by none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from graphwright.array import NDArray, Spec, empty
from graphwright.array.world import joined
from graphwright.errors import GraphwrightError, UsageError
from graphwright.program.axes.divide import is_divided
from graphwright.program.editing.journal import Entry
from graphwright.program.editing.replay import PayloadFinder, play
from graphwright.program.errors import ReplayConflict

if TYPE_CHECKING:
    from graphwright.program import Program

_known: WeakKeyDictionary[Program, int] = WeakKeyDictionary()
"""Program -> length of its journal when its edits were last shared."""


class EditRefused(UsageError):
    """A rank could not apply the edits of rank 0, or came to another program; no rank has them any more.

    Attributes:
        reasons: rank -> its reason.
    """

    def __init__(self, reasons: Mapping[int, str], count: int, where: str) -> None:
        self.reasons = dict(reasons)
        got = "; ".join(f"rank {r}: {why}" for r, why in sorted(reasons.items()))
        what = f"{count} edit{'s' if count > 1 else ''} of rank 0 were taken back, because not all ranks can apply them"
        super().__init__(what, where=where, expected="the same program on all ranks", got=got)


def sync_edits(p: Program) -> tuple[Entry, ...]:
    """Apply the edits that rank 0 has made since the last call, undo and redo included, on all other ranks.

    Every rank calls it between two steps. Optimizers move their state with the weights, as after any edit.

    Returns: the new journal entries of this rank; those of rank 0 are its own.
    Raises: EditRefused on all ranks if one of them cannot apply the edits or has another program afterwards; the
        programs are then as before these edits. UsageError on all ranks if another rank than 0 has edited, or if the
        program is divided. CollectivesDiffer, RankLost.
    """
    here = joined("sync_edits")
    group = here.group
    if group is not None and is_divided(p):
        raise UsageError("the program is divided among the ranks", where=p.name,
                         fix="make each edit on all ranks; no sync_edits")  # fmt: skip
    if group is None:
        start, _known[p] = _known.get(p, 0), len(p.journal)
        return tuple(p.journal[start:])
    start = _known.get(p)
    if start is None:  # earlier edits are the same on all ranks
        lengths = list(map(int, group.exchange(str(len(p.journal)), "sync_edits")))
        _only_rank_0(p, [r for r, n in enumerate(lengths) if n > min(lengths)])
        start = _known[p] = min(lengths) if here.rank == 0 else len(p.journal)
    mine = list(p.journal[start:])
    arrays, wrong = _Arrays(), ""
    if here.rank == 0:
        try:
            arrays = _named(mine)
        except ReplayConflict as error:  # told to all ranks, which would otherwise wait for the arrays
            wrong = f"rank 0 cannot send them: {error}"
    sent = [wrong, [e.to_json() for e in mine] if here.rank == 0 else len(mine)]
    errors, given = zip(*map(json.loads, group.exchange(json.dumps(sent), "sync_edits")), strict=True)
    _only_rank_0(p, [r for r, count in enumerate(given) if count])
    if not given[0]:
        return ()
    entries = [Entry.from_json(form) for form in given[0]]
    if errors[0]:
        _take_back(p, start)
        _known[p] = len(p.journal)
        raise EditRefused({0: errors[0]}, len(entries), p.name)
    for (seq, i, _), named in _payloads(entries):
        if here.rank:
            spec = Spec.from_json(named["spec"])
            arrays[seq, i, _name(named)] = empty(spec.sizes, spec.dtype)
        group.broadcast(arrays[seq, i, _name(named)].impl, 0, "sync_edits").wait()
    why = "" if here.rank == 0 else _apply(entries, p, arrays)
    # of all bytes: which weights are still in a file, whose reference the journal's hashes have, may differ
    answers = [json.loads(t) for t in group.exchange(json.dumps([why, "" if why else p.hash()]), "sync_edits")]
    reasons = {r: reason for r, (reason, _) in enumerate(answers) if reason}
    reasons |= {r: "its program is another afterwards" for r, (reason, digest) in enumerate(answers)
                if not reason and digest != answers[0][1]}  # fmt: skip
    if reasons:
        _take_back(p, start)
        _known[p] = len(p.journal)
        raise EditRefused(reasons, len(entries), p.name)
    _known[p] = len(p.journal)
    return tuple(p.journal[start:])


def _only_rank_0(p: Program, edited: Sequence[int]) -> None:
    """Raise UsageError if one of the ranks that have edited the program is not rank 0."""
    if local := [r for r in edited if r]:
        raise UsageError("a rank other than 0 has edited the program", where=p.name, expected="edits on rank 0 alone",
                         got=f"edits on {', '.join(f'rank {r}' for r in local)} since the last call",
                         fix="edit on rank 0, or make equal edits on all ranks before training")  # fmt: skip


_Key = tuple[int, int, str]
"""Of an array: number of the entry, number of the edit in it, the name that the record gives it."""
_Arrays = dict[_Key, NDArray]


def _name(named: Mapping[str, Any]) -> str:
    return json.dumps(named, sort_keys=True)


def _payloads(entries: Sequence[Entry]) -> Iterator[tuple[_Key, Mapping[str, Any]]]:
    """Yield the arrays that edits name, in order; an undo or a redo needs none."""
    for entry in entries:
        if entry.undoes is None and entry.redoes is None:
            for i, record in enumerate(entry.edits):
                yield from (((entry.seq, i, _name(named)), named) for named in _named_in(record))


def _named_in(form: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the fields `payload` in the JSON form of an edit."""
    if isinstance(form, Mapping):
        if "spec" in form and ("blake2b" in form or "source" in form):
            yield form
        else:
            for value in form.values():
                yield from _named_in(value)
    elif isinstance(form, list | tuple):
        for value in form:
            yield from _named_in(value)


def _named(entries: Sequence[Entry]) -> _Arrays:
    """Return copies of the arrays that edits name. Raises: ReplayConflict if the history lacks one."""
    finder, by_seq = PayloadFinder(entries, {}), {entry.seq: entry for entry in entries}
    return {key: finder.find(by_seq[key[0]], key[1], named).copy() for key, named in _payloads(entries)}


def _apply(entries: Sequence[Entry], p: Program, arrays: _Arrays) -> str:
    """Apply entries; return why that is not possible, or "". What was applied before an error stays."""

    def find(entry: Entry, i: int, named: Mapping[str, Any]) -> NDArray:
        return arrays[entry.seq, i, _name(named)]

    try:
        for entry in entries:
            if entry.undoes is not None:
                p.undo()
            elif entry.redoes is not None:
                p.redo()
            else:
                play([entry], p, True, find)
    except (GraphwrightError, MemoryError) as error:
        return str(getattr(error, "what", error))
    return ""


def _take_back(p: Program, start: int) -> None:
    """Revert the journal entries from `start` on, the last one first."""
    if len(p.journal) == start:
        p.plan_again()  # ranks with entries trace their steps again and compare them: this one does so, too
    for entry in reversed(p.journal[start:]):
        if entry.undoes is not None:
            p.redo()
        else:
            p.undo()
