"""The normal distribution, and the normal distribution squashed into an interval by tanh."""

from __future__ import annotations

from collections.abc import Sequence
from math import log, pi, sqrt
from typing import Any

from graphwright.array import finfo
from graphwright.autograd import Generator, Tensor, as_tensor, randn
from graphwright.autograd.create import device_of
from graphwright.distributions.distribution import Distribution, parameters, require
from graphwright.errors import UsageError
from graphwright.ops import call


class Normal(Distribution):
    """The normal distribution: density exp(-(x - loc)² / (2 scale²)) / (scale √(2π)).

    Args:
        loc, scale: mean and standard deviation > 0; floating tensors or numbers that broadcast.
    Raises: UsageError for a scale that is not > 0, where its values are known.
    """

    def __init__(self, loc: Any, scale: Any) -> None:
        self.loc, self.scale = parameters(loc, scale)
        require(self.scale, lambda s: s > 0, "scale", "> 0")
        self.shape = self.loc.shape

    @property
    def mean(self) -> Tensor:
        """The mean, which is also median and mode."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """The square of the scale."""
        return self.scale * self.scale

    def rsample(self, sample_shape: Sequence[int] = (), *, generator: Generator | None = None) -> Tensor:
        """loc + scale·ε, with ε from the standard normal distribution."""
        shape = (*sample_shape, *self.shape)
        noise = randn(shape, dtype=self.loc.dtype, generator=generator, device=device_of(self.loc))
        return self.loc + self.scale * noise

    def log_prob(self, value: Any) -> Tensor:
        """-(x - loc)² / (2 scale²) - ln scale - ln √(2π)."""
        apart = (as_tensor(value) - self.loc) / self.scale
        return -0.5 * apart * apart - self.scale.log() - 0.5 * log(2 * pi)

    def cdf(self, value: Any) -> Tensor:
        """Φ((x - loc) / scale)."""
        return 0.5 * (1 + ((as_tensor(value) - self.loc) / (self.scale * sqrt(2))).erf())

    def icdf(self, value: Any) -> Tensor:
        """Return the quantiles at probabilities."""
        return self.loc + self.scale * sqrt(2) * (2 * as_tensor(value) - 1).erfinv()

    def entropy(self) -> Tensor:
        """½ ln(2πe scale²)."""
        return self.scale.log() + 0.5 * (1 + log(2 * pi))

    def kl(self, other: Normal) -> Tensor:
        """½ (r² + ((loc - loc') / scale')² - 1) - ln r, with r = scale / scale'."""
        ratio, apart = self.scale / other.scale, (self.loc - other.loc) / other.scale
        return 0.5 * (ratio * ratio + apart * apart - 1) - ratio.log()


class TanhNormal(Distribution):
    """low + (high - low)(1 + tanh u) / 2 for a normal u: the policy of soft actor-critic, with bounded actions.

    Args:
        loc, scale: mean and standard deviation of u, as for `Normal`.
        low, high: ends of the interval, low < high; numbers or tensors that broadcast.
    Raises: UsageError for a scale that is not > 0 or an empty interval, where the values are known.
    Source: Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications", appendix C.
    """

    def __init__(self, loc: Any, scale: Any, low: Any = -1.0, high: Any = 1.0) -> None:
        loc, scale, self.low, self.high = parameters(loc, scale, low, high)
        require(self.high - self.low, lambda width: width > 0, "high - low", "> 0")
        self.base = Normal(loc, scale)
        self.shape = self.base.shape
        self._half = 0.5 * (self.high - self.low)

    @property
    def median(self) -> Tensor:
        """The image of loc, which a policy takes when it does not explore."""
        return self._squashed(self.base.loc)

    def rsample(self, sample_shape: Sequence[int] = (), *, generator: Generator | None = None) -> Tensor:
        """The image of a sample of the normal distribution."""
        return self._squashed(self.base.rsample(sample_shape, generator=generator))

    def rsample_and_log_prob(
        self, sample_shape: Sequence[int] = (), *, generator: Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return a sample and its log-probability, computed from u: exact where tanh u rounds to ±1."""
        u = self.base.rsample(sample_shape, generator=generator)
        return self._squashed(u), self._log_prob_of(u)

    def log_prob(self, value: Any) -> Tensor:
        """ln N(u) - ln |dx/du|; a value at the ends of the interval counts as the next one inside."""
        eps = finfo(self.base.loc.dtype).eps
        inner = ((as_tensor(value) - self.low) / self._half - 1).clamp(-1 + eps, 1 - eps)
        return self._log_prob_of(inner.atanh())

    def entropy(self) -> Tensor:
        """Raise UsageError: the entropy has no closed form."""
        raise UsageError("the entropy of TanhNormal has no closed form", where="TanhNormal",
                         fix="estimate it: -d.rsample_and_log_prob()[1]")  # fmt: skip

    def kl(self, other: TanhNormal) -> Tensor:
        """Return the divergence of the normal distributions. Raises: UsageError for different intervals."""
        for mine, theirs in ((self.low, other.low), (self.high, other.high)):
            require(mine - theirs, lambda gap: gap == 0, "the intervals differ by", "0")
        return self.base.kl(other.base)

    def _squashed(self, u: Tensor) -> Tensor:
        return self.low + self._half * (1 + u.tanh())

    def _log_prob_of(self, u: Tensor) -> Tensor:
        slope = 2 * (log(2) - u - call("softplus", -2 * u))  # ln (1 - tanh² u)
        return self.base.log_prob(u) - slope - self._half.log()
