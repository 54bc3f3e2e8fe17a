"""Settings: dataclasses whose annotations state the valid values of each field, which are checked on creation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from math import inf, nan
from numbers import Integral, Real
from sys import float_info
from typing import Annotated, Any, get_type_hints

from graphwright.arguments import matches, words
from graphwright.errors import UsageError, shown


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
            raise UsageError("the argument is out of range", where=name, expected=self, got=shown(value))

    def __contains__(self, value: Any) -> bool:
        x: Any = value if isinstance(value, Real) and not isinstance(value, bool) else nan
        inside = abs(x) <= float_info.max and self.low <= x <= self.high and not (self.above and x == self.low)
        return inside and (not self.whole or x == int(x))

    def __str__(self) -> str:
        kind, sign = "a whole number" if self.whole else "a finite number", ">" if self.above else ">="
        if self.high < inf:
            low, high = (str(n) if self.whole else f"{n:g}" for n in (self.low, self.high))
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
Size = Annotated[int, Range(1, (1 << 31) - 1, whole=True)]
Seed = Annotated[int, Range(0, (1 << 63) - 1, whole=True)]
AtLeastTwo = Annotated[int, Range(2, whole=True)]


class Settings:
    """Base of dataclasses that check the fields against their annotations."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Check the fields. Raises: UsageError that names the first field out of range."""
        for name, hint in _hints(type(self)).items():
            if not matches(getattr(self, name), hint):
                raise self.out_of_range(name, words(hint))

    def out_of_range(self, name: str, expected: object) -> UsageError:
        """Return a UsageError for the invalid value of the field `name`; `expected` describes the valid values."""
        where, got = f"{type(self).__name__}, {name}", shown(getattr(self, name))
        return UsageError("a setting is out of range", where=where, expected=expected, got=got)


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name] for f in fields(kind)}
