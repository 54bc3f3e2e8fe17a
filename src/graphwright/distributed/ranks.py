"""The ranks of a run: joining them, who this process is, and small values for all. torchrun starts the processes."""

from __future__ import annotations

import json
import os
from importlib import import_module
from typing import Any

from graphwright.array import CPU, Device, set_num_threads
from graphwright.array.world import World, joined, world
from graphwright.errors import UsageError


def setup(timeout: float = 300.0, *, device: Device | str = CPU, threads: int | None = None) -> World:
    """Join the run that torchrun's variables describe (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).

    Without them, or with one rank, the process is a world of one, which needs no process group. A second call returns
    the world that the first one joined. Rank 0 prints: commands of the other ranks write no progress and no results.

    Args:
        timeout: most seconds to wait for the other ranks, here and in each collective.
        device: `cpu` for gloo, `cuda` for NCCL.
        threads: CPU threads of kernels; by default the cores of this host divided by its ranks, unless OMP_NUM_THREADS
            is set. (torchrun itself sets it to 1, which does not count.)
    Raises: UsageError for missing or invalid variables, or without NCCL; WrongWorld if the ranks disagree about their
        number; RankLost if a rank does not come within the timeout.
    """
    if not timeout > 0:
        raise UsageError("the timeout is out of range", where="distributed.setup", expected="> 0 seconds", got=timeout)
    if world().ranks > 1:
        return world()
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        made = world()
    else:
        made = import_module("graphwright.array.process_group").join(timeout, Device.parse(device).kind)
    if threads is not None or made.ranks > 1:
        set_num_threads(_threads(made.local_ranks) if threads is None else threads)
    return made


def _threads(local_ranks: int) -> int:
    """Return the number of threads of each rank: two thread pools on the same cores would slow down both."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given) > 0 and not (given == "1" and "TORCHELASTIC_RUN_ID" in os.environ):
        return int(given)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_ranks)


def rank() -> int:
    """Return the number of this process among the ranks; 0 in a world of one. Raises: UsageError as `ranks`."""
    return joined("rank").rank


def ranks() -> int:
    """Return the number of ranks; 1 without torchrun. Raises: UsageError under torchrun without `setup`."""
    return joined("ranks").ranks


def local_rank() -> int:
    """Return the number of this process among the ranks on its host, which is the index of its device."""
    return world().local_rank


def is_main() -> bool:
    """Return whether this is rank 0, which prints and writes. Raises: UsageError as `ranks`."""
    return joined("is_main").rank == 0


def barrier() -> None:
    """Wait until all ranks have come here. Raises: RankLost."""
    group = joined("barrier").group
    if group is not None:
        group.exchange("", "barrier")


def broadcast_object(value: Any = None, root: int = 0) -> Any:
    """Return the `value` of rank `root`, a small JSON value, on all ranks; that of the others is ignored.

    Raises: UsageError if it is not JSON, on all ranks; RankLost.
    """
    group = joined("broadcast_object").group
    if not 0 <= root < world().ranks:
        raise UsageError("root is no rank", where="broadcast_object", expected=f"0 to {world().ranks - 1}", got=root)
    if group is None:
        return json.loads(_json(value))
    text, wrong = "", None
    if group.rank == root:
        try:
            text = _json(value)
        except UsageError as error:
            wrong = error
    found = group.exchange(text, "broadcast_object")[root]
    if wrong is not None:
        raise wrong
    if not found:
        raise UsageError("the value of the root is not JSON", where="broadcast_object", got=f"rank {root}")
    return json.loads(found)


def _json(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError("the value is not JSON", where="broadcast_object", got=str(error)) from error


def close() -> None:
    """Leave the run: the process is a world of one again."""
    group = world().group
    if group is not None:
        group.close()
