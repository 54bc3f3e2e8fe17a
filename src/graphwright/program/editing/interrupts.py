"""Ctrl-C waits while a program is between two states: half a primitive edit could not be taken back.

Python raises KeyboardInterrupt between any two instructions of the main thread. In a `held_back()` block it is noted;
it is raised when the outermost block is left. Other threads never get one. An open edit keeps the handler that notes,
which between the blocks tells at once: so an edit of many primitives installs it once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_depth = 0  # of blocks in the main thread
_keeping = 0  # open edits of the main thread
_told: Callable[[int, FrameType | None], Any] | None = None  # who had the interrupts before
_noted: list[tuple[int, FrameType | None]] = []


@contextmanager
def held_back() -> Iterator[None]:
    """Raises: KeyboardInterrupt on leaving, if it came inside; what the block did stands then."""
    global _depth
    if not _in_main():
        yield
        return
    outer = _depth
    try:
        _depth = outer + 1
        if not outer and not _keeping:
            _listen()
        yield
    finally:  # until `_stop` the handler is there, and it notes: each of these lines is reached
        _depth = outer
        if not outer:
            told = _told
            if not _keeping:
                _stop()
            if _noted and told is not None:
                first = _noted[0]
                _noted.clear()
                told(*first)


def keep_listening() -> bool:
    """In a block: let the handler stay behind it, for further ones. True if `listen_no_longer` has to be called."""
    global _keeping
    kept = _in_main()
    _keeping += kept
    return kept


def listen_no_longer() -> None:
    """In a block: the handler goes with it."""
    global _keeping
    _keeping -= 1


def _in_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _note(number: int, frame: FrameType | None) -> None:
    if _depth or not _keeping:
        _noted.append((number, frame))
    else:
        _noted.clear()
        (_told or signal.default_int_handler)(number, frame)


def _listen() -> None:
    global _told
    handler: Any = signal.getsignal(signal.SIGINT)
    _noted.clear()
    if handler is not _note:
        _told = handler if callable(handler) else None
        if _told is not None:
            signal.signal(signal.SIGINT, _note)


def _stop() -> None:
    global _told
    if _told is not None and signal.getsignal(signal.SIGINT) is _note:  # else somebody took it inside the edit
        signal.signal(signal.SIGINT, _told)
    _told = None
