"""Programs divided among ranks compute what the whole one does; undo brings it back, with the values of all ranks."""

from __future__ import annotations

from typing import Any

import divided_on_ranks
import numpy as np
import pytest

import graphwright as gw
from graphwright.distributed.tensor_parallel import shares_of
from run_ranks import run_ranks


def check(found: list[dict[str, Any]], ranks: int) -> None:
    for facts in found:
        whole = facts["bundled"]
        assert whole["far"] < 1e-4  # of logits up to 20: 5e-6 of them
        assert whole["planned"] < 1e-4
        assert whole["same"]
        assert len(set(whole["hashes"])) == 1
        assert whole["divided"][0] == whole["divided"][1]
        assert whole["doubled"]
        assert 1 / ranks < whole["share"] < 1 / ranks + 0.25
        for name, one in (*facts["modules"].items(), ("pruned", facts["pruned"])):
            assert one["far"] < 2e-6, name
            assert one["same"], name
            assert all(len(units) == ranks and min(units) > 0 for units in one["axes"].values()), name
        assert facts["refused"]["ranks"].startswith("WrongWorld")
        assert facts["refused"]["nothing"].startswith("UsageError")
        assert "1 edits since" in facts["refused"]["later"]
        assert facts["refused"]["hash"] == "True"
    alone, together = divided_on_ranks.trained(4, ranks, 0.5, divide=False), [facts["trained"] for facts in found]
    assert all(one == together[0] for one in together)  # replicas have equal bits
    np.testing.assert_allclose(together[0]["losses"], alone["losses"], rtol=1e-5)
    for key, values in alone["few"].items():
        np.testing.assert_allclose(together[0]["few"][key], values, atol=1e-6)
    assert len({str(facts["bundled"]["journal"]) for facts in found}) == 1  # the same record on all ranks
    assert len({facts["bundled"]["divided"][0] for facts in found}) == ranks  # of different weights


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.deep)])
def test_a_divided_program_is_the_whole_one(ranks: int) -> None:
    check(run_ranks(ranks, divided_on_ranks.everything), ranks)


def test_shares_are_all_units_and_differ_by_one() -> None:
    for units, ranks in ((6, 3), (7, 3), (5, 5), (512, 3)):
        found = shares_of(units, ranks)
        assert sum(found) == units
        assert max(found) - min(found) <= 1
        assert len(found) == ranks


def test_one_rank_divides_nothing() -> None:
    p = gw.open("bundled").program
    before = p.hash()
    with p.edit("divide") as e:
        division = gw.distributed.tensor_parallel(e, p.select("layers.*"))
    assert (division.axes, p.hash(), gw.distributed.is_divided(p)) == ({}, before, False)
