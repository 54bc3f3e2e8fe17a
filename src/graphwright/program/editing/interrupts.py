"""Deferred Ctrl-C: half a primitive edit could not be rolled back, so interrupts wait until it is complete.

In a `defer_interrupts()` block a handler records the signal, which is raised when the outermost block is left. Other
threads receive no signals. An open edit keeps the handler installed between its blocks, where it raises at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_depth = 0  # of nested blocks in the main thread
_open_edits = 0  # in the main thread
_previous: Callable[[int, FrameType | None], Any] | None = None  # the handler before ours
_pending: list[tuple[int, FrameType | None]] = []


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block: KeyboardInterrupt is raised after the whole block has run."""
    global _depth
    if not _in_main():
        yield
        return
    outer = _depth
    try:
        _depth = outer + 1
        if not outer and not _open_edits:
            _install()
        yield
    finally:  # until `_uninstall` our handler records interrupts, so each of these lines is reached
        _depth = outer
        if not outer:
            previous = _previous
            if not _open_edits:
                _uninstall()
            if _pending and previous is not None:
                first = _pending[0]
                _pending.clear()
                previous(*first)


def start_listening() -> bool:
    """Keep the signal handler installed after the current `defer_interrupts` block.

    Returns False, and does nothing, outside the main thread; else the caller must call `stop_listening` later.
    """
    global _open_edits
    main = _in_main()
    _open_edits += main
    return main


def stop_listening() -> None:
    """Let the current `defer_interrupts` block uninstall the handler at its end."""
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
    if _previous is not None and signal.getsignal(signal.SIGINT) is _handle:  # else user code replaced it
        signal.signal(signal.SIGINT, _previous)
    _previous = None
