"""One test over many seeds: what a test costs pytest itself is more than a small random case takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any


def seeds(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with `seed` from 0 to count - 1; the seed that fails stands under its traceback."""

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
