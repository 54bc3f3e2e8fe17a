"""Functions that workers import."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphwright.array.threads import ThreadCounts, thread_counts
from graphwright.workers import Pool


def product(common: Any, a: np.ndarray) -> tuple[ThreadCounts, bytes]:
    return thread_counts(), (a.T @ a).tobytes()


class KillsOne:
    """A pool of which one worker ends by SIGKILL in the middle of its first task, and leaves a file."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self.pool, self.folder = pool, folder
        self.size, self.threads = pool.size, pool.threads

    def map(
        self, function: Callable[[Any, Any], Any], items: Sequence[Any], common: Any = None, *, retries: int = 1,
        each: Callable[[int, Any], object] | None = None,
    ) -> list[Any]:  # fmt: skip
        return self.pool.map(_dying, items, (function, common, self.folder), retries=retries, each=each)

    def close(self) -> None: ...


def _dying(shared: tuple[Callable[[Any, Any], Any], Any, Path], item: Any) -> Any:
    function, common, folder = shared
    found = function(common, item)
    try:
        (folder / "killed").touch(exist_ok=False)
    except FileExistsError:
        return found
    os.kill(os.getpid(), signal.SIGKILL)
