"""Second programs over the same weights: a fork goes its own way, a past state is looked at.

Columns are copied, arrays are shared until one side writes. Handles of the parent name the same things in both, and
both go on issuing from the same generations.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from graphwright.errors import UsageError
from graphwright.graph import Chain
from graphwright.program.editing.edits import AddNode
from graphwright.program.editing.journal import Journal
from graphwright.program.errors import NotUndoable
from graphwright.program.program import Program
from graphwright.program.weights import VariableTwins, hollow_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphwright.program.editing.edits import Edit
    from graphwright.program.editing.journal import Entry


def fork(p: Program, name: str | None = None) -> Program:
    """A program of its own that starts as `p` is; its journal goes on from the hash of `p`'s and has nothing to undo.

    Raises: UsageError while an edit of `p` is open.
    """
    return _twin(p, name or p.name, VariableTwins())


def hollow(p: Program) -> Program:
    """A fork whose params have no bytes; constants, which tables are made of, keep theirs. It is not to be run."""
    flags = [(v, v.shared) for v in p.weights.values()]
    twin = fork(p)
    for variable, shared in flags:  # nothing of the fork writes
        variable.shared = shared
    for key in {twin.key(n) for n in twin.params()}:
        variable = twin.weights[key]
        variable.data = hollow_array(variable.data.shape, variable.data.dtype)
        twin.weights.refer(variable.data)
    return twin


def at(p: Program, ref: str | int) -> Program:
    """A past (or undone) state as a read-only program that shares weights.

    Args:
        ref: name of a mark, or seq of the journal entry after which the state was; -1 is the state before the first.
    Raises: UsageError listing the marks; NotUndoable for a state on a branch that was given up, or whose undo was not
        kept.
    """
    seq = p.history.marked(ref) if isinstance(ref, str) else ref
    if type(seq) is not int or not -1 <= seq < len(p.journal):
        raise UsageError("no such entry", where=p.name, expected=f"-1 to {len(p.journal) - 1}", got=repr(seq))
    here = [e.seq for e in p.history.undoable]
    line = here + [e.seq for e in reversed(p.history.redoable)]
    then = standing(p.journal, seq)
    if then != line[: len(then)]:
        raise NotUndoable(
            "this state is on a branch that was given up",
            where=f"entry {seq}",
            fix="replay(journal[...], onto=program.fork())",
        )
    twins = VariableTwins()
    past = _twin(p, f"{p.name} @ {ref}", twins)
    past.history.undoable = [_own(e, twins) for e in p.history.undoable]
    past.history.redoable = [_own(e, twins) for e in p.history.redoable]
    yard = past.graveyard
    yard.removed = dict(p.graveyard.removed)
    yard.back = {e: list(records) for e, records in p.graveyard.back.items()}
    yard.forth = {e: list(records) for e, records in p.graveyard.forth.items()}
    past.history.walk(abs(len(here) - len(then)), back=len(here) > len(then))
    past.journal = Journal(Chain(p.journal.chain.links[: seq + 1], p.journal.chain.base))
    past.version = (
        p.journal[seq].base_version + 1 if seq >= 0 else p.journal[0].base_version if len(p.journal) else p.version
    )
    past.history.undoable, past.history.redoable, past.history.marks = [], [], {}
    past.readonly = True
    return past


def standing(journal: Sequence[Entry], seq: int) -> list[int]:
    """Entries in force after entry `seq`: those made, or made again, and not undone since."""
    stack: list[int] = []
    for entry in journal[: seq + 1]:
        if entry.undoes is not None:
            stack.pop()
        else:
            stack.append(entry.seq if entry.redoes is None else entry.redoes)
    return stack


def _twin(p: Program, name: str, twins: VariableTwins) -> Program:
    if p.history.open is not None:
        raise UsageError("an edit is open", where=p.name, fix="leave the with-block first")
    with p.graph.locked():
        twin = Program(name)
        twin.set_order(p.graph.copy(), {n: p.order_labels.key(n) for n in p.nodes()})
        twin.graph.describe = twin.history.describe
        twin.weights = p.weights.fork(twins)
        twin.version, twin.valid, twin._seq = p.version, p.valid, p._seq
        twin.history_bytes = p.history_bytes
        twin.journal = Journal(Chain(base=p.journal.hash))
        twin._names, twin._outputs = dict(p._names), dict(p._outputs)
        twin._kinds = {kind: dict(nodes) for kind, nodes in p._kinds.items()}
        twin._unsorted = set(p._unsorted)
        twin._keyed, twin._keys = {key: set(nodes) for key, nodes in p._keyed.items()}, p._keys
        twin.checkpoints = p.checkpoints
        twin.constraints = p.constraints.copy()
        twin._structure = p._structure.copy(twin)
    return twin


def _own(entry: Entry, twins: VariableTwins) -> Entry:
    """An entry whose undo can be walked without touching the variables or logs of the program it comes from."""
    if entry.undo is None:
        return entry

    def own(edit: Edit) -> Edit:
        if isinstance(edit, AddNode) and edit.variable is not None:
            return replace(edit, variable=twins(edit.variable))
        return edit

    undo = replace(
        entry.undo,
        forward=tuple(map(own, entry.undo.forward)),
        inverse=tuple(map(own, entry.undo.inverse)),
        labels=list(entry.undo.labels),
    )
    return replace(entry, undo=undo)
