"""Numbers that settings may be, checked where they are given."""

from __future__ import annotations

from math import inf, nan
from numbers import Integral, Real
from typing import Any

from graphwright.errors import UsageError


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
