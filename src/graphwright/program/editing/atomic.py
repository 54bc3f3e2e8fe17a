"""Atomic: primitive edits of a program that are kept as one journal entry, or taken back as if never made.

Invariant: leaving by an exception, anyone's, restores the program bit for bit; leaving normally commits one entry.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from graphwright.array import Spec
from graphwright.errors import UsageError
from graphwright.graph import EdgeId, NodeId, Relabelled
from graphwright.program.editing.edits import AddNode, Edit, replaced, written
from graphwright.program.editing.interrupts import held_back, keep_listening, listen_no_longer
from graphwright.program.editing.journal import AUTHORS
from graphwright.program.infer import check_outputs, check_ports, infer
from graphwright.program.program import Program

if TYPE_CHECKING:
    from graphwright.program.editing.journal import Entry

_PACKAGE = str(Path(__file__).parents[2])


class Atomic:
    """An open edit of a program: what was done, and how it ends.

    Attributes:
        why, author, tool, line: what the journal entry will say; line is the user's file and line.
        done: the primitive edits made so far, each with its inverse and its JSON form.
        warnings: what is allowed but probably not meant.
        cone: nodes that inference looked at when the edit was left.
    """

    def __init__(self, program: Program, why: str, author: str, tool: str | None, check: bool, keep_undo: bool) -> None:
        if author not in AUTHORS:
            raise UsageError("no such author", expected=", ".join(AUTHORS), got=author, fix="name a program by tool=")
        self.program, self.why, self.author, self.tool, self.check = program, why, author, tool, check
        self.keep_undo, self.valid_before = keep_undo, program.valid
        self.owner, self._left, self._listens = 0, False, False
        self.cone: set[NodeId] = set()
        self.line = _caller()
        self.done: list[tuple[Edit, Edit, dict[str, Any]]] = []
        self.touched: dict[NodeId, None] = {}
        self.warnings: list[str] = []
        self.specs_before: dict[NodeId, tuple[Spec, ...]] = {}
        self.relabelled: list[Relabelled[NodeId]] = []
        self.loose_before: frozenset[EdgeId] = frozenset()
        self._savepoints: list[tuple[int, int, dict[NodeId, None], frozenset[EdgeId]]] = []

    def do(self, edit: Edit) -> None:
        """Make one primitive edit. Raises what its check raises, with nothing changed."""
        p = self.program
        edit.check(p)
        if keys := replaced(edit, p):
            p.history.collect_trained(self, keys)  # the inverse takes the value from before: it must be the journal's
        record, inverse = edit.to_json(p), edit.invert(p)
        with held_back():
            edit.apply(p)
            self.done.append((edit, inverse, record))
            for key in written(edit):
                p.history.note(p.weights[key])
            if isinstance(edit, AddNode) and edit.variable is not None:
                p.history.note(edit.variable)
            for node in edit.touches(p):
                self.touched[node] = None

    def __enter__(self) -> Self:
        try:
            with held_back():
                return self._enter()
        except KeyboardInterrupt as error:  # it came while the edit was opened: nobody else would close it
            if self.owner:
                self.__exit__(type(error), error, None)
            raise

    def _enter(self) -> Self:
        p = self.program
        outer, thread = p.history.open, threading.get_ident()
        if self.owner:
            raise UsageError("an edit is entered once", where=self.why, fix="open another with program.edit(...)")
        if outer is None or outer.owner != thread:
            p.history.begin(self)
            self.owner, self.valid_before, self.loose_before = thread, p.valid, frozenset(p.loose)
            self._listens = keep_listening()
            return self
        assert isinstance(outer, type(self))
        # nested: a savepoint of the outer transaction, what was trained so far before it
        self.owner = thread
        p.history.collect_trained(outer)
        outer._savepoints.append((len(outer.done), len(outer.relabelled), dict(outer.touched), frozenset(p.loose)))
        return outer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entry = None
        try:
            with held_back():
                entry = self._leave(failed=kind is not None)
        except KeyboardInterrupt:
            if not self._left:  # it came before it was held back
                with held_back():
                    self._leave(failed=True)
            raise
        finally:
            if entry is not None:
                self.program.history.tell(entry)

    def _leave(self, failed: bool) -> Entry | None:
        p = self.program
        self._left = True
        current = p.history.open
        assert current is not None, "an edit is left once"
        if current is not self:
            mark, labels, touched, loose = current._savepoints.pop()
            if failed:
                p.history.drop_trained()
                current._roll_back(mark, labels, loose)
                current.touched = touched
            return None
        if self._listens:
            listen_no_longer()
        if failed:
            self._give_up()
            return None
        try:
            self._settle()
            entry = p.history.write(self)
        except BaseException:
            self._give_up()
            raise
        p.history.end(entry)
        return entry

    def _give_up(self) -> None:
        self.program.history.drop_trained()  # what was set in place is put back where it was set
        self._roll_back(0, 0, self.loose_before)
        self.program.valid = self.valid_before
        self.program.history.end(None, failed=True)

    def _settle(self) -> None:
        """Check order and ports, and bring specs up to date. Raises: CycleError, PortEmpty, SpecMismatch."""
        p = self.program
        p.history.collect_trained(self)
        # what was broken before may be anywhere: then everything is looked at
        alive = [n for n in (self.touched if self.valid_before else p.nodes()) if n in p.graph]
        p.sort_weights([edit for pair in self.done for edit in pair[:2]])
        try:
            p.straighten()
            for node in alive:
                check_ports(p, node)
            self.cone = infer(p, alive, self.specs_before)
            fewer = (n in p.graph and len(p.specs(n)) < len(had) for n, had in self.specs_before.items())
            if not self.valid_before or any(fewer):
                check_outputs(p)
            p.valid = True
        except UsageError:
            if self.check:
                raise
            p.valid = False
            with suppress(UsageError):  # what can be inferred is
                infer(p, alive, self.specs_before)
        if p.valid:
            p.constraints.check(p)
        for node in alive:
            if p.is_junction(node) and not p.graph.in_degree(node):
                self.warnings.append(f"{p.path(node)} has no edge left and is zero")

    def _roll_back(self, mark: int, labels: int, loose: frozenset[EdgeId]) -> None:
        p = self.program
        p.graveyard.mode = "roll back"
        undone = [edit for pair in self.done[mark:] for edit in pair[:2]]
        while len(self.done) > mark:
            inverse = self.done.pop()[1]
            inverse.apply(p)
            for key in written(inverse):
                p.history.note(p.weights[key])
        p.sort_weights(undone)
        while len(self.relabelled) > labels:
            p.restore_order(self.relabelled.pop())
        p.loose.clear()
        p.loose |= loose
        p.graveyard.mode = "edit"
        for node, specs in self.specs_before.items():  # what is left of the edit is inferred again when it ends
            if node in p.graph:
                p.update_node(node, specs=specs)
        self.specs_before.clear()


def _caller() -> str | None:
    """file:line of the first frame outside this package and the standard library's contextlib."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename.startswith(_PACKAGE) or "contextlib" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return None if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
