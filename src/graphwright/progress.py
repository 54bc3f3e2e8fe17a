"""Progress of long work as events; whoever shows them (CLI, notebook, studio) gets the same ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of some work.

    Attributes:
        what: of the work.
        done, total: steps.
        facts: numbers worth showing: loss, tokens per second.
        table: row -> column -> number, where several parts of the work go on at once.
    """

    what: str
    done: int
    total: int
    facts: dict[str, float] = field(default_factory=dict)
    table: dict[str, dict[str, float]] = field(default_factory=dict)


Report = Callable[[Progress], None]
