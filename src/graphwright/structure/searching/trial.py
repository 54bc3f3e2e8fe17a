"""Trials: the data, budget and training that all methods of a search share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.autograd import no_grad
from graphwright.errors import UsageError
from graphwright.optim.lr_scheduler import CosineAnnealingLR
from graphwright.progress import Progress
from graphwright.structure.graph import DifferentiableGraph, as_tensor
from graphwright.structure.optimizer import JointOptimizer

if TYPE_CHECKING:
    from graphwright.program import Program
    from graphwright.progress import Report
    from graphwright.structure.graph import Task
    from graphwright.structure.searching.candidates import Candidates

Batch = Mapping[str, Any]
Batches = Callable[[np.random.Generator], Batch]


@dataclass(slots=True)
class Trials:
    """One search by one method.

    Attributes:
        start: the program before the search; never changed.
        candidates: to choose from.
        train: function of a random generator that returns a batch.
        valid: a batch for validation only.
        task: name of a scalar output, or a function of (outputs, batch).
        budget: training steps, including retraining.
        seed: of batches; all structures are trained on the same ones.
        lr: of Adam on the weights, with cosine decay to a twentieth.
        spent: steps so far.
        curve: (steps, validation loss) of each scored structure.
    """

    start: Program
    candidates: Candidates
    train: Batches
    valid: Batch
    task: Task
    budget: int
    seed: int
    lr: float
    report: Report | None = None
    spent: int = 0
    curve: list[tuple[int, float]] = field(default_factory=list)

    def rng(self, purpose: int) -> np.random.Generator:
        """A random generator for one purpose."""
        return np.random.Generator(np.random.Philox(key=[self.seed, purpose]))

    def structure(self, chosen: Collection[str]) -> Program:
        """The start with chosen candidates and its initial weights."""
        p = self.start.fork()
        self.candidates.build(p, chosen)
        return p

    def fit(self, p: Program, steps: int, purpose: int = 0) -> Program:
        """Train the weights of a program in place for some steps of the budget."""
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
            purpose: of the random stream of batches.
            valid: purpose of a second stream, for optimizers with two batches, each of which counts as a step.
        """
        assert opt.weights is not None
        schedule = CosineAnnealingLR(opt.weights, steps, eta_min=self.lr / 20)
        rng, other = self.rng(purpose), None if valid is None else self.rng(valid)
        for _ in range(steps):
            opt.step(self.train(rng), None if other is None else self.train(other))
            schedule.step()
        self.spent += steps if other is None else 2 * steps
        if self.report is not None:
            facts = {"loss": self.curve[-1][1]} if self.curve else {}
            self.report(Progress("search", min(self.spent, self.budget), self.budget, facts))

    def score(self, p: Program) -> float:
        """The task's loss on the validation batch; appended to the curve."""
        with no_grad():
            feeds = {n: as_tensor(v) for n, v in self.valid.items()}
            loss, _, _ = DifferentiableGraph(p, seed=self.seed).evaluate(feeds, self.task)
        found = loss.item()
        self.curve.append((self.spent, found))
        return found

    @property
    def left(self) -> int:
        """Remaining steps."""
        return self.budget - self.spent


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """Result of one method: chosen names, trained program, validation loss."""

    chosen: tuple[str, ...]
    program: Program
    loss: float
