"""Budgets: what an operation may cost in accuracy, or what must be left of the model afterwards, as values.

A size budget (`Ratio`, `Params`, `Flops`, `Bytes`, `Latency`) bounds what is left; a quality budget (`Error`, `Energy`)
bounds what is lost. The operation that takes one says what it counts: prune the blocks, compress the selected weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from graphwright.errors import UsageError

Counted = Literal["params", "flops", "bytes"]
COUNTED: tuple[Counted, ...] = ("params", "flops", "bytes")


@dataclass(frozen=True, slots=True)
class Ratio:
    """Take away at least this share: `Ratio(0.3)` leaves 70 %.

    Attributes:
        share: 0 <= share < 1 of what is there before; 0.75 is what others call "4x".
        of: what is counted: `params`, `flops` (of one token, or of one sample) or `bytes` (as stored).
    """

    share: float
    of: Counted = "params"

    def __post_init__(self) -> None:
        _need(0 <= self.share < 1, "a share to take away", "0 <= share < 1", self.share)
        _need(self.of in COUNTED, "no such thing to count", ", ".join(COUNTED), self.of)


@dataclass(frozen=True, slots=True)
class AtMost:
    """A budget of so much and no more, of what `of` says."""

    most: int | float
    of: ClassVar[Counted]

    def __post_init__(self) -> None:
        _need(self.most >= 0, f"{self.of} to leave", "a number >= 0", self.most)


class Params(AtMost):
    """Leave at most `most` parameters."""

    __slots__ = ()
    of: ClassVar[Counted] = "params"


class Flops(AtMost):
    """Leave at most `most` floating point operations for one token (or one sample)."""

    __slots__ = ()
    of: ClassVar[Counted] = "flops"


class Bytes(AtMost):
    """Leave at most `most` bytes of weights, as stored."""

    __slots__ = ()
    of: ClassVar[Counted] = "bytes"


@dataclass(frozen=True, slots=True)
class Latency:
    """Leave at most `ms` milliseconds per token, as measured on this machine."""

    ms: float

    def __post_init__(self) -> None:
        _need(self.ms > 0, "milliseconds per token", "a number > 0", self.ms)


@dataclass(frozen=True, slots=True)
class Error:
    """Lose at most this relative error (Frobenius; of outputs where calibration data are given), `most` >= 0."""

    most: float

    def __post_init__(self) -> None:
        _need(self.most >= 0, "a relative error", "a number >= 0", self.most)


@dataclass(frozen=True, slots=True)
class Energy:
    """Keep at least this share of the sum of squared singular values, 0 < `share` <= 1."""

    share: float = 0.99

    def __post_init__(self) -> None:
        _need(0 < self.share <= 1, "a share of energy", "0 < share <= 1", self.share)


SizeBudget = Ratio | Params | Flops | Bytes | Latency
"""Budgets of what is left."""
QualityBudget = Error | Energy
"""Budgets of what is lost."""


def _need(holds: bool, what: str, expected: str, got: object) -> None:
    if not holds:
        raise UsageError(what, expected=expected, got=got)
