"""Gradient clipping, as tensor code: no value leaves the device."""

from __future__ import annotations

from collections.abc import Iterable

from graphwright.autograd import Parameter, Tensor, no_grad, scoped
from graphwright.errors import UsageError
from graphwright.ops import call


def clip_grad_norm_(params: Iterable[Parameter], max_norm: float) -> Tensor:
    """Scale gradients so that their common 2-norm is at most `max_norm`; returns the norm before, a float32 scalar.

    coefficient = min(1, max_norm / (norm + 1e-6)), as in torch. Raises: UsageError if no parameter has a gradient.
    """
    with_grad = [p for p in params if p.grad is not None]
    if not with_grad:
        raise UsageError("no parameter has a gradient", fix="call backward() first")
    with no_grad(), scoped("clip"):
        squares = [(p.grad.float() * p.grad.float()).sum() for p in with_grad if p.grad is not None]
        norm = call("junction", *squares).sqrt()
        scale = call("minimum", max_norm / (norm + 1e-6), 1.0)
        for p in with_grad:
            assert p.grad is not None
            p.grad = p.grad * scale.to(p.grad.dtype)
    return norm
