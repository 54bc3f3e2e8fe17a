"""What all methods of a search are given: the start, data, and training of a structure at a counted price."""

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
    """One search by one method: its budget, and what was spent of it.

    Attributes:
        start: the program before the search; it is never changed.
        candidates: what may be added.
        train: batches by a random generator; valid: one batch that no weight is trained on.
        task: a scalar output by name, or a function of (outputs, batch).
        budget: training steps, retraining included.
        seed: of batches; structures that are compared are trained on the same ones.
        lr: of Adam on the weights, falling to a twentieth by a cosine.
        spent: steps so far; curve: (steps, validation loss) of each structure that was scored.
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
        """Random numbers for one purpose."""
        return np.random.Generator(np.random.Philox(key=[self.seed, purpose]))

    def structure(self, chosen: Collection[str]) -> Program:
        """The start with some candidates, at its first weights."""
        p = self.start.fork()
        self.candidates.build(p, chosen)
        return p

    def fit(self, p: Program, steps: int, purpose: int = 0) -> Program:
        """Train the weights of a program in place, for so many steps of the budget."""
        if steps <= 0:
            return p
        view = DifferentiableGraph(p, seed=self.seed)
        opt = JointOptimizer(view, self.task, params=self.lr, mode="params")
        if opt.weights is None:
            raise UsageError("there is nothing to train", where=p.name)
        self.drive(opt, steps, purpose)
        return p

    def drive(self, opt: JointOptimizer, steps: int, purpose: int, valid: int | None = None) -> None:
        """So many steps of the budget by an optimizer, its rate on the weights falling by a cosine.

        Args:
            purpose: of the random stream of batches; valid: of a second one, for optimizers that want two batches, each
                of which counts as a step.
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
        """The task's loss on the validation batch; entered into the curve."""
        with no_grad():
            feeds = {n: as_tensor(v) for n, v in self.valid.items()}
            loss, _, _ = DifferentiableGraph(p, seed=self.seed).evaluate(feeds, self.task)
        found = loss.item()
        self.curve.append((self.spent, found))
        return found

    @property
    def left(self) -> int:
        """Steps that are left."""
        return self.budget - self.spent


@dataclass(frozen=True, slots=True)
class Found:
    """What a method found: the names it chose, the trained program, its validation loss."""

    chosen: tuple[str, ...]
    program: Program
    loss: float
