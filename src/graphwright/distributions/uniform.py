"""The uniform distribution over an interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphwright.autograd import Generator, Tensor, as_tensor, rand, where
from graphwright.autograd.create import device_of
from graphwright.distributions.distribution import Distribution, parameters, require


class Uniform(Distribution):
    """The uniform distribution over [low, high).

    Args:
        low, high: ends, low < high; floating tensors or numbers that broadcast.
    Raises: UsageError for an empty interval, where the values are known.
    """

    def __init__(self, low: Any, high: Any) -> None:
        self.low, self.high = parameters(low, high)
        require(self.high - self.low, lambda width: width > 0, "high - low", "> 0")
        self.shape = self.low.shape

    @property
    def mean(self) -> Tensor:
        """The middle, which is also the median."""
        return 0.5 * (self.low + self.high)

    @property
    def variance(self) -> Tensor:
        """(high - low)² / 12."""
        return (self.high - self.low) ** 2 / 12

    def rsample(self, sample_shape: Sequence[int] = (), *, generator: Generator | None = None) -> Tensor:
        """low + (high - low)·r, with r uniform in [0, 1)."""
        shape = (*sample_shape, *self.shape)
        return self.low + (self.high - self.low) * rand(
            shape, dtype=self.low.dtype, generator=generator, device=device_of(self.low)
        )

    def log_prob(self, value: Any) -> Tensor:
        """-ln(high - low) inside the interval, else -∞."""
        value = as_tensor(value)
        inside = (value >= self.low) & (value < self.high)
        return where(inside, -(self.high - self.low).log(), -float("inf"))

    def cdf(self, value: Any) -> Tensor:
        """(x - low) / (high - low), between 0 and 1."""
        return ((as_tensor(value) - self.low) / (self.high - self.low)).clamp(0, 1)

    def entropy(self) -> Tensor:
        """ln(high - low)."""
        return (self.high - self.low).log()

    def kl(self, other: Uniform) -> Tensor:
        """ln((high' - low') / (high - low)) if this interval is inside the other one, else ∞."""
        inside = (other.low <= self.low) & (self.high <= other.high)
        return where(inside, other.entropy() - self.entropy(), float("inf"))
