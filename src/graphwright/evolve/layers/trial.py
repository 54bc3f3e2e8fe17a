"""The trial of a candidate: it is trained and scored, in this process or in a worker.

The result depends on the candidate, its number, and the seed of the run: its batches come from a random stream of its
own. Both ways call `Trainer.trial`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from graphwright.array import NDArray
from graphwright.array.threads import using_threads
from graphwright.errors import GraphwrightError
from graphwright.evolve.layers import train
from graphwright.evolve.layers.candidate import Moments, TrainingGenes
from graphwright.evolve.settings import Layers
from graphwright.evolve.tasks.task import Task
from graphwright.plan.planning.native import wait_for_native_code
from graphwright.program import Program
from graphwright.workers import Failed, Pool

_TRAIN = 2  # purpose of the random streams of batches


@dataclass(frozen=True, slots=True)
class Newborn:
    """A candidate before its trial: number, program, training genes, and the state of its optimizer."""

    number: int
    program: Program
    training: TrainingGenes
    moments: Moments


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a trial.

    Attributes:
        metric, loss: scores on the validation cases; metric is None if the candidate failed, and `failure` says why.
        moments: state of the optimizer after training; weights: all weights after training, if it was in a worker.
        scored: True if the forward passes of scoring were begun.
    """

    metric: float | None
    loss: float
    failure: str = ""
    moments: Moments = field(default_factory=dict)
    weights: dict[str, NDArray] = field(default_factory=dict)
    scored: bool = True


class Trainer:
    """Trains and scores the candidates of a run; compiled steps are cached by structure, per process.

    Args:
        task, settings, seed: those of the run; threads: number of threads of each op.
    """

    def __init__(self, task: Task, settings: Layers, seed: int, threads: int) -> None:
        self.task, self.settings, self.seed, self.threads = task, settings, seed, threads
        self.steps = train.StepCache()

    def __reduce__(self) -> tuple[type[Trainer], tuple[Task, Layers, int, int]]:
        return Trainer, (self.task, self.settings, self.seed, self.threads)

    def trials(self, born: Sequence[Newborn], pool: Pool | None) -> list[Outcome]:
        """Train all programs in place and score them, by the workers of `pool` if there is one."""
        wait_for_native_code()
        if pool is None:
            with using_threads(self.threads):
                return [self.trial(one) for one in born]
        found = []
        for one, outcome in zip(born, pool.map(_in_worker, born, self), strict=True):
            if isinstance(outcome, Failed):
                outcome = Outcome(None, float("inf"), outcome.reason)
            elif outcome.metric is not None and self.settings.steps:
                train.adopt(one.program, outcome.weights, self.settings.steps)
            found.append(outcome)
        return found

    def trial(self, one: Newborn) -> Outcome:
        """Train a program in place and score it."""
        s, scored, program = self.settings, False, one.program
        opt = train.optimizer(program, one.training, one.moments)
        rng = np.random.Generator(np.random.Philox(key=[self.seed, (_TRAIN << 40) + one.number]))
        try:
            train.fit(self.task, program, opt, one.training, s, rng, self.steps)
            scored = True
            metric, loss = train.measure(self.task, program, self.task.valid)
        except (GraphwrightError, FloatingPointError) as error:
            return Outcome(None, float("inf"), f"{type(error).__name__}: {error}", scored=scored)
        if not np.isfinite(loss):
            return Outcome(None, loss, f"loss is {loss}")
        return Outcome(metric, loss, "", train.moments(opt))


def _in_worker(trainer: Trainer, one: Newborn) -> Outcome:
    with using_threads(trainer.threads):
        outcome = trainer.trial(one)
    if outcome.metric is not None:
        outcome.weights.update((key, one.program.weights.array(key)) for key in one.program.weights)
    return outcome
