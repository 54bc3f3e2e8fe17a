"""A pool of processes of this machine, which are spawned, persist between calls, and are replaced when they die.

A forked process would inherit locks of the threads of torch that no thread releases, so workers are always spawned.
Invariant: a worker has at most one task; between two calls of `map` no worker has one.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from threading import Thread, Timer
from time import monotonic
from typing import Any, Self
from weakref import finalize

from graphwright.errors import UsageError, shown
from graphwright.workers.messages import WorkerError, ending, loaded, packed, portable, unpacked, use_threads
from graphwright.workers.pool import HOUR, LOADING, Failed

_STARTS = 3  # workers that may end before they are ready, one after the other
_PIPE = 1 << 15  # bytes that surely fit into the buffer of a pipe
_SPAWN = get_context("spawn")
_COMMON, _TASK = b"c", b"t"  # kinds of messages
_MAIN = 'put the code of the script under: if __name__ == "__main__":'


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Worker:
    """A worker process and the pipe to it.

    Attributes:
        ready: True once it runs; key: number of the `common` that it has; task: index of its task, or None.
        deadline: time at which it must be ready, or have ended its task.
    """

    def __init__(self, number: int, threads: int) -> None:
        self.ready, self.key = False, 0
        self.task: int | None = None
        self.pipe, other = _SPAWN.Pipe()
        name = f"graphwright-worker-{number}"
        self.process = _SPAWN.Process(target=_work, args=(other, name, threads), name=name, daemon=True)
        try:
            self.process.start()
        except BaseException:
            self.pipe.close()
            raise
        finally:
            other.close()  # so that the death of the worker closes the pipe
        self.deadline = monotonic() + LOADING

    def send(self, kind: bytes, data: bytes, seconds: float) -> None:
        """Send a message; a worker that does not read it is killed after some seconds. Raises: OSError."""
        if len(data) < _PIPE:
            self.pipe.send_bytes(kind + data)
            return
        guard = Timer(seconds, self.process.kill)
        guard.start()
        try:
            self.pipe.send_bytes(kind + data)
        finally:
            guard.cancel()

    def end(self) -> int | None:
        """Kill the process; return its exit code, which is its own if it ended before."""
        self.pipe.close()
        self.process.kill()
        self.process.join()
        code = self.process.exitcode
        self.process.close()
        return code


class Processes:
    """A pool of worker processes on this machine; see `Pool`.

    Args:
        count: number of processes; they start when they are first needed.
        timeout: seconds that a task may take; then its worker is killed.
        threads: number of threads per worker; by default all cores divided by `count`, at least 1.
    Raises: UsageError for a count, timeout or number of threads that is not positive.
    """

    def __init__(self, count: int, *, timeout: float = HOUR, threads: int | None = None) -> None:
        for name, value in (("count", count), ("threads", 1 if threads is None else threads)):
            if type(value) is not int or value < 1:
                raise UsageError("the argument is not a number >= 1", where=f"Processes, {name}", got=shown(value))
        if not timeout > 0:
            raise UsageError("the argument is not a number > 0", where="Processes, timeout", got=shown(timeout))
        self.size, self.timeout, self.threads = count, timeout, threads or max(1, cores() // count)
        self._workers: list[_Worker] = []
        self._key, self._common, self._bytes = 0, None, b""
        self._started = 0
        finalize(self, _end_all, self._workers, os.getpid())

    @property
    def pids(self) -> list[int]:
        """The ids of the running worker processes."""
        return [w.process.pid for w in self._workers if w.process.pid is not None]

    def map(
        self, function: Callable[[Any, Any], Any], items: Sequence[Any], common: Any = None, *, retries: int = 1,
        each: Callable[[int, Any], object] | None = None,
    ) -> list[Any]:  # fmt: skip
        """Return `[function(common, item) for item in items]`; see `Pool.map`."""
        name = getattr(function, "__qualname__", repr(function))
        if self._key == 0 or common is not self._common:
            self._bytes = packed(common, f"the common argument of {name}")
            self._key, self._common = self._key + 1, common
        tasks = [packed((function, item), f"task {i} of {name}") for i, item in enumerate(items)]
        call = _Call(tasks, retries, each)
        try:
            while call.left:
                self._give(call)
                self._take(call)
        finally:  # after an error or Ctrl-C no worker keeps a task
            for worker in [w for w in self._workers if w.task is not None]:
                self._remove(worker)
        if call.errors:
            raise call.errors[min(call.errors)]
        return call.results

    def close(self) -> None:
        """End all workers; a later `map` starts new ones."""
        _end_all(self._workers, os.getpid())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- one round ---------------------------------------------------------------------------------------------------
    def _give(self, call: _Call) -> None:
        """Start missing workers, and give waiting tasks to idle ones."""
        while len(self._workers) < min(self.size, call.left):
            self._workers.append(_Worker(self._started, self.threads))
            self._started += 1
        for worker in [w for w in self._workers if w.ready and w.task is None]:
            if not call.waiting:
                return
            index = worker.task = call.waiting.popleft()
            try:
                if worker.key != self._key:
                    worker.send(_COMMON, self._bytes, self.timeout)
                worker.send(_TASK, call.tasks[index], self.timeout)
                worker.key, worker.deadline = self._key, monotonic() + max(LOADING, self.timeout)
            except OSError:
                if worker.key != self._key:
                    self._lost(worker, call)
                else:  # it died while it was idle, which is not the fault of the task
                    call.waiting.appendleft(index)
                    self._remove(worker)

    def _take(self, call: _Call) -> None:
        """Wait until a worker answers, dies or is late, and note what came of it."""
        busy = [w for w in self._workers if w.task is not None or not w.ready]
        if not busy:
            return
        seconds = max(0.0, min(w.deadline for w in busy) - monotonic())
        found = set(wait([w.pipe for w in busy], seconds))
        for worker in busy:
            if worker.pipe in found:
                self._answer(worker, call)
            elif monotonic() >= worker.deadline:
                self._lost(worker, call, f"no result within {self.timeout:g} s")

    def _answer(self, worker: _Worker, call: _Call) -> None:
        try:
            kind, value = unpacked(worker.pipe.recv_bytes())
        except (EOFError, OSError):
            self._lost(worker, call)
            return
        if kind == "ready":
            worker.ready, call.starts = True, 0
            return
        if kind == "began":  # all that it needs is loaded
            worker.deadline = monotonic() + self.timeout
            return
        index, worker.task = worker.task, None
        assert index is not None
        if kind == "done":
            call.end(index, value)
        else:
            call.left -= 1
            call.errors[index] = value
            earlier = deque(i for i in call.waiting if i < index)  # which may raise, too
            call.left -= len(call.waiting) - len(earlier)
            call.waiting = earlier

    def _lost(self, worker: _Worker, call: _Call, reason: str = "") -> None:
        """Give out the task of a lost worker again, or note that it failed."""
        index = worker.task
        code = self._remove(worker)
        reason = reason or ending(code)
        if index is None:
            call.starts += 1
            if call.starts == _STARTS:
                raise WorkerError("worker processes end before they are ready", where="workers", got=reason, fix=_MAIN)
            return
        call.attempts[index] += 1
        if call.attempts[index] <= call.retries:
            call.waiting.append(index)
        else:
            call.end(index, Failed(reason))

    def _remove(self, worker: _Worker) -> int | None:
        self._workers.remove(worker)
        return worker.end()


class _Call:
    """The state of one call of `map`.

    Attributes:
        waiting: indices of tasks that no worker has; left: number of tasks without an outcome.
        attempts: per task, how many workers were lost with it; starts: workers lost before they were ready, in a row.
    """

    def __init__(self, tasks: list[bytes], retries: int, each: Callable[[int, Any], object] | None) -> None:
        self.tasks, self.retries, self.each = tasks, retries, each
        self.waiting, self.left = deque(range(len(tasks))), len(tasks)
        self.results: list[Any] = [None] * len(tasks)
        self.errors: dict[int, Exception] = {}
        self.attempts, self.starts = [0] * len(tasks), 0

    def end(self, index: int, result: Any) -> None:
        """Note the result of a task."""
        self.results[index] = result
        self.left -= 1
        if self.each is not None:
            self.each(index, result)


def _end_all(workers: list[_Worker], parent: int) -> None:
    """End all workers, unless this process is a fork of their parent."""
    if os.getpid() != parent:
        return
    for worker in workers:
        worker.process.kill()  # all at once; `end` waits for each
    while workers:
        workers.pop().end()


def _work(pipe: Connection, name: str, threads: int) -> None:
    """Do tasks until the pipe closes; runs in the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends its workers
    Thread(target=_end_with_parent, daemon=True).start()
    use_threads(threads)
    common = _Common(b"")
    with suppress(EOFError, OSError):  # the parent closed the pipe
        ready, began = (packed((kind, None), "a message") for kind in ("ready", "began"))
        pipe.send_bytes(ready)
        while True:
            data = pipe.recv_bytes()
            if data[:1] == _COMMON:
                common = _Common(data[1:])
                continue
            try:
                value = common.value
                function, item = loaded(data[1:], "its task")
                pipe.send_bytes(began)
                answer = packed(("done", function(value, item)), "the result of a task")
            except Exception as error:
                answer = packed(("error", portable(error, name)), "an error")
            pipe.send_bytes(answer)


class _Common:
    """The common argument, loaded at its first use."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @cached_property
    def value(self) -> Any:
        """The argument. Raises: UsageError if it cannot be loaded here."""
        return loaded(self._data, "the common argument of its tasks")


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
