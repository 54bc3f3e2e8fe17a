"""Ctrl-C waits while a program is between two states: half a primitive edit could not be taken back.

Python raises KeyboardInterrupt between any two instructions of the main thread. In a `held_back()` block it is noted;
it is raised when the outermost block is left. Other threads never get one.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_depth = 0  # of blocks in the main thread


@contextmanager
def held_back() -> Iterator[None]:
    """Raises: KeyboardInterrupt on leaving, if it came inside; what the block did stands then."""
    global _depth
    handler: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or _depth or not callable(handler):
        yield
        return
    noted: list[tuple[int, FrameType | None]] = []
    note: Callable[[int, FrameType | None], None] = lambda *facts: noted.append(facts)  # noqa: E731
    try:  # before its first line, nothing is to be put back
        _depth = 1
        signal.signal(signal.SIGINT, note)
        yield
    finally:
        _depth = 0
        signal.signal(signal.SIGINT, handler)
        if noted:
            handler(*noted[0])
