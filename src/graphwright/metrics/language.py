"""Metrics of language models: the perplexity of logits."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, nan

import numpy as np

from graphwright.array import from_numpy
from graphwright.errors import ShapeError
from graphwright.metrics.metric import Metric, Statistics, check_ids, of_batch
from graphwright.ops import call


def nll(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return -ln softmax(logits)[ids] in nats, float64, for logits [..., V] and ids [...].

    Raises: DTypeError for ids that are not integers, IndexOutOfRange for ids outside 0..V-1.
    """
    check_ids(ids, logits.shape[-1], "nll")
    rows, wanted = logits.reshape(-1, logits.shape[-1]).astype(np.float64), np.ascontiguousarray(ids, np.int64)
    return call("cross_entropy", from_numpy(rows), from_numpy(wanted.reshape(-1)))[0].to_numpy().reshape(ids.shape)


@dataclass(kw_only=True)
class Perplexity(Metric[float]):
    """exp of the mean -ln softmax(logits)[target]: predictions are logits [..., V], targets ids [...].

    Computed in float64. The figure of no samples is NaN.

    Attributes:
        ignore_index: target of positions to leave out.
    Raises: ShapeError; DTypeError for targets that are not integers; IndexOutOfRange for a target outside 0..V-1.
    """

    ignore_index: int = -100

    def statistics(self, predictions: np.ndarray, targets: np.ndarray) -> Statistics:
        """Return the sum of nats and the number of targets."""
        if not predictions.ndim or predictions.shape[:-1] != targets.shape:
            raise ShapeError("the logits do not have one row per target", where="Perplexity",
                             expected=[*targets.shape, "V"], got=list(predictions.shape))  # fmt: skip
        keep = targets != self.ignore_index
        return nll(predictions[keep], targets[keep]).sum(), np.asarray(keep.sum())

    def figure(self, *statistics: np.ndarray) -> float:
        """Return the perplexity."""
        nats, count = statistics
        return exp(min(float(nats / count), 700)) if count else nan


perplexity = of_batch(Perplexity)
