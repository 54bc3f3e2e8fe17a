"""Work on many large arrays side by side: copying and hashing let other threads run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
LARGE = 1 << 20
"""Bytes from which on an array is worth handing to a thread."""


def side_by_side(call: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """`call` of each item, in order, on as many threads as there are cores; the first error is raised."""
    given = list(items)
    if len(given) < 2:
        return [call(item) for item in given]
    with ThreadPoolExecutor(min(len(given), os.cpu_count() or 1), "graphwright") as pool:
        return list(pool.map(call, given))
