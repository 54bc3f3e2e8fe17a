"""Gradient accumulation, and moving averages of weights: tensor code without device synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from graphwright.array import DType, from_numpy
from graphwright.autograd import Parameter, Tensor, Variable, no_grad, scoped, update
from graphwright.errors import UsageError
from graphwright.optim.optimizer import HasParameters

Variables = HasParameters | Iterable[Parameter]


def ema_update(target: Variables, source: Variables, tau: float) -> None:
    """target ← (1 - tau)·target + tau·source for every parameter, in place; tau in [0, 1].

    Raises: UsageError if the numbers of parameters differ or tau is out of range, ShapeError if specs differ.
    """
    if not 0 <= tau <= 1:
        raise UsageError("tau is out of range", expected="0 to 1", got=tau)
    targets, sources = (list(v.parameters() if isinstance(v, HasParameters) else v) for v in (target, source))
    if len(targets) != len(sources):
        expected, got = f"{len(targets)} parameters in source", f"{len(sources)} parameters"
        raise UsageError("target and source have different numbers of parameters", expected=expected, got=got)
    kinds: dict[DType, list[tuple[Variable, Tensor]]] = {}
    for t, s in zip(targets, sources, strict=True):
        kinds.setdefault(t.dtype, []).append((t, s))
    with no_grad(), scoped("ema"):
        rate = Tensor(from_numpy(np.asarray(tau, np.float64)))
        for pairs in kinds.values():
            targets = [t for t, _ in pairs]
            update(targets, "ema_step", rate, *(s for _, s in pairs), *targets)


def accumulate(loss: Callable[..., Tensor], batches: Iterable[Any]) -> Tensor:
    """Add the gradient of the mean loss over micro-batches to `.grad`, one batch after another.

    Args:
        loss: called with each batch (a tuple as several arguments); returns a scalar, the mean loss of the batch.
        batches: batches of equal size, so that the mean of their losses is the mean over all items.
    Returns: the mean loss, detached. Raises: UsageError if there are no batches.
    """
    given = list(batches)
    if not given:
        raise UsageError("accumulate got no batches", expected="at least one batch")
    total: Tensor | None = None
    for batch in given:
        part = (loss(*batch) if isinstance(batch, tuple | list) else loss(batch)) / float(len(given))
        part.backward()
        total = part.detach() if total is None else total + part.detach()
    assert total is not None
    return total
