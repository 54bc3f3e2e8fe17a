"""A pool of the workers of a Ray cluster: Ray, imported at first use, schedules, transports and replaces workers."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from socket import create_connection
from time import monotonic
from typing import Any, Self

from graphwright.errors import MissingExtra, UsageError, shown
from graphwright.workers.messages import WorkerError, loaded, packed, portable, use_threads
from graphwright.workers.pool import HOUR, LOADING, Failed

_SECONDS = 20.0  # for the first connection to a cluster
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}


class RayPool:
    """A pool of the workers of a Ray cluster, each with one core; see `Pool`.

    Args:
        address: "ray://host:port" of a cluster. By default the cluster to which this process is connected, else that
            of the variable RAY_ADDRESS, or that of `ray start` on this machine, else a local one, which `close` stops.
        timeout: seconds that a task may take; then its worker ends.
    Raises: MissingExtra if Ray is not installed; UsageError for a timeout that is not positive.
    """

    threads = 1

    def __init__(self, address: str | None = None, *, timeout: float = HOUR) -> None:
        if not timeout > 0:
            raise UsageError("the argument is not a number > 0", where="RayPool, timeout", got=shown(timeout))
        if find_spec("ray") is None:
            raise MissingExtra("ray", "a pool of workers on Ray")
        self.address, self.timeout = address, timeout
        self._ray: Any = None
        self._connected_here = False
        self._common: Any = None
        self._reference: Any = None

    @property
    def size(self) -> int:
        """The number of cores of the cluster."""
        return max(1, int(self._connected().cluster_resources().get("CPU", 0)))

    def map(
        self, function: Callable[[Any, Any], Any], items: Sequence[Any], common: Any = None, *, retries: int = 1,
        each: Callable[[int, Any], object] | None = None,
    ) -> list[Any]:  # fmt: skip
        """Return `[function(common, item) for item in items]`; see `Pool.map`."""
        ray, name = self._connected(), getattr(function, "__qualname__", repr(function))
        if self._reference is None or common is not self._common:
            self._reference = ray.put(packed(common, f"the common argument of {name}"))
            self._common = common
        tasks = [packed((function, item), f"task {i} of {name}") for i, item in enumerate(items)]
        start = ray.remote(max_retries=0, num_cpus=1)(_task).remote
        results: list[Any] = [None] * len(tasks)
        errors: dict[int, Exception] = {}
        attempts, began = [0] * len(tasks), monotonic()
        running = {start([self._reference], data, self.timeout): i for i, data in enumerate(tasks)}
        try:
            while running:
                (reference,), _ = ray.wait(list(running), num_returns=1)
                i = running.pop(reference)
                attempts[i] += 1
                kind, value = self._outcome(reference, monotonic() - began)
                if kind == "error":
                    errors[i] = value
                    for later in [r for r, k in running.items() if k > i]:  # an earlier task may raise, too
                        ray.cancel(later, force=True)
                        del running[later]
                elif kind == "lost" and attempts[i] <= retries:
                    running[start([self._reference], tasks[i], self.timeout)] = i
                else:
                    results[i] = Failed(value) if kind == "lost" else value
                    if each is not None:
                        each(i, results[i])
        finally:  # after Ctrl-C no worker keeps a task
            for reference in running:
                ray.cancel(reference, force=True)
        if errors:
            raise errors[min(errors)]
        return results

    def _outcome(self, reference: Any, seconds: float) -> tuple[str, Any]:
        """Return "done" and the result of a task that ended, "error" and its error, or "lost" and the reason."""
        try:
            kind, data = self._ray.get(reference)
        except self._ray.exceptions.WorkerCrashedError:
            late = f", or the task took more than {self.timeout:g} s" if seconds >= self.timeout else ""
            return "lost", f"the worker ended{late}"
        except self._ray.exceptions.RayError as error:  # such as too little memory on its machine
            return "lost", f"{type(error).__name__}: {str(error).strip().partition(os.linesep)[0]}"
        return kind, loaded(data, "the result of a task")

    def close(self) -> None:
        """Disconnect from the cluster if this pool connected to it; a local one is stopped."""
        if self._connected_here:
            self._ray.shutdown()
        self._ray, self._connected_here, self._reference, self._common = None, False, None, None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _connected(self) -> Any:
        """Return the module `ray`, connected to a cluster. Raises: WorkerError if that fails."""
        if self._ray is not None:
            return self._ray
        ray: Any = import_module("ray")
        if self.address is not None or not ray.is_initialized():
            try:
                _connect(ray, self.address)
            except Exception as error:  # Ray raises errors of many types
                where, got = self.address or "ray", f"{type(error).__name__}: {str(error).strip()[:200]}"
                fix = "ray start --head, or workers=N for processes of this machine"
                raise WorkerError("cannot connect to a Ray cluster", where=where, got=got, fix=fix) from error
            self._connected_here = True
        self._ray = ray
        return ray


def _connect(ray: Any, address: str | None) -> None:
    given = address or os.environ.get("RAY_ADDRESS", "")
    host, _, port = given.removeprefix("ray://").rpartition(":")
    if port.isdecimal():  # Ray itself waits for minutes
        create_connection((host, int(port)), _SECONDS).close()
    if given:
        ray.init(given, **_QUIET)
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it sends nothing to its makers
    path = os.pathsep.join(p for p in sys.path if p)  # so that workers import what this process does
    options = {"include_dashboard": False, "runtime_env": {"env_vars": {"PYTHONPATH": path}}, **_QUIET}
    try:
        ray.init(**options)  # "auto" also finds the local cluster of another run, which ends with that run
    except ConnectionError:  # of `ray start`, which has crashed
        ray.init("local", **options)


_loaded: dict[Any, Any] = {}
"""In a worker: the last common argument, by the id of its object."""


def _task(common: list[Any], data: bytes, timeout: float) -> tuple[str, bytes]:
    """Do a task; runs in the worker, which ends by itself when it is late, even in native code."""
    ray: Any = import_module("ray")
    with open(os.devnull, "w") as quiet:
        faulthandler.dump_traceback_later(max(timeout, LOADING), exit=True, file=quiet)
        try:
            key = common[0].hex()
            if key not in _loaded:
                use_threads(1)
                _loaded.clear()
                _loaded[key] = loaded(ray.get(common[0]), "the common argument of its tasks")
            function, item = loaded(data, "its task")
            faulthandler.dump_traceback_later(timeout, exit=True, file=quiet)
            return "done", packed(function(_loaded[key], item), "the result of a task")
        except Exception as error:
            return "error", packed(portable(error, f"worker {os.getpid()}"), "an error")
        finally:
            faulthandler.cancel_dump_traceback_later()
