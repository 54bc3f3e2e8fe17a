"""Work on chunks of data, in this process or by workers: the results are the same, and in the order of the chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from graphwright.array.threads import ThreadCounts, thread_counts, using_threads
from graphwright.workers import Pool
from graphwright.workers.complete import complete

C = TypeVar("C")
T = TypeVar("T")
R = TypeVar("R")


def spread(pool: Pool | None, function: Callable[[C, T], R], items: Sequence[T], common: C) -> Iterator[R]:
    """Yield `function(common, item)` for each chunk, by workers if there are any and several chunks.

    Chunks go out in rounds of one per worker, so that this process holds no more results than that. Workers use the
    numbers of threads of this process, because sums depend on them in their last bits.
    Raises: UsageError if something cannot be sent; WorkerError if the worker of a chunk died or was late twice.
    """
    if pool is None or len(items) < 2:
        yield from (function(common, item) for item in items)
    else:
        shared, size = (function, common, thread_counts()), pool.size
        for i in range(0, len(items), size):
            yield from complete(pool, _in_worker, items[i : i + size], shared, "chunk", i)


def _in_worker(shared: tuple[Callable[[C, T], R], C, ThreadCounts], item: T) -> R:
    function, common, counts = shared
    with using_threads(counts):
        return function(common, item)
