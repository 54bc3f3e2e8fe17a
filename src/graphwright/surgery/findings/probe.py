"""A probe: one batch and a loss, run once on a fork of the program, with gradients where a rule asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from graphwright.program import Program, Run, Value
from graphwright.progress import Progress, Report


class Cancelled(Exception):
    """The caller wants no more; what was found so far is kept."""


class Probe:
    """What rules of the kind `probe` run.

    Attributes:
        inputs: arrays by input name.
        loss: name of an output or node whose sum is the loss; or a function that adds one to a fork and gives its name;
            None if none was given.
    """

    def __init__(
        self,
        inputs: Mapping[str, Any],
        loss: str | Callable[[Program], str] | None,
        report: Report | None = None,
        cancel: Callable[[], bool] | None = None,
    ) -> None:
        self.inputs, self.loss = dict(inputs), loss
        self._report, self._cancel = report, cancel
        self._run: tuple[Program, int, Run, str | None] | None = None

    def step(self, what: str, done: int, total: int) -> None:
        """Report progress. Raises: Cancelled."""
        if self._report is not None:
            self._report(Progress(what, done, total))
        if self._cancel is not None and self._cancel():
            raise Cancelled

    def run(self, p: Program) -> Run:
        """All values of one run; states are written on a fork only."""
        return self._made(p)[2]

    def _made(self, p: Program) -> tuple[Program, int, Run, str | None]:
        if self._run is None or self._run[0] is not p or self._run[1] != p.version:
            self.step("probe", 0, 1)
            twin = p.fork()
            name = self.loss(twin) if callable(self.loss) else self.loss
            self._run = p, p.version, twin.run(self.inputs), name
        return self._run

    def gradients(self, p: Program, wrt: Sequence[Value]) -> dict[Value, np.ndarray]:
        """D loss / d of some values, as float64 arrays."""
        _, _, made, loss = self._made(p)
        if loss is None or not wrt:
            return {}
        self.step("gradients", 0, 1)
        found = made.grad(loss, list(wrt))
        return {v: g.to_numpy("float64") for v, g in zip(wrt, found, strict=True)}
