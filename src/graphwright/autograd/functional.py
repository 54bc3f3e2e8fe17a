"""Derivatives of functions in the spelling of `torch.autograd.functional`; `gw.func` has the mechanism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphwright.autograd import func as of
from graphwright.autograd.create import ones_like
from graphwright.autograd.nested import leaves_of, with_leaves
from graphwright.errors import UsageError

__all__ = ["hessian", "hvp", "jacobian", "jvp", "vhp", "vjp"]


def _tracked(inputs: Any, create_graph: bool) -> tuple[Any, ...]:
    """Return the inputs as a tuple, off the tape unless the result shall be on it."""
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    return given if create_graph else tuple(t.detach() for t in given)


def _single(made: Any, inputs: Any) -> Any:
    return made if isinstance(inputs, tuple) else made[0]


def jacobian(func: Callable[..., Any], inputs: Any, create_graph: bool = False) -> Any:
    """Return the Jacobian [*result, *input]; for several results or inputs, tuples of tuples of them."""
    given = _tracked(inputs, create_graph)
    made = of.jacrev(func, tuple(range(len(given))))(*given)
    if isinstance(inputs, tuple):
        return made
    several = isinstance(made, tuple) and made and isinstance(made[0], tuple)
    return tuple(part[0] for part in made) if several else made[0]


def hessian(func: Callable[..., Any], inputs: Any, create_graph: bool = False) -> Any:
    """Return the second derivatives of a function whose result is a number; for several inputs, tuples of tuples."""
    given = _tracked(inputs, create_graph)
    numbers = tuple(range(len(given)))
    first = of.grad(lambda *xs: func(*xs).reshape(()), numbers)
    made = of.jacrev(first, numbers)(*given)
    return made if isinstance(inputs, tuple) else made[0][0]


def vjp(func: Callable[..., Any], inputs: Any, v: Any = None, create_graph: bool = False) -> tuple[Any, Any]:
    """Return the result and vᵀJ; v may be left out for a result of one entry."""
    given = _tracked(inputs, create_graph)
    result, product = of.vjp(func, *given)
    return result, _single(product(_seed(result, v)), inputs)


def _seed(result: Any, v: Any) -> Any:
    if v is not None:
        return v
    if any(t.numel() != 1 for t in leaves_of(result)):
        raise UsageError("v was left out", where="autograd.functional", expected="v of the shapes of the result")
    return with_leaves(result, [ones_like(t) for t in leaves_of(result)])


def jvp(func: Callable[..., Any], inputs: Any, v: Any = None, create_graph: bool = False) -> tuple[Any, Any]:
    """Return the result and J·v; v may be left out for an input of one entry."""
    given = _tracked(inputs, create_graph)
    tangents = _seed(given, v if v is None or isinstance(v, tuple) else (v,))
    return of.jvp(func, given, tangents)


def vhp(func: Callable[..., Any], inputs: Any, v: Any = None, create_graph: bool = False) -> tuple[Any, Any]:
    """Return the value and vᵀH of a function whose result is a number."""
    given = _tracked(inputs, create_graph)
    numbers = tuple(range(len(given)))
    value: list[Any] = []

    def gradients(*xs: Any) -> Any:
        found, made = of.grad_and_value(lambda *ys: func(*ys).reshape(()), numbers)(*xs)
        value.append(made if create_graph else made.detach())
        return found

    _, product = of.vjp(gradients, *given)
    seeds = _seed(given, v if v is None or isinstance(v, tuple) else (v,))
    return value[0], _single(product(*seeds), inputs)


def hvp(func: Callable[..., Any], inputs: Any, v: Any = None, create_graph: bool = False) -> tuple[Any, Any]:
    """Return the value and H·v, which is vᵀH, as H is symmetric."""
    return vhp(func, inputs, v, create_graph)
