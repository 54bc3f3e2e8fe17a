"""One pool of two workers for all tests of a process: a worker costs the start of a Python."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from graphwright import workers


@pytest.fixture(scope="session")
def pool() -> Iterator[workers.Processes]:
    with workers.Processes(2, timeout=60) as made:
        yield made
