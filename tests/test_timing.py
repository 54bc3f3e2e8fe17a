"""Times against a simulated clock, on which the true times are known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from graphwright.timing import LEAST, Repeated, alternate, compare_times, measure_time, median_rank


class Machine:
    """A clock, and calls that advance it; `drift(now)` is the slowness of the machine at a time."""

    def __init__(self, drift=lambda now: 1.0, noise: float = 0.0) -> None:
        self.now, self.drift, self.noise, self.rng = 0.0, drift, noise, np.random.default_rng(0)
        self.order: list[str] = []

    def clock(self) -> float:
        return self.now

    def call(self, name: str, seconds: float):
        def run() -> None:
            self.order.append(name)
            self.now += seconds * self.drift(self.now) * (1 + self.noise * self.rng.random())

        return run


def test_a_machine_that_slows_down_does_not_decide_the_verdict() -> None:
    """The machine becomes 3 times slower while it is measured; a tenth less is still a tenth less."""
    m = Machine(lambda now: 1 + 2 * now)
    found = compare_times(m.call("a", 1e-3), m.call("b", 0.9e-3), 0.5, clock=m.clock)
    assert found.ratio == pytest.approx(0.9, rel=0.02)
    assert found.verdict == "faster"
    assert found.low <= 0.9 <= found.high < 1
    assert found.before > 1
    assert found.spread[0][0] < found.before < found.spread[0][1]


def test_equal_calls_have_no_difference() -> None:
    m = Machine(noise=0.5)
    found = compare_times(m.call("a", 1e-3), m.call("b", 1e-3), 0.3, clock=m.clock)
    assert found.verdict == "no difference"
    assert "no difference" in str(found)
    assert found.to_json()["verdict"] == "no difference"


def test_each_side_is_measured_for_the_seconds_in_alternating_rounds() -> None:
    m = Machine()
    times = alternate([m.call("a", 1e-3), m.call("b", 4e-3)], 0.5, clock=m.clock)
    assert [m.order.count(n) * s >= 0.5 for n, s in (("a", 1e-3), ("b", 4e-3))] == [True, True]
    assert {len(t) for t in times} == {25}
    changes = sum(a != b for a, b in zip(m.order, m.order[1:], strict=False))
    assert changes >= 25  # not one half after the other


def test_slow_calls_are_repeated_too() -> None:
    m = Machine()
    assert measure_time(m.call("a", 3.0), 0.5, clock=m.clock) == pytest.approx(3000)
    assert len(m.order) == LEAST + 2


@pytest.mark.parametrize("n", [3, 6, 7, 8, 25, 40, 101])
def test_the_interval_of_the_median_has_its_confidence(n: int) -> None:
    k = median_rank(n)
    if n >= 6:
        assert 2 * binom.cdf(k, n, 0.5) <= 0.05 < 2 * binom.cdf(k + 1, n, 0.5)
    else:
        assert k == 0


def test_the_time_of_a_repeated_call_is_that_of_one() -> None:
    m = Machine()
    assert measure_time(Repeated(m.call("a", 0.8), 4), 0.5, clock=m.clock) == pytest.approx(200)
