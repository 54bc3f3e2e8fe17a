"""What crosses the border of a process: functions and arguments on the way out, results and errors on the way back."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from multiprocessing.reduction import ForkingPickler
from typing import Any

from graphwright.errors import ComputeError, UsageError

FIX = "define functions and classes at the top level of a module that workers can import"


class WorkerError(ComputeError):
    """A worker process did not start, ended early, or raised an error that cannot be sent to the parent."""


def packed(value: Any, what: str) -> bytes:
    """Return the bytes of a value for another process. Raises: UsageError naming `what` if it cannot be sent."""
    try:
        return bytes(ForkingPickler.dumps(value))
    except Exception as error:  # pickling raises errors of many types
        raise UsageError(f"{what} cannot be sent to a worker process", where="workers",
                         got=f"{type(error).__name__}: {error}", fix=FIX) from error  # fmt: skip


def unpacked(data: bytes | memoryview) -> Any:
    """Return the value that `packed` turned into bytes."""
    return ForkingPickler.loads(data)  # pyright: ignore[reportAttributeAccessIssue]  # a function


def loaded(data: bytes, what: str) -> Any:
    """Return the value that `packed` turned into bytes in another process. Raises: UsageError if that fails here."""
    try:
        return unpacked(data)
    except Exception as error:  # what is missing here may raise any error
        got, fix = f"{type(error).__name__}: {error}", f"{FIX}, not in a notebook or at the prompt"
        raise UsageError(f"a worker cannot load {what}", where="workers", got=got, fix=fix) from error


def portable(error: Exception, who: str) -> Exception:
    """Return an error that survives the way to another process: itself, or a WorkerError with its text.

    Its note is the traceback in `who`.
    """
    note = f"in {who}:\n{''.join(traceback.format_exception(error))}"
    try:
        twin = unpacked(ForkingPickler.dumps(error))
        if type(twin) is not type(error) or str(twin) != str(error):
            raise ValueError(twin)
        error.__cause__ = error.__context__ = None
        error.with_traceback(None).add_note(note)
        ForkingPickler.dumps(error)
    except Exception:
        error = WorkerError("a worker failed", where=who, got=f"{type(error).__name__}: {error}")
        error.add_note(note)
    return error


def ending(code: int | None) -> str:
    """Describe how a worker ended, given the exit code of `multiprocessing`."""
    if code is not None and code < 0:
        try:
            return f"the worker was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"the worker was killed by signal {-code}"
    return f"the worker ended with exit code {code}"


def use_threads(count: int) -> None:
    """Set the number of threads of the native libraries that this process loads, and of torch if it is loaded."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(count)
    if (backend := sys.modules.get("graphwright.array.cpu")) is not None:
        backend.set_num_threads(count)
