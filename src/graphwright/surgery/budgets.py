"""Budgets: how much accuracy an operation may cost, or how large the model may be afterwards.

A size budget (`Ratio`, `Params`, `Flops`, `Bytes`, `Latency`) limits the size that remains; a quality budget (`Error`,
`Energy`) limits the loss of accuracy. In pruning, a `Ratio` refers to the selected nodes (by default the numbered
layers), other size budgets to the whole program. In compression, size budgets refer to the selected matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from graphwright.errors import UsageError

Counted = Literal["params", "flops", "bytes"]
COUNTED: tuple[Counted, ...] = ("params", "flops", "bytes")


@dataclass(frozen=True, slots=True)
class Ratio:
    """A budget that removes at least a given share: `Ratio(0.3)` leaves at most 70 %.

    Attributes:
        share: part of the original size to remove, 0 <= share < 1; 0.75 is also called "4x" compression.
        of: quantity that measures the size: `params`, `flops` (of one token or sample) or `bytes` (as stored).
    """

    share: float
    of: Counted = "params"

    def __post_init__(self) -> None:
        _check(0 <= self.share < 1, "the share to remove is out of range", "0 <= share < 1", self.share)
        _check(self.of in COUNTED, "unknown quantity to limit", ", ".join(COUNTED), self.of)


@dataclass(frozen=True, slots=True)
class AtMost:
    """Base class of the budgets that set an upper limit `most` on the quantity `of`."""

    most: int | float
    of: ClassVar[Counted]

    def __post_init__(self) -> None:
        _check(self.most >= 0, f"the limit of {self.of} is negative", "a number >= 0", self.most)


class Params(AtMost):
    """A budget of at most `most` remaining parameters."""

    __slots__ = ()
    of: ClassVar[Counted] = "params"


class Flops(AtMost):
    """A budget of at most `most` remaining floating point operations per token (or sample)."""

    __slots__ = ()
    of: ClassVar[Counted] = "flops"


class Bytes(AtMost):
    """A budget of at most `most` remaining bytes of weights, in their stored dtypes."""

    __slots__ = ()
    of: ClassVar[Counted] = "bytes"


@dataclass(frozen=True, slots=True)
class Latency:
    """A budget of at most `ms` milliseconds per token (or run), measured on this machine."""

    ms: float

    def __post_init__(self) -> None:
        _check(self.ms > 0, "the time limit is not positive", "milliseconds > 0", self.ms)


@dataclass(frozen=True, slots=True)
class Error:
    """A budget: a relative Frobenius error <= `most` of each matrix, or with method `asvd` of its layer's output."""

    most: float

    def __post_init__(self) -> None:
        _check(self.most >= 0, "the limit of the relative error is negative", "a number >= 0", self.most)


@dataclass(frozen=True, slots=True)
class Energy:
    """A budget that retains at least `share` of each matrix's sum of squared singular values, 0 < `share` <= 1."""

    share: float = 0.99

    def __post_init__(self) -> None:
        _check(0 < self.share <= 1, "the share of energy is out of range", "0 < share <= 1", self.share)


SizeBudget = Ratio | Params | Flops | Bytes | Latency
MatrixBudget = Error | Energy | Ratio | Params | Bytes
"""Budgets of `compress`."""


def _check(holds: bool, what: str, expected: str, got: object) -> None:
    if not holds:
        raise UsageError(what, expected=expected, got=got)
