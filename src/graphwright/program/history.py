"""Committing, undoing and redoing: the only code that moves a program from one version to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from graphwright.array import NDArray
from graphwright.errors import UsageError
from graphwright.graph import EdgeId, NodeId
from graphwright.program.edits import SetWeight
from graphwright.program.errors import NotUndoable
from graphwright.program.journal import Entry, Undo

if TYPE_CHECKING:
    from graphwright.program.program import Program
    from graphwright.program.transaction import Transaction


class History:
    """The undo and redo stacks of a program, and the edit that is open."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.undoable: list[Entry] = []
        self.redoable: list[Entry] = []
        self.marks: dict[str, int] = {}
        self.open: Transaction | None = None
        self.listeners: list[Callable[[Entry], None]] = []
        self._held: dict[str, tuple[NDArray, bool]] = {}
        self._expected: dict[str, NDArray] = {}
        self._lock: Any = None
        self._before = ""

    # -- an edit ----------------------------------------------------------------------------------------------------------
    def begin(self, transaction: Transaction) -> None:
        """Open an edit: note the state, and make weights copy themselves before they are trained in place."""
        p = self.program
        self._lock = p.graph.locked()
        self._lock.__enter__()
        self.open = transaction
        self._before = p.state_hash()
        self._held = {key: (p.weights.array(key), v.shared) for key, v in p.weights.items()}
        self._expected = {key: array for key, (array, _) in self._held.items()}
        for variable in p.weights.values():
            variable.shared = True

    def note(self, key: str, array: NDArray) -> None:
        """Told of each `SetWeight` in the edit, so that it is not taken for training."""
        self._expected[key] = array

    def collect_trained(self, transaction: Transaction) -> None:
        """Enter weights that were trained inside the edit as `SetWeight`s, the arrays from before as their undo."""
        p = self.program
        for key, array in list(self._expected.items()):
            if key in p.weights and (trained := p.weights.array(key)) is not array:
                p.weights.set(key, array)
                transaction.do(SetWeight(key, trained))

    def end(self, transaction: Transaction | None) -> None:
        """Close the edit: write its entry, or after a roll-back put the weights' flags back."""
        p = self.program
        self.open = None
        for key, (array, shared) in self._held.items():
            variable = p.weights.get(key)
            if variable is None:
                continue
            if transaction is None and variable.data is not array:
                p.weights.set(key, array)
            if variable.data is array:  # one that the edit set stays shared: the journal holds it too
                variable.shared = shared
        self._held, self._expected = {}, {}
        try:
            if transaction is not None and transaction.done:
                p.version += 1
                specs = {n: (old, p.specs(n)) for n, old in transaction.specs_before.items() if n in p.graph}
                undo = Undo(tuple(d[0] for d in transaction.done), tuple(d[1] for d in reversed(transaction.done)), specs,
                            transaction.relabelled[::-1])  # fmt: skip
                entry = p.journal.append(
                    undo=undo, why=transaction.why, author=transaction.author, tool=transaction.tool,
                    line=transaction.line, base_version=p.version - 1, edits=[d[2] for d in transaction.done],
                    before=self._before, after=p.state_hash(), warnings=transaction.warnings,
                )  # fmt: skip
                self.undoable.append(entry)
                self.redoable.clear()
        finally:
            self._lock.__exit__(None, None, None)
        if transaction is not None and transaction.done:
            self._tell(entry)

    def _tell(self, entry: Entry) -> None:
        for listener in list(self.listeners):
            listener(entry)

    # -- undo and redo ----------------------------------------------------------------------------------------------------
    def step(self, back: bool) -> Entry:
        """Undo or redo one entry, as an entry of its own."""
        p = self.program
        if self.open is not None:
            raise UsageError("an edit is open", fix="leave the with-block first")
        stack, other = (self.undoable, self.redoable) if back else (self.redoable, self.undoable)
        if not stack:
            raise NotUndoable(f"there is nothing to {'undo' if back else 'redo'}", where=p.name)
        entry = stack[-1]
        undo = entry.undo
        if undo is None:
            raise NotUndoable("the undo payload of this entry was not kept", where=f"entry {entry.seq}: {entry.why}")
        before = p.state_hash()
        edits = undo.inverse if back else undo.forward
        records = []
        p.order_frozen = True
        for edit in edits:
            records.append(edit.to_json(p))
            edit.apply(p)
        undo.labels[:] = [p.order_labels.restore(record) for record in undo.labels][::-1]
        p.order_frozen = False
        for node, specs in undo.specs.items():
            if node in p.graph:
                p.update_node(node, specs=specs[0 if back else 1])
        stack.pop()
        other.append(entry)
        p.version += 1
        verb = "undo" if back else "redo"
        made = p.journal.append(
            undo=None, why=f"{verb}: {entry.why}", author="human", tool=None, line=None, base_version=p.version - 1,
            edits=records, before=before, after=p.state_hash(), warnings=(),
            **{"undoes" if back else "redoes": entry.seq},
        )  # fmt: skip
        self._tell(made)
        return made

    def mark(self, name: str) -> None:
        """Name the present state."""
        self.marks[name] = len(self.undoable)

    def rollback(self, name: str) -> int:
        """Undo to a mark; returns how many entries were undone."""
        depth = self.marks.get(name)
        if depth is None:
            raise UsageError("no such mark", where=name, expected=", ".join(self.marks) or "p.mark(name) first")
        count = len(self.undoable) - depth
        if count < 0:
            raise NotUndoable("the mark lies ahead: it was undone", where=name, fix="p.redo() to it")
        for _ in range(count):
            self.step(back=True)
        return count

    def blame(self, node: NodeId | EdgeId | None, path: str | None) -> list[Entry]:
        """Entries whose edits name a node by handle, or a path or key."""
        wanted = None if node is None else [node.index, node.generation]
        return [e for e in self.program.journal if any(_names(edit, wanted, path) for edit in e.edits)]


def _names(record: Any, handle: list[int] | None, path: str | None) -> bool:
    """True if a journal record mentions a handle, path or key anywhere."""
    if isinstance(record, dict):
        if handle is not None and record.get("handle") == handle:
            return True
        if path is not None and path in (record.get("path"), record.get("dst"), record.get("key"), record.get("name")):
            return True
        return any(_names(v, handle, path) for v in record.values())
    return isinstance(record, list) and any(_names(v, handle, path) for v in record)

