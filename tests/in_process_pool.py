"""A pool without processes, for tests of what runs by workers."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

from graphwright.workers import Failed


class Shuffled:
    """A pool within this process: `size` workers with copies of everything, which do the tasks in a random order.

    Args:
        lost: how many of the first tasks lose their worker in every attempt of a call.
    """

    def __init__(self, size: int, lost: int = 0) -> None:
        self.size, self.threads, self.calls, self.lost = size, 1, 0, lost
        self.rng = random.Random(size)
        self._common: Any = None
        self._copies: list[Any] = []

    def map(
        self, function: Callable[[Any, Any], Any], items: Sequence[Any], common: Any = None, *, retries: int = 1,
        each: Callable[[int, Any], object] | None = None,
    ) -> list[Any]:  # fmt: skip
        self.calls += 1
        if common is not self._common:
            self._common, self._copies = common, [pickle.loads(pickle.dumps(common)) for _ in range(self.size)]
        results: list[Any] = [None] * len(items)
        for i in self.rng.sample(range(len(items)), len(items)):
            task = pickle.dumps((function, items[i]))
            if self.lost > 0 and function.__name__ != "all_tasks":
                self.lost -= 1
                results[i] = Failed("lost")
                continue
            copy, item = pickle.loads(task)
            results[i] = pickle.loads(pickle.dumps(copy(self.rng.choice(self._copies), item)))
        return results

    def close(self) -> None:
        pass
