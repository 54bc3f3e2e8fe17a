"""How much a test does: many seeds in one test, and more of them in the deep profile than in every run."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import wraps
from typing import Any

DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"


def deep(count: int, quick: int) -> int:
    """A number of cases: `count` in the deep profile, else as many as fit into every run of the suite."""
    return count if DEEP else quick


def seeds(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with `seed` from 0 to count - 1, in every run a quarter of them; a traceback ends with its seed."""
    count = deep(count, (count + 3) // 4)

    def over(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run(**fixtures: Any) -> None:
            for seed in range(count):
                try:
                    test(seed=seed, **fixtures)
                except BaseException as error:
                    error.add_note(f"seed {seed} of {count}")
                    raise

        asked = inspect.signature(test)
        given = [p for name, p in asked.parameters.items() if name != "seed"]
        run.__signature__ = asked.replace(parameters=given)  # pyright: ignore[reportAttributeAccessIssue]
        return run

    return over
