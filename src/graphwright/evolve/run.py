"""The base class of runs, which breed generations until a target or a limit is reached, and the report on a run.

Random numbers depend only on seed, purpose, generation and child, so a run gives the same result for any number of
threads, and no matter how often it was interrupted and resumed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Self

from graphwright.errors import UsageError
from graphwright.evolve.errors import EvaluationFailed, Status
from graphwright.evolve.saving import rotate_states, write_run
from graphwright.evolve.tasks.task import Scores, Trial
from graphwright.files import StrPath, atomic_directory
from graphwright.progress import Progress, ProgressCallback
from graphwright.report import Report
from graphwright.settings import Range
from graphwright.workers import Pool, Workers, pool_of
from graphwright.workers.complete import arrive


@dataclass(slots=True)
class Counters:
    """The costs of a run.

    Attributes:
        evaluations: number of scored candidates; forward: number of cases in forward passes; backward: number of cases
            in gradient steps.
        failed: number of candidates without fitness; refused: dict from mutations to counts of impossible attempts.
        seconds: time for scoring and reproduction; environment: the part of `seconds` that environments took.
    """

    evaluations: int = 0
    forward: int = 0
    backward: int = 0
    failed: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    environment: float = 0.0

    def refuse(self, mutation: str, count: int = 1) -> None:
        """Add `count` to the number of times that `mutation` was impossible."""
        self.refused[mutation] = self.refused.get(mutation, 0) + count

    def add(self, cost: Scores | Trial, evaluations: int = 0) -> None:
        """Add the cost of scoring some candidates."""
        self.evaluations += evaluations
        self.forward += cost.passes
        self.environment += cost.seconds


class EvolutionRun(ABC):
    """Base class of runs on neurons and on layers; see `Evolution` for the arguments."""

    RESULT: ClassVar[type[EvolutionResult]]

    def __init__(self, task: Any, seed: int, threads: int, workers: Workers = None) -> None:
        if type(seed) is not int or not 0 <= seed < 1 << 63:
            raise UsageError("the seed is not an int in range", expected="0 to 2⁶³ - 1", got=repr(seed))
        self.task, self.seed, self.threads = task, seed, threads
        self._owns_pool = not isinstance(workers, Pool)
        self.pool = None if workers is None else pool_of(workers)
        """The workers that train and score candidates; None if this process does."""
        self.counters, self.generation = Counters(), 0
        self.log: list[Any] = []
        self.failures: list[str] = []
        self.gained = 0
        """The last generation in which the best score improved."""
        self.warned = False
        """True once the run has warned that gradients cannot reach some weights."""

    def run(
        self, max_generations: int | None = None, max_evaluations: int | None = None, max_seconds: float | None = None,
        *, target: float | None = None, callback: Callable[[Self], object] | None = None,
        progress: ProgressCallback | None = None, save: StrPath | None = None, save_every: int = 10, keep: int = 3,
    ) -> Any:  # fmt: skip
        """Run until the target or a limit is reached. Limits count from the start of the run, not of this call.

        Args:
            max_generations, max_evaluations, max_seconds: limits; None for no limit.
            target: target of the metric; by default that of the task.
            callback: called with the run after each generation; the run stops if it returns a true value.
            progress: called with the progress after each generation.
            save: a directory, written every `save_every` generations and at the end.
            save_every: generations between two saved states.
            keep: number of saved states to keep: the last one in `save`, older ones in `save.1`, `save.2`, ...
        Returns: the result; it has no champion if a limit is 0.
        Raises: EvaluationFailed if more than half of a generation has no fitness.
        """
        limits, aim = (max_generations, max_evaluations, max_seconds), self.task.target if target is None else target
        if all(limit is None for limit in (*limits, aim)):
            raise UsageError("the run has neither a limit nor a target", fix="run(max_generations=...)")
        names = ("max_generations", "max_evaluations", "max_seconds", "target")
        for name, value in zip(names, (*limits, aim), strict=True):
            if value is not None and (not isinstance(value, Real) or value != value):
                raise UsageError("a limit or the target is not a number", where=name, got=repr(value)[:80])
            if value is not None and value < 0 and name != "target":
                raise UsageError("a limit is negative", where=name, expected=">= 0", got=value)
        Range(1, whole=True).check("save_every", save_every)
        Range(1, whole=True).check("keep", keep)
        began = perf_counter() - self.counters.seconds
        status: Status | None = None
        saved = -1
        try:
            checked = False
            while status is None and (status := self._limit(*limits, aim)) is None:
                if not checked:
                    self._check_workers()
                checked, done = True, len(self.log)
                self._advance(aim, max_generations, max_evaluations)
                self.counters.seconds = perf_counter() - began
                if progress is not None:
                    progress(self._progress(max_generations, max_evaluations))
                if callback is not None and callback(self):
                    status = Status.CALLBACK_STOPPED
                if save is not None and len(self.log) // save_every > done // save_every:
                    saved = self._save(save, keep)
        finally:
            if self.pool is not None and self._owns_pool:
                self.pool.close()
        if save is not None and saved != len(self.log):
            self._save(save, keep)
        return self.RESULT(self, self._limit(*limits, aim) or status, aim)

    def _check_workers(self) -> None:
        """Start the workers that the next generation needs.

        Raises: UsageError if they cannot load the task; WorkerError if all of them end while they do.
        """
        if self.pool is not None and self._sends:
            arrive(self.pool, self._shared, self.task.name)

    def _save(self, directory: StrPath, keep: int) -> int:
        """Save the run after rotating older states; return the number of saved generations."""
        rotate_states(directory, keep)
        self.save(directory)
        return len(self.log)

    def save(self, directory: StrPath) -> None:
        """Write the whole run atomically; `evolve.resume` loads it.

        Raises: FileError if the run cannot be written; the previous files are then unchanged.
        """
        with atomic_directory(directory, overwrite=True) as folder:
            write_run(folder, self, self._content(folder))

    def _limit(
        self, generations: int | None, evaluations: int | None, seconds: float | None, aim: float | None
    ) -> Status | None:
        """Return why the run ends now, or None if it continues."""
        if aim is not None and self._reached(aim):
            return Status.TARGET_REACHED
        if generations is not None and len(self.log) >= generations:
            return Status.MAX_GENERATIONS
        if evaluations is not None and self.counters.evaluations >= evaluations:
            return Status.MAX_EVALUATIONS
        if seconds is not None and self.counters.seconds >= seconds:
            return Status.MAX_TIME
        return self._stuck()

    def _check_failures(self, born: int, failures: Sequence[str], missing: str) -> None:
        """Raise EvaluationFailed if over half of `born` candidates failed, that is, lack the score named `missing`."""
        if 2 * len(failures) > born:
            raise EvaluationFailed(f"more than half of the generation has no {missing}",
                                   where=f"{self.task.name}, generation {self.generation}",
                                   expected=f"at most {born // 2} failures", got="; ".join(failures[:3]))  # fmt: skip

    # -- the parts of each kind of run --------------------------------------------------------------------------------
    @property
    @abstractmethod
    def _shared(self) -> Any:
        """The object that workers get once, with the task."""

    @property
    @abstractmethod
    def _sends(self) -> bool:
        """True if workers, if there are any, train and score the next generation."""

    @abstractmethod
    def _content(self, folder: Path) -> dict[str, Any]:
        """Write the arrays of the run to `folder`, and return its entries of `run.json`."""

    @abstractmethod
    def _advance(self, aim: float | None, generations: int | None, evaluations: int | None) -> None:
        """Breed the next generation if the current one was scored, and score the new one."""

    @abstractmethod
    def _reached(self, aim: float) -> bool:
        """Return True if an individual reaches the target `aim`."""

    @abstractmethod
    def _stuck(self) -> Status | None:
        """Return why the run must end although no limit is reached; None if it can continue."""

    @abstractmethod
    def _progress(self, generations: int | None, evaluations: int | None) -> Progress: ...


class EvolutionResult(Report, ABC):
    """The outcome of `Evolution.run`.

    Attributes:
        evolution: the run, which can be continued.
        status: why the run ended.
        aim: the target of the metric, or None.
    """

    evolution: Any

    def __init__(self, evolution: EvolutionRun, status: Status, aim: float | None) -> None:
        self.evolution, self.status, self.aim = evolution, status, aim

    @property
    def solved(self) -> bool:
        """True if the target was reached."""
        return self.status is Status.TARGET_REACHED

    @abstractmethod
    def _champion_facts(self) -> dict[str, Any]:
        """Return the entries of `to_json` that describe the champion."""

    @abstractmethod
    def _champion_lines(self, report: dict[str, Any]) -> list[str]:
        """Return the lines of `str(result)` that describe the champion; `report` is the result of `to_json`."""

    def _no_champion(self) -> UsageError:
        name = self.evolution.task.name
        return UsageError("the run has no champion yet", where=name, fix="run(max_generations=1) or more")

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON-serialisable dict; before the first generation it has no champion."""
        run, c, task = self.evolution, self.evolution.counters, self.evolution.task
        facts = {"task": task.name, "split": task.split if isinstance(task.split, str) else "train/valid/test",
                 "target": self.aim, "seed": run.seed, "status": str(self.status), "generations": len(run.log),
                 "evaluations": c.evaluations, "forward_passes": c.forward, "backward_passes": c.backward,
                 "seconds": c.seconds, "environment_seconds": c.environment, "refused": dict(c.refused),
                 "failed": c.failed, "failures": run.failures[:3], "test_reads": task.test_reads}  # fmt: skip
        return facts | (self._champion_facts() if run.log else {})

    def _text(self) -> str:
        r = self.to_json()
        count = r["generations"]
        ended = f"{r['status']} after {count} generation{'' if count == 1 else 's'}"
        if not self.evolution.log:
            return f"{ended}: nothing was scored yet"
        lines = [f"{ended}, {r['evaluations']:,} evaluations, {r['seconds']:.2f} s", *self._champion_lines(r)]
        if r["failed"]:
            lines.append(f"  {r['failed']} candidates failed: {'; '.join(r['failures'])}")
        if r["test_reads"] > 1:  # a choice based on the test cases is no longer tested by them
            lines.append(f"  the test cases were read {r['test_reads']} times")
        return "\n".join(lines)


def same_cases(report: dict[str, Any]) -> str:
    """Return a note for the report if training, validation and test use the same cases, else ""."""
    return " (the same cases for training, validation and test)" if report["split"] == "same" else ""


def cost(report: dict[str, Any]) -> str:
    """Return a line of text with the costs of a run: passes, share of time in environments, impossible mutations."""
    share, refused = report["environment_seconds"] / max(report["seconds"], 1e-9), sum(report["refused"].values())
    parts = [f"{report['forward_passes']:,} passes forward, {report['backward_passes']:,} with gradients"]
    parts += [f"{100 * share:.0f} % of the time in environments"] if share else []
    parts += [f"{refused:,} mutations refused"] if refused else []
    return "; ".join(parts)
