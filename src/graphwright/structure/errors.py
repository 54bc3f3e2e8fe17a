"""Errors and warnings of trained structure, and checks of numeric settings."""

from __future__ import annotations

from math import inf, nan
from numbers import Integral, Real
from typing import Any

from graphwright.errors import ComputeError, UsageError


class NotScalar(UsageError):
    """The loss is not a scalar."""


class GatesUnused(UsageError):
    """The loss does not depend on any gate."""


class WouldDisconnect(UsageError):
    """Cuts would disconnect an output from all inputs."""


class Diverged(ComputeError):
    """Loss or gradients were not finite in several consecutive steps."""


class NoTaskTerm(UserWarning):
    """The objective has penalties only: its optimum is to cut everything."""


class GatesCannotClose(UserWarning):
    """Steps or learning rate are too small for any gate to close."""


class ClippedStart(UserWarning):
    """An initial probability close to 0 or 1 was clipped."""


def within(where: str, value: Any, low: float = -inf, high: float = inf, *, above: bool = False) -> None:
    """Check for a finite number from `low` to `high`; with `above` excluding `low`. Raises: UsageError."""
    x = float(value) if isinstance(value, Real) else nan
    _needs(abs(x) < inf and low <= x <= high and not (above and x == low), where, value, _range(low, high, above))


def whole(where: str, value: Any, low: int = 0) -> None:
    """Check for an integer >= `low`. Raises: UsageError."""
    fits = isinstance(value, Integral) and int(value) >= low
    _needs(fits, where, value, f"an integer >= {low}")


def _range(low: float, high: float, above: bool) -> str:
    if low == -inf:
        return "a finite number"
    if high < inf:
        return f"a number from {low:g} to {high:g}"
    return f"a number > {low:g}" if above else f"a finite number >= {low:g}"


def _needs(fits: bool, where: str, value: Any, expected: str) -> None:
    if not fits:
        raise UsageError(f"{where} is out of range", where=where, expected=expected, got=repr(value))
