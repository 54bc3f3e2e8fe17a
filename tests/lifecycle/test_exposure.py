"""The exposure gap of models whose predictions are known, computed by a formula."""

from __future__ import annotations

import json
from math import exp, log

import numpy as np
import pytest
from small import bigram, follows, transformer

from graphwright import lifecycle as lf
from graphwright.data import grids
from graphwright.errors import UsageError
from graphwright.metrics import nll
from graphwright.models import PromptError

CHAIN = {12: 1, 1: 2, 2: 3, 3: 13}


def test_a_perfect_model_has_no_gap() -> None:
    found = lf.exposure_gap(follows(CHAIN), [([5, 12], [1, 2, 3, 13])] * 3)
    assert (found.exact, found.gap, found.tasks) == (1.0, 0.0, 3)
    assert found.first_error is None
    assert found.forced == pytest.approx(0, abs=1e-5)


def test_the_gap_of_a_model_that_copies_its_prefix_is_that_of_the_formula() -> None:
    """It repeats the last token with logit s: right after the target's prefix 1 1 1, but its own begins with 12."""
    s = 5.0
    model = bigram(s * np.eye(15))
    right, wrong = log(exp(s) + 14) - s, log(exp(s) + 14)
    found = lf.exposure_gap(model, [([12], [1, 1, 1, 13])])
    # forced: 1 after 12 wrong, 1 after 1 right twice, 13 after 1 wrong; own: all after 12, each wrong
    assert found.forced == pytest.approx((2 * wrong + 2 * right) / 4, rel=1e-5)
    assert found.own == pytest.approx(wrong, rel=1e-5)
    assert found.gap == pytest.approx(s / 2, rel=1e-5)
    assert (found.exact, found.first_errors, found.first_error) == (0.0, [0], 0.0)


@pytest.mark.parametrize(
    ("answer", "first", "own_targets"),
    [
        ([1, 2, 3, 13], None, 4),
        ([1, 2, 4, 13], 2, 4),  # own: 1 2 3 13
        ([1, 2, 3], 3, 3),  # own is longer by the end
        ([1, 2, 3, 13, 13], 4, 5),  # own is shorter, one target follows its end
        ([1, 2, 3, 13, 5, 6, 7], 4, 5),
    ],
)
def test_first_errors_and_targets_of_outputs_of_other_lengths(
    answer: list[int], first: int | None, own_targets: int
) -> None:
    model, x, own = follows(CHAIN), [5, 12], [1, 2, 3, 13]
    found = lf.exposure_gap(model, [(x, answer)])
    assert found.first_errors == ([] if first is None else [first])
    assert found.exact == float(first is None)
    nats = [nll(model.logits([*x, *own[:t]])[-1:], np.array([answer[t]]))[0] for t in range(own_targets)]
    assert found.own == pytest.approx(np.mean(nats), rel=1e-5)


def test_the_gap_is_the_mean_over_tasks_whatever_runs_together() -> None:
    model, tasks = transformer(seed=3), grids(["crop", "count"], side=3, pairs=1)
    found = [lf.exposure_gap(model, tasks, count=7, batch=size) for size in (1, 3, 16)]
    alone = [lf.exposure_gap(model, [tasks[i]]) for i in range(7)]
    for one in found:
        assert one.tasks == 7
        for name in ("forced", "own", "gap", "exact"):
            assert getattr(one, name) == pytest.approx(np.mean([getattr(a, name) for a in alone]), rel=1e-4, abs=1e-6)
        assert one.first_errors == [e for a in alone for e in a.first_errors]


def test_the_report_is_text_and_json() -> None:
    found = lf.exposure_gap(follows(CHAIN), [([12], [1, 2, 13]), ([12], [1, 2, 3, 13])])
    facts = json.loads(json.dumps(found.to_json()))
    assert facts["gap"] == found.gap
    assert (facts["tasks"], facts["exact"], facts["first_error"]) == (2, 0.5, 2.0)
    assert "50.0% of 2 tasks, first error at token 2.0" in str(found)
    assert f"{found.gap:+.4f} nats" in str(found)


def test_other_tasks_are_refused() -> None:
    for tasks, error in (([], UsageError), ([([99], [1])], PromptError), ([([1], [99])], PromptError)):
        with pytest.raises(error):
            lf.exposure_gap(transformer(), tasks)
    with pytest.raises(UsageError):
        lf.exposure_gap(transformer(), [([1], [2])], count=0)
