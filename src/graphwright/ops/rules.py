"""Shape and dtype rules, and traits, that several rows share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from graphwright.array.spec import Dim, Spec, broadcast_shapes
from graphwright.errors import DTypeError, ShapeError
from graphwright.ops.registry import Traits

UNARY = Traits(inplace=((0, 0),), elementwise=True)
BINARY = Traits(inplace=((0, 0), (0, 1)), elementwise=True, amp="promote")


def same(x: Spec, **attrs: Any) -> Spec:
    """The spec of the operand."""
    return x


def floating(x: Spec, **attrs: Any) -> Spec:
    """The spec of the operand, which must be floating."""
    if not x.dtype.is_float:
        raise DTypeError("takes floating operands", expected="a floating dtype", got=x)
    return x


def broadcast(*ins: Spec, **attrs: Any) -> Spec:
    """Operands of one dtype, broadcast together."""
    one_dtype(*ins)
    return Spec(broadcast_shapes(*(i.shape for i in ins)), ins[0].dtype)


def one_dtype(*ins: Spec) -> None:
    """Raises: DTypeError unless all operands share a dtype."""
    if any(i.dtype is not ins[0].dtype for i in ins):
        raise DTypeError(
            "operands differ in dtype",
            expected=ins[0].dtype.name,
            got=", ".join(map(repr, ins)),
            fix="cast one of them",
        )


def equal_dim(a: Dim, b: Dim, axis: str) -> None:
    """Raises: ShapeError unless two dimensions agree."""
    if a != b:
        raise ShapeError("sizes differ", where=f"axis {axis}", expected=a, got=b)


def axis_of(axis: int, rank: int) -> int:
    """A possibly negative axis as 0..rank-1. Raises: ShapeError."""
    if not -rank <= axis < rank:
        raise ShapeError("no such axis", expected=f"-{rank}..{rank - 1}", got=axis)
    return axis % rank


def axes_of(axes: int | tuple[int, ...] | None, rank: int) -> tuple[int, ...]:
    """Reduction axes, sorted, as 0..rank-1; None means all."""
    if axes is None:
        return tuple(range(rank))
    return tuple(sorted({axis_of(a, rank) for a in ((axes,) if isinstance(axes, int) else axes)}))


Draw = tuple[list[Any], dict[str, Any]]


def unary_sample(low: float, high: float, **attrs: Any) -> Callable[[np.random.Generator], Draw]:
    """Operands uniform in [low, high], and attributes."""
    return lambda rng: ([rng.uniform(low, high, (3, 5))], attrs)


def away_from_zero(rng: np.random.Generator) -> Draw:
    """An operand of both signs, where a difference quotient does not step over the kink at 0."""
    return [rng.uniform(0.1, 2, (3, 5)) * rng.choice((-1.0, 1.0), (3, 5))], {}


def between_integers(rng: np.random.Generator) -> Draw:
    """An operand that stays away from the steps of rounding: neither whole nor halfway."""
    return [rng.integers(-3, 4, (3, 5)) + rng.choice((-0.3, 0.3), (3, 5))], {}


def binary_sample(rng: np.random.Generator, low: float = -2, high: float = 2) -> Draw:
    """Two operands that broadcast."""
    return [rng.uniform(low, high, (3, 1, 4)), rng.uniform(low, high, (5, 4))], {}
