"""Replaying a journal on another program: edits find their targets by path, port and checkpoint key, not by handle.

Undone edits are not replayed, unless they were redone. Values of weights come from the undo data of the entries, from
the history file of a saved program, or from `payloads`; missing values are an error. A replayed entry has a warning if
the entry sets weights and the program is not in the state that was recorded before the entry.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from graphwright.array import Spec, dtype, empty, from_numpy
from graphwright.errors import GraphwrightError
from graphwright.files import open_regular
from graphwright.graph import chain
from graphwright.program.axes.units import Units, layers, parsed
from graphwright.program.editing.edits import AddEdge, RecordReader, Rewire
from graphwright.program.editing.journal import Entry, Journal, in_force
from graphwright.program.errors import ProgramFileError, ReplayConflict, UnknownAxis
from graphwright.program.files.load import load
from graphwright.program.fork import abstract_fork
from graphwright.program.op_graph import OpGraph
from graphwright.program.selection import matches
from graphwright.program.weights import array_digest

if TYPE_CHECKING:
    from graphwright.array import DType, NDArray
    from graphwright.files import StrPath
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.program import Program


FindPayload = Callable[[Entry, int, Mapping[str, Any]], "NDArray"]
"""(entry, index of an edit in it, the field `payload` of its record) -> the array that it names."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a replay: the new entries, and with `strict=False` the conflicts of the skipped entries."""

    entries: tuple[Entry, ...]
    conflicts: tuple[ReplayConflict, ...]


def replay(
    journal: Sequence[Entry] | Program | StrPath, onto: Program, strict: bool = True, *,
    payloads: Mapping[str, NDArray] | None = None, cast: object = None,
) -> Replayed:  # fmt: skip
    """Apply the edits of a journal to another program, which gets one new entry for each replayed entry.

    Args:
        journal: entries, a program, the directory of a saved program, or a `journal.jsonl`.
        onto: the program to edit.
        strict: raise at the first entry that does not fit and leave `onto` unchanged; else skip such entries.
        payloads: dict from the `blake2b` digest of an array in the journal to the array.
        cast: dtype of new floating-point weights; an existing weight that is set keeps its dtype.
    Raises: ReplayConflict naming the entry and edit that do not fit; JournalCorrupt, ProgramFileError for files.
    """
    entries = in_force(_entries(journal))
    kind = None if cast is None else dtype(cast)
    find = PayloadFinder(entries, payloads or {}).find
    if strict and entries:  # first on an abstract fork: a conflict in a late entry must leave `onto` unchanged
        play(entries, abstract_fork(onto), True, find, kind)
    return play(entries, onto, strict, find, kind)


def _entries(journal: Sequence[Entry] | Program | StrPath) -> Sequence[Entry]:
    if isinstance(journal, OpGraph):
        return journal.journal
    if not isinstance(journal, str | os.PathLike):
        entries = list(journal) if isinstance(journal, Sequence) else [None]
        if all(isinstance(entry, Entry) for entry in entries):
            return journal
    elif "\0" not in os.fspath(journal):
        return _read(journal)
    expected = "entries of a journal, a program, or a path"
    raise ReplayConflict("the argument is not a journal", expected=expected, got=repr(journal)[:80])


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


def play(entries: Sequence[Entry], p: Program, strict: bool, find: FindPayload, kind: DType | None = None) -> Replayed:
    """Apply entries to a program; `find` returns arrays as `PayloadFinder.find`. See `replay` for the rest."""
    made: list[Entry] = []
    conflicts: list[ReplayConflict] = []
    ports: dict[tuple[str, int], int] = {}
    for entry in entries:
        at = f"entry {entry.seq} ({entry.why})"
        before, saved = len(p.journal), dict(ports)
        brings = any("payload" in r for r in entry.edits)
        try:
            foreign = _own_values(entry) if brings and p.state_hash() != entry.before else []
            with p.edit(entry.why, author=entry.author, tool=entry.tool or "replay") as e:
                if foreign:
                    more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
                    e.warnings.append(f"{foreign[0]}{more}: the values are those of the program that was recorded")
                for i, record in enumerate(entry.edits):
                    at = f"entry {entry.seq} ({entry.why}), edit {i}: {_label(record)}"
                    edit = RecordReader(p, partial(find, entry, i), ports, kind).edit(record)
                    if isinstance(edit, AddEdge | Rewire) and edit.src.port >= len(p.specs(edit.src.node)):
                        e.spec(edit.src)  # a result that an earlier edit of this entry adds, such as a gate
                    e.do(edit)
                at = f"entry {entry.seq} ({entry.why}), at its end"
        except (GraphwrightError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            conflict = conflict_of(error, at)
            if strict:
                raise conflict from error
            conflicts.append(conflict)
            ports = saved
        made += p.journal[before:]
    return Replayed(tuple(made), tuple(conflicts))


def conflict_of(error: Exception, where: str) -> ReplayConflict:
    """Return a ReplayConflict for an error in a journal entry or recipe step; `where` begins with `entry` or `step`."""
    if not isinstance(error, GraphwrightError):
        return ReplayConflict(f"the {where.partition(' ')[0]} cannot be read: {error}", where=where)
    got = ": ".join(str(fact) for fact in (error.where, error.got) if fact is not None) or None
    return ReplayConflict(f"the edit does not fit this program: {error.what}", where=where, got=got, fix=error.fix)


def _own_values(entry: Entry) -> list[str]:
    """Return the keys of the weights that an entry sets or adds, except those whose values the journal contains."""
    brought = [r for r in entry.edits if r["edit"] in ("SetWeight", "AddNode") and "payload" in r]
    records = [r for r in brought if "values" not in r["payload"]]
    return [r["key"] if r["edit"] == "SetWeight" else r["attrs"]["key"] for r in records]


def _label(record: Mapping[str, Any]) -> str:
    axes = ", ".join(str(row.get("axis")) for row in record.get("axes", ()))
    port = f"{record.get('dst', '')} port {record.get('port', '')}"
    return f"{record.get('edit')} {record.get('path') or record.get('key') or axes or port}"


class PayloadFinder:
    """Finds arrays of journal entries: in the entry's undo data, else by digest in `payloads` and other undo data."""

    def __init__(self, entries: Sequence[Entry], payloads: Mapping[str, NDArray]) -> None:
        self._entries, self._payloads = entries, payloads
        self._known: dict[str, NDArray] = {}
        self._searched = False

    def find(self, entry: Entry, i: int, named: Mapping[str, Any]) -> NDArray:
        """Return the weight values of edit `i` of a journal entry. Raises: ReplayConflict if they are missing.

        `named`: the edit's field `payload`, which has the values themselves or their digest.
        """
        if "values" in named:
            return _inline_array(named)
        own, digest = entry.undo.forward[i].payloads if entry.undo is not None else (), named.get("blake2b")
        for array in own:
            if (digest is None and len(own) == 1) or array_digest(array) == digest:
                return array
        if digest is not None and digest in self._payloads:
            return self._payloads[digest]
        if not self._searched:
            self._searched = True
            for undo in (e.undo for e in self._entries if e.undo is not None):
                self._known = {**{array_digest(a): a for a in undo.arrays()}, **self._known}
        if digest not in self._known:
            what = "the values of this weight are not in the history"
            fix = "save the program with history='full', or pass payloads={digest: array} to replay"
            raise ReplayConflict(what, got=str(dict(named)), fix=fix)
        return self._known[digest]


def _inline_array(named: Mapping[str, Any]) -> NDArray:
    """Return the array whose values a journal record contains. Raises: ReplayConflict if its digest differs."""
    spec = Spec.from_json(named["spec"])
    values = np.asarray(named["values"], np.int64).reshape(spec.sizes)
    array = empty(spec.sizes, spec.dtype).copy_from(from_numpy(values))
    if array_digest(array) != named.get("blake2b"):
        raise ReplayConflict("the values in this journal record do not match its digest", got=str(named)[:200],
                             expected=f"digest {array_digest(array)}")  # fmt: skip
    return array


# -- recipes -----------------------------------------------------------------------------------------------------------
_LIMIT = 4 << 20


@dataclass(frozen=True, slots=True)
class RecipeStep:
    """A step of a recipe. Applying it adds one journal entry.

    Attributes:
        why: reason for the edit, written to the journal.
        actions: pairs (name of an action, its argument), in the order in which they run.
        ragged, correct: arguments of `Transaction.cut_units`.
    """

    why: str
    actions: tuple[tuple[str, Any], ...]
    ragged: bool = False
    correct: bool = True


def apply_recipe(path: StrPath, onto: Program) -> Replayed:
    """Apply the edits of a recipe, a `journal.jsonl` or a saved program to another program of the same family.

    Args:
        path: a recipe if it ends in `.yaml` or `.yml`; any other path is read as a journal.
        onto: the program to edit; unchanged if a step does not fit.
    Raises: ReplayConflict naming the first step that does not fit; ProgramFileError for an unreadable file.
    """
    if Path(path).suffix not in (".yaml", ".yml"):
        return replay(path, onto)
    steps = read_recipe(path)
    _recipe_play(steps, abstract_fork(onto))
    return Replayed(tuple(_recipe_play(steps, onto)), ())


def read_recipe(path: StrPath) -> list[RecipeStep]:
    """Return the steps of a recipe: a YAML file with a list of steps, or with a mapping that has the list as `steps`.

        - why: a third of the neurons of the upper layers
          cut_units: {"layers.{2,3}.mlp.neurons": 0-99 200, layers.0.attn.kv_groups: 1}
        - cut: layers.1.mlp.down -> layers.1.out

    Raises: ProgramFileError naming the file and the malformed step.
    """
    try:
        with open_regular(path) as file:
            data = file.read(_LIMIT + 1)
        if len(data) > _LIMIT:
            raise ProgramFileError("the recipe file is too large", where=str(path), expected=f"<= {_LIMIT} bytes")
        found = yaml.safe_load(data)
    except (OSError, yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise ProgramFileError("cannot read the recipe", where=str(path), got=str(error)) from error
    steps = found.get("steps") if isinstance(found, Mapping) else found
    if not isinstance(steps, list) or not steps:
        got = type(steps).__name__
        raise ProgramFileError("the recipe has no steps", where=str(path), expected="a list of steps", got=got)
    return [_step(step, f"{path}, step {i}") for i, step in enumerate(steps)]


def _step(form: Any, where: str) -> RecipeStep:
    if not isinstance(form, Mapping):
        raise ProgramFileError("the recipe step is not a mapping", where=where, got=repr(form)[:80])
    known = ("why", "ragged", "correct", *_ACTIONS)
    if unknown := ", ".join(str(k) for k in form if k not in known):
        raise ProgramFileError("unknown fields in a recipe step", where=where, got=unknown, expected=", ".join(known))
    actions = tuple((name, value) for name, value in form.items() if name in _ACTIONS)
    if not actions:
        raise ProgramFileError("the recipe step has no action", where=where, expected=", ".join(_ACTIONS))
    flags = {name: form[name] for name in ("ragged", "correct") if name in form}
    if wrong := {name: v for name, v in flags.items() if not isinstance(v, bool)}:
        raise ProgramFileError(f"not a boolean in the recipe step: {', '.join(wrong)}", where=where,
                               expected="true or false", got=wrong)  # fmt: skip
    why = form.get("why") or "; ".join(f"{name} {value}" for name, value in actions)
    return RecipeStep(str(why), actions, **flags)


def _recipe_play(steps: Sequence[RecipeStep], p: Program) -> list[Entry]:
    before = len(p.journal)
    for i, step in enumerate(steps):
        at = f"step {i} ({step.why})"
        try:
            with p.edit(step.why, tool="recipe") as e:
                for name, value in step.actions:
                    at = f"step {i} ({step.why}), {name}"
                    for what in value if isinstance(value, list) else [value]:
                        _ACTIONS[name](e, what, step)
                at = f"step {i} ({step.why}), at its end"
        except (GraphwrightError, TypeError, AttributeError, ValueError, KeyError) as error:
            raise conflict_of(error, at) from error
    return list(p.journal[before:])


# -- actions ----------------------------------------------------------------------------------------------------------
def _cut_units(e: Transaction, form: Any, step: RecipeStep) -> None:
    """Cut units. `form` maps patterns of axis names, or paths of layer lists, to an int, a list or a text `0-4 9`."""
    for pattern, units in dict(form).items():
        e.cut_units(units_named(e.program, str(pattern), units), ragged=step.ragged, correct=step.correct)


def units_named(p: Program, pattern: str, form: Any) -> Units:
    """Return units of the axes that match a pattern, or of a list of layers; `form`: an int, a list, or `0-4 9`.

    Raises: UnknownAxis; UnitRange; ValueError for another form.
    """
    ids = _numbers(form)
    if pattern in (lists := layers(p)):
        size = len(lists[pattern])
        return Units(p, {pattern: tuple(range(size))}, {pattern: size})[list(ids)]
    axes = p.axes()
    names = [pattern] if pattern in axes else [name for name in axes if matches(pattern, name)]
    if not names:
        axes[pattern]  # raises UnknownAxis with the nearest names
        raise UnknownAxis("no axis matches this pattern", where=pattern, fix="list them by print(program.axes())")
    return Units.of(p, [axes[name] for name in names])[list(ids)]


def _numbers(form: Any) -> tuple[int, ...]:
    if isinstance(form, bool) or not isinstance(form, int | str | list):
        raise ValueError(f"units must be a number, a list or a string, not {form!r}")
    if isinstance(form, list):
        return tuple(map(int, form))
    found = parsed(str(form))
    if any(i < 0 for i in found):
        raise ValueError(f"'+n' stands for new units, which cannot be cut: {form!r}")
    return found


def _sides(text: Any, mark: str, form: str) -> tuple[str, str]:
    left, found, right = (part.strip() for part in str(text).rpartition(mark))
    if not (left and found and right):
        raise ValueError(f"{text!r} does not have the form {form!r}")
    return left, right


def _set(e: Transaction, form: Any, step: RecipeStep) -> None:
    for path, value in dict(form).items():
        node, attr = _sides(path, ".", "node.attr")
        e.set_attr(node, **{attr: tuple(value) if isinstance(value, list) else value})


_ACTIONS: dict[str, Callable[[Transaction, Any, RecipeStep], object]] = {
    "cut_units": _cut_units,
    "cut": lambda e, form, step: e.cut(str(form)),
    "connect": lambda e, form, step: e.connect(*_sides(form, "->", "source -> target")),
    "insert": lambda e, form, step: e.insert(*_sides(form, ":", "source -> target : op")),
    "set": _set,
    "duplicate": lambda e, form, step: e.duplicate(str(form)),
    "remove": lambda e, form, step: e.remove(e.program.select(str(form))),
}
"""The actions of a step by name; those of one step run in the order in which they are written."""
