"""Writes commits, in the calling thread or in one of its own.

One commit is in flight at a time, and in a thread they take a bounded share of the time. A commit that comes meanwhile
is skipped: what it would write is still marked as changed, so that the next one writes it, with the values of its own
step. So is the content of a commit that failed.
"""

from __future__ import annotations

import logging
from threading import Condition, Thread
from time import perf_counter, thread_time

from graphwright.lifecycle import compaction
from graphwright.lifecycle.commit import Commit
from graphwright.lifecycle.store import Batch, Store

SHARE = 0.05
"""Largest share of the time that commits of a thread take; the interpreter's lock delays the training by about twice
that, since both threads wait for it."""
_log = logging.getLogger("graphwright.lifecycle")


class Writer:
    """Writes the commits of a store.

    Attributes:
        store: the store; while `busy`, only the writer reads or changes it.
        failed: names of the tensors of commits that could not be written, until `take_failed`.
        error: why the last commit could not be written; None if it was.
    """

    def __init__(self, store: Store, *, asynchronous: bool = False) -> None:
        self.store, self.asynchronous = store, asynchronous
        self.failed: set[str] = set()
        self.error: OSError | None = None
        self._batch: Batch | None = None
        self._bug: BaseException | None = None
        self._changed = Condition()
        self._thread: Thread | None = None
        self._closed = False
        self._began = self._taken = self._next = 0.0  # seconds

    @property
    def busy(self) -> bool:
        """Whether a commit is in flight."""
        return self._batch is not None

    @property
    def ready(self) -> bool:
        """Whether the commit of a step can be written now."""
        return not self.busy and perf_counter() >= self._next

    def submit(self, batch: Batch, began: float) -> Commit | None:
        """Write a commit, on which work began at a `perf_counter`; return it, or None if it is in flight.

        Raises: OSError if this thread writes and fails.
        """
        if not self.asynchronous:
            return self._write(batch)
        with self._changed:
            assert self._batch is None, "one commit is in flight at a time"
            self._batch, self._began, self._taken = batch, began, perf_counter() - began
            if self._thread is None:
                self._thread = Thread(target=self._run, name="graphwright-life", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return None

    def wait(self) -> None:
        """Wait until no commit is in flight."""
        with self._changed:
            self._changed.wait_for(lambda: self._batch is None)
        self.check()

    def close(self) -> None:
        """Wait, and end the thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._batch is None)
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def take_failed(self) -> set[str]:
        """Return `failed`, and empty it."""
        failed, self.failed = self.failed, set()
        return failed

    def check(self) -> None:
        """Raise what the writer's thread raised, other than OSError."""
        if self._bug is not None:
            bug, self._bug = self._bug, None
            raise bug

    def _write(self, batch: Batch) -> Commit:
        base = compaction.due(self.store, batch)
        try:
            made = self.store.write(batch, base=base)
        except BaseException as error:
            self.failed |= batch.tensors.keys()
            if isinstance(error, OSError):
                if self.error is None:
                    _log.warning("a commit of %s could not be written: %s", self.store.folder.name, error)
                self.error = error
            raise
        self.error = None
        if base and made.record.base:
            self.store.forget(made.number)
        return made

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._batch is not None or self._closed)
                if self._batch is None:
                    return
                batch = self._batch
            before = thread_time()
            try:
                self._write(batch)
            except OSError:
                pass  # noted in `error`
            except BaseException as bug:  # raised in the thread of the training, by its next commit
                self._bug = bug
            self._next = self._began + (self._taken + thread_time() - before) / SHARE
            with self._changed:
                self._batch = None
                self._changed.notify_all()
