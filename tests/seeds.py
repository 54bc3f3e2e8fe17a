"""How much a test does: many seeds in one test, and more of them in the deep profile than in every run."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")
DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"


def deep(cases: T, quick: T) -> T:
    """Cases, or their number: `cases` in the deep profile, else as many as fit into every run of the suite."""
    return cases if DEEP else quick


def some(cases: Iterable[Any], every: int) -> list[Any]:
    """Parameters of a test with few long cases: each n-th, beginning with the first; in the deep profile all of them.

    Of tests with more cases the whole suite takes half by itself, see `pytest_collection_modifyitems`.
    """
    import pytest  # late: processes that are ranks use this file, too

    return [case if i % every == 0 else pytest.param(case, marks=pytest.mark.deep) for i, case in enumerate(cases)]


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
