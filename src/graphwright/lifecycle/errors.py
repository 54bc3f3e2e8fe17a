"""Errors of lives: missing, busy or damaged directories, and trainings that do not match."""

from __future__ import annotations

import os

from graphwright.errors import GraphwrightError, UsageError
from graphwright.files import DestinationExists, FileError, UnreadableFile


class LifeExists(DestinationExists):
    """The directory has a life, or other files, so that none can be born there."""


class NoLife(UnreadableFile):
    """The directory has no life."""


class LifeBusy(FileError):
    """Another process writes to the life; `pid` is its number, 0 if it is unknown."""

    def __init__(self, where: object, pid: int) -> None:
        own = pid == os.getpid()
        fix = f"{'close() it' if own else 'end that process'}, or open the life with readonly=True"
        got = "this process" if own else f"process {pid}" if pid else "another process"
        super().__init__("the life is in use", where=where, got=got, fix=fix)
        self.pid = pid


class SubstrateMismatch(UsageError):
    """A model has other physical sizes than the life."""


class StoreDamaged(GraphwrightError):
    """A file of a life breaks the format."""


class CommitDamaged(StoreDamaged):
    """A commit file breaks the format, or a tensor of it does not match its digest."""


class StoreGap(StoreDamaged):
    """A commit file between two others is missing; `number` is its number."""

    def __init__(self, where: object, number: int, last: int) -> None:
        fix = f"open the state before it: lf.open(directory, commit={last})" if last else "restore the file from a copy"
        super().__init__("a commit file is missing", where=where, expected=f"{number:08d}.safetensors", fix=fix)
        self.number = number


class LogCorrupt(StoreDamaged):
    """A line of log or journal was changed, lost or added, or they contradict each other; `line` counts from 1."""

    def __init__(self, what: str, *, where: object, line: int, got: object = None, expected: object = None) -> None:
        super().__init__(what, where=f"{where}, line {line}", got=got, expected=expected, fix="restore it from a copy")
        self.line = line


class StepGone(UsageError, LookupError):
    """The state after a step is not stored; `nearest` is the closest stored step."""

    def __init__(self, where: object, step: object, nearest: int | None) -> None:
        fix = "life.pin(step) keeps a step" if nearest is None else f"life.at({nearest}); life.pin(step) keeps a step"
        super().__init__("the state after this step is not stored", where=where, got=step, expected=nearest, fix=fix)
        self.nearest = nearest


class ResumeMismatch(UsageError):
    """A training differs from the one that a life would resume."""


class MergeConflict(UsageError):
    """Two lives changed the same values; `names` lists them."""

    def __init__(self, where: object, names: tuple[str, ...]) -> None:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        fix = 'prefer="ours" or prefer="theirs" decides them'
        super().__init__("both lives changed the same values", where=where, got=shown, fix=fix)
        self.names = names
