"""Progress of long tasks as events, the same for the command line, notebooks and other frontends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Progress:
    """One event of a long task.

    Attributes:
        what: name of the task.
        done, total: steps done so far, and steps in all.
        facts: numbers to show, such as the loss or tokens per second.
        table: row name -> column name -> number; a row per part if several parts of the task run at once, else empty.
    """

    what: str
    done: int
    total: int
    facts: dict[str, float] = field(default_factory=dict)
    table: dict[str, dict[str, float]] = field(default_factory=dict)


ProgressCallback = Callable[[Progress], None]
