"""Python's cycle collector, held back while a plan's many small tables are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MANY = 10_000  # objects made since the last collection


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
        if gc.get_count()[0] > _MANY and not gc.get_freeze_count():
            gc.freeze()  # what was made is old at once, by moving a list: to visit it would free nothing
            gc.unfreeze()
        gc.enable()
