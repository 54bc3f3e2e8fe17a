"""The number of threads of kernels."""

from __future__ import annotations

from graphwright.array.backend import backend
from graphwright.array.device import CPU
from graphwright.errors import UsageError


def get_num_threads() -> int:
    """Return the number of threads that one kernel uses."""
    backend(CPU)
    from graphwright.array import cpu  # loads torch

    return cpu.get_num_threads()


def set_num_threads(threads: int) -> None:
    """Set the number of threads that one kernel uses. Raises: UsageError below 1."""
    if not isinstance(threads, int) or threads < 1:
        raise UsageError("invalid number of threads", where="set_num_threads", expected="an int >= 1", got=threads)
    backend(CPU)
    from graphwright.array import cpu  # loads torch

    cpu.set_num_threads(threads)
