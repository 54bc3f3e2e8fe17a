"""Gradient clipping and accumulation, and moving averages of weights: tensor code without device synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from math import inf, isfinite
from typing import Any

import numpy as np

from graphwright.array import DType, from_numpy
from graphwright.autograd import Parameter, Tensor, Variable, no_grad, scoped, update
from graphwright.errors import ComputeError, UsageError
from graphwright.ops import call
from graphwright.optim.optimizer import HasParameters


class NonFiniteGradient(ComputeError):
    """A gradient has an infinity or a NaN; `where` is the first parameter with such a gradient."""


def clip_grad_norm_(
    params: Iterable[Parameter], max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients so that their total norm is at most `max_norm`; return the unclipped norm, a float32 scalar.

    coefficient = min(1, max_norm / (norm + 1e-6)), as in torch.

    Args:
        params: parameters; those without a gradient are skipped.
        max_norm: upper bound of the norm.
        norm_type: 1, 2 or infinity.
        error_if_nonfinite: read the norm back, which synchronises, and raise NonFiniteGradient before any gradient
            changes. In a trace this raises TraceError.
    Raises: UsageError if no parameter has a gradient, or for another norm type.
    """
    if norm_type not in _PARTS:
        raise UsageError("unknown norm_type", expected="1, 2 or inf", got=norm_type)
    found = _with_grad(params)
    part, whole = _PARTS[norm_type]
    with no_grad(), scoped("clip"):
        norm = whole([part(p.grad.float()) for p in found])
        if error_if_nonfinite and not isfinite(norm.item()):
            bad = [p.name for p in found if not isfinite(whole([part(p.grad.float())]).item())]
            fix = "reduce lr, use a GradScaler for float16, or inspect the loss"
            where = (bad[0] or None) if bad else None
            raise NonFiniteGradient("the norm of the gradients is not finite", where=where, got=norm.item(), fix=fix)
        scale = call("minimum", max_norm / (norm + 1e-6), 1.0)
        for p in found:
            p.grad = p.grad * scale.to(p.grad.dtype)
    return norm


def clip_grad_value_(params: Iterable[Parameter], clip_value: float) -> None:
    """Clamp each entry of the gradients to ±`clip_value`. Raises: UsageError if no parameter has a gradient."""
    with no_grad(), scoped("clip"):
        for p in _with_grad(params):
            p.grad = call("maximum", call("minimum", p.grad, clip_value), -clip_value)


def _with_grad(params: Iterable[Parameter]) -> list[Any]:
    found = [p for p in params if p.grad is not None]
    if not found:
        raise UsageError("no parameter has a gradient", fix="call backward() first")
    return found


_larger = partial(call, "maximum")
_PARTS: dict[float, tuple[Callable[[Tensor], Tensor], Callable[[Sequence[Tensor]], Tensor]]] = {
    1.0: (lambda g: call("abs", g).sum(), lambda parts: call("junction", *parts)),
    2.0: (lambda g: (g * g).sum(), lambda parts: call("junction", *parts).sqrt()),
    inf: (lambda g: call("amax", call("abs", g), axes=tuple(range(g.ndim))), lambda parts: reduce(_larger, parts)),
}
"""Norm type -> function from one gradient to its contribution, and function from all contributions to the norm."""


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
