"""What the container refuses, as types; each derives from the package's root errors and carries its facts as fields."""

from __future__ import annotations

from ..errors import ComputeError, UsageError


class StaleHandle(UsageError, KeyError):
    """A handle whose node or edge is gone, or that this graph never issued.

    Args:
        index: slot of the handle.
        generation: generation of the handle.
        was: what the handle named while it lived, where somebody still knows.
        removed_by: the edit that removed it, where somebody still knows.
        what: one sentence; the default says that the handle is dead.
        where: row of a bulk edit, if the handle came in one.
    """

    def __init__(
        self,
        index: int,
        generation: int,
        was: str | None = None,
        removed_by: str | None = None,
        *,
        what: str | None = None,
        where: object = None,
    ) -> None:
        text = what or f"slot {index}, generation {generation} is gone"
        text += f"; it was {was}" if was else ""
        text += f", removed by {removed_by}" if removed_by else ""
        super().__init__(text, where=where, fix="look the handle up again, or undo the edit that removed it")
        self.index, self.generation, self.was, self.removed_by = index, generation, was, removed_by


class CapacityError(UsageError):
    """More slots, bucket places or ports than 31 bits can number."""


class EditBusy(ComputeError):
    """Another thread held the graph's edit lock for longer than the timeout."""


class NotUndoable(UsageError):
    """A record that does not fit the present state: restores run in the reverse order of the edits they undo."""


class GraphFileError(UsageError):
    """A saved graph whose tables contradict each other."""


class JournalCorrupt(UsageError):
    """A journal whose chain breaks at `line` (counted from 1), with the `reason`."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason, where=f"line {line}", fix="recover=True reads the lines before it")
        self.line, self.reason = line, reason
