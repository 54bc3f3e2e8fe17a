"""A pool of the workers of a Ray cluster: Ray, imported at first use, schedules, transports and replaces workers."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Self

from graphwright.errors import MissingExtra, UsageError, shown
from graphwright.workers.messages import WorkerError, loaded, packed, portable, use_threads
from graphwright.workers.pool import HOUR, Failed


class RayPool:
    """A pool of the workers of a Ray cluster, each with one core; see `Pool`.

    Args:
        address: "ray://host:port" of a cluster. By default the cluster to which this process is connected, else that
            of the variable RAY_ADDRESS or of this machine, else a local one, which `close` stops.
        timeout: seconds that a task may take; then its worker ends.
    Raises: MissingExtra if Ray is not installed.
    """

    threads = 1

    def __init__(self, address: str | None = None, *, timeout: float = HOUR) -> None:
        if not timeout > 0:
            raise UsageError("the argument is not a number > 0", where="RayPool, timeout", got=shown(timeout))
        if find_spec("ray") is None:
            raise MissingExtra("ray", "a pool of workers on Ray")
        self.address, self.timeout = address, timeout
        self._ray: Any = None
        self._started = False
        self._common: Any = None
        self._reference: Any = None
        self._key = 0

    @property
    def size(self) -> int:
        """The number of cores of the cluster."""
        return max(1, int(self._connected().cluster_resources().get("CPU", 0)))

    def map(
        self, function: Callable[[Any, Any], Any], items: Sequence[Any], common: Any = None, *, retries: int = 1
    ) -> list[Any]:
        """Return `[function(common, item) for item in items]`; see `Pool.map`."""
        ray, name = self._connected(), getattr(function, "__qualname__", repr(function))
        if self._reference is None or common is not self._common:
            self._reference = ray.put(packed(common, f"the common argument of {name}"))
            self._common = common
        tasks = [packed((function, item), f"task {i} of {name}") for i, item in enumerate(items)]
        results: list[Any] = [None] * len(tasks)
        remote = ray.remote(_task).options(num_cpus=1, max_retries=0)
        waiting = list(range(len(tasks)))
        for _ in range(retries + 1):
            found = {i: remote.remote([self._reference], tasks[i], self.timeout) for i in waiting}
            lost: list[int] = []
            try:
                for i, reference in found.items():
                    try:
                        kind, data = ray.get(reference)
                    except ray.exceptions.WorkerCrashedError:
                        kind, data = "lost", b""
                    if kind == "error":
                        raise loaded(data, "an error of a task")
                    if kind == "lost":
                        lost.append(i)
                        results[i] = Failed(f"the worker ended, or the task took more than {self.timeout:g} s")
                    else:
                        results[i] = loaded(data, "a result")
            except BaseException:
                for reference in found.values():
                    ray.cancel(reference, force=True)
                raise
            waiting = lost
            if not waiting:
                break
        return results

    def close(self) -> None:
        """Disconnect from the cluster if this pool connected to it; a local one is stopped."""
        if self._started:
            self._ray.shutdown()
        self._ray, self._started, self._reference, self._common = None, False, None, None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _connected(self) -> Any:
        """Return the module `ray`, connected to a cluster. Raises: WorkerError if that fails."""
        if self._ray is not None:
            return self._ray
        ray: Any = import_module("ray")
        if not ray.is_initialized():
            quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
            try:
                if self.address is not None:
                    ray.init(self.address, **quiet)
                else:
                    try:
                        ray.init("auto", **quiet)
                    except ConnectionError:  # none is running
                        ray.init(include_dashboard=False, **quiet)
            except Exception as error:
                raise WorkerError("cannot connect to Ray", where=self.address or "ray", got=str(error).strip()[:200],
                                  fix="ray start --head, or workers=N for local processes") from error  # fmt: skip
            self._started = True
        self._ray = ray
        return ray


_loaded: dict[str, Any] = {}
"""In a worker: the last common argument, by the id of its object."""


def _task(common: list[Any], data: bytes, timeout: float) -> tuple[str, bytes]:
    """Do a task; runs in the worker, which ends by itself when it is late."""
    ray: Any = import_module("ray")
    faulthandler.dump_traceback_later(timeout, exit=True)
    try:
        key = common[0].hex()
        if key not in _loaded:
            use_threads(1)
            _loaded.clear()
            _loaded[key] = loaded(ray.get(common[0]), "the common argument of its tasks")
        function, item = loaded(data, "its task")
        return "done", packed(function(_loaded[key], item), "the result of a task")
    except Exception as error:
        return "error", packed(portable(error, f"worker {os.getpid()}"), "an error")
    finally:
        faulthandler.cancel_dump_traceback_later()
