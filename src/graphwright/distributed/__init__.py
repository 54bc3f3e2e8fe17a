"""Several processes: ranks started by torchrun, collectives as ops, and data-parallel training steps."""

from __future__ import annotations

from graphwright.array.world import CollectivesDiffer, InputsDiffer, ProgramsDiffer, RankLost, World, WrongWorld
from graphwright.distributed.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    recv,
    reduce,
    reduce_scatter,
    send,
)
from graphwright.distributed.data_parallel import data_parallel
from graphwright.distributed.edits import EditRefused, sync_edits
from graphwright.distributed.ranks import (
    barrier,
    broadcast_object,
    close,
    is_main,
    local_rank,
    rank,
    ranks,
    setup,
)
from graphwright.distributed.saving import SaveFailed, save
from graphwright.distributed.tensor_parallel import Division, tensor_parallel
from graphwright.program.axes.divide import gathered, is_divided

__all__ = [
    "CollectivesDiffer",
    "Division",
    "EditRefused",
    "InputsDiffer",
    "ProgramsDiffer",
    "RankLost",
    "SaveFailed",
    "World",
    "WrongWorld",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "close",
    "data_parallel",
    "gathered",
    "is_divided",
    "is_main",
    "local_rank",
    "rank",
    "ranks",
    "recv",
    "reduce",
    "reduce_scatter",
    "save",
    "send",
    "setup",
    "sync_edits",
    "tensor_parallel",
]
