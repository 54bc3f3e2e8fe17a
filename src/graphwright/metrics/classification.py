"""Metrics of classes: accuracy, the confusion matrix and what follows from it, and the area under the ROC curve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from graphwright.errors import DTypeError, ShapeError, UsageError
from graphwright.metrics.metric import Metric, Statistics, check_ids, of_batch, same_shape
from graphwright.settings import AtLeastOne

R = TypeVar("R")


def _kept(
    predictions: np.ndarray, targets: np.ndarray, ignore_index: int | None, where: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return predictions [N] (ids) or [N, K] (scores) and targets [N], without the rows to ignore."""
    if targets.dtype.kind not in "biu":
        raise DTypeError("targets are not class ids", where=where, expected="integers", got=targets.dtype)
    scores = predictions.ndim == targets.ndim + 1
    if predictions.shape[: targets.ndim] != targets.shape or (not scores and predictions.ndim != targets.ndim):
        fix = "pass scores.argmax(axis), if classes are not on the last axis" if scores else None
        raise ShapeError("there is not one prediction per target", where=where, got=list(predictions.shape), fix=fix,
                         expected=f"ids {list(targets.shape)}, or scores {[*targets.shape, 'K']}")  # fmt: skip
    if not scores and predictions.dtype.kind not in "biu":
        fix = "pass scores [..., K], or for two classes scores > threshold"
        raise DTypeError("predictions of the shape of the targets are not class ids", where=where, expected="integers",
                         got=predictions.dtype, fix=fix)  # fmt: skip
    found, wanted = predictions.reshape(-1, *predictions.shape[targets.ndim :]), targets.reshape(-1).astype(np.int64)
    keep = slice(None) if ignore_index is None else wanted != ignore_index
    return found[keep], wanted[keep]


@dataclass(kw_only=True)
class Accuracy(Metric[float]):
    """The share of targets that are predicted, or are among the `top_k` largest scores.

    Predictions are class ids in the shape of the targets, or scores [..., K]; targets are ids [...]. Equal scores are
    ranked by class. The figure of no samples is NaN.

    Attributes:
        top_k: number of classes among which the target counts as predicted.
        ignore_index: target of samples to leave out.
    Raises: ShapeError, DTypeError; IndexOutOfRange for a target outside 0..K-1; UsageError for top_k > 1 with ids.
    """

    top_k: AtLeastOne = 1
    ignore_index: int | None = None

    def statistics(self, predictions: np.ndarray, targets: np.ndarray) -> Statistics:
        """Return the number of predicted targets and of targets."""
        found, wanted = _kept(predictions, targets, self.ignore_index, "Accuracy")
        if found.ndim == 1:
            if self.top_k > 1:
                raise UsageError("top_k needs scores", where="Accuracy", expected="scores [..., K]", got="class ids")
            return np.asarray((found == wanted).sum()), np.asarray(len(wanted))
        check_ids(wanted, found.shape[1], "Accuracy")
        own, index = found[np.arange(len(wanted)), wanted][:, None], np.arange(found.shape[1])
        better = (found > own) | ((found == own) & (index < wanted[:, None]))
        right = (better.sum(-1) < self.top_k) & ~np.isnan(own[:, 0])
        return np.asarray(right.sum()), np.asarray(len(wanted))

    def figure(self, *statistics: np.ndarray) -> float:
        """Return the share."""
        right, count = statistics
        return float(right / count) if count else float("nan")


@dataclass(kw_only=True)
class _OfConfusion(Metric[R]):
    """Base of metrics of the confusion matrix; the matrix grows with the classes unless their number is given."""

    classes: AtLeastOne | None = None
    ignore_index: int | None = None

    def statistics(self, predictions: np.ndarray, targets: np.ndarray) -> Statistics:
        """Return the confusion matrix of a batch."""
        where = type(self).__name__
        found, wanted = _kept(predictions, targets, self.ignore_index, where)
        size = self.classes
        if found.ndim > 1:
            size = size or found.shape[1]
            found = found.argmax(-1)
        found = found.astype(np.int64)
        size = size or int(max(found.max(initial=0), wanted.max(initial=0))) + 1
        for ids in (found, wanted):
            check_ids(ids, size, where)
        return (np.bincount(wanted * size + found, minlength=size * size).reshape(size, size),)

    def merged(self, a: Statistics, b: Statistics) -> Statistics:
        """Add two confusion matrices; the smaller one gets rows and columns of zeros."""
        size = max(len(a[0]), len(b[0]))
        return (sum(np.pad(m, (0, size - len(m))) for m in (a[0], b[0])),)  # pyright: ignore[reportReturnType]  # sum starts at 0


@dataclass(kw_only=True)
class ConfusionMatrix(_OfConfusion[np.ndarray]):
    """The number of samples by target (row) and prediction (column): int64 [K, K].

    Predictions are class ids in the shape of the targets, or scores [..., K]; targets are ids [...].

    Attributes:
        classes: K; by default the number of scores, or the largest id so far plus 1.
        ignore_index: target of samples to leave out.
    Raises: ShapeError, DTypeError; IndexOutOfRange for an id outside 0..K-1.
    """

    def figure(self, *statistics: np.ndarray) -> np.ndarray:
        """Return the matrix."""
        return statistics[0].copy()


@dataclass(kw_only=True)
class _Averaged(_OfConfusion["float | np.ndarray"]):
    """Base of ratios by class."""

    average: Literal["macro", "micro", "weighted", "binary", "none"] = "macro"

    def parts(self, hits: np.ndarray, misses: np.ndarray, alarms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return numerator and denominator from true positives, false negatives and false positives."""
        raise NotImplementedError

    def figure(self, *statistics: np.ndarray) -> float | np.ndarray:
        """Return the ratio, averaged over the classes."""
        matrix = statistics[0]
        hits = np.diag(matrix)
        counts = hits, matrix.sum(1) - hits, matrix.sum(0) - hits
        if self.average == "micro":
            counts = tuple(np.asarray(c.sum()) for c in counts)
        above, below = self.parts(*counts)
        seen = np.asarray(sum(counts)) > 0
        ratio = np.where(seen, above / np.maximum(below, 1), np.nan)
        if self.average == "none":
            return ratio
        if self.average == "micro":
            return float(ratio)
        if self.average == "binary":
            if len(matrix) > 2:
                raise UsageError("average='binary' is for two classes", where=type(self).__name__, got=len(matrix))
            return float(ratio[1]) if len(matrix) == 2 else float("nan")
        weights = matrix.sum(1) if self.average == "weighted" else seen.astype(np.int64)
        return float((np.nan_to_num(ratio) * weights).sum() / weights.sum()) if weights.sum() else float("nan")


@dataclass(kw_only=True)
class Precision(_Averaged):
    """TP / (TP + FP), the share of the predictions of a class that are right.

    Predictions are class ids in the shape of the targets, or scores [..., K]; targets are ids [...]. A ratio whose
    denominator is 0 is 0. Classes that neither predictions nor targets have do not count, and are NaN.

    Attributes:
        classes: K; by default the number of scores, or the largest id so far plus 1.
        ignore_index: target of samples to leave out.
        average: `macro`, the mean over classes; `weighted`, weighted by the number of targets; `micro`, the ratio of
            the sums; `binary`, the ratio of class 1 of two; `none`, float64 [K].
    Raises: ShapeError, DTypeError; IndexOutOfRange for an id outside 0..K-1; UsageError for `binary` with more classes.
    """

    def parts(self, hits: np.ndarray, misses: np.ndarray, alarms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return TP and TP + FP."""
        return hits, hits + alarms


@dataclass(kw_only=True)
class Recall(_Averaged):
    """TP / (TP + FN), the share of the samples of a class that are found.

    Predictions, options and errors are as for `Precision`.
    """

    def parts(self, hits: np.ndarray, misses: np.ndarray, alarms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return TP and TP + FN."""
        return hits, hits + misses


@dataclass(kw_only=True)
class F1(_Averaged):
    """2 TP / (2 TP + FP + FN), the harmonic mean of precision and recall.

    Predictions, options and errors are as for `Precision`.
    """

    def parts(self, hits: np.ndarray, misses: np.ndarray, alarms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return 2 TP and 2 TP + FP + FN."""
        return 2 * hits, 2 * hits + misses + alarms


@dataclass(kw_only=True)
class IoU(_Averaged):
    """TP / (TP + FP + FN), the intersection over the union of predictions and targets.

    Predictions, options and errors are as for `Precision`.
    """

    def parts(self, hits: np.ndarray, misses: np.ndarray, alarms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return TP and TP + FP + FN."""
        return hits, hits + misses + alarms


@dataclass(kw_only=True)
class RocAuc(Metric[float]):
    """The probability that a random positive sample has a larger score than a random negative one; equal scores half.

    Predictions are scores, and targets 0 or 1 (or bools), both of one shape. All scores are stored. NaN without
    positive or without negative samples.
    Raises: ShapeError; DTypeError for targets that are not 0 or 1.
    Source: Mann and Whitney 1947; Hanley and McNeil 1982.
    """

    def statistics(self, predictions: np.ndarray, targets: np.ndarray) -> Statistics:
        """Return scores and targets."""
        same_shape(predictions, targets, "RocAuc")
        if targets.dtype.kind not in "biu" or not np.isin(targets, (0, 1)).all():
            raise DTypeError("targets are not 0 or 1", where="RocAuc", expected="integers 0 and 1", got=targets.dtype)
        return predictions.reshape(-1), targets.reshape(-1).astype(bool)

    def merged(self, a: Statistics, b: Statistics) -> Statistics:
        """Join the samples."""
        return tuple(np.concatenate(pair) for pair in zip(a, b, strict=True))

    def figure(self, *statistics: np.ndarray) -> float:
        """Return the probability."""
        scores, positive = statistics
        count = int(positive.sum()), int((~positive).sum())
        if not all(count) or np.isnan(scores).any():
            return float("nan")
        _, group, sizes = np.unique(scores, return_inverse=True, return_counts=True)
        rank = np.cumsum(sizes) - (sizes - 1) / 2  # the mean rank of equal scores, from 1
        return float((rank[group][positive].sum() - count[0] * (count[0] + 1) / 2) / (count[0] * count[1]))


accuracy = of_batch(Accuracy)
confusion_matrix = of_batch(ConfusionMatrix)
precision = of_batch(Precision)
recall = of_batch(Recall)
f1 = of_batch(F1)
iou = of_batch(IoU)
roc_auc = of_batch(RocAuc)
