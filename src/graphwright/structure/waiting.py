"""When gates begin to be trained: where the task's loss has levelled off, and what they are worth to the task then.

Over weights that have learned nothing every message only disturbs: gates would close before the weights have a chance.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from graphwright.array import from_numpy
from graphwright.autograd import Tensor
from graphwright.program.gates.gates import LOGITS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphwright.structure.graph import DifferentiableGraph

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
