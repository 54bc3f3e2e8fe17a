"""Second programs over the same weights: forks, abstract forks without weight values, and past states.

Nodes and edges are copied; arrays are shared until one program writes to them. A handle names the same node or edge in
both programs. Later handles are numbered independently, so equal new handles may name different nodes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from graphwright.errors import UsageError
from graphwright.graph import Chain
from graphwright.program.editing.edits import AddNode
from graphwright.program.editing.journal import Journal, in_force
from graphwright.program.errors import NotUndoable
from graphwright.program.patterns import adopt_all
from graphwright.program.primitives import copy_into
from graphwright.program.weights import VariableTwins, abstract_array

if TYPE_CHECKING:
    from graphwright.program.editing.edits import Edit
    from graphwright.program.editing.journal import Entry
    from graphwright.program.program import Program


def fork(p: Program, name: str | None = None) -> Program:
    """Return an independent copy whose weights are copied on write; its journal continues the hash chain of `p`.

    Raises: UsageError while an edit of `p` is open.
    """
    return _twin(p, name or p.name, VariableTwins())


def abstract_fork(p: Program) -> Program:
    """Return a fork for trying edits: its params have specs but no values; consts and states keep their values."""
    flags = [(v, v.shared) for v in p.weights.values()]
    twin = fork(p)
    for variable, shared in flags:  # the fork writes no array
        variable.shared = shared
    for key in {twin.key(n) for n in twin.params()}:
        variable = twin.weights[key]
        variable.data = abstract_array(variable.data.shape, variable.data.dtype)
        twin.weights.refer(variable.data)
    return twin


def at(p: Program, ref: str | int) -> Program:
    """Return a past (or undone) state as a read-only program that shares weights.

    Args:
        ref: name of a mark, or seq of the last journal entry of the state; -1 is the state before the first entry.
    Raises: UsageError listing the marks; NotUndoable for a state on an abandoned branch, or whose undo was not stored.
    """
    seq = p.history.marked(ref) if isinstance(ref, str) else ref
    if type(seq) is not int or not -1 <= seq < len(p.journal):
        raise UsageError("no such journal entry", where=p.name, expected=f"-1 to {len(p.journal) - 1}", got=repr(seq))
    here = [e.seq for e in p.history.undoable]
    line = here + [e.seq for e in reversed(p.history.redoable)]
    then = [e.seq for e in in_force(p.journal[: seq + 1])]
    if then != line[: len(then)]:
        raise NotUndoable("this state is on an abandoned branch of the history", where=f"entry {seq}",
                          fix="replay(journal[...], onto=program.fork())")  # fmt: skip
    twins = VariableTwins()
    past = _twin(p, f"{p.name} @ {ref}", twins)
    past.history.undoable = [_own(e, twins) for e in p.history.undoable]
    past.history.redoable = [_own(e, twins) for e in p.history.redoable]
    past.tombstones = p.tombstones.copy()
    past.history.walk(abs(len(here) - len(then)), back=len(here) > len(then))
    past.journal = Journal(Chain(p.journal.chain.links[: seq + 1], p.journal.chain.base))
    past.version = p.journal[max(seq, 0)].base_version + int(seq >= 0) if len(p.journal) else p.version
    past.history.undoable, past.history.redoable, past.history.marks = [], [], {}
    past.readonly = True
    return past


def _twin(p: Program, name: str, twins: VariableTwins) -> Program:
    if p.history.open is not None:
        raise UsageError("cannot fork while an edit is open", where=p.name, fix="leave the with-block first")
    with p.graph.locked():
        twin = p.empty(name)
        copy_into(p, twin)
        twin.graph.describe = twin.history.describe
        twin.weights = p.weights.fork(twin, twins)
        adopt_all(twin)
        twin.version, twin.valid = p.version, p.valid
        twin.history_bytes, twin.undo_horizon = p.history_bytes, p.undo_horizon
        twin.journal = Journal(Chain(base=p.journal.hash))
        twin.checkpoints = p.checkpoints
        twin.constraints = p.constraints.copy()
        twin.imported, twin.module_state = p.imported, p.module_state
    return twin


def _own(entry: Entry, twins: VariableTwins) -> Entry:
    """Copy a journal entry for a fork: the copy's undo uses the variables of the fork and a separate `labels` list."""
    if entry.undo is None:
        return entry

    def own(edit: Edit) -> Edit:
        if isinstance(edit, AddNode) and edit.variable is not None:
            return replace(edit, variable=twins(edit.variable))
        return edit

    forward, inverse = (tuple(map(own, edits)) for edits in (entry.undo.forward, entry.undo.inverse))
    return replace(entry, undo=replace(entry.undo, forward=forward, inverse=inverse, labels=list(entry.undo.labels)))
