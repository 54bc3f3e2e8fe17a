"""What every pool of workers offers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

HOUR = 3600.0
"""Default number of seconds that a task may take."""
LOADING = 120.0
"""Seconds that a worker may take to start, and to load what a task needs."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Stands in the results for a task that has none, since its worker died or took too long.

    Attributes:
        reason: what happened to the worker of the last attempt, such as "the worker was killed by SIGKILL".
    """

    reason: str


@runtime_checkable
class Pool(Protocol):
    """Workers that call functions."""

    @property
    def size(self) -> int:
        """The number of tasks that run at once."""
        ...

    @property
    def threads(self) -> int:
        """The number of threads that each worker uses."""
        ...

    def map(
        self, function: Callable[[Any, Any], Any], items: Sequence[Any], common: Any = None, *, retries: int = 1,
        each: Callable[[int, Any], object] | None = None,
    ) -> list[Any]:  # fmt: skip
        """Return `[function(common, item) for item in items]`, with `Failed` where a worker died or took too long.

        Args:
            function: a function at the top level of a module that workers can import.
            items: one argument per task.
            common: an argument of all tasks. A worker receives it once and keeps it until `map` is called with another
                object; `function` may store what it derives in it.
            retries: how often a task is given out again after its worker died or took too long.
            each: called in this process with index and result of each task, in the order in which they end.
        Raises: UsageError if something cannot be sent to a worker; WorkerError if workers do not start; the error of
            the first task, by index, whose call raised one, with the traceback of the worker as a note.
        """
        ...

    def close(self) -> None:
        """End all workers. A later `map` starts new ones."""
        ...
