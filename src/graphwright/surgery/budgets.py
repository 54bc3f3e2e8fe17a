"""Budgets: how much accuracy an operation may cost, or how large the model may be afterwards.

A size budget (`Ratio`, `Params`, `Flops`, `Bytes`, `Latency`) limits the size that remains; a quality budget (`Error`,
`Energy`) limits the loss of accuracy. In pruning, a `Ratio` refers to the selected nodes (by default the numbered
layers), other size budgets to the whole program. In compression, size budgets refer to the selected matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from graphwright.settings import NotNegative, Positive, PositiveShare, Settings, Share

Counted = Literal["params", "flops", "bytes"]


@dataclass(frozen=True, slots=True)
class Ratio(Settings):
    """A budget that removes at least a given share: `Ratio(0.3)` leaves at most 70 %.

    Attributes:
        share: part of the original size to remove, 0 <= share < 1; 0.75 is also called "4x" compression.
        of: quantity that measures the size: `params`, `flops` (of one token or sample) or `bytes` (as stored).
    """

    share: Share
    of: Counted = "params"

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if self.share == 1:
            raise self.out_of_range("share", "a number from 0 to below 1")


@dataclass(frozen=True, slots=True)
class AtMost(Settings):
    """Base class of the budgets that set an upper limit `most` on the quantity `of`."""

    most: NotNegative
    of: ClassVar[Counted]


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
class Latency(Settings):
    """A budget of at most `ms` milliseconds per token (or run), measured on this machine."""

    ms: Positive


@dataclass(frozen=True, slots=True)
class Error(Settings):
    """A budget: a relative Frobenius error <= `most` of each matrix, or with method `asvd` of its layer's output."""

    most: NotNegative


@dataclass(frozen=True, slots=True)
class Energy(Settings):
    """A budget that retains at least `share` of each matrix's sum of squared singular values, 0 < `share` <= 1."""

    share: PositiveShare = 0.99


SizeBudget = Ratio | Params | Flops | Bytes | Latency
MatrixBudget = Error | Energy | Ratio | Params | Bytes
"""Budgets of `compress`."""
