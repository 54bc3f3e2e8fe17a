"""The loop of every run: generations until a target or a limit, saved as it goes.

All random numbers are counted by seed, purpose, generation and child, so a run gives the same result however often it
was interrupted, and for every number of threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from numbers import Real
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self

from graphwright.errors import UsageError
from graphwright.evolve.errors import Status
from graphwright.evolve.saved_run import rotate_states

if TYPE_CHECKING:
    from graphwright.files import StrPath
    from graphwright.program import Transaction
    from graphwright.progress import Progress, Report


@dataclass(slots=True)
class Counters:
    """The costs of a run.

    Attributes:
        evaluations: candidates scored; forward: cases run forwards; backward: cases of gradient steps.
        failed: candidates without fitness; refused: number of impossible mutations by name.
        seconds: time of evaluation and reproduction; environment: the part of it spent in environments.
    """

    evaluations: int = 0
    forward: int = 0
    backward: int = 0
    failed: int = 0
    refused: dict[str, int] | None = None
    seconds: float = 0.0
    environment: float = 0.0

    def refuse(self, mutation: str, count: int = 1) -> None:
        """Count mutations that could not be made."""
        assert self.refused is not None
        self.refused[mutation] = self.refused.get(mutation, 0) + count


class EvolutionRun(ABC):
    """What runs on neurons and on layers share; see `Evolution` for the arguments."""

    def __init__(self, task: Any, seed: int, threads: int) -> None:
        if type(seed) is not int or not 0 <= seed < 1 << 63:
            raise UsageError("seed must be a whole number from 0 to 2⁶³ - 1", got=repr(seed))
        self.task, self.seed, self.threads = task, seed, threads
        self.counters, self.generation = Counters(refused={}), 0
        self.log: list[Any] = []
        self.failures: list[str] = []
        self.gained = 0
        """The last generation in which the best improved."""

    def run(
        self,
        max_generations: int | None = None,
        max_evaluations: int | None = None,
        max_seconds: float | None = None,
        *,
        target: float | None = None,
        callback: Callable[[Self], object] | None = None,
        report: Report | None = None,
        save: StrPath | None = None,
        save_every: int = 10,
        keep: int = 3,
    ) -> Any:
        """Run until the target or a limit is reached. Limits count from the beginning of the run, not of the call.

        Args:
            max_generations, max_evaluations, max_seconds: limits.
            target: target of the metric; by default that of the task.
            callback: called after each generation; True stops the run.
            report: receives progress.
            save: a directory, written every `save_every` generations and at the end.
            save_every: generations between two saved states.
            keep: number of saved states to keep: the last one in `save`, older ones in `save.1`, `save.2`, ...
        Returns: the result, which is empty if a limit is 0.
        Raises: EvaluationFailed if more than half of a generation has no fitness.
        """
        limits, aim = (max_generations, max_evaluations, max_seconds), self.task.target if target is None else target
        if all(limit is None for limit in limits) and aim is None:
            raise UsageError("the run has neither a limit nor a target", fix="run(max_generations=...)")
        for value in (*limits, aim):
            if value is not None and (not isinstance(value, Real) or value != value):
                raise UsageError("a limit or the target is not a number", got=repr(value)[:80])
        if any(limit is not None and limit < 0 for limit in limits):
            raise UsageError("a limit is below 0", got=min(limit for limit in limits if limit is not None))
        for name, value in (("save_every", save_every), ("keep", keep)):
            if type(value) is not int or value < 1:
                raise UsageError(f"{name} must be a whole number >= 1", got=repr(value))
        began = perf_counter() - self.counters.seconds
        status: Status | None = None
        saved = -1
        while status is None:
            status = self._limit(*limits, aim)
            if status is not None:
                break
            self._advance(aim, max_generations, max_evaluations)
            self.counters.seconds = perf_counter() - began
            if report is not None:
                report(self._progress(max_generations, max_evaluations))
            if callback is not None and callback(self):
                status = Status.CALLBACK_STOPPED
            if save is not None and len(self.log) % save_every == 0:
                self._save(save, keep)
                saved = len(self.log)
        if save is not None and saved != len(self.log):
            self._save(save, keep)
        return self._result(self._limit(*limits, aim) or status, aim)

    def _save(self, directory: StrPath, keep: int) -> None:
        rotate_states(directory, keep)
        self.save(directory)

    def _limit(
        self, generations: int | None, evaluations: int | None, seconds: float | None, aim: float | None
    ) -> Status | None:
        """Why the run is over, or None."""
        if aim is not None and self._reached(aim):
            return Status.TARGET_REACHED
        if generations is not None and len(self.log) >= generations:
            return Status.MAX_GENERATIONS
        if evaluations is not None and self.counters.evaluations >= evaluations:
            return Status.MAX_EVALUATIONS
        if seconds is not None and self.counters.seconds >= seconds:
            return Status.MAX_TIME
        return self._stuck()

    # -- the parts of each kind of run --------------------------------------------------------------------------------
    @abstractmethod
    def edit(self, who: Any, why: str = "edited") -> AbstractContextManager[Transaction]:
        """Edit a living individual manually between generations: `with run.edit(who, "why") as e:`."""

    @abstractmethod
    def save(self, directory: StrPath) -> None:
        """Write the whole run atomically; `evolve.resume` loads it.

        Raises: FileError; the previous files are then still there.
        """

    @abstractmethod
    def _advance(self, aim: float | None, generations: int | None, evaluations: int | None) -> None:
        """Breed the next generation if the present one was scored, and score."""

    @abstractmethod
    def _reached(self, aim: float) -> bool:
        """Whether an individual meets the target."""

    @abstractmethod
    def _stuck(self) -> Status | None:
        """Why the run cannot continue, whatever the limits; None if it can."""

    @abstractmethod
    def _progress(self, generations: int | None, evaluations: int | None) -> Progress: ...

    @abstractmethod
    def _result(self, status: Status, aim: float | None) -> Any: ...
