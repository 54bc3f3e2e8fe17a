"""The choice of a pool from the argument `workers` of functions and commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from graphwright.errors import UsageError, shown
from graphwright.workers.cluster import RayPool
from graphwright.workers.pool import Pool
from graphwright.workers.processes import Processes

Workers = int | str | Pool | None
"""The argument `workers` of functions: see `pool_of`; None for no workers."""


@contextmanager
def opened(workers: Workers) -> Iterator[Pool | None]:
    """Yield the pool of the argument `workers`, or None; close it after the body unless it was given as a pool."""
    pool = None if workers is None else pool_of(workers)
    try:
        yield pool
    finally:
        if pool is not None and pool is not workers:
            pool.close()


def pool_of(workers: int | str | Pool) -> Pool:
    """Return the pool that the argument `workers` of a function stands for.

    Args:
        workers: number of local processes; "ray" for the Ray cluster at hand, else a local one; the address
            "ray://host:port" of a Ray cluster; or a pool, which is returned.
    Raises: UsageError for another value; MissingExtra if Ray is not installed.
    """
    if isinstance(workers, str):
        if workers.isdecimal():
            return Processes(int(workers))
        if workers == "ray" or workers.startswith("ray://"):
            return RayPool(None if workers == "ray" else workers)
    elif isinstance(workers, int) and not isinstance(workers, bool):
        return Processes(workers)
    elif isinstance(workers, Pool):
        return workers
    raise UsageError("the argument names no workers", where="workers", got=shown(workers),
                     expected='a number >= 1, "ray", "ray://host:port", or a pool of graphwright.workers')  # fmt: skip
