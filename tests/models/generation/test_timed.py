"""Times of two programs are of equal work, whatever the machine does meanwhile."""

from __future__ import annotations

from itertools import accumulate, count

import pytest

import graphwright as gw
from graphwright.models.generation import timed
from graphwright.surgery import measure


def test_both_programs_decode_equally_many_tokens(byte_model: gw.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of a burst costs more, so that bursts of different lengths have different times per token."""
    clock = accumulate(1e-6 * 2**k for k in count())  # a machine that gets slower from call to call
    monkeypatch.setattr(timed, "perf_counter", lambda: next(clock))
    compared = []
    monkeypatch.setattr(measure, "compare_times", lambda *calls: compared.extend(calls))
    measure.compare_speed(byte_model.program, byte_model.program, {})
    first, second = compared
    assert first.times == second.times
    assert first.times == 1
