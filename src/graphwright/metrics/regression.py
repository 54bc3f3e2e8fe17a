"""Metrics of numbers: R², and mean squared and absolute error."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from graphwright.metrics.metric import Metric, Statistics, of_batch, same_shape


@dataclass(kw_only=True)
class R2(Metric[float]):
    """1 - Σ(y - ŷ)² / Σ(y - ȳ)², the share of the variance that is explained, averaged over the outputs.

    Predictions ŷ and targets y are [N] or [N, outputs]. An output whose targets are constant counts as 1 if its
    predictions are exact, else 0, as in scikit-learn. NaN for fewer than two samples.
    Raises: ShapeError.
    Source: Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance", for joining batches.
    """

    def statistics(self, predictions: np.ndarray, targets: np.ndarray) -> Statistics:
        """Return the number of samples, and by output the mean of y, Σ(y - ȳ)² and Σ(y - ŷ)²."""
        same_shape(predictions, targets, "R2")
        rows = len(np.atleast_1d(targets)), prod(targets.shape[1:])
        found, y = (a.astype(np.float64).reshape(rows) for a in (predictions, targets))
        mean = y.mean(0) if len(y) else np.zeros(y.shape[1])
        return np.asarray(len(y)), mean, ((y - mean) ** 2).sum(0), ((y - found) ** 2).sum(0)

    def merged(self, a: Statistics, b: Statistics) -> Statistics:
        """Join counts, means and sums of squares."""
        count, apart = a[0] + b[0], b[1] - a[1]
        share = b[0] / np.maximum(count, 1)
        return count, a[1] + apart * share, a[2] + b[2] + apart**2 * a[0] * share, a[3] + b[3]

    def figure(self, *statistics: np.ndarray) -> float:
        """Return the mean share."""
        count, _, total, error = statistics
        if count < 2:
            return float("nan")
        share = np.where(total > 0, 1 - error / np.where(total > 0, total, 1), error == 0)
        return float(share.mean())


@dataclass(kw_only=True)
class MeanSquaredError(Metric[float]):
    """The mean of (y - ŷ)² over all entries, for predictions and targets of one shape. Raises: ShapeError."""

    def statistics(self, predictions: np.ndarray, targets: np.ndarray) -> Statistics:
        """Return the sum of squares and the number of entries."""
        same_shape(predictions, targets, "MeanSquaredError")
        return ((predictions.astype(np.float64) - targets) ** 2).sum(), np.asarray(targets.size)

    def figure(self, *statistics: np.ndarray) -> float:
        """Return the mean."""
        return float(statistics[0] / statistics[1]) if statistics[1] else float("nan")


@dataclass(kw_only=True)
class MeanAbsoluteError(MeanSquaredError):
    """The mean of the absolute y - ŷ over all entries, for predictions and targets of one shape. Raises: ShapeError."""

    def statistics(self, predictions: np.ndarray, targets: np.ndarray) -> Statistics:
        """Return the sum of differences and the number of entries."""
        same_shape(predictions, targets, "MeanAbsoluteError")
        return np.abs(predictions.astype(np.float64) - targets).sum(), np.asarray(targets.size)


r2 = of_batch(R2)
mean_squared_error = of_batch(MeanSquaredError)
mean_absolute_error = of_batch(MeanAbsoluteError)
