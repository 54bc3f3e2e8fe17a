"""Norms and limits of gradients: tensor code without device synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from math import inf, isfinite
from typing import Any

from graphwright.array import float32, float64
from graphwright.autograd.create import scalar_tensor
from graphwright.autograd.modes import no_grad
from graphwright.autograd.recorder import scoped
from graphwright.autograd.tensor import Tensor
from graphwright.errors import ComputeError, UsageError
from graphwright.ops import call


class NonFiniteGradient(ComputeError):
    """A gradient has an infinity or a NaN; `where` is the first parameter with such a gradient."""


def get_total_norm(
    tensors: Tensor | Iterable[Tensor], norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Return the norm of all entries of tensors together, a float32 scalar, float64 if a tensor is float64.

    Args:
        norm_type: > 0, or infinity.
        error_if_nonfinite: read the norm back, which synchronises, and raise NonFiniteGradient if it is not finite. In
            a trace this raises TraceError.
    Raises: UsageError for another norm type.
    """
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    return _total(given, norm_type, [f"tensor {i}" for i in range(len(given))] if error_if_nonfinite else None)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, *,
    total: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Scale gradients so that their total norm is at most `max_norm`; return the unclipped norm, as `get_total_norm`.

    coefficient = min(1, max_norm / (norm + 1e-6)), as in torch.

    Args:
        parameters: those without a gradient are skipped.
        max_norm: upper bound of the norm.
        norm_type, error_if_nonfinite: see `get_total_norm`; after an error no gradient has changed.
        total: function from the norm of these gradients to that of all, if other processes have some; there may then be
            no gradient here.
    Raises: UsageError if no parameter has a gradient, or for a norm type that is not positive.
    """
    found = _with_grad(parameters, total is not None)
    norm = _total([p.grad for p in found], norm_type, [p.name for p in found] if error_if_nonfinite else None)
    with no_grad(), scoped("clip"):
        norm = norm if total is None else total(norm)
        scale = call("minimum", max_norm / (norm + 1e-6), 1.0)
        for p in found:
            p.grad = p.grad * scale.to(p.grad.dtype)
    return norm


def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Clamp each entry of the gradients to ±`clip_value`. Raises: UsageError if no parameter has a gradient."""
    with no_grad(), scoped("clip"):
        for p in _with_grad(parameters):
            p.grad = call("maximum", call("minimum", p.grad, clip_value), -clip_value)


def _with_grad(parameters: Tensor | Iterable[Tensor], may_lack: bool = False) -> list[Any]:
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    found = [p for p in given if p.grad is not None]
    if not found and not may_lack:
        raise UsageError("no parameter has a gradient", fix="call backward() first")
    return found


def _total(given: Sequence[Tensor], norm_type: float, names: Sequence[str] | None) -> Tensor:
    """The norm of all tensors; with `names`, an error names the first that is not finite."""
    if not norm_type > 0:
        raise UsageError("the norm_type is out of range", expected="> 0", got=norm_type)
    part, whole = _PARTS.get(norm_type) or _powers(norm_type)
    kind = float64 if any(g.dtype is float64 for g in given) else float32
    with no_grad(), scoped("clip"):
        norms = [part(g.to(kind)) for g in given if g.numel()]
        norm = whole(norms) if norms else scalar_tensor(0.0)
        if names is not None and not isfinite(norm.item()):
            sizes = zip((n for n, g in zip(names, given, strict=True) if g.numel()), norms, strict=True)
            bad = next((name for name, size in sizes if not isfinite(size.item())), "")
            fix = "reduce lr, use a GradScaler for float16, or inspect the loss"
            raise NonFiniteGradient(
                "the norm of the gradients is not finite", where=bad or None, got=norm.item(), fix=fix
            )
    return norm


def _powers(p: float) -> tuple[Callable[[Tensor], Tensor], Callable[[Sequence[Tensor]], Tensor]]:
    return lambda g: (g.abs() ** p).sum(), lambda parts: call("junction", *parts) ** (1 / p)


_larger = partial(call, "maximum")
_PARTS: dict[float, tuple[Callable[[Tensor], Tensor], Callable[[Sequence[Tensor]], Tensor]]] = {
    1.0: (lambda g: call("abs", g).sum(), lambda parts: call("junction", *parts)),
    2.0: (lambda g: (g * g).sum(), lambda parts: call("junction", *parts).sqrt()),
    inf: (lambda g: call("amax", call("abs", g), axes=tuple(range(g.ndim))), lambda parts: reduce(_larger, parts)),
}
"""Norm type -> function from one gradient to its contribution, and function from all contributions to the norm."""
