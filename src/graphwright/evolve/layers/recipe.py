"""How a network is trained, as genes: a rate on a ladder, an optimizer, a loss. Inherited, crossed over, mutated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

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
