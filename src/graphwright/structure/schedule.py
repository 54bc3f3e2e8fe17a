"""Temperature schedules, the warm-up on weights alone, and the gain of all gates."""

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
class TemperatureSchedule:
    """A temperature that falls monotonically over steps; with 0 steps it stays at the start.

    Attributes:
        start, end: temperatures > 0, end <= start.
        steps: until the end is reached.
        form: `exponential`, `linear` or `cosine`.
    Raises: UsageError.
    """

    start: float = 1.0
    end: float = 0.1
    steps: int = 0
    form: str = "exponential"

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise UsageError("unknown form of schedule", expected=", ".join(FORMS), got=self.form)
        if not 0 < self.end <= self.start:
            raise UsageError("the temperatures are out of range", expected="0 < end <= start",
                             got=(self.start, self.end))  # fmt: skip
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
"""Share of the loss; a smaller decrease from one window to the next counts as levelled off."""


class WarmUp:
    """The first steps, which train weights alone.

    Args:
        most: largest number of steps.
        levels: whether it ends as soon as the loss has levelled off.
        steps: of the run; a window is a fifteenth of them, from 10 to 50.

    Attributes:
        until: the step at which gates start, as currently known.
        losses: of the task during the warm-up; empty afterwards.
    """

    def __init__(self, most: int, levels: bool, steps: int) -> None:
        self.until, self.levels, self.window = most, levels, max(10, min(50, steps // 15))
        self.losses: list[float] = []

    def saw(self, step: int, loss: float) -> None:
        """Record the task's loss of a finished step."""
        if not self.levels or step >= self.until:
            self.losses.clear()
            return
        w = self.window
        self.losses = [*self.losses, loss][-2 * w :]
        if len(self.losses) == 2 * w:
            before, now = np.mean(self.losses[:w]), np.mean(self.losses[w:])
            if before - now < LEVEL * abs(before):
                self.until = step + 1


def gates_gain(view: DifferentiableGraph, loss: Callable[[], float], limit: float) -> float:
    """The loss with all soft gates closed less that with all open; |loss with gates open| if that is not positive.

    Args:
        loss: computes the loss of the program.
        limit: size of the logits at which gates are closed.
    """
    with view.using("open"):
        value_with_gates_open = loss()
    with view.using("hard"), _closed(view, limit):
        gain = loss() - value_with_gates_open
    return gain if np.isfinite(gain) and gain > 0 else abs(value_with_gates_open)


@contextmanager
def _closed(view: DifferentiableGraph, limit: float) -> Iterator[None]:
    held = view.program.weights[LOGITS]
    before = held.data.to_numpy().copy()
    low = np.full(held.shape, -limit, held.dtype.numpy)
    for e in view.elements():
        if e.gate.kind == "scale":
            low[e.offset] = 0
    held.assign(Tensor(from_numpy(low)))
    try:
        yield
    finally:
        held.assign(Tensor(from_numpy(before)))
