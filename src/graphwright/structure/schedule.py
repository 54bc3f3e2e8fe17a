"""How a temperature falls: T(0) = start, T(steps) = end, monotone, and end from there on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from math import cos, pi
from typing import TYPE_CHECKING

import numpy as np

from graphwright.array import from_numpy
from graphwright.autograd import Tensor
from graphwright.errors import UsageError
from graphwright.program.gates import LOGITS
from graphwright.structure.errors import whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphwright.structure.graph import DifferentiableGraph

FORMS = ("exponential", "linear", "cosine")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A temperature over steps; with 0 steps it stays at the start.

    Attributes:
        start, end: temperatures > 0, end <= start.
        steps: after which the end is reached.
        form: `exponential`, `linear` or `cosine`.
    Raises: UsageError.
    """

    start: float = 1.0
    end: float = 0.1
    steps: int = 0
    form: str = "exponential"

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise UsageError(f"the form is {self.form!r}: expected one of {', '.join(FORMS)}")
        if not 0 < self.end <= self.start:
            raise UsageError(f"from {self.start} to {self.end}: expected 0 < end <= start")
        whole("steps", self.steps)

    def at(self, step: int) -> float:
        """The temperature of a step, counted from 0."""
        if not self.steps:
            return self.start
        x = min(max(step, 0) / self.steps, 1.0)
        if self.form == "exponential":
            return max(self.end, self.start * (self.end / self.start) ** x)
        if self.form == "linear":
            return self.start + (self.end - self.start) * x
        return self.end + (self.start - self.end) * (1 + cos(pi * x)) / 2


LEVEL = 0.05
"""A loss that falls by less than this share from one window to the next has levelled off."""


class Wait:
    """Steps on weights alone at first.

    Args:
        most: that are waited, at most; levels: whether less will do, once the loss has levelled off.
        steps: of the run; a window is a fifteenth of them, from 10 to 50.

    Attributes:
        until: the step at which gates begin, by now.
        losses: of the task while waiting; after that, none.
    """

    def __init__(self, most: int, levels: bool, steps: int) -> None:
        self.until, self.levels, self.window = most, levels, max(10, min(50, steps // 15))
        self.losses: list[float] = []

    def saw(self, step: int, loss: float) -> None:
        """The loss of a step, which is over."""
        if not self.levels or step >= self.until:
            self.losses.clear()
            return
        w = self.window
        self.losses = [*self.losses, loss][-2 * w :]
        if len(self.losses) == 2 * w:
            before, now = np.mean(self.losses[:w]), np.mean(self.losses[w:])
            if before - now < LEVEL * abs(before):
                self.until = step + 1


def worth(view: DifferentiableGraph, loss: Callable[[], float], limit: float) -> float:
    """The loss with all soft gates closed, less that with all open; where that is no gain, the size of the latter.

    Args:
        loss: of the program as it is; limit: size of the logits at which gates are closed.
    """
    with view.using("open"):
        opened = loss()
    with view.using("hard"), _closed(view, limit):
        gained = loss() - opened
    return gained if np.isfinite(gained) and gained > 0 else abs(opened)


@contextmanager
def _closed(view: DifferentiableGraph, limit: float) -> Iterator[None]:
    held = view.program.weights[LOGITS]
    before = held.data.to_numpy().copy()
    low = np.full(held.shape, -limit, held.dtype.numpy)
    for e in view.elements():
        if e.gate.kind == "scale":
            low[e.place] = 0
    held.assign(Tensor(from_numpy(low)))
    try:
        yield
    finally:
        held.assign(Tensor(from_numpy(before)))
