"""Metrics over batches: a class per metric with `update`, `merge` and `compute`, and a function for one batch."""

from __future__ import annotations

from graphwright.metrics.classification import (
    F1,
    Accuracy,
    ConfusionMatrix,
    IoU,
    Precision,
    Recall,
    RocAuc,
    accuracy,
    confusion_matrix,
    f1,
    iou,
    precision,
    recall,
    roc_auc,
)
from graphwright.metrics.language import Perplexity, nll, perplexity
from graphwright.metrics.metric import Metric
from graphwright.metrics.regression import (
    R2,
    MeanAbsoluteError,
    MeanSquaredError,
    mean_absolute_error,
    mean_squared_error,
    r2,
)

__all__ = [
    "F1", "R2", "Accuracy", "ConfusionMatrix", "IoU", "MeanAbsoluteError", "MeanSquaredError", "Metric", "Perplexity",
    "Precision", "Recall", "RocAuc", "accuracy", "confusion_matrix", "f1", "iou", "mean_absolute_error",
    "mean_squared_error", "nll", "perplexity", "precision", "r2", "recall", "roc_auc",
]  # fmt: skip
