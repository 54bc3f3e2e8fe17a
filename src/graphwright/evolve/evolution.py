"""A run of evolution: generations until a target or a limit, saved as it goes. What is bred is the start's affair.

All random numbers are counted by seed, purpose, generation and child, so a run is the same however often it was
interrupted, and whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from numbers import Real
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self, overload

from graphwright.errors import UsageError
from graphwright.evolve.errors import Status, TaskError

if TYPE_CHECKING:
    from graphwright.evolve.layers.engine import LayerEvolution
    from graphwright.evolve.layers.settings import Layers
    from graphwright.evolve.neurons import NeuronEvolution
    from graphwright.evolve.settings import NEAT
    from graphwright.files import StrPath
    from graphwright.program import Program, Transaction
    from graphwright.progress import Progress, Report


@dataclass(frozen=True, slots=True)
class Scalar:
    """Start: genomes of single neurons, inputs and bias wired to the outputs. Made by `evolve.scalar()`."""


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Start: a program whose layers evolve. Made by `evolve.blocks(program)`."""

    program: Program


def scalar() -> Scalar:
    """Neurons and links; the start is inputs and bias wired to the outputs."""
    return Scalar()


def blocks(program: Program) -> Blocks:
    """Layers of a program of yours: input [batch, ...], one output [batch, outputs], logits for classes."""
    from graphwright.program import Program

    if not isinstance(program, Program):
        raise UsageError(
            "layers evolve from a program", got=repr(program)[:80], expected="gw.Builder(...).build(), or a trace"
        )
    return Blocks(program)


@dataclass(slots=True)
class Counters:
    """What a run has cost.

    Attributes:
        evaluations: candidates scored; forward: cases run forwards; backward: cases of gradient steps.
        failed: candidates without fitness; refused: mutations that could not be made, by name.
        seconds, environment: of evaluation and reproduction in all; spent in environments.
    """

    evaluations: int = 0
    forward: int = 0
    backward: int = 0
    failed: int = 0
    refused: dict[str, int] | None = None
    seconds: float = 0.0
    environment: float = 0.0


class Evolution:
    """A run of evolution on one task.

    Args:
        task: `evolve.tasks....()`, or a `Task` of one's own.
        start: `evolve.scalar()` or `evolve.blocks(program)`.
        settings: `NEAT(...)` or `Hybrid(...)` for neurons, `Layers(...)` for layers.
        seed: of everything random; threads: of native calls, which change no result.
    Raises: LimitTooSmall, TaskError, UsageError.
    """

    task: Any
    seed: int
    threads: int
    counters: Counters
    log: list[Any]
    generation: int

    @overload
    def __new__(
        cls, task: Any, start: Scalar | None = None, settings: NEAT | None = None, *, seed: int = 0, threads: int = 1
    ) -> NeuronEvolution: ...
    @overload
    def __new__(
        cls, task: Any, start: Blocks, settings: Layers | None = None, *, seed: int = 0, threads: int = 1
    ) -> LayerEvolution: ...
    def __new__(cls, task: Any, start: Any = None, settings: Any = None, **options: Any) -> Any:
        """The run that the start asks for."""
        from graphwright.evolve.layers.engine import LayerEvolution
        from graphwright.evolve.neurons import NeuronEvolution

        if not hasattr(task, "score"):
            raise TaskError("not a task", got=repr(task)[:80], expected="evolve.tasks.xor(), or a Task of one's own")
        if start is not None and not isinstance(start, Scalar | Blocks):
            raise UsageError("a start that nothing evolves from", got=repr(start)[:80],
                             expected="evolve.scalar() or evolve.blocks(program)")  # fmt: skip
        if cls is Evolution:
            return object.__new__(LayerEvolution if isinstance(start, Blocks) else NeuronEvolution)
        return object.__new__(cls)

    def _begin(self, task: Any, seed: int, threads: int) -> None:
        if type(seed) is not int or not 0 <= seed < 1 << 63:
            raise UsageError("a seed is a whole number", expected="0 to 2⁶³ - 1", got=repr(seed))
        self.task, self.seed, self.threads = task, seed, threads
        self.counters, self.log, self.generation = Counters(refused={}), [], 0
        self.failures: list[str] = []

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
        """Go on until the target or a limit is reached; a limit of an earlier call counts from the beginning too.

        Args:
            target: of the metric; by default the task's.
            callback: called after each generation; True stops the run.
            report: gets progress; save: a directory, written every `save_every` generations and at the end; of these
                states `keep` are kept, the last in `save`, those before it in `save.1`, `save.2`, ...
        Returns: what was found; nothing yet if a limit is 0.
        Raises: EvaluationFailed if more than half of a generation has no fitness.
        """
        limits, aim = (max_generations, max_evaluations, max_seconds), self.task.target if target is None else target
        if all(limit is None for limit in limits) and aim is None:
            raise UsageError("nothing would stop this run", fix="run(max_generations=...)")
        for value in (*limits, aim):
            if value is not None and (not isinstance(value, Real) or value != value):
                raise UsageError("a limit or a target is a number", got=repr(value)[:80])
        if any(limit is not None and limit < 0 for limit in limits):
            raise UsageError("a limit is below 0", got=min(limit for limit in limits if limit is not None))
        for name, value in (("save_every", save_every), ("keep", keep)):
            if type(value) is not int or value < 1:
                raise UsageError(f"{name} is a whole number from 1 on", got=repr(value))
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
        from graphwright.evolve.stored import keep_former

        keep_former(directory, keep)
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

    def edit(self, who: Any, why: str = "edited") -> AbstractContextManager[Transaction]:
        """Edit one of the living by hand, between generations: `with run.edit(who, "why") as e:`."""
        raise NotImplementedError

    # -- what a kind of genome adds -----------------------------------------------------------------------------------
    def _advance(self, aim: float | None, generations: int | None, evaluations: int | None) -> None:
        """Breed if the present generation was scored, and score."""
        raise NotImplementedError

    def _reached(self, aim: float) -> bool:
        """Whether somebody meets the target."""
        raise NotImplementedError

    def _stuck(self) -> Status | None:
        """Why there is no going on, whatever the limits; None if there is."""
        return None

    def _progress(self, generations: int | None, evaluations: int | None) -> Progress:
        raise NotImplementedError

    def _result(self, status: Status, aim: float | None) -> Any:
        raise NotImplementedError

    def save(self, directory: StrPath) -> None:
        """Write all that the run needs to go on, atomically; see `evolve.resume`."""
        raise NotImplementedError
