"""Parallel runs: each instruction starts once the instructions that it depends on are done.

Results have the same bits as a sequential run. Only the larger ATen kernels become faster, because they release the
GIL.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from heapq import heapify, heappop, heappush
from threading import Condition, Event, get_ident, local
from time import monotonic
from typing import TYPE_CHECKING, Any
from weakref import finalize

from graphwright.array import CPU, NDArray
from graphwright.autograd import Variable
from graphwright.errors import ComputeError, UsageError
from graphwright.plan.options import VM
from graphwright.plan.planning.hazards import dependencies
from graphwright.plan.running.executable import Executable
from graphwright.plan.running.kernels import BoundKernels
from graphwright.plan.table import PlanSlice

if TYPE_CHECKING:
    from graphwright.plan.plan import Plan


class Cancelled(ComputeError):
    """The run was cancelled before its commit, which writes the states."""


class DeadlineExceeded(ComputeError, TimeoutError):
    """The run did not reach its commit, which writes the states, before the deadline."""


class CancelToken:
    """Cancels the runs that it was passed to, from any thread: running instructions finish, no further ones start."""

    def __init__(self) -> None:
        self._event = Event()

    def cancel(self) -> None:
        """Cancel the runs; this cannot be undone."""
        self._event.set()

    @property
    def cancelled(self) -> bool:
        """True once `cancel` was called."""
        return self._event.is_set()


_thread = local()


class ParallelExecutable(Executable):
    """An executable that runs independent instructions in parallel on `threads` threads.

    Args:
        plan: the plan. Each VM segment is one task, and so is each other instruction.
        variables, safe: see `Executable`.
        threads: number of threads including the caller's; the others start with the first run and end with `close`.
    Raises: UsageError if threads < 1 or the device of the plan is not the CPU.
    """

    def __init__(
        self, plan: Plan, variables: Mapping[str, Variable] | None = None, *, threads: int = 2, safe: bool = False
    ) -> None:
        if threads < 1:
            raise UsageError("cannot run on fewer than 1 thread", where=plan.program.name, expected="threads >= 1",
                             got=threads, fix="threads=2")  # fmt: skip
        if plan.options.device != CPU:
            raise UsageError("cannot run this plan in parallel: it is not for the CPU", where=plan.program.name,
                             expected=CPU, got=plan.options.device, fix="plan.new_executable()")  # fmt: skip
        kernels = BoundKernels(plan, variables, poison=False, shared=False, separate=True)
        super().__init__(plan, safe=safe, kernels=kernels)
        self.pinned = True  # the tasks belong to this plan
        self.threads = threads
        self._tasks = TaskGraph(plan)
        self._pool: ThreadPoolExecutor | None = None
        self._limits: dict[int, tuple[CancelToken | None, float | None]] = {}  # by the thread that runs or waits

    def run(
        self, feeds: Mapping[str, Any] | PlanSlice, *, borrow: bool = False, plan: Plan | None = None,
        cancel: CancelToken | None = None, deadline: float | None = None,
    ) -> dict[str, NDArray]:  # fmt: skip
        """Run as `Executable.run` does. The first error is raised once the other running instructions have finished.

        Args:
            cancel: token that stops the run; it is checked before each task up to the commit.
            deadline: maximum seconds until the commit, which is never interrupted.
        Raises: Cancelled or DeadlineExceeded if no state was written, else StepTorn; UsageError if the calling thread
            is running an instruction of a parallel run.
        """
        if getattr(_thread, "inside", False):
            raise UsageError("nested parallel run: this thread is running an instruction of a parallel run",
                             where=self.plan.program.name, expected="a thread that runs no parallel plan",
                             got="a thread that runs one", fix="Executable(plan) for the inner run")  # fmt: skip
        self._limits[get_ident()] = cancel, None if deadline is None else monotonic() + deadline
        try:
            return super().run(feeds, borrow=borrow, plan=plan)
        finally:
            del self._limits[get_ident()]

    def execute(self) -> None:
        """Run the tasks on the current inputs. Raises: the errors of `run`."""
        if self.kernels.override is not None:  # the override is one call, whose dependencies are unknown
            super().execute()
            return
        self.kernels.runs.rise()
        run = _ParallelRun(self._tasks, self._task_calls(), *self._limits.get(get_ident(), (None, None)))
        if self._pool is None and self.threads > 1:
            self._pool = ThreadPoolExecutor(self.threads - 1, f"plan {self.plan.program.name}")
            finalize(self, self._pool.shutdown, wait=False)
        helpers: list[Future[None]] = []
        try:
            helpers = [self._pool.submit(run.work) for _ in range(self.threads - 1)] if self._pool else []
            run.work()
        finally:
            run.stop()
            wait(helpers)
        ran = [i for t in run.done for i in range(*self._tasks.bounds[t])] if run.error or run.stopped else []
        if run.error is not None:
            at, error = run.error
            raise self.failed(at, error, ran) from error
        if run.stopped is not None:
            raise self.torn(run.stopped, ran)

    def _task_calls(self) -> list[list[Any]]:
        ends = [0, *self.kernels.call_ends]
        return [self.kernels.calls[ends[start] : ends[stop]] for start, stop in self._tasks.bounds]

    def close(self) -> None:
        """End the threads once they are idle; the next run starts new threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


class TaskGraph:
    """The tasks of a plan (VM segments, and the other instructions one by one) and their dependencies.

    Attributes:
        bounds: per task (index of its first instruction, index after its last one).
        waits: per task the number of tasks that it depends on.
        then: per task the tasks that depend on it.
        commit: index of the first task of the commit, which starts after all earlier tasks.
    """

    def __init__(self, plan: Plan) -> None:
        self.bounds: list[tuple[int, int]] = []
        for segment in plan.segments:
            step = segment.stop - segment.start if segment.kind == VM else 1
            self.bounds += [(i, i + step) for i in range(segment.start, segment.stop, step)]
        task = [t for t, (start, stop) in enumerate(self.bounds) for _ in range(start, stop)]
        pairs = {(task[e.before], task[e.after]) for e in dependencies(plan)}
        self.then: list[list[int]] = [[] for _ in self.bounds]
        self.waits = [0] * len(self.bounds)
        for before, after in sorted(pairs):
            if before != after:
                self.then[before].append(after)
                self.waits[after] += 1
        at = plan.commit_start
        self.commit = task[at] if at < len(task) else len(self.bounds)


class _ParallelRun:
    """One run of all tasks; its threads share this object.

    Attributes:
        done: finished tasks, in order of completion.
        error: (index of the instruction, exception) of the first failure, or None.
        stopped: the error with which the run was stopped early, or None.
    """

    def __init__(
        self, tasks: TaskGraph, calls: list[list[Any]], cancel: CancelToken | None, until: float | None
    ) -> None:
        self.tasks, self.calls, self.cancel, self.until = tasks, calls, cancel, until
        self.done: list[int] = []
        self.error: tuple[int, Exception] | None = None
        self.stopped: ComputeError | None = None
        self._waits = list(tasks.waits)
        self._front = tasks.commit  # tasks before the commit that have not run
        for t in range(tasks.commit, len(self._waits)):
            self._waits[t] += self._front > 0
        self._ready = [t for t, n in enumerate(self._waits) if n == 0]
        heapify(self._ready)
        self._changed = Condition()
        self._over = False

    def work(self) -> None:
        """Run tasks until all are done or the run is stopped; every thread calls this."""
        _thread.inside = True
        try:
            while (task := self._next()) is not None:
                try:
                    for call in self.calls[task]:
                        call()
                except Exception as error:
                    self.stop((self.tasks.bounds[task][0] + getattr(error, "op", 0), error))
                else:
                    self._finish(task)
        finally:
            _thread.inside = False

    def stop(self, error: tuple[int, Exception] | None = None) -> None:
        """Stop starting tasks; record `error`, (index of the instruction, exception), if it is the first."""
        with self._changed:
            self.error = self.error or error
            self._over = True
            self._changed.notify_all()

    def _next(self) -> int | None:
        """Wait until a task can start, and return it; None if no task is left or the run was stopped."""
        with self._changed:
            while not self._over and len(self.done) < len(self.calls):
                if self._front:
                    self.stopped = self._limit()
                    if self.stopped is not None:
                        break
                if self._ready:
                    return heappop(self._ready)
                self._changed.wait(None if self.cancel is None and self.until is None else 0.01)
            self._over = True
            self._changed.notify_all()
            return None

    def _limit(self) -> ComputeError | None:
        """Return the error to stop the run with if it was cancelled or its deadline has passed, else None."""
        progress = f"{len(self.done)} of {len(self.calls)} tasks done"
        if self.cancel is not None and self.cancel.cancelled:
            return Cancelled("the run was cancelled", got=progress)
        late = self.until is not None and monotonic() >= self.until
        what, fix = "the run exceeded its deadline", "a longer deadline, or none"
        return DeadlineExceeded(what, got=progress, fix=fix) if late else None

    def _finish(self, task: int) -> None:
        with self._changed:
            self.done.append(task)
            for after in self.tasks.then[task]:
                self._release(after)
            if task < self.tasks.commit:
                self._front -= 1
                if self._front == 0:
                    for t in range(self.tasks.commit, len(self._waits)):
                        self._release(t)
            self._changed.notify_all()

    def _release(self, task: int) -> None:
        self._waits[task] -= 1
        if self._waits[task] == 0:
            heappush(self._ready, task)
