"""The history of a program, which commits, undoes and redoes edits. No other code changes `Program.version`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from graphwright.array.world import RankLost
from graphwright.autograd.variable import share
from graphwright.errors import GraphwrightError, UsageError
from graphwright.graph import EdgeId, NodeId
from graphwright.program.editing.edits import Annotation, EditPattern, SetWeight, sort_weights
from graphwright.program.editing.interrupts import defer_interrupts
from graphwright.program.editing.journal import AUTHORS, Undo, caller
from graphwright.program.editing.undo_storage import UndoSpill
from graphwright.program.errors import NotUndoable
from graphwright.program.exclusive import exclusive
from graphwright.program.patterns import PatternVariable
from graphwright.program.primitives import find_back_edges, restore_order, update_node

if TYPE_CHECKING:
    from graphwright.array import NDArray
    from graphwright.autograd import Variable
    from graphwright.patterns import PatternChange
    from graphwright.program.editing.journal import Entry
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.program import Program

_log = logging.getLogger("graphwright.program")
_EDGE_EDITS = frozenset({"AddEdge", "RemoveEdge", "Rewire"})


class History:
    """The undo and redo stacks of a program, and its open edit.

    Attributes:
        undoable, redoable: stacks of the journal entries that can be undone and redone; the next entry is the last.
        marks: dict from the name of a mark to `seq` of the last undoable entry when it was set; -1 for none.
        open: the open edit; None if no edit is open.
        listeners: functions called with each new journal entry.
        spill: moves arrays of undo data to a temporary file when they exceed `program.history_bytes`.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.undoable: list[Entry] = []
        self.redoable: list[Entry] = []
        self.marks: dict[str, int] = {}
        self.open: Transaction | None = None
        self.listeners: list[Callable[[Entry], object]] = []
        self.spill = UndoSpill(program)
        self._before_edit: dict[int, tuple[Variable, NDArray, bool]] = {}  # by id: variable, array, shared flag
        self._expected: dict[int, NDArray] = {}  # by id of the variable: the array, unless it is trained in the edit
        self._private: dict[int, NDArray] = {}  # by id of the variable: memory that only the open edit holds
        self._lock: Any = None
        self._hash_before = ""

    # -- an edit -----------------------------------------------------------------------------------------------------
    def begin(self, transaction: Transaction) -> None:
        """Open an edit: save the weight arrays and mark them copy-on-write, so that training cannot change them.

        Raises: UsageError for a read-only program, EditBusy if another thread's edit is open.
        """
        p = self.program
        self.check_writable()
        lock = exclusive(p)
        lock.__enter__()
        try:
            self._hash_before = p.state_hash()
        except BaseException:
            lock.__exit__(None, None, None)
            raise
        self._lock, self.open = lock, transaction
        p.order_log, p.admits_cycles = transaction.relabelled, not transaction.check
        self._before_edit = {id(v): (v, v.data, v.shared) for v in p.weights.values()}
        self._expected = {number: array for number, (_, array, _) in self._before_edit.items()}
        share([v for v, _, shared in self._before_edit.values() if not shared], True)

    def check_writable(self) -> None:
        """Raise UsageError if the program is a past state, or inside `without`."""
        if self.program.readonly:
            raise UsageError(
                "a past state, or one with an entry left out, cannot be edited",
                where=self.program.name,
                fix="edit a copy: p.fork()",
            )

    def note(self, variable: Variable) -> None:
        """Record that the edit, not training, set this variable, so that `collect_trained` ignores the new value."""
        if not variable.shared:
            self._private[id(variable)] = variable.data
        variable.shared = True
        self._expected[id(variable)] = variable.data

    def owns(self, variable: Variable) -> bool:
        """Return True if only the open edit holds a variable's memory, so that this memory may be overwritten."""
        array = variable.data
        if array.storage.readonly or not array.contiguous:
            return False
        if self.open is None:
            return not variable.shared
        if self._private.get(id(variable)) is array:
            return True
        _, before, shared = self._before_edit.get(id(variable), (variable, None, True))
        return before is array and not shared

    def collect_trained(self, transaction: Transaction, keys: Iterable[str] | None = None) -> None:
        """Add a `SetWeight` to the edit for each weight (of `keys`, if given) that training changed since it opened."""
        weights, expected = self.program.weights, self._expected
        pairs = weights.items() if keys is None else [(key, weights[key]) for key in keys]
        trained = [(key, v) for key, v in pairs if v.data is not expected.get(id(v), v.data)]
        for key, variable in trained:
            with defer_interrupts():
                array, variable.data = variable.data, expected[id(variable)]
                if array is not variable.data:  # a tied weight is set once
                    transaction.do(SetWeight(key, array))

    def drop_trained(self) -> None:
        """Revert training inside the open edit: restore the last values that the edit set, or those before the edit."""
        for variable in self.program.weights.values():
            expected = self._expected.get(id(variable))
            if expected is not None and variable.data is not expected:
                variable.data, variable.shared = expected, True

    def write(self, t: Transaction) -> Entry | None:
        """Append and return the journal entry of an edit; None if it is empty. Raises: UsageError if it is not JSON."""
        p = self.program
        if not t.done:
            return None
        undo = None
        if t.keep_undo:
            specs = {n: (old, p.specs(n) if n in p.graph else old) for n, old in t.specs_before.items()}
            forward, inverse = tuple(d[0] for d in t.done), tuple(d[1] for d in reversed(t.done))
            undo = Undo(forward, inverse, specs, (t.valid_before, p.valid), t.relabelled[::-1])
        entry = p.journal.append(
            t.why, t.author, tool=t.tool, line=t.line, base_version=p.version, edits=[d[2] for d in t.done],
            before=self._hash_before, after=p.state_hash(), warnings=t.warnings, undo=undo,
            cone=tuple(n for n in t.cone if n in p.graph),
        )  # fmt: skip
        self._committed(entry, undo)
        return entry

    def commit_pattern(self, key: str, change: PatternChange, why: str, author: str | None) -> None:
        """Journal a change of a pattern that was applied already: as a part of the open edit, else as an entry.

        The author of an entry is `human` without an author, and `pass` for one that the journal does not have.
        """
        p, edit = self.program, EditPattern(key, change)
        variable = p.weights.at_key(key)
        assert isinstance(variable, PatternVariable)
        with exclusive(p), defer_interrupts():
            if self.open is not None:
                self.open.done.append((edit, edit.invert(p), edit.to_json(p)))
                variable.follow(change)
                return
            before, record = p.state_hash(), edit.to_json(p)  # the variable still has the digest before the change
            variable.follow(change)
            undo = Undo((edit,), (edit.invert(p),), {}, (p.valid, p.valid))
            named = author if author in AUTHORS else "pass" if author else "human"
            entry = p.journal.append(
                why, named, line=caller(), base_version=p.version, edits=[record], before=before,
                after=p.state_hash(), undo=undo,
            )  # fmt: skip
            self._committed(entry, undo)
            self.spill.entered(undo)
        self.notify(entry)

    def _committed(self, entry: Entry, undo: Undo | None) -> None:
        """Count a new entry and put it on the stack; without undo data, plans are made again."""
        p = self.program
        self._count(undo)
        self.undoable.append(entry)
        if self.redoable:
            undos = [e.undo for e in self.redoable if e.undo is not None]
            p.tombstones.forget(h for undo in undos for edit in undo.forward if (h := edit.issued) is not None)
            self.redoable.clear()
        self.trim()

    def _count(self, undo: Undo | None) -> None:
        """Increment the version of the program; plans keep theirs if only edges of patterns changed."""
        kinds = set() if undo is None else set(map(type, undo.forward))
        if EditPattern in kinds and kinds <= {EditPattern, Annotation}:
            self.program.count_pattern_edit()
        else:
            self.program.version += 1

    def trim(self) -> None:
        """Drop the undo data of the entries beyond `program.undo_horizon`; their records stay in the journal."""
        p, horizon = self.program, self.program.undo_horizon
        beyond = [] if horizon is None else self.undoable[: max(len(self.undoable) - horizon, 0)]
        gone = {entry.seq: entry.undo for entry in takewhile(lambda e: e.undo is not None, reversed(beyond))}
        if not gone:
            return
        for seq in gone:
            p.journal.put(replace(p.journal[seq], undo=None))
        self.undoable = [p.journal[e.seq] for e in self.undoable]
        kept = [e.undo for e in (*self.undoable, *self.redoable)]
        needed, dropped = ({edit.issued for u in undos if u for edit in u.edits} for undos in (kept, gone.values()))
        p.tombstones.drop(handle for handle in dropped - needed if handle is not None)

    def end(self, entry: Entry | None, *, failed: bool = False) -> None:
        """Close the open edit, which wrote `entry`. If it failed, restore the weights and their copy-on-write flags."""
        self.open = None
        self.program.order_log, self.program.admits_cycles = None, False
        free: list[Variable] = []
        for number, (variable, array, shared) in self._before_edit.items():
            if failed and variable.data is not array:
                variable.data = array
            if variable.data is array:  # a variable that the edit set stays shared: the journal holds its array too
                if not shared:
                    free.append(variable)
            elif variable.data is self._private.get(number):
                free.append(variable)
        share(free, False)
        self._before_edit, self._expected, self._private = {}, {}, {}
        if entry is not None:
            self.spill.entered(entry.undo)
        self._lock.__exit__(None, None, None)

    def notify(self, entry: Entry) -> None:
        """Call each listener with a journal entry. Exceptions of listeners are only logged."""
        for listener in list(self.listeners):
            try:
                listener(entry)
            except Exception:  # neither the commit nor the other listeners are affected
                _log.exception("a listener of %s failed at entry %d (%s)", self.program.name, entry.seq, entry.why)

    # -- undo and redo -----------------------------------------------------------------------------------------------
    def walk(self, n: int, *, back: bool) -> None:
        """Undo `n` entries, or redo them if `back` is False. Raises, before any change: NotUndoable, UsageError."""
        self.check_writable()
        if type(n) is not int or n < 0:
            raise UsageError("invalid number of edits to undo or redo", expected="an integer >= 0", got=repr(n))
        made: list[Entry] = []
        try:
            with exclusive(self.program):
                self._check_walk(n, back)
                with defer_interrupts():
                    for _ in range(n):
                        made.append(self._step(back))
        finally:
            for entry in made:
                self.notify(entry)

    def _check_walk(self, n: int, back: bool) -> None:
        if self.open is not None:
            raise UsageError("cannot undo or redo while an edit is open", fix="leave the with-block first")
        stack = self.undoable if back else self.redoable
        if n > len(stack):
            verb = "undo" if back else "redo"
            what = f"fewer edits to {verb} than requested" if stack else f"nothing to {verb}"
            raise NotUndoable(what, where=self.program.name, expected=n, got=len(stack))
        for entry in stack[len(stack) - n :]:
            _check_undo(entry)

    def _step(self, back: bool) -> Entry:
        """Undo one entry, or redo it if `back` is False; append a journal entry for this and return it."""
        p = self.program
        stack, other = (self.undoable, self.redoable) if back else (self.redoable, self.undoable)
        entry = stack[-1]
        undo = _check_undo(entry)
        before = p.state_hash()
        records, cone = self._apply(entry, undo, back)
        other.append(stack.pop())
        undoes, redoes = (entry.seq, None) if back else (None, entry.seq)
        made = p.journal.append(
            f"{'undo' if back else 'redo'}: {entry.why}", "human", base_version=p.version, edits=records, before=before,
            after=p.state_hash(), undoes=undoes, redoes=redoes,
            cone=tuple(n for n in cone | undo.specs if n in p.graph),
        )  # fmt: skip
        self._count(undo)
        self.spill.entered(undo)
        return made

    def _apply(self, entry: Entry, undo: Undo, back: bool) -> tuple[list[dict[str, Any]], dict[NodeId, None]]:
        """Undo or redo what an entry did; return the records of its edits, and the nodes that they touch."""
        p, records = self.program, list[dict[str, Any]]()
        cone: dict[NodeId, None] = {}
        p.tombstones.mode = "undo" if back else "redo"
        try:
            for edit in undo.inverse if back else undo.forward:
                records.append(edit.to_json(p))
                edit.apply(p)
                cone |= dict.fromkeys(edit.touches(p))
            moved = [node for record in undo.labels for node, _, _ in record.before]
            undo.labels[:] = [restore_order(p, record) for record in undo.labels][::-1]
            if any((node in p.graph) != (node in p.order_labels) for node in moved):
                raise LookupError("the order of the nodes does not match the nodes")
            sort_weights(p, undo.edits)
        except RankLost:
            if len(records) > 1:  # else nothing was changed
                p.valid = False
            raise
        except (GraphwrightError, LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
            p.valid = False
            raise NotUndoable("the undo data of this entry does not fit the program", where=f"entry {entry.seq}",
                              got=str(error)[:120], fix="load a copy of the saved program") from error  # fmt: skip
        finally:
            p.tombstones.mode = "edit"
        for node, specs in undo.specs.items():
            if node in p.graph:
                update_node(p, node, specs=specs[0 if back else 1])
        p.valid = undo.valid[0 if back else 1]
        find_back_edges(p, p.valid)
        return records, cone

    @contextmanager
    def without(self, entry: Entry) -> Iterator[None]:
        """Inside the block the program is as if an entry were undone, of which later ones depend on values alone.

        Nothing is journaled, and the program cannot be edited inside. Raises: NotUndoable; UsageError while an edit is
        open.
        """
        p = self.program
        self._check_walk(0, True)
        undo = _check_undo(entry)
        with exclusive(p):
            with defer_interrupts():
                self._apply(entry, undo, True)
                self._count(undo)
            held, p.readonly = p.readonly, True
            try:
                yield
            finally:
                p.readonly = held
                with defer_interrupts():
                    self._apply(entry, undo, False)
                    self._count(undo)

    # -- marks -------------------------------------------------------------------------------------------------------
    def mark(self, name: str) -> None:
        """Set a mark with this name at the present state. Raises: UsageError for an invalid name."""
        if not isinstance(name, str) or not name:
            raise UsageError("invalid name of a mark", expected="a non-empty string", got=repr(name))
        self.marks[name] = self.undoable[-1].seq if self.undoable else -1

    def marked(self, name: str) -> int:
        """Return `seq` of the last undoable entry when a mark was set, else -1. Raises: UsageError if it is unknown."""
        if not isinstance(name, str) or name not in self.marks:
            known = ", ".join(self.marks) or None
            raise UsageError("no mark has this name", where=name, expected=known, fix="set a mark by p.mark(name)")
        return self.marks[name]

    def depth(self, seq: int, where: object) -> int:
        """Return how many entries must be undone to return to the state after entry `seq`. Raises: NotUndoable."""
        if seq == -1:
            return len(self.undoable)
        below = [e.seq for e in reversed(self.undoable)]
        if seq in below:
            return below.index(seq)
        undone = any(e.seq == seq for e in self.redoable)
        why = "it was undone" if undone else "it is not on the current branch of the history"
        fix = "call p.redo() until it is reached" if undone else None
        raise NotUndoable(f"cannot undo to this state: {why}", where=where, fix=fix)

    def rollback(self, name: str) -> int:
        """Undo all entries after a mark; return the number of undone entries."""
        with exclusive(self.program):
            count = self.depth(self.marked(name), name)
            self.walk(count, back=True)
        return count

    # -- blame -------------------------------------------------------------------------------------------------------
    def blame(self, ref: NodeId | EdgeId | None, name: str | None) -> list[Entry]:
        """Return the entries that created or changed a node (or its operands), edge or weight, by handle or name."""
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
                several = (*record.get("paths", ()), *record.get("keys", ()))  # of a ResizeAxis
                hit |= name in several or (isinstance(ref, NodeId) and handle in record.get("handles", ()))
                if own and not of_edge:  # the path before this edit
                    at = None if record["edit"] == "AddNode" else record["path"]
            if hit:
                found.append(entry)
        return found[::-1]

    def describe(self, handle: NodeId | EdgeId) -> tuple[str | None, str | None]:
        """Return (path of a removed node or edge, text naming the entry that removed it); (None, None) if not found."""
        here = [] if self.open is None else [("this edit", [d[2] for d in self.open.done])]
        past = ((f"entry {e.seq}: {e.why}", e.edits) for e in reversed(self.program.journal))
        for by, r in ((by, r) for by, records in (*here, *past) for r in reversed(records)):
            if r.get("handle") == [handle.index, handle.generation]:
                if r["edit"] == "RemoveNode" and isinstance(handle, NodeId):
                    return r["path"], by
                if r["edit"] == "RemoveEdge" and isinstance(handle, EdgeId):
                    return f"{r['src']['path']} -> {r['dst']}, port {r['port']}", by
        return None, None


def _check_undo(entry: Entry) -> Undo:
    """Return the undo data of an entry. Raises: NotUndoable if it was not stored or its arrays cannot be read."""
    where = f"entry {entry.seq}: {entry.why}"
    if entry.undo is None:
        fix = "edit with keep_undo=True and within program.undo_horizon, and save with history='full'"
        raise NotUndoable("no undo data was stored for this entry", where=where, fix=fix)
    for array in entry.undo.arrays():
        if array.storage.readonly:
            try:
                array.storage.check()  # the file must be the one that was read, and unchanged
            except GraphwrightError as error:
                got = error.what if error.where is None else f"{error.where}: {error.what}"
                raise NotUndoable("cannot read the values needed to undo or redo this entry", where=where, got=got,
                                  fix="restore the file") from error  # fmt: skip
    return entry.undo
