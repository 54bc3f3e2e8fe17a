"""Plans on several threads: what an instruction waits for is said by the edges of `hazards`, and by nothing else.

The bits are those of the plan in order. What gains is work that lets go of Python's lock: ATen's larger kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from heapq import heapify, heappop, heappush
from threading import Condition, Event, local
from time import monotonic
from typing import TYPE_CHECKING, Any
from weakref import finalize

import numpy as np

from graphwright.array import CPU
from graphwright.errors import ComputeError, UsageError
from graphwright.plan.planning.executors import VM
from graphwright.plan.planning.hazards import edges
from graphwright.plan.running.executable import Executable

if TYPE_CHECKING:
    from graphwright.array import NDArray
    from graphwright.autograd import Variable
    from graphwright.plan.plan import Plan, PlanSlice


class Cancelled(ComputeError):
    """The run was cancelled before its commit."""


class DeadlineExceeded(ComputeError, TimeoutError):
    """The run had not reached its commit when its time was over."""


class CancelToken:
    """Stops the runs that it was given to, from any thread: what has begun is finished, nothing else begins."""

    def __init__(self) -> None:
        self._event = Event()

    def cancel(self) -> None:
        """Ask for the stop; for good."""
        self._event.set()

    @property
    def cancelled(self) -> bool:
        """True once it was asked for."""
        return self._event.is_set()


_thread = local()


class ParallelExecutable(Executable):
    """A workspace that runs instructions as soon as what they wait for is done, on `threads` threads.

    Args:
        plan: the tables. A run of the VM is one task, each other instruction too.
        variables: as of a Executable.
        safe: as of a Executable.
        threads: the caller's own counts as one; the others are started at the first run and end with `close`.
    Raises: UsageError for threads < 1, or a plan of another device than the CPU.
    """

    def __init__(
        self, plan: Plan, variables: Mapping[str, Variable] | None = None, *, threads: int = 2, safe: bool = False
    ) -> None:
        if threads < 1:
            raise UsageError(
                "at least one thread", where=plan.program.name, expected="threads >= 1", got=threads, fix="threads=2"
            )
        if plan.options.device != CPU:
            raise UsageError(
                "threads are for the CPU; a device has queues",
                where=plan.program.name,
                expected=CPU,
                got=plan.options.device,
                fix="plan.new_executable()",
            )
        super().__init__(plan, variables, safe=safe)
        self.pinned = True  # the tasks are those of this plan
        self.threads = threads
        self._tasks = TaskGraph(plan)
        self._pool: ThreadPoolExecutor | None = None
        self._cancel: CancelToken | None = None
        self._until: float | None = None

    def run(
        self,
        feeds: Mapping[str, Any] | PlanSlice,
        *,
        borrow: bool = False,
        cancel: CancelToken | None = None,
        deadline: float | None = None,
    ) -> dict[str, Any]:
        """As `Executable.run`. The first error wins; what runs beside it is finished first, the rest is not begun.

        Args:
            cancel: stops the run; looked at before each instruction in front of the commit.
            deadline: seconds that the run may take to its commit, which itself is never interrupted.
        Raises: Cancelled, DeadlineExceeded, with states as before the step (else StepTorn); UsageError inside an
            instruction of another parallel run.
        """
        if getattr(_thread, "inside", False):
            raise UsageError(
                "a parallel run inside an instruction of another",
                where=self.plan.program.name,
                expected="a thread that runs no plan in parallel",
                got="one that does",
                fix="Executable(plan) there",
            )
        self._cancel = cancel
        self._until = None if deadline is None else monotonic() + deadline
        try:
            return super().run(feeds, borrow=borrow)
        finally:
            self._cancel = self._until = None

    def execute(self) -> None:
        """Run the tasks on what lies in the inputs. Raises: as `run`."""
        if self._override is not None:  # it is one call, for which nothing is known of what waits for what
            super().execute()
            return
        self.runs.rise()
        run = _Run(self._tasks, self._task_calls(), self._cancel, self._until)
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
        if run.error is not None:
            at, error = run.error
            ran = [i for t in run.done for i in range(*self._tasks.bounds[t])]
            raise self._failed(at, error, ran) from error
        if run.stopped is not None:
            raise self._torn(run.stopped, [i for t in run.done for i in range(*self._tasks.bounds[t])])

    def close(self) -> None:
        """End the threads, after what they run; the next run starts others."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _bind_fed(self, targets: Sequence[NDArray | None]) -> None:
        """No native call for all: it could not be stopped in front of the commit."""

    def _room_of_vm(self) -> np.ndarray:
        """Scratch of its own per segment, as they run side by side."""
        from graphwright.array.vm.running.segment import new_scratch  # loads numba

        return new_scratch()

    def _task_calls(self) -> list[list[Any]]:
        ends = [0, *self._counts]
        return [self._calls[ends[start] : ends[stop]] for start, stop in self._tasks.bounds]


class TaskGraph:
    """The dispatches of a plan with what they wait for.

    Attributes:
        bounds: per task its first instruction and the one after its last.
        waits: per task how many others it waits for.
        then: per task those that wait for it.
        commit: the first task of the commit, which all in front of it precede.
    """

    def __init__(self, plan: Plan) -> None:
        self.bounds: list[tuple[int, int]] = []
        for segment in plan.segments:
            step = segment.stop - segment.start if segment.kind == VM else 1
            self.bounds += [(i, i + step) for i in range(segment.start, segment.stop, step)]
        task = [t for t, (start, stop) in enumerate(self.bounds) for _ in range(start, stop)]
        pairs = {(task[e.before], task[e.after]) for e in edges(plan)}
        self.then: list[list[int]] = [[] for _ in self.bounds]
        self.waits = [0] * len(self.bounds)
        for before, after in sorted(pairs):
            if before != after:
                self.then[before].append(after)
                self.waits[after] += 1
        at = plan.commit_start
        self.commit = task[at] if at < len(task) else len(self.bounds)


class _Run:
    """One run over the tasks, shared by its threads.

    Attributes:
        done: tasks that have run, in the order of their ends.
        error: place and exception of the first that failed.
        stopped: why nothing more was begun.
    """

    def __init__(
        self, tasks: TaskGraph, calls: list[list[Any]], cancel: CancelToken | None, until: float | None
    ) -> None:
        self.tasks, self.calls, self.cancel, self.until = tasks, calls, cancel, until
        self.done: list[int] = []
        self.error: tuple[int, Exception] | None = None
        self.stopped: ComputeError | None = None
        self._waits = list(tasks.waits)
        self._front = tasks.commit  # tasks in front of the commit that have not run
        for t in range(tasks.commit, len(self._waits)):
            self._waits[t] += self._front > 0
        self._ready = [t for t, n in enumerate(self._waits) if n == 0]
        heapify(self._ready)
        self._changed = Condition()
        self._over = False

    def work(self) -> None:
        """Take tasks until all are done or the run is stopped; each of the threads calls it."""
        _thread.inside = True
        try:
            while (task := self._next()) is not None:
                try:
                    for call in self.calls[task]:
                        call()
                except Exception as error:
                    self._fail(self.tasks.bounds[task][0] + getattr(error, "op", 0), error)
                else:
                    self._finish(task)
        finally:
            _thread.inside = False

    def stop(self) -> None:
        """Begin nothing more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _next(self) -> int | None:
        """A task to run; waits for one. None when nothing more is to be begun."""
        with self._changed:
            while not self._over:
                if len(self.done) == len(self.calls):
                    break
                if self._front:
                    self._look_at_limits()
                    if self._over:
                        break
                if self._ready:
                    return heappop(self._ready)
                self._changed.wait(None if self.cancel is None and self.until is None else 0.01)
            self._over = True
            self._changed.notify_all()
            return None

    def _look_at_limits(self) -> None:
        if self.cancel is not None and self.cancel.cancelled:
            self.stopped = Cancelled("the run was cancelled", got=self._progress())
        elif self.until is not None and monotonic() >= self.until:
            self.stopped = DeadlineExceeded("the run took longer than its deadline", got=self._progress())
        self._over = self._over or self.stopped is not None

    def _progress(self) -> str:
        return f"{len(self.done)} of {len(self.calls)} tasks done"

    def _fail(self, at: int, error: Exception) -> None:
        with self._changed:
            if self.error is None:
                self.error = at, error
            self._over = True
            self._changed.notify_all()

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
