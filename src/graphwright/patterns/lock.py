"""The lock of a pattern: many runs read it at the same time, or one thread edits it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager

from graphwright.graph import EditBusy


class RunLock:
    """A re-entrant lock for edits, which wait until no run reads; a run waits for edits that are open or waiting.

    A thread that edits may read its own unfinished edit. Waiting ends with `EditBusy` after `timeout` seconds.
    """

    __slots__ = ("_changed", "_depth", "_lock", "_readers", "_waiting", "acquire", "release", "timeout")

    def __init__(self, timeout: float) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.acquire, self.release, self.timeout = self._lock.acquire, self._lock.release, timeout
        self._readers: dict[int, int] = {}
        """Thread -> number of its runs that read now."""
        self._depth, self._waiting = 0, 0

    @contextmanager
    def reading(self) -> Generator[None]:
        """Hold off edits of other threads. Raises: EditBusy if one does not end in time."""
        thread, end = threading.get_ident(), time.monotonic() + self.timeout
        if not self.acquire(timeout=self.timeout):
            raise self._busy("another thread is editing this pattern")
        own = self._depth > 0
        try:
            while not own and self._waiting and thread not in self._readers:  # edits go first: runs may be endless
                if not self._changed.wait(max(end - time.monotonic(), 0)):
                    raise self._busy("another thread waits to edit this pattern")
            if not own:
                self._readers[thread] = self._readers.get(thread, 0) + 1
        finally:
            self.release()
        try:
            yield
        finally:
            if not own:
                with self._changed:
                    self._readers[thread] -= 1
                    if not self._readers[thread]:
                        del self._readers[thread]
                    self._changed.notify_all()

    def __enter__(self) -> None:
        if not self.acquire(False) and not self.acquire(timeout=self.timeout):
            raise self._busy("another thread is editing this pattern")
        if self._readers and not self._depth:
            self._wait()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self.release()

    def _wait(self) -> None:
        """Wait until no run reads, with the lock taken; on failure it is released. Raises: EditBusy."""
        end = time.monotonic() + self.timeout
        self._waiting += 1
        try:
            while self._readers:
                if not self._changed.wait(max(end - time.monotonic(), 0)) and self._readers:
                    self.release()
                    raise self._busy("a run reads this pattern")
        finally:
            self._waiting -= 1
            if not self._waiting and self._lock.acquire(False):
                self._changed.notify_all()
                self._lock.release()

    def _busy(self, what: str) -> EditBusy:
        return EditBusy(what, expected=f"its end within {self.timeout} s",
                        fix="edit between runs, or set a longer pattern.timeout")  # fmt: skip


class OwnedLock:
    """The lock of a pattern that an owner journals: an edit holds the owner, then the pattern, as runs do.

    Args:
        holding: function that returns a context that holds the owner.
        lock: the lock of the pattern.
    """

    __slots__ = ("_held", "_holding", "_lock")

    def __init__(self, holding: Callable[[], AbstractContextManager[None]], lock: RunLock) -> None:
        self._holding, self._lock = holding, lock
        self._held: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        held = self._holding()
        held.__enter__()
        try:
            self._lock.__enter__()
        except BaseException:
            held.__exit__(None, None, None)
            raise
        self._held.append(held)  # only the thread that has the lock writes the list

    def __exit__(self, *_: object) -> None:
        held = self._held.pop()
        self._lock.__exit__()
        held.__exit__(None, None, None)
