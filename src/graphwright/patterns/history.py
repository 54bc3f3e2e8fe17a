"""The history of a pattern: its transactions, for undo and redo, unless a program owns the pattern."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from graphwright.graph import NotUndoable

from ..errors import UsageError
from . import changes
from .changes import PatternChange


class Owner(Protocol):
    """The object that journals the transactions of a pattern, such as a program."""

    def holding(self) -> AbstractContextManager[None]:
        """Return a context that an edit enters before it locks the pattern. Raises: UsageError if it is refused."""
        ...

    def __call__(self, change: PatternChange, why: str, author: str | None, /) -> None:
        """Journal a change that was applied already. If it raises an error, the pattern reverts the change."""
        ...

    def changes(self) -> Iterator[tuple[Any, PatternChange]]:
        """Yield (entry of the journal, change) of each journalled change of the pattern, oldest first."""
        ...


class Entry:
    """One transaction; `change` is built from the noted rows when it is first asked for."""

    __slots__ = ("_block", "_change", "author", "parts", "why")

    def __init__(self, why: str, author: str | None, parts: list[Any], block: int) -> None:
        self.why, self.author, self.parts, self._block = why, author, parts, block
        self._change: PatternChange | None = None

    @property
    def change(self) -> PatternChange:
        """The change of this transaction."""
        if self._change is None:
            self._change = changes.build(self.parts, self._block)
            self.parts = []
        return self._change

    def __repr__(self) -> str:
        return f"Entry({self.why!r}, author={self.author!r}, {len(self.change)} rows)"


class History:
    """Transactions that were done, and those that were undone."""

    def __init__(self) -> None:
        self.done: list[Entry] = []
        self._undone: list[Entry] = []
        self.owner: Owner | None = None

    def commit(self, entry: Entry) -> None:
        """Add a transaction, or hand it to the owner."""
        if self.owner is not None:
            self.owner(entry.change, entry.why, entry.author)
        else:
            self.done.append(entry)
            self._undone.clear()

    def changes(self) -> Iterator[tuple[Any, PatternChange]]:
        """Yield (entry, change) of each transaction, oldest first; the entries are those of the owner, if there is one.

        The owner's entries may be undone ones.
        """
        yield from ((entry, entry.change) for entry in self.done) if self.owner is None else self.owner.changes()

    def last(self, name: str) -> Entry:
        """Return the transaction to undo. Raises: NotUndoable, UsageError."""
        return self._top(self.done, "undo", name)

    def next(self, name: str) -> Entry:
        """Return the transaction to redo. Raises: NotUndoable, UsageError."""
        return self._top(self._undone, "redo", name)

    def undone(self) -> None:
        """Note that the last transaction was undone."""
        self._undone.append(self.done.pop())

    def redone(self) -> None:
        """Note that the next transaction was done again."""
        self.done.append(self._undone.pop())

    def _top(self, entries: list[Entry], verb: str, name: str) -> Entry:
        if self.owner is not None:
            raise UsageError("a program owns the history of this pattern", where=name or None, fix=f"program.{verb}()")
        if not entries:
            raise NotUndoable(f"there is no edit to {verb}", where=name or None)
        return entries[-1]
