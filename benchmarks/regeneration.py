"""Regeneration of experts after a shift of the data: steps until the accuracy is back, for each way to time it.

The planted problem: eight clusters in 32 dimensions, each labelled by a map of its own; 900 steps, then all clusters
and maps are replaced, 700 steps. 24 experts with a threshold router (k0 = 2), lazy Adam. Arms of one seed share
weights and stream. Recovered: the mean accuracy of 20 steps is 0.9 of that of the last 200 before the shift.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import wilcoxon

from benchmarks.harness import Figure
from graphwright import experts as ex

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "experts"))
from planted import Run

PARTS = ("plain", "null_share", "calm")
SEEDS, BEFORE, AFTER, CALM = 20, 900, 700, 2000
FIXED = [(every, count) for every in (10, 30, 100, 300) for count in (1, 4)]
PI = "timed by alarms (PI)"


@dataclass(frozen=True)
class Clock(ex.Regeneration):
    """A controller that replaces dead experts by a clock: step -> the most of a layer."""

    schedule: Mapping[int, int] = field(default_factory=dict)

    def due(self, step: int, rho: float) -> int | None:
        return self.schedule.get(step)


@dataclass(slots=True)
class Outcome:
    """Steps to recover, mean accuracy after the shift, accuracy before it, renewals by step, and steps of alarms."""

    steps: int
    accuracy: float
    base: float
    renewals: dict[int, int]
    alarms: list[int]


def arm(seed: int, care: ex.Regeneration | None, **options: Any) -> Outcome:
    """Run one arm on one seed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Run(seed, care, **options)
        for step in range(BEFORE + AFTER):
            if step == BEFORE:
                run.stream.shift()
            run.step()
    base, after = float(np.mean(run.accuracy[BEFORE - 200 : BEFORE])), np.array(run.accuracy[BEFORE:])
    hit = np.flatnonzero(np.convolve(after, np.ones(20) / 20, "valid") >= 0.9 * base)
    renewals: dict[int, int] = {}
    for step, change in run.changes:
        if change.event == "expert_reborn":
            renewals[step] = renewals.get(step, 0) + 1
    alarms = [step for step, change in run.changes if change.event == "alarm"]
    return Outcome(int(hit[0]) + 20 if len(hit) else AFTER, float(after.mean()), base, renewals, alarms)


def scattered(seed: int, outcome: Outcome) -> dict[int, int]:
    """As many renewals as in an outcome, each decision at a random step from 100 on."""
    rng = np.random.default_rng([seed, 1])
    found: dict[int, int] = {}
    for count in outcome.renewals.values():
        step = int(rng.integers(100, BEFORE + AFTER))
        found[step] = found.get(step, 0) + count
    return found


def clock(schedule: Mapping[int, int], **options: Any) -> Clock:
    return Clock(upkeep=0, growth=1.0, schedule=dict(schedule), **options)


def plain() -> Figure:
    """All arms, plain threshold router."""
    arms: dict[str, list[Outcome]] = {}
    for seed in range(SEEDS):
        own = arm(seed, ex.Regeneration(growth=1.0))
        arms.setdefault("no regeneration", []).append(arm(seed, None))
        arms.setdefault("random times", []).append(arm(seed, clock(scattered(seed, own))))
        arms.setdefault(PI, []).append(own)
        arms.setdefault("PI, random prototypes", []).append(arm(seed, ex.Regeneration(growth=1.0, near=1.0)))
        known = {step: 4 for step in range(BEFORE + 10, BEFORE + 101, 10)}
        arms.setdefault("known: the 100 steps after the shift", []).append(arm(seed, clock(known)))
        for every, count in FIXED:
            times = dict.fromkeys(range(every, BEFORE + AFTER + 1, every), count)
            arms.setdefault(f"every {every}, {count}", []).append(arm(seed, clock(times)))
    return figure("regeneration after a shift: steps to recover", arms)


def null_share() -> Figure:
    """None, random times and alarms, with null share and ghosts."""
    arms: dict[str, list[Outcome]] = {}
    options = {"null": True, "ghost": True}
    care = {"pruning": 0.2, "window": 100, "growth": 1.0}
    for seed in range(SEEDS):
        own = arm(seed, ex.Regeneration(**care), **options)
        arms.setdefault("no regeneration", []).append(arm(seed, None, **options))
        random = clock(scattered(seed, own), pruning=0.2, window=100)
        arms.setdefault("random times", []).append(arm(seed, random, **options))
        arms.setdefault(PI, []).append(own)
    return figure("regeneration after a shift, with null share and ghosts: steps to recover", arms)


def figure(title: str, arms: Mapping[str, list[Outcome]]) -> Figure:
    """Rows of medians and ranges, and one-sided Wilcoxon tests of the arm timed by alarms against the others."""
    made = Figure(title, f"{SEEDS} paired seeds, shift at step {BEFORE}, at most {AFTER} steps after it")
    for name, outcomes in arms.items():
        steps = [o.steps for o in outcomes]
        accuracy = np.mean([o.accuracy for o in outcomes])
        count = np.mean([sum(o.renewals.values()) for o in outcomes])
        note = f"{min(steps)} to {max(steps)}; accuracy after the shift {accuracy:.3f}; {count:.1f} renewals"
        made.add(name, float(np.median(steps)), "steps", note, seeds=[float(s) for s in steps])
    own = np.array([o.steps for o in arms[PI]])
    for name, outcomes in arms.items():
        other = np.array([o.steps for o in outcomes])
        if name != PI and (own != other).any():
            p = wilcoxon(own, other, alternative="less").pvalue
            ahead, tied = int((own < other).sum()), int((own == other).sum())
            made.notes.append(f"PI against {name}: ahead in {ahead}, tied in {tied} of {len(own)}; p = {p:.2g}")
    delays = [min((a for a in o.alarms if a > BEFORE), default=AFTER) - BEFORE for o in arms[PI]]
    early = sum(a <= BEFORE for o in arms[PI] for a in o.alarms)
    made.notes.append(
        f"first alarm {min(delays)} to {max(delays)} steps after the shift; {early} false alarms before it"
    )
    return made


def calm() -> Figure:
    """Without a shift: renewals and accuracy beside those without a controller."""
    made = Figure("regeneration without a shift", f"{CALM} steps, 3 seeds")
    rows: dict[str, list[float]] = {"accuracy with": [], "accuracy without": [], "renewals": [], "alarms": []}
    for seed in range(3):
        for name, care in (("with", ex.Regeneration(growth=1.0)), ("without", None)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run = Run(seed, care)
                for _ in range(CALM):
                    run.step()
            rows[f"accuracy {name}"].append(float(np.mean(run.accuracy[200:])))
            if care is not None:
                rows["renewals"].append(sum(c.event == "expert_reborn" for _, c in run.changes))
                rows["alarms"].append(sum(c.event == "alarm" for _, c in run.changes))
    for name, values in rows.items():
        made.add(name, float(np.mean(values)), "", seeds=values)
    return made
