"""How a network is trained, as genes: a rate on a ladder, an optimizer, a loss. Inherited, crossed over, mutated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

LADDER = tuple(10.0 ** (-5 + i / 3) for i in range(13))
"""Learning rates, 1e-5 to 1e-1."""
OPTIMIZERS = ("adam", "sgd")
_RANGE = {"adam": (6, 9), "sgd": (8, 12)}  # places on the ladder that an optimizer begins with: 1e-3 to 1e-2, 5e-3 on
LOSSES = {"bce": ("bce", "mse"), "cross_entropy": ("cross_entropy", "mse"), "mse": ("mse", "huber")}
"""Loss of a task -> losses that training may lower instead; fitness is always by the task's own."""


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

    def step(self, rng: np.random.Generator) -> Recipe:
        """Another rate: one place up or down four times of five, else two; the ladder's ends hold."""
        step = int(rng.choice([-2, -1, 1, 2], p=[0.1, 0.4, 0.4, 0.1]))
        return replace(self, rate=min(max(self.rate + step, 0), len(LADDER) - 1))

    def switch(self) -> Recipe:
        """The other optimizer, its rate within what that one begins with."""
        other = next(o for o in OPTIMIZERS if o != self.optimizer)
        low, high = _RANGE[other]
        return replace(self, optimizer=other, rate=min(max(self.rate, low), high))

    def relearn(self, losses: Iterable[str]) -> Recipe:
        """The next of the losses."""
        names = list(losses)
        return replace(self, loss=names[(names.index(self.loss) + 1) % len(names)])

    def to_json(self) -> dict[str, Any]:
        """By name, with the rate in numbers too."""
        return {"rate": self.rate, "lr": self.lr, "optimizer": self.optimizer, "loss": self.loss}

    def __str__(self) -> str:
        return f"{self.optimizer} {self.lr:.2g}, {self.loss}"
