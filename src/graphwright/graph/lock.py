"""The one-writer lock of a graph: re-entrant, with a timeout instead of a deadlock."""

from __future__ import annotations

import threading

from .errors import EditBusy


class EditLock:
    """`with lock:` holds it; a second thread waits `timeout` seconds, then gets `EditBusy`."""

    __slots__ = ("acquire", "release", "timeout")

    def __init__(self, timeout: float) -> None:
        lock = threading.RLock()
        self.acquire, self.release, self.timeout = lock.acquire, lock.release, timeout

    def wait(self, timeout: float | None = None) -> None:
        """Take the lock within `timeout` seconds, or the lock's own. Raises EditBusy."""
        timeout = self.timeout if timeout is None else timeout
        if not self.acquire(timeout=timeout):
            raise EditBusy(
                "another thread is editing this graph",
                expected=f"the edit lock within {timeout} s",
                fix="read through graph.snapshot(), or raise graph.timeout",
            )

    def __enter__(self) -> None:
        if not self.acquire(False):
            self.wait()

    def __exit__(self, *_: object) -> None:
        self.release()
