"""Shared parts of op definitions: base classes, checks of operands, and samplers for the tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphwright.array.dtype import bool_
from graphwright.array.spec import Dim, Spec, broadcast_shapes
from graphwright.errors import DTypeError, ShapeError
from graphwright.ops.call import call
from graphwright.ops.registry import Row, Traits, free_cost


# -- checks ------------------------------------------------------------------------------------------------------------
def same(x: Spec, **attrs: Any) -> Spec:
    """Return the operand's spec unchanged: `infer` of ops that keep shape and dtype."""
    return x


def floating(x: Spec, **attrs: Any) -> Spec:
    """Return the spec of the operand. Raises: DTypeError if it is not floating."""
    if not x.dtype.is_float:
        raise DTypeError("an operand is not floating", expected="a floating dtype", got=x)
    return x


def integral(x: Spec) -> Spec:
    """Return the spec of the operand. Raises: DTypeError if it is neither integer nor bool."""
    if x.dtype.kind not in ("int", "uint", "bool"):
        raise DTypeError("an operand has no bits to combine", expected="an integer dtype or bool", got=x)
    return x


def broadcast(*ins: Spec, **attrs: Any) -> Spec:
    """Return the spec of operands broadcast together. Raises: DTypeError, ShapeError if they do not match."""
    one_dtype(*ins)
    return Spec(broadcast_shapes(*(i.shape for i in ins)), ins[0].dtype)


def one_dtype(first: Spec, *others: Spec | None) -> Spec:
    """Return the first operand's spec. Raises: DTypeError if another operand, except None, has a different dtype."""
    if any(i is not None and i.dtype is not first.dtype for i in others):
        got = ", ".join(repr(i) for i in (first, *others) if i is not None)
        raise DTypeError("operands have different dtypes", expected="one dtype", got=got, fix="cast one of them")
    return first


def equal_dim(a: Dim, b: Dim, axis: str) -> None:
    """Check that two dimensions are equal; `axis` names them in the error. Raises: ShapeError if they differ."""
    if a != b:
        raise ShapeError("operands have different sizes along a shared axis", where=f"axis {axis}", expected=a, got=b)


def wanted(needs: Sequence[bool], *gradients: Callable[[], Any]) -> tuple[Any, ...]:
    """Call the gradient function of each operand whose gradient is needed; return the results, None for the others."""
    return tuple(gradient() if need else None for gradient, need in zip(gradients, needs, strict=False))


# -- samplers ----------------------------------------------------------------------------------------------------------
Sample = tuple[list[Any], dict[str, Any]]


def unary_sample(low: float, high: float, **attrs: Any) -> Callable[[np.random.Generator], Sample]:
    """Return a function that draws a test sample: one operand, uniform in [low, high], and these attributes."""
    return lambda rng: ([rng.uniform(low, high, (3, 5))], attrs)


def normal_sample(*shape: int, **attrs: Any) -> Callable[[np.random.Generator], Sample]:
    """Return a function that draws a test sample: one normally distributed operand, and these attributes."""
    return lambda rng: ([rng.normal(size=shape)], attrs)


def away_from_zero(rng: np.random.Generator) -> Sample:
    """Draw an operand of both signs, far enough from 0 that a difference quotient does not step over a kink there."""
    return [rng.uniform(0.1, 2, (3, 5)) * rng.choice((-1.0, 1.0), (3, 5))], {}


def between_integers(rng: np.random.Generator) -> Sample:
    """Draw an operand away from the steps of rounding functions: neither near an integer nor near a half."""
    return [rng.integers(-3, 4, (3, 5)) + rng.choice((-0.3, 0.3), (3, 5))], {}


def binary_sample(rng: np.random.Generator, low: float = -2, high: float = 2) -> Sample:
    """Draw two operands of different shapes that broadcast."""
    return [rng.uniform(low, high, (3, 1, 4)), rng.uniform(low, high, (5, 4))], {}


# -- base classes ------------------------------------------------------------------------------------------------------
class Unary(Row):
    """An elementwise op of one operand that keeps its spec."""

    arity, infer, operands = 1, same, ("input",)
    traits = Traits(inplace=((0, 0),), elementwise=True)


class UnaryFloat(Unary):
    """An elementwise op of one floating operand."""

    infer = floating


class FloatFunction(UnaryFloat):
    """An elementwise function of one floating operand, which promotes integers of tensors."""

    traits = Traits(promotes=True)


class Binary(Row):
    """An elementwise op of two operands of one dtype, which broadcast."""

    arity, infer, sample, operands = 2, broadcast, binary_sample, ("input", "other")
    traits = Traits(inplace=((0, 0), (0, 1)), elementwise=True, amp="promote")


class Flat(Row):
    """An op whose gradient is zero wherever it exists, as torch has it."""

    traits = Traits(flat=True)
    vjp = lambda g, ins, outs, attrs, needs: tuple(call("full_like", g, value=0.0) if need else None for need in needs)


class Predicate(Row):
    """An elementwise op with a bool result."""

    vjp, why = None, {"vjp": "the result is bool"}
    traits = Traits(elementwise=True)
    infer = lambda *ins: Spec(broadcast(*ins).shape, bool_)


class ComparisonOp(Predicate):
    """A predicate of two operands that broadcast."""

    arity, operands, traits = 2, ("input", "other"), Traits(amp="promote")

    def sample(rng):
        """Draw two operands that broadcast, with ties, zeros and both signs."""
        return [rng.integers(-1, 2, (3, 1, 4)).astype(float), rng.integers(-1, 2, (5, 4)).astype(float)], {}


class ViewOp(Row):
    """An op whose result shares the operand's memory wherever strides allow it."""

    arity, cost, operands = 1, free_cost, ("x",)


class Backward(Row):
    """An op that occurs only in gradients."""

    why = dict.fromkeys(("emit", "onnx"), "backward ops are not part of an exported model") | {
        "axes": "a gradient is recomputed from the edited program"
    }


class Update(Row):
    """An op that computes the next value of loop-carried state, such as a KV cache or optimizer moments."""

    vjp, traits = None, Traits(update=True)
    why = {
        "vjp": "an update of loop-carried state; gradients do not cross steps",
        "axes": "a training step is recorded again from the edited program",
        "emit": "updates are not part of an exported model",
        "onnx": "updates are not part of an exported model",
    }


class Loss(Row):
    """An op that compares predictions with targets."""

    traits = Traits(loss=True)
    why = dict.fromkeys(("emit", "onnx"), "losses are not part of an exported model")


class Random(Row):
    """An op that draws random numbers from a key."""

    vjp = None
    why = {
        "vjp": "no gradient flows to random numbers",
        "emit": "exported models draw no random numbers: they are not trained there",
        "onnx": "exported models draw no random numbers",
    }
