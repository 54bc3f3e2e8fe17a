"""Edits of rank 0 reach all ranks, or none: equal hashes after each call, refusals taken back everywhere."""

from __future__ import annotations

from typing import Any

import edits_on_ranks
import numpy as np

from graphwright import distributed
from run_ranks import run_ranks


def alone(facts: dict[str, Any]) -> None:
    """Compare with the same edits in one process."""
    p, rng = edits_on_ranks.net(), np.random.default_rng(5)
    for n, digest in enumerate(facts["hashes"]):
        for k in range(int(rng.integers(3))):
            edits_on_ranks.random_edit(p, rng, 10 * n + k)
        assert p.hash() == digest


def test_fifty_rounds_of_random_edits_on_three_ranks() -> None:
    found = run_ranks(3, edits_on_ranks.everything)
    rounds = [facts["fifty"] for facts in found]
    assert rounds[0]["hashes"] == rounds[1]["hashes"] == rounds[2]["hashes"]
    assert rounds[0]["counts"] == rounds[1]["counts"] == rounds[2]["counts"]
    assert len(set(rounds[0]["hashes"])) > 20
    assert rounds[0]["y"] == rounds[1]["y"] == rounds[2]["y"]
    alone(rounds[0])
    for facts in (f["refused"] for f in found):
        assert facts["refused"][0] == "EditRefused"
        assert "rank 1: " in facts["refused"][1]
        assert facts["same"]
        assert facts["third"] == found[0]["refused"]["third"]
        assert facts["local"][0] == "UsageError"
        assert "edits on rank 1" in facts["local"][1]


def test_one_rank_has_its_own_edits() -> None:
    p = edits_on_ranks.net()
    assert distributed.sync_edits(p) == ()
    with p.edit("double") as e:
        e.set_weight("w1", lambda w: w * 2)
    assert [entry.why for entry in distributed.sync_edits(p)] == ["double"]
    assert distributed.sync_edits(p) == ()
