"""Batches made by worker processes, in the order in which one process would make them.

Invariant: batch k comes from worker k mod n, each of which is at most one finished batch ahead of the reader. No worker
outlives the loop that started it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from graphwright.array.world import world
from graphwright.autograd import Tensor
from graphwright.errors import UsageError
from graphwright.workers import WorkerError
from graphwright.workers.messages import portable, use_threads

Batches = Callable[[int, int], Iterable[Any]]
"""`batches(w, n)`: every n-th batch from number w on."""


def batches_of_workers(batches: Batches, count: int) -> Iterator[Any]:
    """Yield the batches of `batches(0, 1)`, made by `count` processes.

    An error of a worker is raised here, with the worker's traceback as a note, in place of the batch that it concerns.
    Raises: UsageError if the function cannot be sent to a process; WorkerError.
    """
    context = get_context("spawn") if world().ranks > 1 else get_context()  # a fork lacks the threads of collectives
    processes, ends = [], []
    try:
        for w in range(count):
            receiving, sending = context.Pipe(duplex=False)
            ends.append(receiving)
            inherited = list(ends) if context.get_start_method() == "fork" else []
            process = context.Process(target=_work, args=(sending, inherited, batches, w, count), daemon=True)
            try:
                process.start()
            except Exception as error:  # pickling raises errors of many types
                raise UsageError("the dataset cannot be sent to a worker process", where="DataLoader", got=str(error),
                                 fix="define them at the top level of a module, or pass num_workers=0",
                                 ) from error  # fmt: skip
            finally:
                sending.close()  # so that the death of the worker closes the pipe
            processes.append(process)
        w = 0
        while True:
            try:
                kind, found = ends[w].recv()
            except EOFError:
                processes[w].join()
                raise WorkerError("a worker process ended early", where=f"worker {w}",
                                  got=f"exit code {processes[w].exitcode}") from None  # fmt: skip
            if kind == "end":
                return
            if kind == "error":
                raise found
            yield found
            w = (w + 1) % count
    finally:
        for process in processes:
            process.terminate()
        for end in ends:
            end.close()
        for process in processes:
            process.join()
            process.close()


def _work(end: Connection, inherited: list[Connection], batches: Batches, w: int, count: int) -> None:
    """Send the batches of one worker; runs in its process."""
    for reading in inherited:
        reading.close()  # so that the death of the parent closes the pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends its workers
    use_threads(1)  # a forked process has none of the threads of its parent
    with suppress(BrokenPipeError):  # the parent no longer reads
        try:
            for batch in batches(w, count):
                end.send(("batch", batch))
            end.send(("end", None))
        except BrokenPipeError:
            raise
        except Exception as error:
            end.send(("error", portable(error, f"worker {w}")))


ForkingPickler.register(Tensor, lambda tensor: (Tensor, (tensor.concrete("sending to a process"),)))
