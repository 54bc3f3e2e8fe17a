"""The exposure gap: how much worse a model predicts a target after its own output than after the target itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from graphwright.arguments import checked
from graphwright.lifecycle.on_policy import EXTRA
from graphwright.lifecycle.prefixes import TrainingRows, pairs_of
from graphwright.metrics import nll
from graphwright.models.generation.batched import GreedyBatch
from graphwright.report import Report
from graphwright.settings import AtLeastOne

if TYPE_CHECKING:
    from graphwright.models.model import Model


@dataclass(frozen=True, slots=True, repr=False)
class ExposureGap(Report):
    """Cross-entropy of the targets of some tasks after two kinds of prefixes.

    Attributes:
        tasks: number of tasks.
        forced: CE after the targets' own prefixes, mean over tasks of the mean nats per token.
        own: CE' after the model's greedy outputs, see `OnPolicy`.
        exact: share of outputs that are equal to their targets.
        first_errors: of each output with an error, the index of the first token that differs from the target.
    """

    tasks: int
    forced: float
    own: float
    exact: float
    first_errors: list[int] = field(default_factory=list)
    FIGURES: ClassVar = ("gap", "first_error")

    @property
    def gap(self) -> float:
        """CE' - CE in nats per token: 0 if all outputs are equal to the targets."""
        return self.own - self.forced

    @property
    def first_error(self) -> float | None:
        """Mean index of the first wrong token of the outputs with an error; None if there are none."""
        return float(np.mean(self.first_errors)) if self.first_errors else None

    def _text(self) -> str:
        at = "" if self.first_error is None else f", first error at token {self.first_error:.1f} on average"
        return (
            f"exposure gap   {self.gap:+.4f} nats a token\n"
            f"prefixes       {self.forced:.4f} of the target, {self.own:.4f} own\n"
            f"exact match    {self.exact:.1%} of {self.tasks} tasks{at}"
        )


@checked
def exposure_gap(
    model: Model, tasks: Any, *, count: AtLeastOne = 64, batch: AtLeastOne = 16, pad: int | None = None
) -> ExposureGap:  # fmt: skip
    """Measure a model's exposure gap on held-out tasks.

    >>> print(lf.exposure_gap(model, gw.data.grids("flip", side=4, seed=1)))

    Args:
        tasks: a dataset of grid tasks or of pairs (prompt, answer), or a batch as in `OnPolicy.step`.
        count: largest number of tasks of a dataset that are read.
        batch: number of tasks that run together.
        pad: id of the padding at the end of rows; by default `pad_token_id` of the model's config.
    Raises: UsageError for other tasks; PromptError for ids out of range; NonFinite if the logits are not finite.
    """
    pairs = pairs_of(tasks, model, pad, count)
    outputs = GreedyBatch(model, batch)([prompt for prompt, _ in pairs], [len(y) + EXTRA for _, y in pairs])
    forced = _cross_entropy(model, [(x, y, y, 1.0) for x, y in pairs], batch)
    own = _cross_entropy(model, [(x, made, y, 1.0) for (x, y), made in zip(pairs, outputs, strict=True)], batch)
    wrong = [
        int(np.argmax([*(made[:n] != y[:n]), True]))
        for (_, y), made in zip(pairs, outputs, strict=True)
        if not np.array_equal(made, y)
        for n in (min(len(made), len(y)),)
    ]
    return ExposureGap(len(pairs), forced, own, 1 - len(wrong) / len(pairs), wrong)


def _cross_entropy(model: Model, rows: list[tuple[np.ndarray, np.ndarray, np.ndarray, float]], batch: int) -> float:
    """Return the mean over rows of the mean nats per predicted token."""
    longest, total = max(len(x) + len(y) - 1 for x, _, y, _ in rows), 0.0
    for first in range(0, len(rows), batch):
        part = TrainingRows.of(rows[first : first + batch], longest)
        at = np.nonzero(part.weights)
        total += float((nll(model.logits(part.ids)[at], part.targets[at]) * part.weights[at]).sum())
    return total / len(rows)
