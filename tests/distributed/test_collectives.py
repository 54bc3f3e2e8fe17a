"""Worlds of one, and errors before there are several ranks; `test_ranks` has what needs several processes."""

from __future__ import annotations

import os
from threading import Thread

import edits_on_ranks
import numpy as np
import pytest

import graphwright as gw
from graphwright import distributed
from graphwright.array import process_group
from graphwright.array.world import RankLost, WrongWorld, world
from graphwright.errors import DTypeError, ShapeError, UsageError
from run_ranks import free_port


def test_a_world_of_one_needs_no_group(monkeypatch):
    for name in process_group.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert distributed.setup().ranks == 1
    assert world().group is None
    x = gw.tensor(np.arange(6.0).reshape(2, 3), requires_grad=True)
    y = distributed.all_reduce(distributed.all_to_all(distributed.reduce_scatter(distributed.all_gather(x))))
    (3.0 * y).sum().backward()
    assert np.array_equal(y.numpy(), x.numpy())
    assert x.grad is not None
    assert x.grad.numpy().tolist() == [[3.0] * 3] * 2
    distributed.barrier()
    assert distributed.broadcast_object({"a": [1]}) == {"a": [1]}


@pytest.mark.parametrize("call", [
    distributed.barrier, lambda: distributed.sync_edits(edits_on_ranks.net()), distributed.rank, distributed.is_main,
    lambda: distributed.all_reduce(gw.ones(2)), lambda: distributed.send(gw.ones(2), 1),
    lambda: gw.data.DataLoader(gw.data.TensorDataset(np.arange(8)), 2),
])  # fmt: skip
def test_ranks_of_a_run_that_was_not_joined_are_refused(monkeypatch, call):
    monkeypatch.setattr("graphwright.array.world._entered", [False])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="not joined") as found:
        call()
    assert "setup()" in str(found.value.fix)


def test_arguments_of_another_type_are_refused() -> None:
    p = edits_on_ranks.net()
    with pytest.raises(UsageError, match="data_parallel, step"):
        distributed.data_parallel(p)  # pyright: ignore[reportArgumentType]
    with p.edit("divide") as e, pytest.raises(UsageError, match="tensor_parallel, ranks"):
        distributed.tensor_parallel(e, p.select("*"), ranks="2")  # pyright: ignore[reportArgumentType]


def test_a_program_of_other_ranks_is_refused():
    with pytest.raises(WrongWorld, match="2 ranks"):
        gw.ops.call("all_reduce", gw.ones(3), ranks=2)


def test_invalid_operands_are_typed_errors():
    with pytest.raises(ShapeError, match="a multiple of 2"):
        gw.ops.call("reduce_scatter", gw.ones(3), ranks=2)
    with pytest.raises(DTypeError, match="cannot be summed"):
        distributed.all_reduce(gw.ones(3, dtype=gw.bool_))
    with pytest.raises(WrongWorld, match="0 to 1"):
        gw.ops.call("broadcast", gw.ones(3), root=2, ranks=2)
    with pytest.raises(UsageError, match="not JSON"):
        distributed.broadcast_object({1, 2})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"RANK": "0"}, "MASTER_ADDR"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "RANK=2"),
        ({"RANK": "zero", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "RANK=zero"),
    ],
)
def test_invalid_variables_are_named(given, text):
    with pytest.raises(UsageError, match=text):
        process_group.join(1.0, environment=given)


def test_cuda_without_nccl_is_a_typed_error():
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    if not process_group.torch_ranks.is_nccl_available():
        with pytest.raises(UsageError, match="no nccl"):
            process_group.join(1.0, "cuda", given)


ALONE = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


def test_a_rank_that_does_not_come_is_named():
    given = {**ALONE, "MASTER_PORT": str(free_port())}
    with pytest.raises(RankLost, match="rank 1 did not reach a collective") as found:
        process_group.join(0.3, environment={**given, "RANK": "0"})
    assert found.value.missing == (1,)
    with pytest.raises(RankLost, match="cannot reach the store") as found:
        process_group.join(0.3, environment={**given, "RANK": "1", "MASTER_PORT": str(free_port())})
    assert found.value.missing == (0,)


class FirstRun(dict[str, int]):
    """The runs that a process has joined, of two ranks in one process: each joins its first."""

    def __getitem__(self, address: str) -> int:
        return 0


def test_ranks_that_disagree_about_their_number_are_named(monkeypatch):
    monkeypatch.setattr(process_group, "_runs", FirstRun())
    given = {**ALONE, "MASTER_PORT": str(free_port())}
    sizes = {"0": "2", "1": "3"}
    errors: dict[str, str] = {}

    def join(rank: str) -> None:
        with pytest.raises(WrongWorld, match="disagree about their number") as found:
            process_group.join(5.0, environment={**given, "RANK": rank, "WORLD_SIZE": sizes[rank]})
        errors[rank] = str(found.value.got)

    threads = [Thread(target=join, args=(rank,)) for rank in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == {"0": "rank 1 3 ranks", "1": "rank 0 2 ranks"}


def test_torchruns_share_of_threads_is_not_its_default_of_one(monkeypatch):
    from graphwright.distributed.ranks import _threads

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert _threads(1) == cores
    assert _threads(cores + 1) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert _threads(1) == 3
