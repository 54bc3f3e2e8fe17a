"""Heads of a task: the targets of one output group, with loss, weight and metric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from graphwright.evolve.errors import TaskError

METRICS = ("accuracy", "r2")
LOSSES = ("mse", "bce", "cross_entropy")


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """One of several targets of a task.

    Attributes:
        targets: [N] or [N, outputs] or [N, T, outputs]; integers 0, 1, ... for cross entropy.
        loss: "mse", "bce" or "cross_entropy"; weight: weight in the loss of the task.
        metric: "accuracy" or "r2"; None chooses by the loss.
    """

    targets: Any
    loss: Literal["mse", "bce", "cross_entropy"] = "bce"
    weight: float = 1.0
    metric: str | None = None


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """A head as a range of outputs.

    Attributes:
        name, loss, metric, weight: see `Head`; start, stop: its range of outputs.
    """

    name: str
    loss: str
    metric: str
    weight: float
    start: int
    stop: int

    @staticmethod
    def of(name: str, head: Head, start: int, width: int) -> HeadSpec:
        """Check a head and assign its outputs. Raises: TaskError."""
        if head.loss not in LOSSES:
            raise TaskError("unknown loss", where=name, expected=", ".join(LOSSES), got=head.loss)
        metric = head.metric or ("r2" if head.loss == "mse" else "accuracy")
        if metric not in METRICS:
            raise TaskError("unknown metric", where=name, expected=", ".join(METRICS), got=metric)
        if not (np.isfinite(head.weight) and head.weight > 0):
            raise TaskError("the weight of a head must be above 0", where=name, got=head.weight)
        return HeadSpec(name, head.loss, metric, float(head.weight), start, start + width)

    @property
    def outputs(self) -> slice:
        """The outputs of the head."""
        return slice(self.start, self.stop)

    def cost(self, y: np.ndarray, wanted: np.ndarray, share: np.ndarray, logits: bool) -> np.ndarray:
        """Compute the unweighted loss from the answers [G, N, T, outputs] of all heads, float64 [G].

        `share` [N, T] are weights of steps that sum to 1.
        """
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
        """Compute the metric from the last answers [G, N, outputs] of all heads; float64 [G]."""
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
    """Softmax over the last axis for cross entropy, else σ(x), elementwise."""
    if loss == "cross_entropy":
        grown = np.exp(logits - logits.max(-1, keepdims=True))
        return grown / grown.sum(-1, keepdims=True)
    return 0.5 * (1 + np.tanh(0.5 * logits))
