"""Calls of a pool that need a result of every task, and the check that its workers can load what they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphwright.workers.messages import WorkerError
from graphwright.workers.pool import Failed, Pool


def arrive(pool: Pool, common: Any, where: str) -> None:
    """Start the workers of a pool, and send them what later tasks share.

    Raises: UsageError if `common` cannot be sent, or not be loaded there; WorkerError if all workers end while they do.
    """
    found = pool.map(all_tasks, range(pool.size), common)
    lost = [one.reason for one in found if isinstance(one, Failed)]
    if lost and len(lost) == len(found):
        raise WorkerError("no worker can load the task", where=where, got=lost[0])


def complete(
    pool: Pool, function: Callable[[Any, Any], Any], items: Sequence[Any], common: Any, where: str, first: int = 0
) -> list[Any]:
    """Return the results of all tasks, as `Pool.map` does; errors call them `where`, and count them from `first`.

    Raises: WorkerError if the worker of a task died or was late twice.
    """
    found = pool.map(function, items, common)
    for i, one in enumerate(found):
        if isinstance(one, Failed):
            raise WorkerError("a task has no result", where=f"{where} {first + i}", got=one.reason)
    return found


def all_tasks(common: Any, number: int) -> None:
    """Do nothing, in a worker that has loaded what the tasks share: the error of one that cannot has this name."""
