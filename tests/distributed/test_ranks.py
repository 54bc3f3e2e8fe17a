"""Two and three processes: collectives beside numpy, data-parallel training beside one process, ranks that are killed.

Processes start once for all tests of this file; `training_on_ranks` and `collectives_on_ranks` are what they run.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from itertools import chain, product
from typing import Any

import numpy as np
import pytest
import training_on_ranks as on_ranks

from run_ranks import Ended, end_ranks, run_ranks


@pytest.fixture(scope="module")
def ended() -> Iterator[tuple[list[Ended], str]]:
    """How two ranks end of which one is killed, and what they saved."""
    with tempfile.TemporaryDirectory() as folder:
        at = random.randrange(3, 11)
        yield end_ranks(2, on_ranks.killed, f"{folder}/saved", at, False, timeout=20.0), f"{folder}/saved"


@pytest.fixture(scope="module")
def runs(ended: Any) -> Iterator[dict[int, list[Any]]]:
    """Number of ranks -> what each rank found; the saved trainings of two ranks continue on one, then on three."""
    with tempfile.TemporaryDirectory() as folder:
        two = run_ranks(2, on_ranks.on_two, folder, ended[1])
        one = {o: on_ranks.resumed(f"{folder}/{o}", 6, 9, o, load=True) for o in on_ranks.OPTIMIZERS}
        yield {1: [one], 2: two, 3: run_ranks(3, on_ranks.on_three, folder, timeout=on_ranks.SECONDS)}


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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sockets of other systems do not count bytes")
@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_counted_are_bytes_sent(runs, ranks):
    found = [r["collectives"]["bytes"] for r in runs[ranks]]
    assert found[0]
    for name in found[0]:
        cost, group, sockets = (sum(r[name][i] for r in found) for i in range(3))
        assert cost == group, name
        assert cost <= sockets <= cost + 5_000, name  # headers and the barrier


@pytest.mark.parametrize(("kind", "name"), [*product(on_ranks.KINDS, on_ranks.OPTIONS)])
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
    assert [r["different"] for r in runs[2]] == [{"structure": [2, True], "collectives": [2, True]}] * 2


def check_ended(found: list[Ended]) -> None:
    assert [e.code for e in found] == [0, -9]
    assert found[0].value is not None, found[0].text
    collective, waiting, missing, seconds = found[0].value["error"]
    assert (waiting, missing) == ([0], [1])
    assert "collective" in collective
    assert seconds < 20
    assert found[0].value["again"]
    assert "rank 0 waits in" in found[0].value["text"]


def test_a_killed_rank_is_named_and_the_training_resumes_bit_for_bit(ended, runs):
    check_ended(ended[0])
    for rank in runs[2]:
        assert 0 < rank["continued"]["first"] <= 10
        assert rank["continued"]["weights"] == rank["uninterrupted"]["weights"]


def test_a_collective_that_not_all_reach_names_who_waits_where(runs):
    *waiting, late = (r["not together"] for r in runs[3])
    for rank in waiting:
        assert rank["waiting"] == {"0": "all_reduce", "1": "all_reduce"}
        assert rank["missing"] == [2]
        assert rank["seconds"] < on_ranks.SECONDS + 1
    assert late["waiting"]["2"] == "barrier"


def test_the_command_trains_on_both_ranks_and_the_first_prints_and_writes(runs, tmp_path, monkeypatch):
    first, second = (r["command"] for r in runs[2])
    assert second["printed"] is None
    assert first["saved"]
    alone = on_ranks.command(str(tmp_path))["printed"]
    assert first["printed"]["steps"] == alone["steps"] == 4
    assert differs(list(first["printed"]["loss"].values()), list(alone["loss"].values())) < 1e-5


def test_the_example_prints_once(runs):
    first, second = (r["example"] for r in runs[2])
    assert first.startswith("2 ranks, 20 steps")
    assert second == ""


@pytest.mark.deep
@pytest.mark.parametrize("shard", [False, True])
def test_ranks_killed_at_many_steps(shard):
    for _ in range(10):
        at = random.randrange(2, 12)
        with tempfile.TemporaryDirectory() as folder:
            check_ended(end_ranks(2, on_ranks.killed, f"{folder}/s", at, shard, timeout=20.0))
            found = run_ranks(2, on_ranks.continued, f"{folder}/s", shard)
            assert found[0]["weights"] == run_ranks(2, on_ranks.continued, "", shard)[0]["weights"], at
