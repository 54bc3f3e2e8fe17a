"""Writes commits, in the calling thread or in one of its own.

One commit is in flight at a time. A commit that comes meanwhile is skipped: what it would write is still marked as
changed, so that the next one writes it, with the values of its own step. So is the content of a commit that failed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from threading import Condition, Thread
from typing import Any

from graphwright.lifecycle import compaction
from graphwright.lifecycle.commit import Commit
from graphwright.lifecycle.store import Batch, Store

_log = logging.getLogger("graphwright.lifecycle")


class Writer:
    """Writes the commits of a store.

    Attributes:
        store: the store; while `busy`, only the writer reads or changes it.
        failed: names of the tensors of commits that could not be written, until `take_failed`.
        error: why the last commit could not be written; None if it was.
        compactions: figures of the compactions since `take_compactions`.
    """

    def __init__(self, store: Store, *, asynchronous: bool = False) -> None:
        self.store, self.asynchronous = store, asynchronous
        self.failed: set[str] = set()
        self.error: OSError | None = None
        self.compactions: list[dict[str, Any]] = []
        self._batch: Batch | None = None
        self._bug: BaseException | None = None
        self._changed = Condition()
        self._thread: Thread | None = None
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether a commit is in flight."""
        return self._batch is not None

    def submit(self, batch: Batch) -> Commit | None:
        """Write a commit; return it, or None if it is in flight. Raises: OSError if this thread writes and fails."""
        if not self.asynchronous:
            return self._write(batch)
        with self._changed:
            assert self._batch is None, "one commit is in flight at a time"
            self._batch = batch
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

    def take_compactions(self) -> list[Mapping[str, Any]]:
        """Return `compactions`, and empty it."""
        found, self.compactions = self.compactions, []
        return list(found)

    def check(self) -> None:
        """Raise what the writer's thread raised, other than OSError."""
        if self._bug is not None:
            bug, self._bug = self._bug, None
            raise bug

    def _write(self, batch: Batch) -> Commit:
        base, before = compaction.due(self.store, batch), (len(self.store.commits), self.store.nbytes)
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
            self.compactions.append(compaction.cleared(self.store, *before))
        return made

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._batch is not None or self._closed)
                if self._batch is None:
                    return
                batch = self._batch
            try:
                self._write(batch)
            except OSError:
                pass  # noted in `error`
            except BaseException as bug:  # raised in the thread of the training, by its next commit
                self._bug = bug
            with self._changed:
                self._batch = None
                self._changed.notify_all()
