"""Settings: dataclasses whose annotations state the valid values of each field, which are checked on creation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import inf, nan
from numbers import Integral, Real
from sys import float_info
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from graphwright.errors import UsageError


@dataclass(frozen=True, slots=True)
class Range:
    """The finite numbers from `low` to `high`, without `low` itself if `above` is set, only integers if `whole` is.

    True and False are not numbers.
    """

    low: float = -inf
    high: float = inf
    above: bool = False
    whole: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raise UsageError if the argument `name` is out of range, or has no integer type although `whole` is set."""
        if value not in self or (self.whole and not isinstance(value, Integral)):
            raise UsageError("the argument is out of range", where=name, expected=self, got=repr(value))

    def __contains__(self, value: Any) -> bool:
        x: Any = value if isinstance(value, Real) and not isinstance(value, bool) else nan
        inside = abs(x) <= float_info.max and self.low <= x <= self.high and not (self.above and x == self.low)
        return inside and (not self.whole or x == int(x))

    def __str__(self) -> str:
        kind, sign = "a whole number" if self.whole else "a finite number", ">" if self.above else ">="
        if self.high < inf:
            low, high = f"{self.low:g}", f"{self.high:g}"
            return f"a number > {low} and <= {high}" if self.above else f"a number from {low} to {high}"
        return kind if self.low == -inf else f"{kind} {sign} {self.low:g}"


Number = Annotated[float, Range()]
Share = Annotated[float, Range(0, 1)]
PositiveShare = Annotated[float, Range(0, 1, above=True)]
NotNegative = Annotated[float, Range(0)]
Positive = Annotated[float, Range(0, above=True)]
Whole = Annotated[int, Range(whole=True)]
Count = Annotated[int, Range(0, whole=True)]
AtLeastOne = Annotated[int, Range(1, whole=True)]
AtLeastTwo = Annotated[int, Range(2, whole=True)]


class Settings:
    """Base of dataclasses that check the fields annotated with a `Range`, a `Literal` or another settings class."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Check the fields. Raises: UsageError that names the first field out of range."""
        for name, allowed in _allowed_fields(type(self)).items():
            value = getattr(self, name)
            if not any(isinstance(value, a) if isinstance(a, type) else value in a for a in allowed):
                raise self.out_of_range(name, " or ".join(map(_words, allowed)))

    def out_of_range(self, name: str, expected: object) -> UsageError:
        """Return a UsageError for the invalid value of the field `name`; `expected` describes the valid values."""
        where, got = f"{type(self).__name__}, {name}", repr(getattr(self, name))
        return UsageError("a setting is out of range", where=where, expected=expected, got=got)


@cache
def _allowed_fields(kind: type) -> dict[str, list[Any]]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: allowed for name, hint in hints.items() if (allowed := _allowed(hint))}


def _allowed(hint: Any) -> list[Any]:
    """Return what an annotation allows: ranges, tuples of literals and classes; empty if it cannot be checked."""
    match get_origin(hint):
        case origin if origin in (Union, UnionType):
            parts = [_allowed(part) for part in get_args(hint)]
            return [one for part in parts for one in part] if all(parts) else []
        case origin if origin is Literal:
            return [get_args(hint)]
        case origin if origin is Annotated:
            return [one for one in hint.__metadata__ if isinstance(one, Range)]
    return [hint] if isinstance(hint, type) and issubclass(hint, Settings | NoneType) else []


def _words(allowed: Any) -> str:
    if isinstance(allowed, type):
        return "None" if allowed is NoneType else allowed.__name__
    return ", ".join(allowed) if isinstance(allowed, tuple) else str(allowed)
