"""Regeneration of experts after a shift of the data: steps until the accuracy is back, for each way to time it.

The planted problem (`graphwright.testing.shift`): eight clusters in 32 dimensions, each labelled by a map of its own;
900 steps, then all clusters and maps are replaced, 700 steps. 24 experts with a threshold router (k0 = 2), lazy Adam.
Arms of one seed share weights and stream. Recovered: the mean accuracy of 20 steps is 0.9 of that of the last 200
before the shift. `SEEDS=5 python -m benchmarks regeneration:shift` measures fewer seeds; every run is stored in
`build/regeneration/` at once, and a part that was interrupted continues there.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata

from benchmarks.harness import COMMIT, Figure
from graphwright import experts as ex
from graphwright.testing.shift import Run

PARTS = ("shift", "arms", "null_share", "calm")
SEEDS = {"shift": 30, "arms": 20, "null_share": 20, "calm": 3}
BEFORE, AFTER, CALM, BATCH = 900, 700, 2000, 128
FIXED = [(every, count) for every in (10, 30, 100, 300) for count in (1, 4)]
NONE, RANDOM, PI = "no regeneration", "random times", "timed by alarms (PI)"
KEPT = Path(__file__).parents[1] / "build" / "regeneration"


@dataclass(frozen=True)
class Clock(ex.Regeneration):
    """A controller that replaces dead experts by a clock: step -> the most of a layer."""

    schedule: Mapping[int, int] = field(default_factory=dict)

    def due(self, step: int, rho: float) -> int | None:
        return self.schedule.get(step)


@dataclass(slots=True)
class Outcome:
    """One run.

    Attributes:
        steps: to recover, `AFTER` if it did not.
        accuracy, before: mean accuracy after the shift, and of the last 200 steps before it.
        old: accuracy on the old clusters at the end.
        renewals: experts replaced by step, and `alarms` the steps of alarms.
    """

    steps: int
    accuracy: float
    before: float
    old: float
    renewals: dict[int, int]
    alarms: list[int]


Arm = Callable[[int, dict[str, Outcome]], tuple[ex.Regeneration | None, dict[str, Any]]]
"""(seed, outcomes of this seed so far) -> a controller, and options of the run."""


def controlled(**options: Any) -> ex.Regeneration:
    """The controller of the arms, whose thresholds are quantiles of the last batch."""
    return ex.Regeneration(recent=BATCH, **options)


def clock(schedule: Mapping[int, int], **options: Any) -> Clock:
    """A clock, and no other renewal."""
    return Clock(upkeep=0, recent=BATCH, every=1, schedule=dict(schedule), **options)


def scattered(seed: int, renewals: Mapping[int, int]) -> dict[int, int]:
    """As many renewals, each decision at a random step from 100 on."""
    rng = np.random.default_rng([seed, 1])
    found: dict[int, int] = {}
    for count in renewals.values():
        step = int(rng.integers(100, BEFORE + AFTER))
        found[step] = found.get(step, 0) + count
    return found


def measure(seed: int, care: ex.Regeneration | None, **options: Any) -> Outcome:
    """Run one arm on one seed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Run(seed, care, **options)
        old = run.stream.world
        for step in range(BEFORE + AFTER):
            if step == BEFORE:
                run.stream.shift()
            run.step()
    before, after = float(np.mean(run.accuracy[BEFORE - 200 : BEFORE])), np.array(run.accuracy[BEFORE:])
    hit = np.flatnonzero(np.convolve(after, np.ones(20) / 20, "valid") >= 0.9 * before)
    renewals: dict[int, int] = {}
    for step, change in run.changes:
        if change.event == "expert_reborn":
            renewals[step] = renewals.get(step, 0) + 1
    alarms = [step for step, change in run.changes if change.event == "alarm"]
    steps = int(hit[0]) + 20 if len(hit) else AFTER
    return Outcome(steps, float(after.mean()), before, run.measured(old), renewals, alarms)


def outcomes(part: str, arms: Mapping[str, Arm]) -> dict[str, list[Outcome]]:
    """All arms on all seeds; what this commit has measured is read."""
    torch.set_num_threads(1)
    KEPT.mkdir(parents=True, exist_ok=True)
    path, known = KEPT / f"{part}-{COMMIT}.jsonl", dict[tuple[int, str], Outcome]()
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        row = json.loads(line)
        row["outcome"]["renewals"] = {int(step): n for step, n in row["outcome"]["renewals"].items()}
        known[row["seed"], row["arm"]] = Outcome(**row["outcome"])
    found: dict[str, list[Outcome]] = {name: [] for name in arms}
    for seed in range(seeds(part)):
        now: dict[str, Outcome] = {}
        for name, arm in arms.items():
            if (seed, name) not in known:
                care, options = arm(seed, now)
                known[seed, name] = measure(seed, care, **options)
                row = {"seed": seed, "arm": name, "outcome": asdict(known[seed, name])}
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            now[name] = known[seed, name]
            found[name].append(now[name])
        middle = ", ".join(f"{name} {np.median([o.steps for o in found[name]]):g}" for name in found)
        print(f"{part}, {seed + 1} seeds, median steps: {middle}", flush=True)
    return found


def seeds(part: str) -> int:
    return int(os.environ.get("SEEDS", SEEDS[part]))


def timed(options: Mapping[str, Any] = {}, **care: Any) -> dict[str, Arm]:
    """PI first, whose renewals the random arm repeats at other times; `options` are of the runs."""
    return {
        PI: lambda seed, now: (controlled(**care), dict(options)),
        NONE: lambda seed, now: (None, dict(options)),
        RANDOM: lambda seed, now: (clock(scattered(seed, now[PI].renewals), **care), dict(options)),
    }


def shift() -> Figure:
    """No regeneration, random times, and alarms."""
    return figure("regeneration after a shift: steps to recover", outcomes("shift", timed()))


def arms() -> Figure:
    """All arms."""

    def every(steps: int, count: int) -> Arm:
        times = dict.fromkeys(range(steps, BEFORE + AFTER + 1, steps), count)
        return lambda seed, now: (clock(times), {})

    known = {step: 4 for step in range(BEFORE + 10, BEFORE + 101, 10)}
    rows = {
        **timed(),
        "PI, random prototypes": lambda seed, now: (controlled(near=1.0), {}),
        "known: the 100 steps after the shift": lambda seed, now: (clock(known), {}),
        **{f"every {steps} steps, up to {count}": every(steps, count) for steps, count in FIXED},
    }
    return figure("regeneration after a shift, all arms: steps to recover", outcomes("arms", rows))


def null_share() -> Figure:
    """No regeneration, random times and alarms, with null share and ghosts."""
    rows = timed({"null": True, "ghost": True}, pruning=0.2, window=100)
    title = "regeneration after a shift, with null share and ghosts: steps to recover"
    return figure(title, outcomes("null_share", rows))


def figure(title: str, arms: Mapping[str, list[Outcome]]) -> Figure:
    """Rows of medians and ranges, and one-sided signed-rank tests of the arm timed by alarms against the others."""
    number = len(arms[PI])
    made = Figure(title, f"{number} paired seeds, shift at step {BEFORE}, at most {AFTER} steps after it; the note has "
                  "the range, means over seeds, and the accuracy on the old clusters at the end")  # fmt: skip
    for name, found in sorted(arms.items(), key=lambda row: row[0] == PI):
        steps = [o.steps for o in found]
        accuracy, old = np.mean([o.accuracy for o in found]), np.mean([o.old for o in found])
        count = np.mean([sum(o.renewals.values()) for o in found])
        note = f"{min(steps)} to {max(steps)}; accuracy {accuracy:.3f}, old clusters {old:.3f}; {count:.1f} renewals"
        made.add(name, float(np.median(steps)), "steps", note, seeds=[float(s) for s in steps])
    own = np.array([o.steps for o in arms[PI]])
    for name, found in arms.items():
        other = np.array([o.steps for o in found])
        if name != PI:
            ahead, tied = int((own < other).sum()), int((own == other).sum())
            p = signed_rank(own, other)
            made.notes.append(f"PI against {name}: ahead in {ahead}, tied in {tied} of {number}; p = {p:.2g}")
    first = [min((a for a in o.alarms if a > BEFORE), default=AFTER + BEFORE) - BEFORE for o in arms[PI]]
    early = sum(a <= BEFORE for o in arms[PI] for a in o.alarms)
    made.notes.append(f"First alarm {min(first)} to {max(first)} steps after the shift; {early} before it.")
    return made


def signed_rank(a: np.ndarray, b: np.ndarray) -> float:
    """P(a is so far below b) by Wilcoxon's signed-rank test, one-sided and exact; equal pairs are dropped."""
    d = (b - a)[b != a]
    ranks = (2 * rankdata(np.abs(d))).astype(int)  # ties have half ranks
    ways = np.zeros(ranks.sum() + 1)  # share of all choices of signs, by the sum of positive ranks
    ways[0] = 1.0
    for rank in ranks:
        ways[rank:] = ways[rank:] + ways[: len(ways) - rank]
        ways /= 2
    return float(ways[ranks[d > 0].sum() :].sum())


def calm() -> Figure:
    """Without a shift: renewals and accuracy beside those without a controller."""
    number = seeds("calm")
    made = Figure("regeneration without a shift", f"{CALM} steps, mean of {number} seeds, accuracy from step 200 on")
    rows: dict[str, list[float]] = {"accuracy with": [], "accuracy without": [], "renewals": [], "alarms": []}
    for seed in range(number):
        for name, care in (("with", controlled()), ("without", None)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run = Run(seed, care)
                for _ in range(CALM):
                    run.step()
            rows[f"accuracy {name}"].append(float(np.mean(run.accuracy[200:])))
            if care is not None:
                rows["renewals"].append(run.count("expert_reborn"))
                rows["alarms"].append(run.count("alarm"))
    for name, values in rows.items():
        made.add(name, float(np.mean(values)), "", seeds=values)
    return made
