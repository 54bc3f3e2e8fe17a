"""Native code is built once per installation, by a process in the background: the VM, the planner's loops, populations.

A part is ready when its marker file is in numba's cache. Several processes build a part once: the child processes that
build it take turns by a file lock, and all but the first find the marker. A child that was killed leaves no marker, so
the next process builds the part again. `GRAPHWRIGHT_NATIVE=0` builds and uses no native code of these parts.
Importing this module loads no numba.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from pkgutil import resolve_name
from threading import Event, Lock, Thread
from time import monotonic

from graphwright.errors import ComputeError, UsageError

try:
    import fcntl
except ImportError:  # without locks, two processes may build the same part
    fcntl = None

_INTERVAL = 0.2
"""Seconds between two looks at a marker file."""
_CHILD = "import sys; sys.path[:0] = [sys.argv[1]]; from graphwright.builds import build; build(sys.argv[2])"


class NativeCodeNotice(UserWarning):
    """Native code is being built, or could not be built."""


class NativeCodeFailed(ComputeError):
    """Native code that has no slower form could not be built."""


class Part:
    """A part of the native code.

    Args:
        name: name in notices, such as "the VM".
        home: "module:name" of this object, which the process that builds it imports.
        compile: function that compiles the part, or loads it from numba's cache.
        marker: function that returns the path of the marker file; called once.
        pieces: functions that each compile a piece of the part into numba's cache, in several processes at once.
    """

    def __init__(
        self, name: str, home: str, compile: Callable[[], object], marker: Callable[[], Path],
        pieces: Sequence[Callable[[], object]] = (),
    ) -> None:  # fmt: skip
        self.name, self._home, self._compile, self._find = name, home, compile, marker
        self._pieces = pieces
        self._ready = False
        self._looked = -_INTERVAL
        self._failure = ""
        self._ended: Event | None = None
        self._followers: list[Callable[[], None]] = []
        self._lock = Lock()

    @cached_property
    def marker(self) -> Path:
        """The path of the marker file."""
        return self._find()

    @property
    def ready(self) -> bool:
        """True once the part is built."""
        if not enabled():
            return False
        if not self._ready and monotonic() - self._looked >= _INTERVAL:
            self._looked = monotonic()
            self._ready = self.marker.exists()
        return self._ready

    @property
    def why(self) -> str:
        """The reason why the part is not ready."""
        if not enabled():
            return f"{self.name} is switched off: GRAPHWRIGHT_NATIVE=0"
        return f"{self.name} could not be built" if self._failure else f"{self.name} is being built"

    def start(self, follow: Callable[[], None] | None = None) -> None:
        """Build the part in the background unless that is done, begun, or failed; `follow` is called once it is ready.

        The call returns at once. `follow` is called in another thread.
        """
        with self._lock:
            if self.ready or self._failure or not enabled():
                return
            if follow is not None and follow not in self._followers:
                self._followers.append(follow)
            if self._ended is not None:
                return
            self._ended = Event()
            _announce()
            Thread(target=self._run, name="graphwright-build", daemon=True).start()

    def wait(self, seconds: float | None = None) -> bool:
        """Start to build the part and wait until it is ready, at most `seconds`; return whether it is ready."""
        self.start()
        ended = self._ended
        if not self.ready and ended is not None and not ended.is_set():
            if seconds is None:
                notice(f"waiting for {self.name}, which is built once for this installation")
            ended.wait(seconds)
        return self.ready

    def require(self) -> None:
        """Wait until the part is built. Raises: NativeCodeFailed; UsageError if native code is switched off."""
        if not enabled():
            raise UsageError(f"{self.name} is needed, but native code is switched off", where="GRAPHWRIGHT_NATIVE",
                             expected="1, or not set", got=repr(os.environ["GRAPHWRIGHT_NATIVE"]),
                             fix="unset GRAPHWRIGHT_NATIVE")  # fmt: skip
        if not self.wait():
            raise NativeCodeFailed(f"{self.name} could not be built", where=str(self.marker.parent),
                                   expected="numba compiles it and writes to this folder", got=self._failure,
                                   fix="graphwright warmup --debug shows the error")  # fmt: skip

    def _run(self) -> None:
        """Run the child process to its end. A daemon thread: the child continues if this process ends."""
        assert self._ended is not None
        command = [sys.executable, "-c", _CHILD, str(Path(__file__).parents[1]), self._home]
        try:
            quiet = subprocess.DEVNULL
            child = subprocess.Popen(
                command, stdin=quiet, stdout=quiet, stderr=subprocess.PIPE, text=True, start_new_session=True,
                env={name: value for name, value in os.environ.items() if name != "NUMBA_DISABLE_JIT"},
            )  # fmt: skip
            error = child.communicate()[1].strip()
        except OSError as failed:
            error = str(failed)
        self._looked = -_INTERVAL
        if not self.ready:
            self._failure = error.rpartition("\n")[2] or "the process that builds it was killed"
            notice(f"{self.name} could not be built; slower code runs instead. {self._failure}")
        self._ended.set()
        if self._ready:
            for follow in self._followers:
                follow()

    def build(self) -> None:
        """Build the part in this process unless it is built, while no other process builds it."""
        self.marker.parent.mkdir(parents=True, exist_ok=True)
        with open(self.marker.with_suffix(".lock"), "a") as lock:
            if fcntl is not None:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.marker.exists():
                in_processes(self._pieces)
                self._compile()  # also a piece that failed, whose error is raised here
                self.marker.touch()
        self._ready = True


def in_processes(calls: Sequence[Callable[[], object]]) -> None:
    """Call functions for what they leave in files, in as many forked processes as there are cores; errors are ignored.

    This process takes its share. Without `fork`, or with one core, nothing is called.
    """
    processes = min(len(calls), os.cpu_count() or 1)
    if processes < 2 or not hasattr(os, "fork"):
        return
    take, offer = os.pipe()
    os.write(offer, bytes(range(len(calls))))
    os.close(offer)
    children: list[int] = []
    while len(children) < processes - 1 and 0 not in children:
        children.append(os.fork())
    while number := os.read(take, 1):  # one byte is read by one process
        with suppress(Exception):
            calls[number[0]]()
    if 0 in children:  # a child process, which leaves out what ends an interpreter
        os._exit(0)
    os.close(take)
    for child in children:
        os.waitpid(child, 0)


def enabled() -> bool:
    """Return False if native code is switched off: the environment has GRAPHWRIGHT_NATIVE=0."""
    return os.environ.get("GRAPHWRIGHT_NATIVE", "1") != "0"


def build(home: str) -> None:
    """Build the part named "module:name" in this process, at low priority; the child process calls it."""
    import gc

    with suppress(AttributeError, OSError):
        os.nice(10)
    gc.disable()  # compilers make millions of objects that live to the end
    resolve_name(home).build()


@cache
def _announce() -> None:
    notice("building native code in the background, once for this installation; until it is ready, slower code runs")


def notice(text: str) -> None:
    """Log a warning, and issue it as a `NativeCodeNotice` if the application shows no log of the package."""
    log = logging.getLogger("graphwright")
    log.warning(text)
    at: logging.Logger | None = log
    while at is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in at.handlers):
            return
        at = at.parent if at.propagate else None
    with suppress(NativeCodeNotice):  # where warnings are errors: nothing is wrong
        warnings.warn(text, NativeCodeNotice, stacklevel=2)
