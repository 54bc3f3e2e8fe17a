"""The losses of tasks, one entry of `LOSSES` each: how outputs are read, which error is reported, how it is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from graphwright.array.formulas.activations import sigmoid
from graphwright.autograd import Tensor
from graphwright.evolve.errors import need
from graphwright.nn import functional
from graphwright.ops import call

Array = np.ndarray
Traced = Callable[[Tensor, Tensor], Tensor]


def _sides(final: Array, right: Array, threshold: float) -> Array:
    hit = (final > threshold) == (right > 0.5)
    return hit[..., 0] if hit.shape[-1] == 1 else hit.all(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A loss of tasks: how outputs are read, which error is reported, and how training steps trace it."""

    metric: str = "accuracy"  # of a head that names none
    # targets and the name of the task -> the checked targets, and a class per case [N] or None
    targets: Callable[[Array, str], tuple[Array, Array | None]] = lambda y, name: (y, None)
    predictions: Callable[[Array], Array] = lambda y: y  # logits [..., outputs] -> predictions
    bounded: Callable[[Array], Array] = lambda y: y  # outputs that are predictions -> first argument of `error`
    error: Callable[[Array, Array], Array]  # predictions and targets [..., outputs] -> error [...]
    # last outputs and targets [..., outputs], threshold between two classes -> True where they agree
    correct: Callable[[Array, Array, float], Array] = _sides
    labels: Callable[[Array], Array] = lambda y: y  # targets [N, outputs] -> those of the loss in `trained`
    # name -> loss that training may minimise, a function of outputs and targets of a batch; the first is this loss
    trained: Mapping[str, Traced]
    steps: Traced  # outputs and targets [B, T, outputs] -> loss of each step [B, T]


def _probabilities(y: Array, name: str) -> tuple[Array, Array | None]:
    need(y.min() >= 0 and y.max() <= 1, "targets of binary cross entropy are not in [0, 1]", where=name,
         got=f"{y.min()} to {y.max()}", fix='"cross_entropy" for classes 0, 1, ..., "mse" for numbers')  # fmt: skip
    return y, (y > 0.5).astype(np.int64) if y.ndim == 1 else None


def _clipped(p: Array) -> Array:
    return np.clip(p, 1e-7, 1 - 1e-7)


def _binary(p: Array, wanted: Array) -> Array:
    p, other = np.clip(p, 1e-30, None), np.clip(1 - p, 1e-30, None)
    return -(wanted * np.log(p) + (1 - wanted) * np.log(other)).mean(-1)


def _one_hot(y: Array, name: str) -> tuple[Array, Array]:
    need(y.ndim == 1 and y.min() >= 0 and np.equal(y, y.astype(np.int64)).all(),
         "targets of cross entropy are not classes 0, 1, ..., one per case", where=name,
         got=f"{y.dtype} {y.shape}: {y.ravel()[:4]}")  # fmt: skip
    classes = y.astype(np.int64)
    return np.eye(int(classes.max()) + 1, dtype=np.float32)[classes], classes


def _softmax(y: Array) -> Array:
    grown = np.exp(y - y.max(-1, keepdims=True))
    return grown / grown.sum(-1, keepdims=True)


def _dense(answer: Tensor, target: Tensor) -> Tensor:
    return -(answer.log_softmax(-1) * target).sum(-1)


def _classes(answer: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy for targets that are class ids [B], or one-hot [B, outputs] of a head."""
    return _dense(answer, target).mean() if target.ndim > 1 else functional.cross_entropy(answer, target)


LOSSES = {  # by name: the losses of tasks, two of which share their names with ops
    "mse": Loss(
        metric="r2",
        error=lambda y, wanted: ((y - wanted) ** 2).mean(-1),
        trained={"mse": functional.mse_loss, "huber": functional.huber_loss},
        steps=lambda answer, target: ((answer - target) ** 2).mean(-1),
    ),
    "bce": Loss(
        targets=_probabilities,
        predictions=sigmoid,
        bounded=_clipped,
        error=_binary,
        trained={"bce": functional.binary_cross_entropy_with_logits,
                 "mse": lambda answer, target: functional.mse_loss(answer.sigmoid(), target)},
        steps=lambda answer, target: call("bce_with_logits", answer, target).mean(-1),
    ),
    "cross_entropy": Loss(
        targets=_one_hot,
        predictions=_softmax,
        bounded=lambda p: _clipped(p) / _clipped(p).sum(-1, keepdims=True),
        error=lambda p, wanted: -(wanted * np.log(np.maximum(p, 1e-30))).sum(-1),
        correct=lambda final, right, _: final.argmax(-1) == right.argmax(-1),
        labels=lambda y: y.argmax(1),
        trained={"cross_entropy": _classes,
                 "mse": lambda answer, target: functional.mse_loss(answer.softmax(-1), target)},
        steps=_dense,
    ),
}  # fmt: skip
