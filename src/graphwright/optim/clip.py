"""Gradient clipping, as tensor code: no value leaves the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from math import inf, isfinite
from typing import Any

from graphwright.autograd import Parameter, Tensor, no_grad, scoped
from graphwright.errors import ComputeError, UsageError
from graphwright.ops import call


class NonFiniteGradient(ComputeError):
    """A gradient has an infinity or a NaN; `where` is the first parameter of which that is so."""


def clip_grad_norm_(
    params: Iterable[Parameter], max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients so that their common norm is at most `max_norm`; returns the norm before, a float32 scalar.

    coefficient = min(1, max_norm / (norm + 1e-6)), as in torch.

    Args:
        params: those without a gradient are left out.
        max_norm: bound.
        norm_type: 1, 2 or infinity.
        error_if_nonfinite: look at the norm, which waits for it, and raise before a gradient is changed.
    Raises: UsageError if no parameter has a gradient; NonFiniteGradient; TraceError if a trace should look at the norm.
    """
    if norm_type not in _PARTS:
        raise UsageError("a norm that is not known", expected="1, 2 or inf", got=norm_type)
    held = _with_grad(params)
    part, whole = _PARTS[norm_type]
    with no_grad(), scoped("clip"):
        norm = whole([part(p.grad.float()) for p in held])
        if error_if_nonfinite and not isfinite(norm.item()):
            bad = [p for p in held if not isfinite(whole([part(p.grad.float())]).item())]
            raise NonFiniteGradient(
                "the norm of the gradients is no finite number",
                where=bad[0].name or None if bad else None,
                got=norm.item(),
                fix="a smaller lr, a GradScaler in float16, or look at the loss",
            )
        scale = call("minimum", max_norm / (norm + 1e-6), 1.0)
        for p in held:
            p.grad = p.grad * scale.to(p.grad.dtype)
    return norm


def clip_grad_value_(params: Iterable[Parameter], clip_value: float) -> None:
    """Limit each entry of the gradients to ±`clip_value`. Raises: UsageError if no parameter has a gradient."""
    with no_grad(), scoped("clip"):
        for p in _with_grad(params):
            p.grad = call("maximum", call("minimum", p.grad, clip_value), -clip_value)


def _with_grad(params: Iterable[Parameter]) -> list[Any]:
    held = [p for p in params if p.grad is not None]
    if not held:
        raise UsageError("no parameter has a gradient", fix="call backward() first")
    return held


def _largest(parts: Sequence[Tensor]) -> Tensor:
    return reduce(lambda a, b: call("maximum", a, b), parts)


_PARTS: dict[float, tuple[Callable[[Tensor], Tensor], Callable[[Sequence[Tensor]], Tensor]]] = {
    1.0: (lambda g: call("abs", g).sum(), lambda parts: call("junction", *parts)),
    2.0: (lambda g: (g * g).sum(), lambda parts: call("junction", *parts).sqrt()),
    inf: (lambda g: call("amax", call("abs", g), axes=tuple(range(g.ndim))), _largest),
}
"""Norm -> what each gradient gives, and how those are joined."""
