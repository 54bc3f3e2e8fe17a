"""Edits of rank 0 reach all ranks, or none: equal hashes after each call, refusals taken back everywhere."""

from __future__ import annotations

import edits_on_ranks
import numpy as np

from graphwright import distributed
from run_ranks import run_ranks


def test_rounds_of_random_edits_on_three_ranks() -> None:
    found = run_ranks(3, edits_on_ranks.everything)
    rounds = [facts["random"] for facts in found]
    assert rounds[0] == rounds[1] == rounds[2]  # weights bit for bit
    assert len(set(rounds[0]["structures"])) > len(rounds[0]["losses"]) // 3
    alone = edits_on_ranks.random_edits()  # the same edits and batches in one process
    assert alone["structures"] == rounds[0]["structures"]
    np.testing.assert_allclose(rounds[0]["losses"], alone["losses"], rtol=1e-5)
    assert found[0]["of a file"]["count"] == 2
    assert [f["of a file"] for f in found] == [found[0]["of a file"]] * 3
    for facts in (f["refused"] for f in found):
        assert facts["refused"].startswith("EditRefused")
        assert "rank 1: " in facts["refused"]
        assert facts["same"]
        assert facts["step"] == 0.0  # the training continues
        assert facts["third"] == found[0]["refused"]["third"]
        for name in ("local", "first"):
            assert facts[name].startswith("UsageError")
            assert "edits on rank 1" in facts[name]


def test_one_rank_has_its_own_edits() -> None:
    p = edits_on_ranks.net()
    assert distributed.sync_edits(p) == ()
    with p.edit("double") as e:
        e.set_weight("w1", lambda w: w * 2)
    assert [entry.why for entry in distributed.sync_edits(p)] == ["double"]
    assert distributed.sync_edits(p) == ()
