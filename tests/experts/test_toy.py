"""The toy of benchmarks/routers.py: ghosts keep the inert expert out; the least-surprise loss feeds it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def toy() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        from benchmarks import routers
    return routers


def run(toy: ModuleType, terms: str, steps: int = 500, **options: bool) -> Any:
    """Of seed 0, one of those whose router keeps the inert expert for long."""
    return toy.trained(0, toy.LOSSES[terms], steps=steps, **options)


def test_ghosts_keep_an_inert_expert_out_and_cost_no_accuracy(toy):
    plain, ghosts = run(toy, "count alone"), run(toy, "ghost 0.1")
    assert plain.inert > 0.06
    assert ghosts.inert <= 0.03
    assert ghosts.unrouted <= 0.06
    assert ghosts.accuracy >= plain.accuracy - 0.01


def test_least_surprise_feeds_the_expert_that_does_nothing(toy):
    found = run(toy, "surprise_min 1, beta 0", steps=200)
    assert found.inert > 0.3
    assert found.accuracy < 0.5


def test_the_null_share_leaves_few_tokens_unrouted_at_no_loss_of_accuracy(toy):
    off, on = (run(toy, "count alone", null=null, inert=False) for null in (False, True))
    assert on.unrouted <= 0.02
    assert on.accuracy >= off.accuracy - 0.02
