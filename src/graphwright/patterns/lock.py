"""The lock of a pattern: many runs read it at the same time, or one thread edits it."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

from graphwright.graph import EditBusy


class RunLock:
    """A re-entrant lock for edits, which wait until no run reads; a run waits until no other thread edits.

    A thread that edits may read its own unfinished edit. Waiting ends with `EditBusy` after `timeout` seconds.
    """

    __slots__ = ("_free", "_lock", "acquire", "readers", "release", "timeout")

    def __init__(self, timeout: float) -> None:
        self._lock = threading.RLock()
        self._free = threading.Condition(self._lock)
        self.acquire, self.release, self.timeout = self._lock.acquire, self._lock.release, timeout
        self.readers = 0

    @contextmanager
    def reading(self) -> Generator[None]:
        """Hold off edits of other threads. Raises EditBusy if one does not end in time."""
        if not self.acquire(timeout=self.timeout):
            expected = f"the end of its edit within {self.timeout} s"
            raise EditBusy("another thread is editing this pattern", expected=expected,
                           fix="end the edit block before the run, or set a longer pattern.timeout")  # fmt: skip
        self.readers += 1
        self.release()
        try:
            yield
        finally:
            with self._free:
                self.readers -= 1
                self._free.notify_all()

    def wait(self) -> None:
        """Take the lock for an edit: within the timeout, and while no run reads. Raises EditBusy."""
        end = time.monotonic() + self.timeout
        if not self.acquire(timeout=self.timeout):
            raise EditBusy("another thread is editing this pattern", expected=f"the edit lock within {self.timeout} s",
                           fix="end its edit block first, or set a longer pattern.timeout")  # fmt: skip
        while self.readers:
            if not self._free.wait(max(end - time.monotonic(), 0)) and self.readers:
                self.release()
                raise EditBusy("a run reads this pattern", expected=f"the end of the run within {self.timeout} s",
                               fix="edit between runs, or set a longer pattern.timeout")  # fmt: skip

    def __enter__(self) -> None:
        self.wait()

    def __exit__(self, *_: object) -> None:
        self.release()
