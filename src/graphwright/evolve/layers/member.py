"""A network that evolved, and how it came to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from graphwright.program import Program

LADDER = tuple(10.0 ** (-5 + i / 3) for i in range(13))
"""Learning rates, 1e-5 to 1e-1."""
OPTIMIZERS = ("adam", "sgd")
_RANGE = {"adam": (6, 9), "sgd": (8, 12)}  # places on the ladder that an optimizer begins with: 1e-3 to 1e-2, 5e-3 on
LOSSES = {
    "bce": ("bce", "mse"),
    "cross_entropy": ("cross_entropy", "mse"),
    "mse": ("mse", "huber"),
    "heads": ("heads",),
}
"""Loss of a task -> losses that training may lower instead; fitness is always by the task's own."""
GENES = {"learning_rate": (0.05, 0.15), "optimizer": (0.02, 0.08), "loss": (0.02, 0.02)}
"""How often a gene of training changes, early and late in a run, beside the mutations of layers."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Genes of training.

    Attributes:
        rate: place on `LADDER`; optimizer: of `OPTIMIZERS`; loss: of `LOSSES[task.loss]`.
    """

    rate: int
    optimizer: str
    loss: str

    @classmethod
    def of(cls, lr: float, optimizer: str, loss: str) -> Recipe:
        """With the rate of the ladder nearest to `lr`."""
        return cls(int(np.argmin([abs(np.log(v / lr)) for v in LADDER])), optimizer, loss)

    @property
    def lr(self) -> float:
        """The learning rate."""
        return LADDER[self.rate]

    def changed(self, gene: str, losses: Sequence[str], rng: np.random.Generator) -> Recipe:
        """Another value of one of `GENES`; `losses` are those that training may lower."""
        if gene == "learning_rate":
            return self.step(rng)
        return self.switch() if gene == "optimizer" else self.relearn(losses)

    def step(self, rng: np.random.Generator) -> Recipe:
        """Another rate: one place up or down four times of five, else two; the ladder's ends hold."""
        step = int(rng.choice([-2, -1, 1, 2], p=[0.1, 0.4, 0.4, 0.1]))
        return replace(self, rate=min(max(self.rate + step, 0), len(LADDER) - 1))

    def switch(self) -> Recipe:
        """The other optimizer, its rate within what that one begins with."""
        other = next(o for o in OPTIMIZERS if o != self.optimizer)
        low, high = _RANGE[other]
        return replace(self, optimizer=other, rate=min(max(self.rate, low), high))

    def relearn(self, losses: Sequence[str]) -> Recipe:
        """The next of the losses."""
        return replace(self, loss=losses[(losses.index(self.loss) + 1) % len(losses)])

    def to_json(self) -> dict[str, Any]:
        """By name, with the rate in numbers too."""
        return {"rate": self.rate, "lr": self.lr, "optimizer": self.optimizer, "loss": self.loss}

    def __str__(self) -> str:
        return f"{self.optimizer} {self.lr:.2g}, {self.loss}"


Moments = dict[str, np.ndarray]
"""State of an optimizer, by name."""


@dataclass(frozen=True, slots=True)
class Birth:
    """How a network came to be.

    Attributes:
        number: in order of birth; generation: of the run; mother, father: their numbers, or None.
        mutation, site, block: what was done, where, and the name of the part it added; empty where nothing was.
        recipe: how it was trained.
        metric, loss: on the validation cases, None if it failed; failure: why.
        params, flops: numbers in its weights; floating-point operations of one case.
        author: "evolution", or "human" for an edit by hand of the mother; why: what a human said of it; edits: the
            lines of the journal.
    """

    number: int
    generation: int
    fitter_parent: int | None
    other_parent: int | None
    mutation: str
    site: str
    block: str
    recipe: Recipe
    metric: float | None
    loss: float
    params: int
    flops: int
    failure: str = ""
    author: str = "evolution"
    why: str = ""
    edits: tuple[dict[str, Any], ...] = ()

    @property
    def what(self) -> str:
        """In words."""
        if self.author == "human":
            return f"by hand, {self.why}"
        place = f" at {self.site}" if self.site else ""
        crossed = f", crossed with {self.other_parent}" if self.other_parent is not None else ""
        return f"{self.mutation or 'start'}{place}{crossed}"

    def value(self, objective: str) -> float:
        """One objective, to be raised."""
        if self.metric is None:
            return float("-inf")
        if objective == "metric":
            return self.metric
        return -float({"loss": self.loss, "params": self.params, "flops": self.flops}[objective])

    def __str__(self) -> str:
        score = self.failure or f"{self.metric:.4g}"
        return f"{self.number}: {self.what}; {self.recipe}; {score}"


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A network of the population.

    Attributes:
        birth: how it came to be, and what it scored.
        program: as it was scored; its journal says what evolution did to it.
        moments: of its optimizer, for its children to go on with.
        seedling, seeds: program and moments before training, where children get these.
    """

    birth: Birth
    program: Program
    moments: Moments
    seedling: Program | None = None
    seeds: Moments = field(default_factory=dict)

    @property
    def heritage(self) -> tuple[Program, Moments]:
        """What children begin with."""
        return (self.program, self.moments) if self.seedling is None else (self.seedling, self.seeds)

    @property
    def number(self) -> int:
        """In order of birth."""
        return self.birth.number

    @property
    def metric(self) -> float:
        """On the validation cases."""
        assert self.birth.metric is not None  # who failed is no member
        return self.birth.metric

    def __repr__(self) -> str:
        return f"Member({self.birth})"
