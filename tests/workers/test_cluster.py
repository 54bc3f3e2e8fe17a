"""Pools on Ray: what is promised of every pool, on a local cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pool_tasks as tasks
import pytest
from test_processes import attempts

from graphwright import workers
from graphwright.errors import MissingExtra, UsageError
from graphwright.workers import Failed, RayPool, WorkerError


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayPool]:
    with RayPool(timeout=60) as made:
        yield made


@pytest.mark.ray
def test_results_are_in_the_order_of_items(cluster):
    assert cluster.size >= 1
    assert cluster.map(tasks.scaled, range(20), {"factor": 3}) == [3 * x for x in range(20)]
    assert cluster.map(tasks.scaled, range(3), {"factor": 5}) == [0, 5, 10]
    assert cluster.map(tasks.scaled, [], {"factor": 5}) == []
    assert set(cluster.map(tasks.threads, range(3))) == {"1"}


@pytest.mark.ray
def test_tasks_of_killed_workers_are_given_out_again_once(cluster, tmp_path):
    ended = []
    found = cluster.map(tasks.killed_once, range(12), str(tmp_path), each=lambda i, x: ended.append((i, x)))
    assert found == list(range(12))
    assert sorted(ended) == [(x, x) for x in range(12)]
    assert attempts(tmp_path) == {x: 2 if x % 4 == 0 else 1 for x in range(12)}
    folder = tmp_path / "killed"
    folder.mkdir()
    found = cluster.map(tasks.killed, range(8), str(folder))
    assert [x for x in found if not isinstance(x, Failed)] == [0, 1, 2, 4, 6, 7]
    assert found[3] == found[5] == Failed("the worker ended")
    assert attempts(folder) == {x: 2 if x in (3, 5) else 1 for x in range(8)}


@pytest.mark.ray
def test_a_task_that_hangs_is_given_out_again_once_and_then_fails(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "timeout", 2.0)
    began = time.monotonic()
    found = cluster.map(tasks.stuck, range(4), str(tmp_path))
    assert time.monotonic() - began < 60
    assert found == [0, 1, Failed("the worker ended, or the task took more than 2 s"), 3]
    assert attempts(tmp_path) == {0: 1, 1: 1, 2: 2, 3: 1}


@pytest.mark.ray
def test_errors_are_raised_here(cluster):
    with pytest.raises(KeyError, match="no 3") as caught:
        cluster.map(tasks.refused, range(8))
    assert "pool_tasks.py" in caught.value.__notes__[-1]
    with pytest.raises(UsageError, match="cannot be sent to a worker process"):
        cluster.map(lambda common, x: x, [1])
    with pytest.raises(UsageError, match="cannot load the common argument"):
        cluster.map(tasks.scaled, [1], tasks.Unloadable())
    assert cluster.map(tasks.refused, [1, 2]) == [1, 2]


@pytest.mark.ray
def test_a_local_cluster_ends_with_its_pool_and_a_cluster_of_others_stays(cluster):
    ray: Any = import_module("ray")
    cluster.close()
    own = RayPool()
    pids = own.map(tasks.process, range(3))
    assert ray.is_initialized()
    with RayPool() as second:  # of the cluster to which this process is connected
        second.map(tasks.process, range(2))
    assert ray.is_initialized()
    own.close()
    assert not ray.is_initialized()
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


OTHER_RUN = """
import ray
from graphwright.workers import RayPool
with RayPool() as pool:
    assert pool.size
    print(ray.get_runtime_context().gcs_address)
"""


@pytest.mark.ray
def test_two_runs_at_once_have_a_local_cluster_each(cluster):
    ray: Any = import_module("ray")
    assert cluster.size
    found = subprocess.run([sys.executable, "-c", OTHER_RUN], capture_output=True, text=True, timeout=100, check=True)
    own, other = ray.get_runtime_context().gcs_address, found.stdout.strip()
    assert ":" in other
    assert other != own


@pytest.mark.ray
def test_an_unreachable_cluster_is_an_error(cluster, monkeypatch):
    cluster.close()
    began = time.monotonic()
    with pytest.raises(WorkerError, match="cannot connect to a Ray cluster") as caught:
        _ = RayPool("ray://127.0.0.1:1").size
    assert "refused" in str(caught.value.got)
    assert "ray start" in str(caught.value.fix)
    monkeypatch.setitem(os.environ, "RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(WorkerError, match="cannot connect to a Ray cluster"):
        _ = RayPool().size
    assert time.monotonic() - began < 50


def test_a_missing_ray_is_a_missing_extra(monkeypatch):
    monkeypatch.setattr("graphwright.workers.cluster.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="extra 'ray'"):
        workers.pool_of("ray")
    with pytest.raises(MissingExtra, match="extra 'ray'"):
        workers.pool_of("ray://head:10001")


def test_the_timeout_is_checked(monkeypatch):
    monkeypatch.setattr("graphwright.workers.cluster.find_spec", lambda name: name)
    with pytest.raises(UsageError, match="number > 0"):
        RayPool(timeout=-1)
