"""Replaying a journal on another program: edits are found again by path, port and checkpoint key, not by handle.

What was undone and not made again is not replayed. Values of weights come from the entries' undo, from `history` of a
saved program, or from `payloads`; without them an entry is refused, never guessed. An entry that brings such values to
another program than it was made on warns of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import Spec, dtype, empty, from_numpy
from graphwright.autograd import Parameter, Variable
from graphwright.errors import GraphwrightError
from graphwright.graph import chain
from graphwright.program.axes.resize import by_name, resize
from graphwright.program.editing import edits
from graphwright.program.editing.edits import (
    AddEdge,
    AddNode,
    Remark,
    RemoveEdge,
    RemoveNode,
    Rename,
    Rewire,
    SetAttr,
    SetOutputs,
    SetWeight,
)
from graphwright.program.editing.journal import Entry, Journal
from graphwright.program.errors import PortEmpty, ProgramFileError, ReplayConflict
from graphwright.program.files import forms
from graphwright.program.files.load import load
from graphwright.program.fork import hollow
from graphwright.program.kinds import PARAM
from graphwright.program.op_graph import Value
from graphwright.program.program import Program
from graphwright.program.weights import array_digest

if TYPE_CHECKING:
    from graphwright.array import DType, NDArray
    from graphwright.files import StrPath
    from graphwright.graph import EdgeId
    from graphwright.program.editing.edits import (
        Edit,
    )

Ports = dict[tuple[str, int], int]
"""(path of a junction, port in the journal) -> port here, where another edge had taken that one."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay did: the entries it made, and with `strict=False` the ones that did not fit."""

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
    """Make the edits of a journal again on another program, one entry each.

    Args:
        journal: entries, a program, the directory of a saved one, or a `journal.jsonl`.
        onto: the program; its own journal grows.
        strict: stop at the first entry that does not fit, with `onto` as it was; else leave such entries out.
        payloads: arrays by the `blake2b` that the journal gives them.
        cast: floating dtype in which new weights come; a weight that is set keeps the dtype it has here.
    Raises: ReplayConflict with entry, edit, path and the nearest names; JournalCorrupt, ProgramFileError for files.
    """
    entries = in_force(_entries(journal))
    kind = None if cast is None else dtype(cast)
    if strict and entries:  # a rehearsal beside it: a conflict at the end must not leave the first half
        _play(entries, hollow(onto), True, payloads or {}, kind)
    return _play(entries, onto, strict, payloads or {}, kind)


def in_force(entries: Sequence[Entry]) -> list[Entry]:
    """Entries that were made and not undone, in order. Raises: ReplayConflict if one undoes what is not among them."""
    stack: list[Entry] = []
    known = {e.seq: e for e in entries}
    for entry in entries:
        other = entry.undoes if entry.undoes is not None else entry.redoes
        if other is None:
            stack.append(entry)
        elif other not in known or (entry.undoes is not None and (not stack or stack[-1].seq != other)):
            raise ReplayConflict("the entry refers to one that is not replayed", where=f"entry {entry.seq}", got=other)
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
    raise ReplayConflict("this is no journal", expected="entries, a program, or a path", got=repr(journal)[:80])


def _read(journal: StrPath) -> Sequence[Entry]:
    if Path(journal).is_dir():
        return load(journal, check=False).journal
    try:
        return Journal(chain.read(journal))
    except chain.JournalCorrupt as error:
        error.where = f"{journal}, {error.where}"
        raise
    except (OSError, UnicodeEncodeError) as error:
        raise ProgramFileError("cannot read this journal", where=repr(journal), got=str(error)) from error


def _play(
    entries: Sequence[Entry], p: Program, strict: bool, payloads: Mapping[str, NDArray], kind: DType | None
) -> Replayed:
    made: list[Entry] = []
    conflicts: list[ReplayConflict] = []
    ports: Ports = {}
    arrays = _Arrays(entries, payloads)
    for entry in entries:
        at = f"entry {entry.seq} ({entry.why})"
        before, saved = len(p.journal), dict(ports)
        foreign = _brought(entry) if any("payload" in r for r in entry.edits) and p.state_hash() != entry.before else []
        try:
            with p.edit(entry.why, author=entry.author, tool=entry.tool or "replay") as e:
                if foreign:
                    more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
                    e.warnings.append(
                        f"{foreign[0]}{more}: values of the program that was replayed from, not computed here"
                    )
                for i, record in enumerate(entry.edits):
                    at = f"entry {entry.seq} ({entry.why}), edit {i}: {_label(record)}"
                    e.do(from_json(p, record, partial(arrays.find, entry, i), ports, kind))
                at = f"entry {entry.seq} ({entry.why}), at its end"
        except (GraphwrightError, LookupError, TypeError) as error:
            what = error.what if isinstance(error, GraphwrightError) else f"malformed record: {error}"
            fix = error.fix if isinstance(error, GraphwrightError) else None
            facts = (error.where, error.got) if isinstance(error, GraphwrightError) else ()
            got = ": ".join(str(fact) for fact in facts if fact is not None) or None
            conflict = ReplayConflict(f"does not fit: {what}", where=at, got=got, fix=fix)
            if strict:
                raise conflict from error
            conflicts.append(conflict)
            ports = saved
        made += p.journal[before:]
    return Replayed(tuple(made), tuple(conflicts))


def _brought(entry: Entry) -> list[str]:
    """Keys of the floating weights whose values an entry brings itself."""
    kept = [
        r
        for r in entry.edits
        if r["edit"] in ("SetWeight", "AddNode") and "payload" in r and "values" not in r["payload"]
    ]
    return [r["key"] if r["edit"] == "SetWeight" else r["attrs"]["key"] for r in kept]


def _label(record: Mapping[str, Any]) -> str:
    axes = ", ".join(str(row.get("axis")) for row in record.get("axes", ()))
    port = f"{record.get('dst', '')} port {record.get('port', '')}"
    place = record.get("path") or record.get("key") or axes or port
    return f"{record.get('edit')} {place}"


class _Arrays:
    """The values that entries bring, from their undo or by digest. A variable may have moved on since it was added."""

    def __init__(self, entries: Sequence[Entry], payloads: Mapping[str, NDArray]) -> None:
        self._entries, self._known = entries, dict(payloads)
        self._searched = False

    def find(self, entry: Entry, i: int, named: Mapping[str, Any]) -> NDArray:
        """The array of edit `i` of an entry. Raises: ReplayConflict if nobody has it."""
        brought = edits.payloads(entry.undo.forward[i]) if entry.undo is not None else ()
        digest = named.get("blake2b")
        if "values" in named:
            return _told(named)
        for own in brought:
            if (digest is None and len(brought) == 1) or array_digest(own) == digest:
                return own
        if digest not in self._known and not self._searched:
            self._searched = True
            for undo in (e.undo for e in self._entries if e.undo is not None):
                arrays = [a for edit in (*undo.inverse, *undo.forward) for a in edits.payloads(edit)]
                self._known = {**{array_digest(a): a for a in arrays}, **self._known}
        if digest not in self._known:
            what = "the values of this weight are not in the history"
            raise ReplayConflict(what, got=str(dict(named)), fix="save(history='full'), or replay(..., payloads=...)")
        return self._known[digest]


def _told(named: Mapping[str, Any]) -> NDArray:
    """The array that a journal line holds itself. Raises: ReplayConflict if it is not the one that it names."""
    spec = Spec.from_json(named["spec"])
    values = np.asarray(named["values"], np.int64).reshape(spec.sizes)
    array = empty(spec.sizes, spec.dtype).copy_from(from_numpy(values))
    if array_digest(array) != named.get("blake2b"):
        raise ReplayConflict("these numbers are not those that were journalled", got=str(named)[:200])
    return array


def from_json(
    p: Program,
    record: Mapping[str, Any],
    payload: Callable[[Any], NDArray],
    ports: Ports | None = None,
    kind: DType | None = None,
) -> Edit:
    """The primitive edit that a journal record stands for, on a program that may not be the one it was made on.

    Args:
        p: where paths, ports and keys are looked up.
        record: what `Edit.to_json` wrote.
        payload: gives the array for the record's `payload`.
        ports: remembers junction edges that get another port here.
        kind: floating dtype of new weights.
    Raises: UnknownNode, PortEmpty, ReplayConflict, ProgramFileError for a record of another form.
    """
    name = record["edit"]
    if name == "AddNode":
        attrs, variable = forms.attrs(record["attrs"]), None
        specs = forms.specs(record["specs"])
        if "payload" in record:
            array = payload(record["payload"])
            array = _cast(array, kind) if kind is not None and array.dtype.is_float else array.copy()
            maker = Parameter if record["op"] == PARAM else Variable
            trained = bool(attrs.get("trainable", False)) and array.dtype.is_float
            variable, specs = maker(array, trained, attrs["key"]), (array.spec,)
        return AddNode(p.graph.next_node(), record["op"], attrs, record["path"], specs, p._seq, variable)
    if name == "RemoveNode":
        return RemoveNode(p.node(record["path"]))
    if name == "AddEdge":
        dst, port = p.node(record["dst"]), forms.integer(record["port"])
        if p.is_junction(dst) and any(p.edge_port(e) == port for e in p.in_edges(dst)):
            fresh = p.graph.node(dst, "next_port")
            if ports is not None:
                ports[record["dst"], port] = fresh
            port = fresh
        return AddEdge(p.graph.next_edge(), _value(p, record["src"]), dst, port)
    if name == "RemoveEdge":
        return RemoveEdge(_edge(p, record, ports or {}))
    if name == "Rewire":
        return Rewire(_edge(p, record, ports or {}), _value(p, record["src"]))
    if name == "SetAttr":
        return SetAttr(p.node(record["path"]), forms.attrs(record["attrs"]))
    if name == "Rename":
        return Rename(p.node(record["path"]), record["name"])
    if name == "SetWeight":
        present = p.weights.array(record["key"]).dtype
        inplace = forms.flag(record.get("inplace", False))
        return SetWeight(record["key"], _cast(payload(record["payload"]), present), inplace)
    if name == "ResizeAxis":
        return _resize(p, record, payload)
    if name == "SetOutputs":
        return SetOutputs(tuple((label, _value(p, v)) for label, v in record["outputs"]))
    if name == "Remark":
        return Remark(forms.text(record["name"]), forms.attrs(record["facts"]))
    raise ReplayConflict("no such edit", got=name)


def _resize(p: Program, record: Mapping[str, Any], payload: Callable[[Any], NDArray]) -> Edit:
    """Solved again here: what stays is what this program has, only values at new places come from the journal."""
    brought = forms.table(record["payloads"])

    def new(key: str, array: NDArray, places: Any) -> np.ndarray:
        value = payload(brought[key]).to_numpy("float64")
        wanted = tuple(len(places[d]) if d in places else n for d, n in enumerate(array.shape))
        if value.shape != wanted:
            raise ReplayConflict("new rows of another size", where=key, expected=wanted, got=value.shape)
        return value

    correct = forms.flag(record["correct"])
    return resize(p.axes(), by_name(p.axes(), forms.array(record["axes"])), correct=correct, new=new)


def _value(p: Program, form: Mapping[str, Any]) -> Value:
    return Value(p.node(forms.text(form["path"])), forms.integer(form["port"]))


def _edge(p: Program, record: Mapping[str, Any], ports: Ports) -> EdgeId:
    dst = p.node(forms.text(record["dst"]))
    port = ports.get((record["dst"], record["port"]), record["port"])
    found = next((e for e in p.in_edges(dst) if p.edge_port(e) == port), None)
    if found is None:
        taken = ", ".join(f"{p.edge_port(e)} from {p.path(p.edge_value(e))}" for e in p.in_edges(dst))
        raise PortEmpty("no edge enters this port", where=f"{p.path(dst)}, port {port}", expected=taken or "no edges")
    return found


def _cast(array: NDArray, kind: DType) -> NDArray:
    return array.copy() if array.dtype is kind else empty(array.shape, kind).copy_from(array)
