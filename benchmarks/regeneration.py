"""Regeneration of experts after a shift of the data: steps until the accuracy is back, for each way to time it.

The planted problem: eight clusters in 32 dimensions, each labelled by a map of its own; 900 steps, then all clusters
and maps are replaced, 700 steps. 24 experts behind a threshold router (k0 = 2), lazy Adam. Arms of one seed share
weights and stream. Recovered: the mean accuracy of 20 steps is 0.9 of that of the last 200 before the shift.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import wilcoxon

from benchmarks.harness import Figure
from graphwright import experts as ex

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "experts"))
from planted import Run  # noqa: E402

PARTS = ("plain", "null_share", "calm")
SEEDS, BEFORE, AFTER, CALM = 20, 900, 700, 2000


@dataclass
class Clock(ex.Regeneration):  # pyright: ignore[reportGeneralTypeIssues]
    """Renewals at given steps instead of after alarms: step -> number of experts, dead ones first."""


class Timed(ex.Regeneration):
    """A controller whose latch is replaced by a schedule: step -> number of renewals."""

    schedule: dict[int, int]


def arm(seed: int, name: str, options: dict[str, Any], schedule: dict[int, int] | None = None) -> dict[str, Any]:
    """Run one arm on one seed; return its measurements."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        care = None if name == "none" else ex.Regeneration(upkeep=0 if schedule is not None else 1000, **options.get("care", {}))
        run = Run(seed, care, **options.get("run", {}))
        for step in range(1, BEFORE + AFTER + 1):
            if step == BEFORE + 1:
                base = float(np.mean(run.accuracy[-200:]))
                run.stream.shift()
            run.step()
            if schedule is not None and step in schedule and care is not None:
                run.changes += [(step, c) for c in care.renew(run.program, schedule[step])]
    after = np.array(run.accuracy[BEFORE:])
    means = np.convolve(after, np.ones(20) / 20, "valid")
    hit = np.flatnonzero(means >= 0.9 * base)
    ticks: dict[int, int] = {}
    for step, change in run.changes:
        if change.event == "expert_reborn":
            ticks[step] = ticks.get(step, 0) + 1
    alarms = [step for step, c in run.changes if c.event == "alarm"]
    return {"steps": int(hit[0]) + 20 if len(hit) else AFTER, "accuracy": float(after.mean()), "ticks": ticks,
            "alarms": alarms, "base": base}  # fmt: skip
