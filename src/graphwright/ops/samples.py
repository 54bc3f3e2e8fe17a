"""Operands that several rows draw for their tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

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
