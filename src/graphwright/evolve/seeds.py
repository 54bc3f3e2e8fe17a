"""Runs from several random seeds: success rate, and distributions of costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from graphwright.arguments import checked
from graphwright.errors import UsageError
from graphwright.evolve.evolution import Evolution, blocks, scalar
from graphwright.evolve.run import same_cases
from graphwright.progress import Progress, ProgressCallback
from graphwright.report import Report, plain
from graphwright.workers import Failed, WorkerError, Workers
from graphwright.workers.choice import opened

_Z = 1.959963984540054  # half-width of the two-sided 95 % interval of a normal distribution
_FIGURES = (
    "generations", "evaluations", "forward_passes", "backward_passes", "seconds", "environment_seconds", "failed",
    "refused", "hidden", "links", "parameters", "flops", "species",
)  # fmt: skip


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Compute the Wilson 95 % confidence interval of a success rate, clipped to [0, 1].

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    if not 0 <= successes <= trials or not trials:
        raise UsageError("invalid numbers of successes and trials", got=(successes, trials),
                         expected="0 <= successes <= trials, trials >= 1")  # fmt: skip
    p, z2 = successes / trials, _Z * _Z / trials
    middle, half = p + z2 / 2, _Z * sqrt((p * (1 - p) + z2 / 4) / trials)
    return max(0.0, (middle - half) / (1 + z2)), min(1.0, (middle + half) / (1 + z2))


@dataclass(frozen=True, slots=True, repr=False)
class Seeds(Report):
    """The reports of runs from several seeds.

    Attributes:
        reports: `Result.to_json()` of each run, in order of the seeds.
    """

    reports: tuple[Mapping[str, Any], ...]

    @property
    def solved(self) -> list[int]:
        """The seeds whose runs reached the target."""
        return [r["seed"] for r in self.reports if r["status"] == "TargetReached"]

    @property
    def success(self) -> tuple[float, float, float]:
        """The fraction of runs that reached the target, and the lower and upper end of its Wilson 95 % interval."""
        return len(self.solved) / len(self.reports), *wilson(len(self.solved), len(self.reports))

    def quartiles(self, name: str) -> tuple[float, float, float]:
        """Return first quartile, median and third quartile of a statistic over all runs, interpolated.

        Args:
            name: a numeric key of the reports, or `fitness`, `metric` (on validation cases) or `test` (on test cases)
                of the champions.
        Raises: UsageError if the reports have no such statistic.
        """
        found = self._figures()
        if name not in found:
            raise UsageError("the reports of these runs have no such statistic", got=name, expected=", ".join(found))
        low, middle, high = np.quantile(found[name], [0.25, 0.5, 0.75]).tolist()
        return low, middle, high

    def _figures(self) -> dict[str, list[float]]:
        first, every = self.reports[0], self.reports
        counts = {name: [_number(r[name]) for r in every] for name in _FIGURES if name in first}
        found = {**counts, "fitness": [r["fitness"]["best"] for r in every],
                 "metric": [r["metric"]["valid"] for r in every]}  # fmt: skip
        return found | ({"test": [r["metric"]["test"] for r in every]} if "test" in first["metric"] else {})

    def to_json(self) -> dict[str, Any]:
        """Return the success rate with its interval, the quartiles of every statistic, and the reports of all runs."""
        first, names = self.reports[0], ("q1", "median", "q3")
        return plain({
            **{name: first[name] for name in ("task", "split", "target")},
            "seeds": [r["seed"] for r in self.reports],
            "solved": self.solved,
            "statuses": dict(Counter(r["status"] for r in self.reports)),
            "success": dict(zip(("rate", "low", "high"), self.success, strict=True)),
            "figures": {name: dict(zip(names, self.quartiles(name), strict=True)) for name in self._figures()},
            "runs": [dict(r) for r in self.reports],
        })  # fmt: skip

    def _text(self) -> str:
        first, (rate, low, high) = self.reports[0], self.success
        aim = "" if first["target"] is None else f" ({first['metric']['name']} >= {first['target']:g})"
        lines = [f"{len(self.solved)} of {len(self.reports)} seeds solved {first['task']}{aim}: {100 * rate:.0f} %, "
                 f"95 % interval {100 * low:.0f} to {100 * high:.0f} %{same_cases(dict(first))}"]  # fmt: skip
        for name, values in self._figures().items():
            if any(values):
                q1, middle, q3 = map(_digits, self.quartiles(name))
                lines.append(f"  {name.replace('_', ' ')}: median {middle}, quartiles {q1} to {q3}")
        return "\n".join(lines)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class _Sweep:
    """The arguments of `over_seeds` that all runs share; `limits` are those of `Evolution.run`."""

    task: Any
    start: scalar | blocks | None
    settings: Any
    threads: int
    test: bool
    limits: Mapping[str, Any]


def _one_run(sweep: _Sweep, seed: int) -> dict[str, Any]:
    """Run evolution from one seed, and return its report."""
    task: Any = sweep.task(seed) if callable(sweep.task) else sweep.task
    reads = task.test_reads
    run: Any = Evolution(task, sweep.start, sweep.settings, seed=seed, threads=sweep.threads)  # type: ignore[arg-type]  # either kind
    result = run.run(**sweep.limits)
    if not result.evolution.log:
        raise UsageError("a run ended before its first generation", where=f"seed {seed}", fix="raise the limits")
    facts = result.to_json()
    facts["test_reads"] -= reads
    if sweep.test:
        facts["metric"]["test"] = result.test()
    return facts


@checked
def over_seeds(
    task: Any, start: scalar | blocks | None = None, settings: Any = None, *, seeds: int | Iterable[int] = 20,
    test: bool = False, threads: int = 1, workers: Workers = None, progress: ProgressCallback | None = None,
    max_generations: int | None = None, max_evaluations: int | None = None, max_seconds: float | None = None,
    target: float | None = None,
) -> Seeds:  # fmt: skip
    """Run evolution once per seed, and return the reports.

    Args:
        task: the task, or a function that makes the task for a given seed.
        start, settings, threads: arguments of `Evolution`.
        seeds: the seeds, or a number n for the seeds 0 to n - 1.
        test: also compute the metric of each champion on the test cases.
        workers: workers that each do whole runs; see `Evolution`.
        progress: called with the progress after every run.
        max_generations, max_evaluations, max_seconds, target: arguments of `Evolution.run`.
    Raises: errors of `Evolution` and of its `run`; UsageError if there is no seed, or if a run makes no generation;
        WorkerError if the worker of a run died or was late twice.
    """
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not numbers:
        raise UsageError("no seeds were given", where="over_seeds", expected="at least one seed", fix="seeds=20")
    limits = {"max_generations": max_generations, "max_evaluations": max_evaluations, "max_seconds": max_seconds,
              "target": target}  # fmt: skip
    sweep, ended = _Sweep(task, start, settings, threads, test, limits), list[Any]()

    def each(k: int, facts: Any) -> None:
        if isinstance(facts, Failed):
            raise WorkerError("a run has no result", where=f"seed {numbers[k]}", got=facts.reason)
        ended.append(facts)
        if progress is not None:
            solved = sum(r["status"] == "TargetReached" for r in ended)
            progress(Progress("seeds", len(ended), len(numbers), {"solved": float(solved)}))

    if workers is None:
        for k, seed in enumerate(numbers):
            each(k, _one_run(sweep, seed))
        return Seeds(tuple(ended))
    with opened(workers) as pool:
        assert pool is not None
        return Seeds(tuple(pool.map(_one_run, numbers, sweep, each=each)))


def _number(value: Any) -> float:
    """Return the value of a statistic as a float; counts by name, such as refused mutations, are summed."""
    return float(sum(value.values())) if isinstance(value, Mapping) else float(value)
