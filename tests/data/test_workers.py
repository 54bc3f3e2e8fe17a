"""Worker processes: the batches of one process in its order, errors in the parent, and no process left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright.data import DataLoader, Dataset, IterableDataset, TensorDataset, WorkerError
from graphwright.errors import ShapeError, UsageError


class Squares(Dataset):
    """Items of several forms; the worker sleeps longer for early items, so that batches finish out of order."""

    def __init__(self, n: int, *, fails: int = -1, error: str = "") -> None:
        self.n, self.fails, self.error = n, fails, error

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        if index == self.fails:
            if self.error == "exit":
                os._exit(7)
            if self.error == "odd":
                raise OddError(1, 2)
            if self.error == "ours":
                raise ShapeError("wrong", where="item", expected=3, got=index)
            raise ValueError(f"item {index}")
        time.sleep(0.002 * (self.n - index) / self.n)
        low = gw.tensor([index / 3, 1.0]).to("bfloat16")
        return {"x": np.full(2, index**2, np.float32), "low": low, "pair": (index, float(index))}


class OddError(Exception):
    """An error that cannot be unpickled."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(np.arange(7.0))


def flat(batch: Any) -> list[np.ndarray]:
    if isinstance(batch, dict):
        return [a for v in batch.values() for a in flat(v)]
    return [a for v in batch for a in flat(v)] if isinstance(batch, tuple) else [np.asarray(batch)]


def assert_same(ours: Any, wanted: Any) -> None:
    for a, b in zip(flat(ours), flat(wanted), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a, b)


@pytest.fixture(autouse=True)
def none_left():
    yield
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("workers", [1, 2, 3, 40])
def test_batches_and_their_order_are_those_of_one_process(workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 3, "shuffle": True, "seed": 4, "rank": 1, "ranks": 2}
    alone, shared = DataLoader(Squares(37), **options), DataLoader(Squares(37), **options, num_workers=workers)
    for _ in range(2):
        batches = list(shared)
        wanted = list(alone)
        assert len(batches) == len(wanted) == 6
        for ours, theirs in zip(batches, wanted, strict=True):
            assert ours["low"].dtype is gw.bfloat16
            assert_same(ours, theirs)
    assert shared.state_dict() == alone.state_dict()


def test_functions_of_the_dataset_and_of_collate_run_in_workers() -> None:
    x = np.arange(20.0)
    mine = os.getpid()
    seen = list(DataLoader(x, 4, num_workers=2, collate_fn=lambda rows: (os.getpid(), float(sum(rows)))))
    assert [total for _, total in seen] == x.reshape(-1, 4).sum(1).tolist()
    assert len({pid for pid, _ in seen} - {mine}) == 2
    pairs = list(DataLoader(TensorDataset(x, x.astype(int)), 6, num_workers=2))
    for ours, theirs in zip(pairs, DataLoader(TensorDataset(x, x.astype(int)), 6), strict=True):
        assert_same(ours, theirs)
    sums = DataLoader(x, 4, num_workers=1, collate_fn=lambda rows: (gw.tensor(sum(rows)), gw.tensor(rows[0]).data))
    assert [(a.shape, b.shape) for a, b in sums] == [((), ())] * 5


def test_a_loop_resumes_at_any_batch() -> None:
    loader = DataLoader(Squares(10), 2, shuffle=True, num_workers=2)
    whole = list(DataLoader(Squares(10), 2, shuffle=True))
    for batch in islice(loader, 2):
        assert batch is not None
    state = loader.state_dict()
    again = DataLoader(Squares(10), 2, shuffle=True, num_workers=3)
    again.load_state_dict(state)
    for ours, theirs in zip(list(again), whole[2:], strict=True):
        assert_same(ours, theirs)


def test_a_stream_is_read_by_one_worker() -> None:
    for ours, theirs in zip(DataLoader(Stream(), 3, num_workers=1), DataLoader(Stream(), 3), strict=True):
        assert_same(ours, theirs)
    with pytest.raises(UsageError, match="iterable"):
        DataLoader(Stream(), 3, num_workers=2)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [("", ValueError, "item 5"), ("ours", ShapeError, "wrong"), ("odd", WorkerError, "OddError: 1 and 2")],
)
def test_an_error_of_a_worker_is_raised_at_its_batch(error: str, kind: type[Exception], text: str) -> None:
    loader = DataLoader(Squares(12, fails=5, error=error), 2, num_workers=2)
    seen = []
    with pytest.raises(kind, match=text) as caught:
        seen.extend(batch["pair"][0].tolist() for batch in loader)
    assert seen == [[0, 1], [2, 3]]
    assert "in worker 0" in caught.value.__notes__[-1]
    assert "__getitem__" in caught.value.__notes__[-1]


def test_a_worker_that_dies_is_reported() -> None:
    with pytest.raises(WorkerError, match="exit code 7"):
        list(DataLoader(Squares(12, fails=5, error="exit"), 2, num_workers=2))


def test_results_that_cannot_be_sent_are_reported() -> None:
    with pytest.raises((WorkerError, AttributeError, TypeError), match="pickle"):
        list(DataLoader(list(range(4)), 2, num_workers=1, collate_fn=lambda rows: lambda: rows))


def test_a_loop_that_ends_early_ends_its_workers() -> None:
    loader = iter(DataLoader(Squares(1000), 2, num_workers=3))
    next(loader)
    started = multiprocessing.active_children()
    assert len(started) == 3
    del loader
    assert multiprocessing.active_children() == []


def test_a_failed_loop_ends_its_workers() -> None:
    def loop() -> None:
        for _ in DataLoader(Squares(1000), 2, num_workers=2):
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        loop()


@pytest.mark.linux
def test_workers_end_when_their_parent_is_killed(tmp_path) -> None:
    def parent(path: str) -> None:
        for _ in DataLoader(Squares(10**6), 2, num_workers=3):
            with open(path, "w", encoding="utf-8") as file:
                file.write(" ".join(str(p.pid) for p in multiprocessing.active_children()))
            time.sleep(60)

    child = multiprocessing.get_context("fork").Process(target=parent, args=(str(tmp_path / "pids"),))
    child.start()
    deadline = time.time() + 30
    while not (tmp_path / "pids").exists() or len((tmp_path / "pids").read_text().split()) < 3:
        assert time.time() < deadline
        time.sleep(0.02)
    pids = [int(p) for p in (tmp_path / "pids").read_text().split()]
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    while any(_runs(pid) for pid in pids):
        assert time.time() < deadline, "workers outlive their parent"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"  # an orphan without a reaper


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_ways_to_start_processes_give_the_same_batches(method: str, monkeypatch) -> None:
    monkeypatch.setattr("graphwright.data.workers.get_context", lambda: multiprocessing.get_context(method))
    x = np.arange(12.0)
    for ours, theirs in zip(DataLoader(x, 4, num_workers=2), DataLoader(x, 4), strict=True):
        assert_same(ours, theirs)
    with pytest.raises(UsageError, match="cannot be sent"):
        list(DataLoader(x, 4, num_workers=1, collate_fn=lambda rows: rows))
