"""The trials of a search: programs are trained and scored, in this process or by workers.

What a trial gives depends on its program, its steps and the seed. Costs and losses are added up in the order in which
the method lists its trials, so results do not depend on workers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Self

import numpy as np

from graphwright.array import NDArray
from graphwright.array.threads import ThreadCounts, thread_counts, using_threads
from graphwright.autograd import as_tensor, no_grad
from graphwright.errors import UsageError
from graphwright.optim.lr_scheduler import CosineAnnealingLR
from graphwright.plan.planning.native import wait_for_native_code
from graphwright.program import Program
from graphwright.progress import Progress, ProgressCallback
from graphwright.structure.graph import DifferentiableGraph, Task
from graphwright.structure.optimizer import JointOptimizer
from graphwright.structure.searching.candidates import Candidates
from graphwright.workers import Failed, Pool, WorkerError
from graphwright.workers.complete import arrive

Batch = Mapping[str, Any]
Batches = Callable[[np.random.Generator], Batch]


@dataclass(frozen=True, slots=True)
class SameBatch:
    """A batch for all steps, as a function of a random generator."""

    batch: Batch

    def __call__(self, rng: np.random.Generator) -> Batch:
        """Return the batch."""
        return self.batch


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """The result of one method: names of the chosen candidates, trained program, validation loss."""

    chosen: tuple[str, ...]
    program: Program
    loss: float


@dataclass(slots=True)
class Trials:
    """The state of an architecture search with one method.

    Attributes:
        start: the program before the search; never changed.
        seed: seed of batches; all structures are trained on the same batches.
        lr: learning rate of Adam on the weights, with cosine decay to a twentieth.
        team: the workers that train several programs at once; None if this process does.
        spent: training steps so far; curve: a pair (steps, validation loss) for each scored structure.
        failures: a text for each trial without a result, because its worker died or was late twice.
        candidates, train, valid, task, budget: see `search`.
    """

    start: Program
    candidates: Candidates
    train: Batches
    valid: Batch
    task: Task
    budget: int
    seed: int
    lr: float
    progress: ProgressCallback | None = None
    team: Team | None = None
    spent: int = 0
    curve: list[tuple[int, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def fresh(self, **changes: Any) -> Self:
        """Return the state at the beginning of a search with the same arguments."""
        return replace(self, spent=0, curve=[], failures=[], **changes)

    def rng(self, purpose: int) -> np.random.Generator:
        """Return a new random generator for one purpose; the same seed and purpose give the same numbers."""
        return np.random.Generator(np.random.Philox(key=[self.seed, purpose]))

    def structure(self, chosen: Collection[str]) -> Program:
        """Return a fork of the start program, with its initial weights, to which chosen candidates are added."""
        p = self.start.fork()
        self.candidates.build(p, chosen)
        return p

    def fit(self, p: Program, steps: int, purpose: int = 0) -> Program:
        """Train a program in place for `steps` of the budget, on batches drawn by `rng(purpose)`, and return it."""
        if steps <= 0:
            return p
        view = DifferentiableGraph(p, seed=self.seed)
        opt = JointOptimizer(view, self.task, params=self.lr, mode="params")
        if opt.weights is None:
            raise UsageError("the program has no weights to train", where=p.name)
        self.drive(opt, steps, purpose)
        return p

    def drive(self, opt: JointOptimizer, steps: int, purpose: int, valid: int | None = None) -> None:
        """Run an optimizer for some steps of the budget, with cosine decay of the weights' learning rate.

        Args:
            purpose: purpose of the random generator that draws batches; see `rng`.
            valid: purpose for second batches, if the optimizer takes two batches per step; a step then counts twice.
        """
        assert opt.weights is not None
        schedule = CosineAnnealingLR(opt.weights, steps, eta_min=self.lr / 20)
        rng, other = self.rng(purpose), None if valid is None else self.rng(valid)
        for _ in range(steps):
            opt.step(self.train(rng), None if other is None else self.train(other))
            schedule.step()
        self._spend(steps if other is None else 2 * steps)

    def score(self, p: Program) -> float:
        """Return the task's loss on the validation batch, and append it to the curve."""
        with no_grad():
            feeds = {n: as_tensor(v) for n, v in self.valid.items()}
            found = DifferentiableGraph(p, seed=self.seed).evaluate(feeds, self.task)[0].item()
        self.curve.append((self.spent, found))
        return found

    def losses(self, programs: Sequence[Program], steps: int, purpose: int = 0) -> list[float]:
        """Train each program in place for `steps` of the budget, and score it; by workers, if there are any.

        Returns: the validation losses; infinity for a program whose worker died or was late twice, see `failures`.
        Raises: WorkerError if no program has a loss.
        """
        if self.team is None or len(programs) < 2:
            return [self.score(self.fit(p, steps, purpose)) for p in programs]
        found = self.team.train([(p, steps, purpose) for p in programs])
        lost = [f"structure {i} of {len(found)}: {x.reason}" for i, x in enumerate(found) if isinstance(x, Failed)]
        if len(lost) == len(found):
            raise WorkerError("no structure has a loss", where=self.start.name, got="; ".join(lost[:3]))
        self.failures += lost
        losses = []
        for p, trained in zip(programs, found, strict=True):
            if isinstance(trained, Failed):
                trained = Trained(inf, {})
            trained.write(p)
            self._spend(max(steps, 0))
            self.curve.append((self.spent, trained.loss))
            losses.append(trained.loss)
        return losses

    def outcomes(self, structures: Sequence[tuple[str, ...]], steps: int) -> list[SearchOutcome]:
        """Build structures, and train and score each; see `losses`."""
        programs = [self.structure(chosen) for chosen in structures]
        found = zip(structures, programs, self.losses(programs, steps), strict=True)
        return [SearchOutcome(chosen, p, loss) for chosen, p, loss in found]

    def outcome(self, chosen: tuple[str, ...], steps: int | None = None) -> SearchOutcome:
        """Build a structure, train it (by default for all remaining steps), and score it."""
        return self.outcomes([chosen], self.left if steps is None else steps)[0]

    @property
    def left(self) -> int:
        """The remaining steps of the budget."""
        return self.budget - self.spent

    def _spend(self, steps: int) -> None:
        self.spent += steps
        if self.progress is not None and steps:
            facts = {"loss": self.curve[-1][1]} if self.curve else {}
            self.progress(Progress("search", min(self.spent, self.budget), self.budget, facts))


# -- workers -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Trained:
    """What comes back of a trial: the validation loss, and the weights after training by key."""

    loss: float
    weights: Mapping[str, NDArray]

    @classmethod
    def of(cls, p: Program, loss: float) -> Self:
        """Return the loss and the weights of a program."""
        keys = [key for key in p.variables() if key not in p.patterns]
        return cls(loss, {key: p.weights.array(key) for key in keys})

    def write(self, p: Program) -> None:
        """Assign the weights to a program of the same structure."""
        variables = p.variables()
        for key, array in self.weights.items():
            variables[key].assign(as_tensor(array))


@dataclass(frozen=True, slots=True)
class WholeMethod:
    """What comes back of a method that one worker ran: its outcome without the program, its state, its warnings.

    Attributes:
        structure: `structure_hash()` of the trained program.
    """

    chosen: tuple[str, ...]
    trained: Trained
    structure: str
    spent: int
    curve: list[tuple[int, float]]
    warnings: list[Warning | str]

    def outcome(self, t: Trials, name: str) -> SearchOutcome:
        """Add the state to `t`, show the warnings, and return the outcome with its program.

        Raises: UsageError if the program is not that of `t.outcome(chosen)`.
        """
        p = t.structure(self.chosen)
        if p.structure_hash() != self.structure:
            raise UsageError("a method that one worker runs does not return an outcome of `Trials.outcome`", where=name,
                             fix="register it without whole=True")  # fmt: skip
        self.trained.write(p)
        t.spent, t.curve = self.spent, self.curve
        for each in self.warnings:
            warnings.warn(each, stacklevel=4)
        return SearchOutcome(self.chosen, p, self.trained.loss)


class Team:
    """The workers of a search, and what they get once: its arguments, and the numbers of threads of this process.

    Raises: UsageError if the arguments cannot be sent, or not be loaded there; WorkerError if no worker starts.
    """

    def __init__(self, pool: Pool, given: Trials) -> None:
        self.pool, self.shared = pool, (given.fresh(progress=None, team=None), thread_counts())
        wait_for_native_code()
        arrive(pool, self.shared, given.start.name)

    def train(self, trials: Sequence[tuple[Program, int, int]]) -> list[Trained | Failed]:
        """Train and score programs, given with their steps and the purpose of their batches."""
        return self.pool.map(_train, trials, self.shared)

    def run(self, methods: Sequence[Callable[[Trials], SearchOutcome]]) -> list[WholeMethod | Failed]:
        """Run each method as a whole."""
        return self.pool.map(_run, methods, self.shared)


def _train(shared: tuple[Trials, ThreadCounts], trial: tuple[Program, int, int]) -> Trained:
    t, (p, steps, purpose) = shared[0].fresh(), trial
    with using_threads(shared[1]):
        return Trained.of(p, t.score(t.fit(p, steps, purpose)))


def _run(shared: tuple[Trials, ThreadCounts], method: Callable[[Trials], SearchOutcome]) -> WholeMethod:
    t = shared[0].fresh()
    with using_threads(shared[1]), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = method(t)
    trained, structure = Trained.of(found.program, found.loss), found.program.structure_hash()
    return WholeMethod(found.chosen, trained, structure, t.spent, t.curve, [each.message for each in heard])
