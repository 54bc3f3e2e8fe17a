"""Deferred Ctrl-C: a half-applied primitive edit cannot be rolled back, so an interrupt waits until it is complete.

Inside a `defer_interrupts()` block a signal handler records interrupts; KeyboardInterrupt is raised after the outermost
block. Only the main thread gets signals. While an edit is open, the handler stays installed and raises between blocks.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_depth = 0  # of nested blocks in the main thread
_open_edits = 0  # in the main thread
_previous: Callable[[int, FrameType | None], Any] | None = None  # the handler before ours
_pending: list[tuple[int, FrameType | None]] = []


class defer_interrupts:  # lower case, as it is used like a function; a class, as every primitive edit enters one
    """Context manager: defer Ctrl-C; KeyboardInterrupt is raised after the whole block has run."""

    __slots__ = ("main", "outer")

    def __enter__(self) -> None:
        global _depth
        self.main, self.outer = _in_main(), _depth
        if self.main:
            try:
                _depth = self.outer + 1
                if not self.outer and not _open_edits:
                    _install()
            except BaseException:  # an interrupt before our handler was installed
                _depth = self.outer
                if not _open_edits:
                    _uninstall()
                raise

    def __exit__(self, *exc: object) -> None:
        global _depth
        if not self.main:
            return
        _depth = self.outer  # until `_uninstall` our handler records interrupts, so each of these lines is reached
        if not self.outer:
            previous = _previous
            if not _open_edits:
                _uninstall()
            if _pending and previous is not None:
                first = _pending[0]
                _pending.clear()
                previous(*first)


def start_listening() -> bool:
    """Keep the signal handler installed after the current `defer_interrupts` block.

    Outside the main thread, do nothing and return False. Else return True; the caller must call `stop_listening` later.
    """
    global _open_edits
    main = _in_main()
    _open_edits += main
    return main


def stop_listening() -> None:
    """Revert `start_listening`: the current `defer_interrupts` block uninstalls the signal handler at its end."""
    global _open_edits
    _open_edits -= 1


def _in_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _handle(number: int, frame: FrameType | None) -> None:
    if _depth or not _open_edits:
        _pending.append((number, frame))
    else:
        _pending.clear()
        (_previous or signal.default_int_handler)(number, frame)


def _install() -> None:
    global _previous
    handler: Any = signal.getsignal(signal.SIGINT)
    _pending.clear()
    if handler is not _handle:
        _previous = handler if callable(handler) else None
        if _previous is not None:
            signal.signal(signal.SIGINT, _handle)


def _uninstall() -> None:
    global _previous
    if _previous is not None and (found := signal.signal(signal.SIGINT, _previous)) is not _handle:
        signal.signal(signal.SIGINT, found)  # user code replaced ours
    _previous = None
