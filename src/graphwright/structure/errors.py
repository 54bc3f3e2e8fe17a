"""What can go wrong with a structure that is trained, and what is probably not meant."""

from __future__ import annotations

from math import inf, nan
from numbers import Integral, Real
from typing import Any

from graphwright.errors import ComputeError, UsageError


class NotScalar(UsageError):
    """A loss that is not one number."""


class GatesUnused(UsageError):
    """A loss to which no gate makes a difference."""


class WouldDisconnect(UsageError):
    """Cuts that would leave an output without any input."""


class Diverged(ComputeError):
    """Steps in a row whose loss or gradients were not finite."""


class NoTaskTerm(UserWarning):
    """An objective of penalties alone: its optimum is to cut everything."""


class GatesCannotClose(UserWarning):
    """So few steps, or so small a rate, that no gate can get from its start to closed."""


class ClippedStart(UserWarning):
    """A start so near to 0 or 1 that it was moved."""


def within(where: str, value: Any, low: float = -inf, high: float = inf, *, above: bool = False) -> None:
    """A finite number from `low` to `high`; with `above` not `low` itself. Raises: UsageError."""
    x = float(value) if isinstance(value, Real) else nan
    _needs(abs(x) < inf and low <= x <= high and not (above and x == low), where, value, _range(low, high, above))


def whole(where: str, value: Any, low: int = 0) -> None:
    """An integer, `low` or more. Raises: UsageError."""
    fits = isinstance(value, Integral) and int(value) >= low
    _needs(fits, where, value, f"a whole number, {low} or more")


def _range(low: float, high: float, above: bool) -> str:
    if low == -inf:
        return "a finite number"
    if high < inf:
        return f"a number from {low:g} to {high:g}"
    return f"a number above {low:g}" if above else f"a finite number, {low:g} or more"


def _needs(fits: bool, where: str, value: Any, expected: str) -> None:
    if not fits:
        raise UsageError("a setting is out of its range", where=where, expected=expected, got=repr(value))
