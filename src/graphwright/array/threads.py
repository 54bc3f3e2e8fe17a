"""The number of threads of kernels and of NumPy's matrix products. Long sums depend on it in their last bits."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from graphwright.array.backend import backend
from graphwright.array.device import CPU
from graphwright.errors import UsageError


class ThreadCounts(NamedTuple):
    """Numbers of threads: of one kernel, and of one product of NumPy matrices (0 if its BLAS does not tell)."""

    kernels: int
    products: int


def get_num_threads() -> int:
    """Return the number of threads that one kernel uses."""
    return _cpu().get_num_threads()


def set_num_threads(threads: int) -> None:
    """Set the number of threads that one kernel uses, and one product of NumPy matrices by OpenBLAS.

    Raises: UsageError below 1.
    """
    if not isinstance(threads, int) or threads < 1:
        raise UsageError("invalid number of threads", where="set_num_threads", expected="an int >= 1", got=threads)
    _set(ThreadCounts(threads, threads))


def thread_counts() -> ThreadCounts:
    """Return the numbers of threads that this process uses."""
    return ThreadCounts(get_num_threads(), blas.scipy_openblas_get_num_threads64_() if (blas := _openblas()) else 0)


@contextmanager
def using_threads(counts: ThreadCounts | int) -> Iterator[None]:
    """Run the body with the given numbers of threads, or with one number for both."""
    before = thread_counts()
    _set(ThreadCounts(counts, counts) if isinstance(counts, int) else counts)
    try:
        yield
    finally:
        _set(before)


def _set(counts: ThreadCounts) -> None:
    _cpu().set_num_threads(counts.kernels)
    if counts.products and (blas := _openblas()) is not None:
        blas.scipy_openblas_set_num_threads64_(counts.products)


def _cpu() -> Any:
    backend(CPU)
    from graphwright.array import cpu  # loads torch

    return cpu


@cache
def _openblas() -> Any:
    """Return the OpenBLAS of NumPy's wheels as a C library; None if NumPy uses another BLAS."""
    try:
        path = import_module("numpy._core._multiarray_umath").__file__
        library = ctypes.CDLL(path)  # finds the symbols of the libraries that it loads, too
        return library if library.scipy_openblas_get_num_threads64_() > 0 else None
    except (AttributeError, ImportError, OSError):
        return None
