"""What answers are compared with: one head, or several by name, each with its loss, weight and metric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from graphwright.evolve.errors import TaskError

METRICS = ("accuracy", "r2")
LOSSES = ("mse", "bce", "cross_entropy")


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """One of several things to predict.

    Attributes:
        targets: [N] or [N, outputs] or [N, T, outputs]; whole numbers 0, 1, ... for cross entropy.
        loss: "mse", "bce" or "cross_entropy"; weight: its share of the task's loss.
        metric: "accuracy" or "r2"; by the loss if it is None.
    """

    targets: Any
    loss: Literal["mse", "bce", "cross_entropy"] = "bce"
    weight: float = 1.0
    metric: str | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """A head by its place among the outputs.

    Attributes:
        name, loss, metric, weight: see `Head`; start, stop: its outputs.
    """

    name: str
    loss: str
    metric: str
    weight: float
    start: int
    stop: int

    @staticmethod
    def of(name: str, head: Head, start: int, width: int) -> Measured:
        """Checked. Raises: TaskError."""
        if head.loss not in LOSSES:
            raise TaskError("no such loss", where=name, expected=", ".join(LOSSES), got=head.loss)
        metric = head.metric or ("r2" if head.loss == "mse" else "accuracy")
        if metric not in METRICS:
            raise TaskError("no such metric", where=name, expected=", ".join(METRICS), got=metric)
        if not (np.isfinite(head.weight) and head.weight > 0):
            raise TaskError("a head counts something", where=name, expected="a weight above 0", got=head.weight)
        return Measured(name, head.loss, metric, float(head.weight), start, start + width)

    @property
    def outputs(self) -> slice:
        """Its outputs."""
        return slice(self.start, self.stop)

    def cost(self, y: np.ndarray, wanted: np.ndarray, share: np.ndarray, logits: bool) -> np.ndarray:
        """Loss of answers [G, N, T, outputs] of all heads; `share` [N, T] sums to 1. Float64 [G], without weight."""
        y, wanted = y[..., self.outputs], wanted[..., self.outputs].astype(np.float64)
        if self.loss == "mse":
            each = ((y - wanted) ** 2).mean(-1)
        else:
            p = probabilities(y, self.loss) if logits else np.clip(y, 1e-7, 1 - 1e-7)
            if self.loss == "cross_entropy":
                p = p if logits else p / p.sum(-1, keepdims=True)
                each = -(wanted * np.log(np.maximum(p, 1e-30))).sum(-1)
            else:
                p = np.clip(p, 1e-30, None), np.clip(1 - p, 1e-30, None)
                each = -(wanted * np.log(p[0]) + (1 - wanted) * np.log(p[1])).mean(-1)
        return np.ascontiguousarray((each * share).reshape(len(y), -1)).sum(1)

    def measure(self, final: np.ndarray, right: np.ndarray, logits: bool) -> np.ndarray:
        """The metric of last answers [G, N, outputs] of all heads; float64 [G]."""
        if self.stop - self.start < final.shape[-1]:
            final, right = np.ascontiguousarray(final[..., self.outputs]), right[..., self.outputs]
        if self.metric == "r2":
            spread = ((right - right.mean(0)) ** 2).sum()
            return 1 - np.ascontiguousarray(((final - right) ** 2).reshape(len(final), -1)).sum(1) / max(spread, 1e-30)
        if self.loss == "cross_entropy":
            hit = final.argmax(-1) == right.argmax(-1)
        else:
            hit = (final > (0.0 if logits else 0.5)) == (right > 0.5)
            hit = hit[..., 0] if hit.shape[-1] == 1 else hit.all(-1)
        return np.add.reduce(hit, -1) / hit.shape[-1]


def probabilities(logits: np.ndarray, loss: str) -> np.ndarray:
    """Softmax over the last axis for cross entropy, else σ of each."""
    if loss == "cross_entropy":
        grown = np.exp(logits - logits.max(-1, keepdims=True))
        return grown / grown.sum(-1, keepdims=True)
    return 0.5 * (1 + np.tanh(0.5 * logits))
