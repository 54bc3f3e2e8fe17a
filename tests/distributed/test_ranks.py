"""Two and three processes: collectives beside numpy, data-parallel training beside one process, ranks that are killed.

Processes start once for all tests of this file; `training_on_ranks` and `collectives_on_ranks` are what they run.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import astuple
from itertools import chain
from typing import Any

import numpy as np
import pytest
import training_on_ranks as on_ranks
from filelock import FileLock

from run_ranks import ROOT, Ended, end_ranks, free_port, run_ranks

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """How four processes end, of which one is killed; what they found is by the run in which they are ranks.

    All workers of pytest-xdist share them.
    """
    base = tmp_path_factory.getbasetemp()
    file = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ranks.json"
    with FileLock(f"{file}.lock"), tempfile.TemporaryDirectory() as folder:
        if file.is_file():
            return [Ended(*row) for row in json.loads(file.read_text())]
        at, ports = random.randrange(3, 11), [free_port() for _ in range(5)]
        ended = end_ranks(4, on_ranks.on_all, folder, at, ports, timeout=0, seconds=200)
        for process in ended[:3]:
            assert process.code == 0, process.text
        file.write_text(json.dumps([astuple(process) for process in ended]))
        return ended


@pytest.fixture(scope="module")
def runs(found: list[Ended]) -> dict[int, list[Any]]:
    """Number of ranks -> what each rank found; saved trainings of two ranks continue on one, then on three."""
    values = [process.value for process in found[:3]]
    return {1: [values[0]["one"]], 2: [v["two"] for v in values[:2]], 3: [v["three"] for v in values]}


def differs(a: Any, b: Any) -> float:
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_knows_its_number_and_has_its_share_of_the_threads(runs, ranks):
    assert [r["collectives"]["world"] for r in runs[ranks]] == [[i, ranks, i, i == 0, 1] for i in range(ranks)]
    assert [r["collectives"]["object"] for r in runs[ranks]] == [{"from": 1}] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("what", ["values", "gradients", "low"])
def test_collectives_equal_numpy_and_finite_differences(runs, ranks, what):
    assert [r["collectives"][what] for r in runs[ranks]] == [[]] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_calls_that_differ_are_refused_on_all_ranks(runs, ranks):
    found = [r["collectives"]["refused"] for r in runs[ranks]]
    for name in ("shape", "dtype", "op", "root", "run", "tape", "plan", "instead", "called", "backward", "slice",
                 "exchanged"):  # fmt: skip
        assert found[0][name].startswith("CollectivesDiffer"), name
        assert len({facts[name].partition(" got ")[2] for facts in found}) == 1
    assert "rank 0: all_reduce of f64[3]; rank 1: all_" in found[0]["op"]
    assert f"rank {ranks - 1}: all_reduce" in found[0]["instead"]
    assert "rank 0: the start of sums" in found[0]["instead"]
    for one, other in ((0, 1), (1, 0)):
        assert f"rank {one}: send of f64[3] to rank {other}" in found[one]["both"]
        assert "rank 1: recv of f64[1, 3] from rank 0" in found[one]["sent"]
    assert all("not to itself" in facts["self"] for facts in found)
    for name in ("same error in a run", "same error in a plan"):  # after which the ranks go on
        assert all(facts[name].startswith("IndexOutOfRange") for facts in found)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sockets of other systems do not count bytes")
@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_counted_are_bytes_sent(runs, ranks):
    found = [r["collectives"]["bytes"] for r in runs[ranks]]
    assert found[0]
    for name in found[0]:
        cost, group, sockets = (sum(r[name][i] for r in found) for i in range(3))
        assert cost == group, name
        assert cost <= sockets <= cost + 10_000, name  # headers, the barrier, and the comparisons of both


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in on_ranks.NAMES.items() for name in names])
def test_two_ranks_with_half_a_batch_train_as_one_with_a_batch(runs, kind, name):
    one, two = on_ranks.single(name, 20), [r[f"{kind} {name}"] for r in runs[2]]
    assert two[0]["weights"] == two[1]["weights"]
    assert differs(two[0]["weights"], one["weights"]) < 1e-6
    assert two[0]["losses"] == two[1]["losses"]
    assert differs(two[0]["losses"], one["losses"]) < 1e-6


@pytest.mark.parametrize("name", ["plain", "clip"])
def test_buckets_are_sent_beside_the_backward_and_waited_for_after_it(runs, name):
    for rank in runs[2]:
        order = rank[f"plain {name}"]["order"]
        starts, waits = ([i for i, op in enumerate(order) if op == f"all_reduce_{what}"] for what in ("start", "wait"))
        assert len(starts) == len(waits) >= 4
        products = [i for i, op in enumerate(order) if op == "matmul"]
        assert len([i for i in products if i > starts[1]]) >= 2
        assert starts[-3] < products[-1]
        assert min(waits) > max(*products, *starts)
        assert max(waits) < order.index("adamw_step")


def test_divided_states_are_on_their_owners_only(runs):
    whole = runs[2][0]["plain plain"]["moments"]
    owned = [r["sharded plain"]["moments"] for r in runs[2]]
    assert sum(owned) == whole
    assert max(owned) < 0.6 * whole


@pytest.mark.parametrize("kind", on_ranks.KINDS)
def test_edits_between_steps_give_the_training_of_one_process(runs, kind):
    one, two = on_ranks.edited(1, 0), [r[f"{kind} edited"] for r in runs[2]]
    assert two[0]["weights"] == two[1]["weights"]
    assert differs(two[0]["weights"], one["weights"]) < 1e-6
    assert differs(two[0]["losses"], one["losses"]) < 1e-6


@pytest.mark.parametrize("optimizer", on_ranks.OPTIMIZERS)
def test_a_training_continues_on_other_numbers_of_ranks(runs, optimizer):
    parts = [runs[n][0][optimizer]["losses"] for n in (2, 1, 3)]
    p, step = on_ranks.compiled(12, optimizer, clip=0.5)
    losses = on_ranks.trained(step, on_ranks.batches(12, 12))
    assert [len(part) for part in parts] == [6, 3, 3]
    assert differs([*chain(*parts)], losses) < 1e-6
    assert differs(runs[3][2][optimizer]["weights"], on_ranks.weights(p)) < 1e-6


def test_other_programs_and_other_collectives_are_refused_on_all_ranks(runs):
    assert [r["different"] for r in runs[2]] == [
        {"structure": [2, True], "collectives": [2, True], "not saved": True}
    ] * 2  # and nothing changed


def check_killed(ended: Ended, value: Any, left: Ended) -> None:
    assert left.code == -9
    assert value, ended.text
    collective, waiting, missing, seconds = value["error"]
    assert (waiting, missing) == ([0], [1])
    assert "(collective " in collective or collective.startswith(("send of", "recv of"))
    assert seconds < 20
    assert value["again"]
    assert "rank 0 waits in" in value["text"]


def test_a_killed_rank_is_named_and_the_training_resumes_bit_for_bit(found, runs):
    check_killed(found[0], found[0].value["killed"], found[3])
    for rank in runs[2]:
        assert 0 < rank["continued"]["first"] <= 10
        assert rank["continued"]["weights"] == rank["uninterrupted"]["weights"]


def test_a_collective_that_not_all_reach_names_who_waits_where(found):
    early, late = (process.value["not together"] for process in found[:2])
    assert early["waiting"] == {"0": "all_reduce"}
    assert early["missing"] == [1]
    assert early["seconds"] < 5
    assert late["waiting"]["1"] == "barrier"


def test_an_error_of_one_rank_in_a_run_is_no_wrong_exchange(found):
    failed, waiting = (process.value["failed apart"] for process in found[:2])
    assert failed == ["IndexOutOfRange", "RankLost"]
    assert waiting == ["RankLost", "RankLost"]


@pytest.mark.parametrize("name", [pytest.param("command", marks=pytest.mark.deep), "command_divided"])
def test_the_command_trains_on_both_ranks_and_the_first_prints_and_writes(runs, tmp_path, name):
    first, second = (r[name] for r in runs[2])
    assert second["printed"] is None
    assert first["saved"] == [True, True]
    alone = on_ranks.command(str(tmp_path))["printed"]
    assert first["printed"]["steps"] == alone["steps"] == 4
    assert differs(list(first["printed"]["loss"].values()), list(alone["loss"].values())) < 1e-5


@pytest.mark.parametrize(("name", "printed"), [("example", "2 ranks, 20 steps"), ("divided", "8 axes divided among 2")])
def test_examples_print_once(runs, name, printed):
    first, second = (r[name] for r in runs[2])
    assert first.startswith(printed)
    assert second == ""


@pytest.mark.deep
@pytest.mark.parametrize("shard", [False, True])
def test_ranks_killed_at_many_steps(shard):
    for _ in range(10):
        at = random.randrange(2, 12)
        with tempfile.TemporaryDirectory() as folder:
            ended = end_ranks(2, on_ranks.killed, f"{folder}/s", at, shard, timeout=20.0)
            check_killed(ended[0], ended[0].value, ended[1])
            resumed = run_ranks(2, on_ranks.continued, f"{folder}/s", shard)
            assert resumed[0]["weights"] == run_ranks(2, on_ranks.continued, "", shard)[0]["weights"], at


@pytest.mark.deep
def test_torchrun_starts_the_command(tmp_path):
    (tmp_path / "text.txt").write_text("To be or not to be, that is the question. " * 20)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--text", "text.txt", "--steps", "2", "--batch", "4", "--window", "16", "--json", "--out", "trained"]
    command = [*launch, "-m", "graphwright", "train", "bundled", *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["steps"] == 2
    assert (tmp_path / "trained" / "model.safetensors").is_file()
