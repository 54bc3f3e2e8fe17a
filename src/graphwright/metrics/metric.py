"""`Metric`: a figure over batches. `update` adds a batch, `merge` another metric, and `compute` returns the figure.

Invariant: the figure depends on all samples together, however they are divided into batches and processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast

import numpy as np

from graphwright.errors import DTypeError, IndexOutOfRange, ShapeError, UsageError
from graphwright.settings import Settings

P = ParamSpec("P")
R = TypeVar("R")
Statistics = tuple[np.ndarray, ...]


@dataclass(kw_only=True)
class Metric(Settings, Generic[R]):
    """Base of metrics: subclasses define `statistics` of a batch, which by default add up, and the `figure` of them."""

    _state: Statistics | None = field(default=None, init=False, repr=False, compare=False)

    def statistics(self, predictions: np.ndarray, targets: np.ndarray) -> Statistics:
        """Return the statistics of one batch."""
        raise NotImplementedError(f"{type(self).__name__} does not define statistics")

    def merged(self, a: Statistics, b: Statistics) -> Statistics:
        """Return the statistics of two sets of samples together."""
        return tuple(x + y for x, y in zip(a, b, strict=True))

    def figure(self, *statistics: np.ndarray) -> R:
        """Return the figure of the statistics of all samples."""
        raise NotImplementedError(f"{type(self).__name__} does not define figure")

    def update(self, predictions: Any, targets: Any) -> Self:
        """Add a batch; returns the metric. A batch that raises an error is not added.

        Args:
            predictions, targets: tensors, arrays or lists, in the shapes that the class states.
        """
        fresh = self.statistics(np.asarray(predictions), np.asarray(targets))
        self._state = fresh if self._state is None else self.merged(self._state, fresh)
        return self

    def merge(self, other: Self) -> Self:
        """Add all batches of another metric, such as that of another process. Raises: UsageError for other options."""
        if self != other:
            raise UsageError("the metrics have different options", expected=self, got=other)
        if other._state is not None:
            self._state = other._state if self._state is None else self.merged(self._state, other._state)
        return self

    def compute(self) -> R:
        """Return the figure of all batches so far. Raises: UsageError without a batch."""
        if self._state is None:
            name = type(self).__name__
            raise UsageError("the metric has no batch yet", where=name, fix="metric.update(predictions, targets)")
        return self.figure(*self._state)

    def reset(self) -> None:
        """Forget all batches."""
        self._state = None


def of_batch(metric: Callable[P, Metric[R]]) -> Callable[Concatenate[Any, Any, P], R]:
    """Return the function that computes a metric of one batch, with the options of its class as keywords."""

    def compute(predictions: Any, targets: Any, *args: P.args, **options: P.kwargs) -> R:
        return metric(*args, **options).update(predictions, targets).compute()

    own = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation="Any") for name in ("predictions", "targets")]
    options = signature(metric).parameters.values()
    named = cast(Any, compute)
    named.__signature__ = signature(metric).replace(parameters=[*own, *options], return_annotation="Any")
    named.__doc__ = metric.__doc__
    return compute


def same_shape(predictions: np.ndarray, targets: np.ndarray, where: str) -> None:
    """Raise ShapeError unless a batch has one prediction per target."""
    if predictions.shape != targets.shape:
        raise ShapeError("predictions and targets differ in shape", where=where, expected=list(targets.shape),
                         got=list(predictions.shape))  # fmt: skip


def check_ids(ids: np.ndarray, classes: int, where: str) -> None:
    """Raise DTypeError unless class ids are integers, and IndexOutOfRange unless they are 0..classes-1."""
    if ids.dtype.kind not in "biu":
        raise DTypeError("targets are not class ids", where=where, expected="integers", got=ids.dtype)
    if (wrong := ids[(ids < 0) | (ids >= classes)]).size:
        raise IndexOutOfRange(
            "a class id is out of range", where=where, expected=f"0..{classes - 1}", got=wrong.flat[0]
        )
