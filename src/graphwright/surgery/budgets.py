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
    """Remove at least this share: `Ratio(0.3)` leaves 70 %.

    Attributes:
        share: 0 <= share < 1 of the size before; removing 0.75 is also called "4x".
        of: quantity that is counted: `params`, `flops` (of one token or sample) or `bytes` (as stored).
    """

    share: float
    of: Counted = "params"

    def __post_init__(self) -> None:
        _check(0 <= self.share < 1, "the share to remove is out of range", "0 <= share < 1", self.share)
        _check(self.of in COUNTED, "unknown quantity to count", ", ".join(COUNTED), self.of)


@dataclass(frozen=True, slots=True)
class AtMost:
    """Base class of the budgets that set an upper limit `most` on the quantity `of`."""

    most: int | float
    of: ClassVar[Counted]

    def __post_init__(self) -> None:
        _check(self.most >= 0, f"the limit of {self.of} is negative", "a number >= 0", self.most)


class Params(AtMost):
    """Leave at most `most` parameters."""

    __slots__ = ()
    of: ClassVar[Counted] = "params"


class Flops(AtMost):
    """Leave at most `most` floating point operations per token (or sample)."""

    __slots__ = ()
    of: ClassVar[Counted] = "flops"


class Bytes(AtMost):
    """Leave at most `most` bytes of weights, as stored."""

    __slots__ = ()
    of: ClassVar[Counted] = "bytes"


@dataclass(frozen=True, slots=True)
class Latency:
    """Leave at most `ms` milliseconds per token, measured on this machine."""

    ms: float

    def __post_init__(self) -> None:
        _check(self.ms > 0, "the time per token is not positive", "milliseconds > 0", self.ms)


@dataclass(frozen=True, slots=True)
class Error:
    """Allow a relative Frobenius error of at most `most` >= 0: of the outputs for `asvd`, else of the weights."""

    most: float

    def __post_init__(self) -> None:
        _check(self.most >= 0, "the relative error is negative", "a number >= 0", self.most)


@dataclass(frozen=True, slots=True)
class Energy:
    """Keep at least this share of the sum of squared singular values, 0 < `share` <= 1."""

    share: float = 0.99

    def __post_init__(self) -> None:
        _check(0 < self.share <= 1, "the share of energy is out of range", "0 < share <= 1", self.share)


SizeBudget = Ratio | Params | Flops | Bytes | Latency
MatrixBudget = Error | Energy | Ratio | Params | Bytes
"""Budgets of `compress`."""


def _check(holds: bool, what: str, expected: str, got: object) -> None:
    if not holds:
        raise UsageError(what, expected=expected, got=got)
