"""Times of calls, measured in alternating rounds, so that a change of the machine's speed affects all calls equally."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, comb
from statistics import median
from time import perf_counter
from typing import ClassVar, Literal

from graphwright.report import Report

SECONDS = 0.5
"""Seconds that each call is measured for, where the caller gives none."""
LEAST, ROUNDS, WARM_UP = 7, 25, 2
"""Smallest and intended number of rounds; calls before the first round."""
Call = Callable[[], object]
Verdict = Literal["faster", "slower", "no difference"]


@dataclass(frozen=True, slots=True)
class Repeated:
    """A call that does the same work `times` times, such as a token each; its time is that of one."""

    call: Call
    times: int

    def __call__(self) -> object:
        """Make the call."""
        return self.call()


@dataclass(frozen=True, slots=True, repr=False)
class TimeComparison(Report):
    """Times of two calls, measured in alternating rounds.

    Attributes:
        before, after: median time of a call over the rounds, in ms.
        spread: quartiles [[low, high] before, [low, high] after] over the rounds, in ms.
        ratio: median over the rounds of time after / time before.
        low, high: distribution-free interval of that median, with a confidence of 95 % or more.
        rounds: number of rounds.
    """

    before: float
    after: float
    spread: tuple[tuple[float, float], tuple[float, float]]
    ratio: float
    low: float
    high: float
    rounds: int
    FIGURES: ClassVar = ("verdict",)

    @property
    def verdict(self) -> Verdict:
        """`faster` or `slower` if the interval is entirely below or above 1, else `no difference`."""
        return "faster" if self.high < 1 else "slower" if self.low > 1 else "no difference"

    def __str__(self) -> str:
        low, high = (f"{100 * (r - 1):+.1f}" for r in (self.low, self.high))
        moved = f"{100 * (self.ratio - 1):+.1f} %" if self.verdict != "no difference" else self.verdict
        return f"{self.before:.4g} => {self.after:.4g}  ({moved}; 95 % interval {low} to {high} %)"


def alternate(
    calls: Sequence[Call], seconds: float | None = None, *, clock: Callable[[], float] = perf_counter
) -> list[list[float]]:
    """Time calls in rounds; each round times every call, in the opposite order of the round before.

    Args:
        calls: functions without arguments, or `Repeated`; each runs two times first.
        seconds: time that each call is measured for; by default `SECONDS`.
        clock: returns seconds.
    Returns: per call a list of its mean ms in each round; all lists have equal lengths, 7 or more.
    """
    seconds = SECONDS if seconds is None else seconds
    counts, spent, times = [], [0.0] * len(calls), [list[float]() for _ in calls]
    for call in calls:
        once = 0.0
        for _ in range(WARM_UP):
            started = clock()
            call()
            once = clock() - started  # of the last call: the first one may compile
        counts.append(max(ceil(seconds / ROUNDS / max(once, 1e-9)), 1))
    order = list(range(len(calls)))
    while min(spent) < seconds or len(times[0]) < LEAST:
        for i in order:
            started = clock()
            for _ in range(counts[i]):
                calls[i]()
            taken = clock() - started
            spent[i] += taken
            work = calls[i]
            times[i].append(1e3 * taken / counts[i] / (work.times if isinstance(work, Repeated) else 1))
        order.reverse()
    return times


def measure_time(call: Call, seconds: float | None = None, *, clock: Callable[[], float] = perf_counter) -> float:
    """Return the median ms of a call over rounds that take `seconds` together; see `alternate`."""
    return median(alternate([call], seconds, clock=clock)[0])


def compare_times(
    before: Call, after: Call, seconds: float | None = None, *, clock: Callable[[], float] = perf_counter
) -> TimeComparison:
    """Compare the times of two calls, measured in alternating rounds of `seconds` a side; see `alternate`."""
    old, new = alternate([before, after], seconds, clock=clock)
    ratios = sorted(b / a for a, b in zip(old, new, strict=True) if a)
    at, spread = median_rank(len(ratios)), (_quartiles(sorted(old)), _quartiles(sorted(new)))
    return TimeComparison(median(old), median(new), spread, median(ratios), ratios[at], ratios[-1 - at], len(old))


def median_rank(n: int) -> int:
    """Return the largest rank k, from 0, so that the k-th smallest and largest of n samples enclose the median.

    P(median outside) = 2·P(Binomial(n, 1/2) <= k) <= 5 %; k is 0 where n is too small for that.
    Source: Conover 1999, "Practical Nonparametric Statistics", section 3.2.
    """
    k, tail = 0, (1 + n) / 2**n
    while k + 1 < n / 2 and tail <= 0.025:
        k += 1
        tail += comb(n, k + 1) / 2**n
    return k


def _quartiles(times: Sequence[float]) -> tuple[float, float]:
    return times[len(times) // 4], times[-1 - len(times) // 4]
