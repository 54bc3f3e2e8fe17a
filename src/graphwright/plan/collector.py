"""Python's cycle collector, held back while a plan's many small tables are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No cycle collection inside: tracing, planning and binding make no cycles, yet thousands of objects to visit."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
