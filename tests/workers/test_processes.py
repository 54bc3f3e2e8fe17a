"""Pools of processes: results in order, lost workers and late tasks, errors, and no process that outlives its pool."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pool_tasks as tasks
import pytest

import graphwright as gw
from graphwright import workers
from graphwright.errors import UsageError
from graphwright.workers import Failed, Processes, WorkerError


def attempts(folder: Path) -> dict[int, int]:
    items = [int(path.name.partition("-")[0]) for path in folder.iterdir()]
    return {x: items.count(x) for x in sorted(set(items))}


def alive(pid: int) -> bool:
    """True if the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


def test_results_are_in_the_order_of_items(pool):
    assert pool.map(tasks.scaled, range(40), {"factor": 3}) == [3 * x for x in range(40)]
    assert pool.map(tasks.scaled, range(3), {"factor": 5}) == [0, 5, 10]  # another common argument
    assert pool.map(tasks.scaled, [], {"factor": 5}) == []


def test_workers_persist_and_share_the_cores(pool):
    first = set(pool.map(tasks.process, range(20)))
    assert len(first) == 2
    assert set(pool.map(tasks.process, range(20))) == first == set(pool.pids)
    assert set(pool.map(tasks.threads, range(4))) == {str(pool.threads)}
    assert Processes(1000).threads == 1
    assert Processes(1).threads >= Processes(2).threads


def test_tasks_of_killed_workers_are_given_out_again(pool, tmp_path):
    """Ten of forty tasks kill their worker."""
    ended = []
    found = pool.map(tasks.killed_once, range(40), str(tmp_path), each=lambda i, x: ended.append((i, x)))
    assert found == list(range(40))
    assert sorted(ended) == [(x, x) for x in range(40)]
    assert attempts(tmp_path) == {x: 2 if x % 4 == 0 else 1 for x in range(40)}


@pytest.mark.parametrize("retries", [0, 1])
def test_a_task_that_always_ends_its_worker_fails_with_the_reason(pool, tmp_path, retries):
    found = pool.map(tasks.killed, range(8), str(tmp_path), retries=retries)
    assert [x for x in found if not isinstance(x, Failed)] == [0, 1, 2, 4, 6, 7]
    assert found[3] == Failed("the worker was killed by SIGKILL")
    assert found[5] == Failed("the worker ended with exit code 7")
    assert attempts(tmp_path) == {x: retries + 1 if x in (3, 5) else 1 for x in range(8)}
    assert len(pool.map(tasks.process, range(4))) == 4  # new workers replaced them


def test_a_task_that_hangs_is_given_out_again_once_and_then_fails(tmp_path):
    with Processes(2, timeout=0.5) as own:
        began = time.monotonic()
        found = own.map(tasks.stuck, range(4), str(tmp_path))
        assert time.monotonic() - began < 15
    assert found == [0, 1, Failed("no result within 0.5 s"), 3]
    assert attempts(tmp_path) == {0: 1, 1: 1, 2: 2, 3: 1}


def test_workers_killed_between_calls_are_replaced(pool, tmp_path):
    pool.map(tasks.counted, range(4), str(tmp_path))
    before = pool.pids
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert gone(before)
    common = str(tmp_path / "more")
    Path(common).mkdir()
    assert pool.map(tasks.counted, range(6), common, retries=1) == [1] * 6
    assert not set(before) & set(pool.pids)


def test_the_first_error_by_index_is_raised_with_its_traceback(pool):
    for _ in range(3):
        with pytest.raises(KeyError, match="no 3") as caught:
            pool.map(tasks.refused, range(8))
        assert "pool_tasks.py" in caught.value.__notes__[-1]
    assert pool.map(tasks.refused, [1, 2]) == [1, 2]  # the pool continues


def test_arrays_and_tensors_can_be_sent_to_all_workers(pool):
    arrays: list[Any] = [gw.zeros(3) + 1.5, gw.tensor([[1.5], [2.5]]).to("bfloat16"), gw.arange(6).reshape(2, 3).T]
    common = {"tensors": arrays, "arrays": [t.data for t in arrays]}
    found = pool.map(tasks.entries, [t.data for t in arrays] * 4, common)
    expected = [[t.numpy().tolist() for t in arrays] * 2, *(t.numpy().tolist() for t in arrays)]
    assert found == [(expected[0], expected[1 + i % 3]) for i in range(12)]
    (back,) = pool.map(tasks.sent_back, [arrays[1].data])
    assert back.spec == arrays[1].data.spec
    assert back.tobytes() == arrays[1].data.tobytes()
    back.writable()


def test_errors_name_functions_and_values_that_cannot_be_sent(pool):
    def local(common, x):
        return x

    with pytest.raises(UsageError, match="cannot be sent to a worker process") as caught:
        pool.map(local, [1])
    assert "local" in str(caught.value.got)
    assert "top level of a module" in str(caught.value.fix)
    with pytest.raises(UsageError, match=r"common argument of scaled cannot be sent"):
        pool.map(tasks.scaled, [1], lambda: 0)
    with pytest.raises(UsageError, match="cannot load the common argument") as caught:
        pool.map(tasks.scaled, [1], tasks.Unloadable())
    assert "no such module" in str(caught.value.got)
    with pytest.raises(UsageError, match="result of a task cannot be sent"):
        pool.map(tasks.not_sent_back, [1])


@pytest.mark.linux
def test_closing_ends_all_processes(tmp_path):
    own = Processes(2)
    own.map(tasks.scaled, range(4), {"factor": 1})
    pids = own.pids
    assert all(map(alive, pids))
    own.close()
    assert not any(map(alive, pids))  # waited for: no zombies
    assert own.map(tasks.scaled, [2], {"factor": 2}) == [4]
    pids = own.pids
    del own
    assert gone(pids)


SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
sys.path.insert(0, {here!r})
import pool_tasks
from graphwright import workers
if __name__ == "__main__":
    workers.Processes(2).map(pool_tasks.waits, range(2), sys.argv[1])
"""


@pytest.mark.linux
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_parent(tmp_path, how):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(here=str(Path(__file__).parent)))
    folder = tmp_path / "pids"
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, str(script), str(folder)], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        end = time.monotonic() + 60
        while len(list(folder.iterdir())) < 2 and time.monotonic() < end:
            time.sleep(0.02)
        pids = [int(path.name) for path in folder.iterdir()]
        assert len(pids) == 2
        os.killpg(parent.pid, how) if how == signal.SIGINT else parent.send_signal(how)
        error = parent.communicate(timeout=30)[1]
    assert "pool_tasks" not in error.replace("pool_tasks.waits", "")  # no traceback of a worker
    assert gone(pids)


def test_the_error_of_a_script_without_a_guard_has_a_fix(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(here=str(Path(__file__).parent)).replace('if __name__ == "__main__":', "if True:"))
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 1
    assert "worker processes end before they are ready" in done.stderr
    assert '__name__ == "__main__"' in done.stderr


def test_arguments_are_checked():
    for count in (0, -1, 1.5, True):
        with pytest.raises(UsageError, match="number >= 1"):
            Processes(count)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="number > 0"):
        Processes(1, timeout=0)
    with pytest.raises(UsageError, match="number >= 1"):
        Processes(1, threads=0)
    for given in ("many", "ray:", None, 1.0, True):
        with pytest.raises(UsageError, match="names no workers"):
            workers.pool_of(given)  # pyright: ignore[reportArgumentType]
    assert workers.pool_of("3").size == workers.pool_of(3).size == 3
    own = Processes(2)
    assert workers.pool_of(own) is own


def test_a_process_that_cannot_start_is_an_error(monkeypatch):
    monkeypatch.setattr("graphwright.workers.processes._work", sys.exit)  # ends before it is ready
    with Processes(1) as own, pytest.raises(WorkerError, match="before they are ready"):
        own.map(tasks.scaled, [1], {"factor": 1})
