"""Errors of the graph container; each derives from a root error of the package and has its details as attributes."""

from __future__ import annotations

from ..errors import ComputeError, UsageError


class StaleHandle(UsageError, KeyError):
    """The node or edge of a handle was removed, or this graph never issued the handle.

    `was` is what the handle named and `removed_by` the edit that removed it, if still known; `where` is the row of a
    bulk edit.
    """

    def __init__(
        self, index: int, generation: int, was: str | None = None, removed_by: str | None = None, *,
        what: str | None = None, where: object = None, issued: bool = True,
    ) -> None:  # fmt: skip
        text = what or f"slot {index}, generation {generation} is gone"
        text += f"; it was {was}" if was else ""
        text += f", removed by {removed_by}" if removed_by else ""
        fix = "look the handle up again, or undo the edit that removed it" if issued else "use a handle of this graph"
        super().__init__(text, where=where, fix=fix)
        self.index, self.generation, self.was, self.removed_by = index, generation, was, removed_by


class CapacityError(UsageError):
    """More nodes, edges, adjacency-list entries or ports than an index of 31 bits can count."""


class EditBusy(ComputeError):
    """Another thread held the graph's edit lock longer than the timeout."""


class NotUndoable(UsageError):
    """There is nothing to undo, the data for it is lost, or edits were not undone in reverse order."""


class GraphFileError(UsageError):
    """A saved graph is malformed, or its tables contradict each other."""


class JournalCorrupt(UsageError):
    """The hash chain of a journal is broken at `line` (counted from 1); `reason` says how."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason, where=f"line {line}", fix="recover=True reads the lines before it")
        self.line, self.reason = line, reason
