"""A profiler of eager code: the time of each op and vjp, and of each run of a plan, as a table or a Chrome trace.

While a profiler runs, it replaces the functions `_HOOKS` of the modules that run ops by timed ones. Code that no
profiler watches therefore pays nothing.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from time import perf_counter_ns
from typing import Any, ClassVar, Self

from graphwright.array import NDArray
from graphwright.autograd import scope
from graphwright.errors import UsageError
from graphwright.files import StrPath
from graphwright.ops import Op
from graphwright.patterns import table as words
from graphwright.plan.chrome_trace import BACKWARD, FORWARD, PLAN, Event, save_trace
from graphwright.plan.running.executable import Executable
from graphwright.report import Report, table

_COMPUTE = ("ops.call", "autograd.apply", "autograd.engine", "autograd.inplace", "autograd.variable")
_HOOKS = (*((f"graphwright.{name}", "compute") for name in _COMPUTE), ("graphwright.autograd.engine", "_vjp"),
          ("graphwright.autograd.engine", "_run"))  # fmt: skip
"""(module, function): all names by which eager code runs an op, a vjp and a backward pass."""
_lock = threading.Lock()


@dataclass(frozen=True, slots=True, repr=False)
class OpTimes(Report):
    """The calls of one op, vjp or plan: their number, time in ms (in all and on average), operations and bytes."""

    name: str
    category: str
    calls: int
    total: float
    mean: float
    flops: int
    nbytes: int
    COLUMNS: ClassVar = ("name", "category", "calls", "total ms", "mean us", "MFLOP", "MB")


class profile:  # lower case, as it is used like a function
    """Context manager that times the ops of eager code: `with gw.profile() as prof: ...`, then `print(prof)`.

    It records all threads. An op's time includes dispatch, but not the tape; each event adds some 5 us to the time of
    what contains it. Runs of plans are one event each; `plan.profile` times their instructions. Ops that are traced,
    not run, are not recorded.
    Raises: UsageError on entry if a profiler runs already.

    Attributes:
        events: the events in order of their ends.
    """

    _running: ClassVar[profile | None] = None

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._thread = threading.local()
        self._replaced: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Self:
        with _lock:
            if profile._running is not None:
                raise UsageError("a profiler is running already", fix="leave its with-block first")
            profile._running = self
            wrappers = {"compute": self._compute, "_vjp": self._vjp, "_run": self._backward}
            owners = [(import_module(module), name) for module, name in _HOOKS]
            for owner, name in (*owners, (Executable, "run"), (Executable, "step")):
                function = getattr(owner, name)
                self._replaced.append((owner, name, function))
                setattr(owner, name, wrappers.get(name, self._plan)(function))
        return self

    def __exit__(self, *error: object) -> None:
        with _lock:
            for owner, name, function in self._replaced:
                setattr(owner, name, function)
            self._replaced.clear()
            profile._running = None

    # -- timed functions ---------------------------------------------------------------------------------------------
    def _compute(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def compute(row: Op, ins: Sequence[NDArray], attrs: Mapping[str, Any], outs: Any = None) -> Any:
            thread = self._thread
            if getattr(thread, "op", False):  # called by itself, for operands on several devices
                return function(row, ins, attrs, outs)
            thread.op = True
            began = perf_counter_ns()
            try:
                results = function(row, ins, attrs, outs)
            finally:
                took = perf_counter_ns() - began
                thread.op = False
            specs, made = tuple(a.spec for a in ins), tuple(a.spec for a in results or outs)
            cost = row.cost(specs, made, attrs)
            flops = cost.flops if row.traits.table is None else _of_edges(cost.flops, ins[row.traits.table])
            self._note(row.name, began, took, ".".join(scope.get()), specs, made, flops, cost.read + cost.write)
            return results

        return compute

    def _vjp(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def vjp(node: Any, *args: Any) -> Any:
            self._thread.vjp = True
            began = perf_counter_ns()
            try:
                return function(node, *args)
            finally:
                took = perf_counter_ns() - began
                self._thread.vjp = False
                self._note(f"{node.op.name} (vjp)", began, took, ".".join(node.scope))

        return vjp

    def _backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            depth = getattr(self._thread, "depth", 0)
            self._thread.depth = depth + 1
            began = perf_counter_ns()
            try:
                return function(*args, **options)
            finally:
                self._thread.depth = depth
                took = perf_counter_ns() - began
                self.events.append(Event("backward", BACKWARD, began, took, threading.get_ident(), inner=True))

        return run

    def _plan(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(space: Executable, *args: Any, **options: Any) -> Any:
            if getattr(self._thread, "plan", False):  # `run` calls `step`
                return function(space, *args, **options)
            self._thread.plan = True
            began = perf_counter_ns()
            try:
                return function(space, *args, **options)
            finally:
                took = perf_counter_ns() - began
                self._thread.plan = False
                name = f"plan {space.plan.program.name}"
                self.events.append(Event(name, PLAN, began, took, threading.get_ident()))

        return run

    def _note(self, name: str, began: int, took: int, path: str, ins: Any = (), outs: Any = (), flops: int = 0,
              nbytes: int = 0) -> None:  # fmt: skip
        thread = self._thread
        category, inner = BACKWARD if getattr(thread, "depth", 0) else FORWARD, getattr(thread, "vjp", False)
        here = threading.get_ident()
        self.events.append(Event(name, category, began, took, here, inner, path, ins, outs, flops, nbytes))

    # -- results -----------------------------------------------------------------------------------------------------
    def rows(self) -> list[OpTimes]:
        """Return the events by name and category, slowest first; ops in vjps count in the vjp and not by themselves."""
        groups: dict[tuple[str, str], list[Event]] = {}
        for event in self.events:
            if not event.inner:
                groups.setdefault((event.name, event.category), []).append(event)
        inner = [e for e in self.events if e.inner and e.ins]
        found = []
        for (name, category), events in groups.items():
            total = sum(e.duration for e in events) / 1e6
            costs = events if category != BACKWARD else [*events, *_within(inner, events)]
            flops, nbytes = sum(e.flops for e in costs), sum(e.nbytes for e in costs)
            found.append(OpTimes(name, category, len(events), total, total / len(events), flops, nbytes))
        return sorted(found, key=lambda row: -row.total)

    def __str__(self) -> str:
        rows = self.rows()
        cells = [
            {"name": r.name, "category": r.category, "calls": r.calls, "total ms": r.total, "mean us": 1e3 * r.mean,
             "MFLOP": r.flops / 1e6, "MB": r.nbytes / 1e6} for r in rows
        ]  # fmt: skip
        return table(cells, OpTimes.COLUMNS)

    def __repr__(self) -> str:
        return f"profile({len(self.events)} events)"

    def save(self, path: StrPath) -> None:
        """Write the events as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing."""
        save_trace(path, self.events)


def _within(inner: Sequence[Event], outer: Sequence[Event]) -> list[Event]:
    """Return the inner events that are within one of the outer events of their thread."""
    spans = {(e.thread, e.start): e.start + e.duration for e in outer}
    starts: dict[int, list[int]] = {}
    for thread, start in sorted(spans):
        starts.setdefault(thread, []).append(start)
    found = []
    for e in inner:
        before = starts.get(e.thread, [])
        at = bisect_right(before, e.start) - 1
        if at >= 0 and e.start < spans[e.thread, before[at]]:
            found.append(e)
    return found


def _of_edges(flops: int, table: NDArray) -> int:
    """Return the operations of attention over a pattern, from those for all pairs of its tokens and its table."""
    held = table.to_numpy()
    pairs = int(held[words.PLANES] * held[words.TQ] * held[words.TK])
    return round(flops * min(int(held[words.EDGES]) * int(held[words.BLOCK]) ** 2 / max(pairs, 1), 1.0))
