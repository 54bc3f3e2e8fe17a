"""Committing, undoing and redoing: the only code that moves a program from one version to the next."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from graphwright.autograd.variable import share
from graphwright.errors import GraphwrightError, UsageError
from graphwright.graph import EdgeId, NodeId
from graphwright.program.editing.edits import SetWeight, made_by, payloads
from graphwright.program.editing.interrupts import held_back
from graphwright.program.editing.journal import Undo
from graphwright.program.editing.undo_storage import Spill
from graphwright.program.errors import NotUndoable

if TYPE_CHECKING:
    from graphwright.array import NDArray
    from graphwright.autograd import Variable
    from graphwright.program.editing.journal import Entry
    from graphwright.program.editing.transaction import Atomic
    from graphwright.program.program import Program

_log = logging.getLogger("graphwright.program")
_EDGE_EDITS = frozenset({"AddEdge", "RemoveEdge", "Rewire"})


class History:
    """The undo and redo stacks of a program, and the edit that is open.

    Attributes:
        undoable, redoable: entries that can be taken back and made again, the next one last.
        marks: name -> seq of the last entry at the time; -1 before the first.
        open: the edit that is open.
        listeners: called with each entry.
        spill: keeps what undo holds in memory below `program.history_bytes`.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.undoable: list[Entry] = []
        self.redoable: list[Entry] = []
        self.marks: dict[str, int] = {}
        self.open: Atomic | None = None
        self.listeners: list[Callable[[Entry], object]] = []
        self.spill = Spill(program)
        self._held: dict[int, tuple[Variable, NDArray, bool]] = {}
        self._expected: dict[int, NDArray] = {}
        self._private: dict[int, NDArray] = {}
        self._lock: Any = None
        self._before = ""

    # -- an edit ----------------------------------------------------------------------------------------
    def begin(self, transaction: Atomic) -> None:
        """Open an edit: note the state, and make weights copy themselves before they are trained in place.

        Raises: UsageError for a read-only program, EditBusy if another thread's edit stays open.
        """
        p = self.program
        _writable(p)
        lock = p.graph.locked()
        lock.__enter__()
        try:
            self._before = p.state_hash()
        except BaseException:
            lock.__exit__(None, None, None)
            raise
        self._lock, self.open = lock, transaction
        p.order_log, p.admits_cycles = transaction.relabelled, not transaction.check
        self._held = {id(v): (v, v.data, v.shared) for v in p.weights.values()}
        self._expected = {number: array for number, (_, array, _) in self._held.items()}
        share([v for v, _, shared in self._held.values() if not shared], True)

    def note(self, variable: Variable) -> None:
        """Told of each value that the edit itself sets, so that it is not taken for training."""
        if not variable.shared:  # its memory is this edit's alone
            self._private[id(variable)] = variable.data
        variable.shared = True
        self._expected[id(variable)] = variable.data

    def owns(self, variable: Variable) -> bool:
        """Whether nobody but the open edit holds a variable's memory, so that it may be written over."""
        array = variable.data
        if array.storage.readonly or not array.contiguous:
            return False
        if self.open is None:
            return not variable.shared
        if self._private.get(id(variable)) is array:
            return True
        _, held, shared = self._held.get(id(variable), (variable, None, True))
        return held is array and not shared

    def collect_trained(self, transaction: Atomic, keys: Iterable[str] | None = None) -> None:
        """Enter weights that were trained inside the edit as `SetWeight`s, the arrays from before as their undo.

        Args:
            keys: of the weights to look at; by default all.
        """
        weights, expected = self.program.weights, self._expected
        pairs = weights.items() if keys is None else [(key, weights[key]) for key in keys]
        trained = [(key, v) for key, v in pairs if v.data is not expected.get(id(v), v.data)]
        for key, variable in trained:
            with held_back():
                array, variable.data = variable.data, expected[id(variable)]
                if array is not variable.data:  # a tied one is entered once
                    transaction.do(SetWeight(key, array))

    def drop_trained(self) -> None:
        """Take back what was trained since the last value that the edit itself set."""
        for variable in self.program.weights.values():
            expected = self._expected.get(id(variable))
            if expected is not None and variable.data is not expected:
                variable.data, variable.shared = expected, True

    def write(self, t: Atomic) -> Entry | None:
        """Write the entry of an edit that holds; None if it changed nothing. Raises what no journal can hold."""
        p = self.program
        if not t.done:
            return None
        undo = None
        if t.keep_undo:
            specs = {n: (old, p.specs(n) if n in p.graph else old) for n, old in t.specs_before.items()}
            undo = Undo(
                tuple(d[0] for d in t.done),
                tuple(d[1] for d in reversed(t.done)),
                specs,
                (t.valid_before, p.valid),
                t.relabelled[::-1],
            )
        entry = p.journal.append(
            undo=undo,
            cone=tuple(n for n in t.cone if n in p.graph),
            why=t.why,
            author=t.author,
            tool=t.tool,
            line=t.line,
            base_version=p.version,
            edits=[d[2] for d in t.done],
            before=self._before,
            after=p.state_hash(),
            warnings=t.warnings,
        )
        p.version += 1
        self.undoable.append(entry)
        if self.redoable:
            lost = [e.undo for e in self.redoable if e.undo is not None]
            p.graveyard.forget([h for undo in lost for edit in undo.forward if (h := made_by(edit)) is not None])
            self.redoable.clear()
        return entry

    def end(self, entry: Entry | None, *, failed: bool = False) -> None:
        """Close the edit; after a roll-back put values and flags of the weights back."""
        self.open = None
        self.program.order_log, self.program.admits_cycles = None, False
        free: list[Variable] = []
        for number, (variable, array, shared) in self._held.items():
            if failed and variable.data is not array:
                variable.data = array
            if variable.data is array:  # one that the edit set stays shared: the journal holds it too
                if not shared:
                    free.append(variable)
            elif variable.data is self._private.get(number):
                free.append(variable)
        share(free, False)
        self._held, self._expected, self._private = {}, {}, {}
        if entry is not None:
            self.spill.entered(entry.undo)
        self._lock.__exit__(None, None, None)

    def tell(self, entry: Entry) -> None:
        """Call the listeners with an entry."""
        for listener in list(self.listeners):
            try:
                listener(entry)
            except Exception:  # the commit stands, and the other listeners are told too
                _log.exception("a listener of %s failed at entry %d (%s)", self.program.name, entry.seq, entry.why)

    # -- undo and redo ----------------------------------------------------------------------------------
    def walk(self, n: int, *, back: bool) -> None:
        """Undo or redo `n` entries, or none of them. Raises: NotUndoable, UsageError for what is no count."""
        _writable(self.program)
        if type(n) is not int or n < 0:
            raise UsageError("not a number of edits", expected="an integer from 0 on", got=repr(n))
        if self.open is not None:
            raise UsageError("an edit is open", fix="leave the with-block first")
        stack = self.undoable if back else self.redoable
        if n > len(stack):
            verb = "undo" if back else "redo"
            what = f"there are fewer edits to {verb}" if stack else f"there is nothing to {verb}"
            raise NotUndoable(what, where=self.program.name, expected=n, got=len(stack))
        for entry in stack[len(stack) - n :]:
            _check_kept(entry)
        with held_back():
            for _ in range(n):
                self.step(back)

    def step(self, back: bool) -> Entry:
        """Undo or redo one entry, as an entry of its own."""
        p = self.program
        _writable(p)
        with p.graph.locked():
            made = self._step(back)
        self.tell(made)
        return made

    def _step(self, back: bool) -> Entry:
        p = self.program
        stack, other = (self.undoable, self.redoable) if back else (self.redoable, self.undoable)
        entry = stack[-1]
        undo = _check_kept(entry)
        before, records = p.state_hash(), []
        cone: dict[NodeId, None] = {}
        p.graveyard.mode = "undo" if back else "redo"
        try:
            for edit in undo.inverse if back else undo.forward:
                records.append(edit.to_json(p))
                edit.apply(p)
                cone |= dict.fromkeys(edit.touches(p))
            undo.labels[:] = [p.restore_order(record) for record in undo.labels][::-1]
            p.sort_weights((*undo.inverse, *undo.forward))
        finally:
            p.graveyard.mode = "edit"
        for node, specs in undo.specs.items():
            if node in p.graph:
                p.update_node(node, specs=specs[0 if back else 1])
        p.valid = undo.valid[0 if back else 1]
        p.find_loose(p.valid)
        other.append(stack.pop())
        facts = {"undoes" if back else "redoes": entry.seq}
        made = p.journal.append(
            undo=None,
            cone=tuple(n for n in cone | undo.specs if n in p.graph),
            why=f"{'undo' if back else 'redo'}: {entry.why}",
            author="human",
            tool=None,
            line=None,
            base_version=p.version,
            edits=records,
            before=before,
            after=p.state_hash(),
            warnings=(),
            **facts,
        )
        p.version += 1
        self.spill.entered(undo)
        return made

    # -- marks ------------------------------------------------------------------------------------------
    def mark(self, name: str) -> None:
        """Name the present state. Raises: UsageError."""
        if not isinstance(name, str) or not name:
            raise UsageError("a mark is named by a text", got=repr(name))
        self.marks[name] = self.undoable[-1].seq if self.undoable else -1

    def marked(self, name: str) -> int:
        """Seq of the entry that was last when a mark was set. Raises: UsageError listing the marks."""
        if not isinstance(name, str) or name not in self.marks:
            raise UsageError("no such mark", where=name, expected=", ".join(self.marks) or "p.mark(name) first")
        return self.marks[name]

    def depth(self, seq: int, where: object) -> int:
        """How many entries must be undone to the state after entry `seq`. Raises: NotUndoable."""
        if seq == -1:
            return len(self.undoable)
        below = [e.seq for e in self.undoable]
        if seq in below:
            return len(below) - 1 - below.index(seq)
        ahead = any(e.seq == seq for e in self.redoable)
        raise NotUndoable(
            "this state lies ahead: it was undone" if ahead else "this state is not on the present branch",
            where=where,
            fix="p.redo() to it" if ahead else None,
        )

    def rollback(self, name: str) -> int:
        """Undo to a mark; returns how many entries were undone."""
        count = self.depth(self.marked(name), name)
        self.walk(count, back=True)
        return count

    # -- who did it -------------------------------------------------------------------------------------
    def blame(self, ref: NodeId | EdgeId | None, name: str | None) -> list[Entry]:
        """Entries that made or changed what a handle names (of a node, also what it reads), or had a path or key."""
        p, found = self.program, []
        handle = None if ref is None else [ref.index, ref.generation]
        at = p.path(ref) if isinstance(ref, NodeId) and ref in p.graph else None
        for entry in reversed(p.journal):
            hit = False
            for record in reversed(entry.edits):
                of_edge = record["edit"] in _EDGE_EDITS
                own = handle is not None and record.get("handle") == handle and isinstance(ref, EdgeId) == of_edge
                reads = at is not None and record.get("dst") == at
                hit |= own or reads or (name is not None and name in map(record.get, ("path", "dst", "key", "name")))
                several = (*record.get("paths", ()), *record.get("keys", ()))  # of an edit of axes
                hit |= name in several or (isinstance(ref, NodeId) and handle in record.get("handles", ()))
                if own and not of_edge:  # the path it had before this edit
                    at = None if record["edit"] == "AddNode" else record["path"]
            if hit:
                found.append(entry)
        return found[::-1]

    def describe(self, handle: NodeId | EdgeId) -> tuple[str | None, str | None]:
        """What a dead handle was, and the entry that removed it, as far as the journal knows."""
        kind = "RemoveEdge" if isinstance(handle, EdgeId) else "RemoveNode"
        here = [] if self.open is None else [("this edit", [d[2] for d in self.open.done])]
        past = ((f"entry {e.seq}: {e.why}", e.edits) for e in reversed(self.program.journal))
        for by, records in (*here, *past):
            for record in reversed(records):
                if record["edit"] == kind and record["handle"] == [handle.index, handle.generation]:
                    edge = (
                        f"{record['src']['path']} -> {record['dst']}, port {record['port']}"
                        if kind == "RemoveEdge"
                        else ""
                    )
                    return edge or record["path"], by
        return None, None


def _writable(p: Program) -> None:
    if p.readonly:
        raise UsageError("a past state cannot be changed", where=p.name, fix="p.fork() is a program of its own")


def _check_kept(entry: Entry) -> Undo:
    """What undoes an entry, with every byte it needs still there. Raises: NotUndoable."""
    where = f"entry {entry.seq}: {entry.why}"
    if entry.undo is None:
        raise NotUndoable(
            "what would undo this entry was not kept", where=where, fix="edit(keep_undo=True), and save(history='full')"
        )
    for array in (a for edit in (*entry.undo.inverse, *entry.undo.forward) for a in payloads(edit)):
        if array.storage.readonly:
            try:
                array.storage.check()  # the file must still be the one that was read, and as it was
            except GraphwrightError as error:
                raise NotUndoable(
                    "the bytes that would undo this entry are gone",
                    where=where,
                    got=error.what if error.where is None else f"{error.where}: {error.what}",
                    fix="put the file back as it was",
                ) from error
    return entry.undo
