"""Gradient clipping as tensor code, without reading values back from the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from math import inf, isfinite
from typing import Any

from graphwright.autograd import Parameter, Tensor, no_grad, scoped
from graphwright.errors import ComputeError, UsageError
from graphwright.ops import call


class NonFiniteGradient(ComputeError):
    """A gradient has an infinity or a NaN; `where` is the first parameter with one."""


def clip_grad_norm_(
    params: Iterable[Parameter], max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients so that their total norm is at most `max_norm`; return the norm before, a float32 scalar.

    coefficient = min(1, max_norm / (norm + 1e-6)), as in torch.

    Args:
        params: those without a gradient are skipped.
        max_norm: upper bound of the norm.
        norm_type: 1, 2 or infinity.
        error_if_nonfinite: read the norm back, which synchronises, and raise before any gradient changes.
    Raises: UsageError if no parameter has a gradient; NonFiniteGradient; TraceError for `error_if_nonfinite` in a
        trace.
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
"""Norm -> the part of one gradient, and the reduction of the parts."""
