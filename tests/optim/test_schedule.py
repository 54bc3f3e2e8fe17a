"""Golden rates: a rate is a function of the step, so a resumed run has the same ones."""

from __future__ import annotations

import math

import pytest

from graphwright.errors import UsageError
from graphwright.optim import warmup_cosine


def test_golden_list():
    rates = [warmup_cosine(s, peak=3e-3, warmup=4, total=10, floor=0.1) for s in range(12)]
    golden = [7.5e-4, 1.5e-3, 2.25e-3, 3e-3, 3e-3, 2.819134e-3, 2.325e-3, 1.65e-3, 9.75e-4, 4.808657e-4, 3e-4, 3e-4]
    assert rates == pytest.approx(golden, rel=1e-6)


def test_closed_form_after_warm_up():
    for step in range(100, 701):
        t = (step - 100) / 600
        wanted = 3e-3 * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * t)))
        assert warmup_cosine(step, peak=3e-3, warmup=100, total=700, floor=0.05) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (5, 5), (7, 5), (0, 10)])
def test_corners_stay_between_floor_and_peak(warmup, total):
    rates = [warmup_cosine(s, peak=1.0, warmup=warmup, total=total, floor=0.2) for s in range(total + 3)]
    assert all(0 < r <= 1 for r in rates)
    assert rates[-1] == pytest.approx(0.2) or warmup >= total


@pytest.mark.parametrize("wrong", [{"total": 0}, {"warmup": -1}, {"floor": 1.5}, {"floor": -0.1}])
def test_nonsense_is_refused(wrong):
    with pytest.raises(UsageError):
        warmup_cosine(0, **{"peak": 1.0, "warmup": 2, "total": 10, **wrong})
