"""Distributions of real numbers that are functions of one simple sample: Laplace, Cauchy, Gumbel, Exponential, ..."""

from __future__ import annotations

from collections.abc import Sequence
from math import e, log, pi
from typing import Any

from graphwright.array import finfo
from graphwright.autograd import Generator, Tensor, as_tensor, rand, where
from graphwright.autograd.create import device_of
from graphwright.distributions.distribution import Distribution, parameters, require
from graphwright.distributions.normal import Normal

EULER = 0.5772156649015329
"""The Euler-Mascheroni constant."""


def open_uniform(shape: Sequence[int], like: Tensor, generator: Generator | None) -> Tensor:
    """Sample uniformly from (0, 1), without the ends."""
    drawn = rand(tuple(shape), dtype=like.dtype, generator=generator, device=device_of(like))
    return drawn.clamp(finfo(like.dtype).tiny, 1 - finfo(like.dtype).eps)


def positive(name: str, value: Tensor) -> None:
    """Raise UsageError unless all values that are known are > 0."""
    require(value, lambda v: v > 0, name, "> 0")


class _LocScale(Distribution):
    """loc + scale·x for a standard distribution of x.

    Args:
        loc, scale: floating tensors or numbers that broadcast; scale > 0.
    Raises: UsageError for a scale that is not > 0, where its values are known.
    """

    def __init__(self, loc: Any, scale: Any) -> None:
        self.loc, self.scale = parameters(loc, scale)
        positive("scale", self.scale)
        self.shape = self.loc.shape

    def rsample(self, sample_shape: Sequence[int] = (), *, generator: Generator | None = None) -> Tensor:
        """Map a uniform sample by the inverse of the distribution function."""
        return self.icdf(open_uniform((*sample_shape, *self.shape), self.loc, generator))

    def icdf(self, value: Any) -> Tensor:
        """Return the quantiles at probabilities."""
        return self.loc + self.scale * self._standard(as_tensor(value))

    def _standard(self, p: Tensor) -> Tensor:
        raise NotImplementedError

    def _apart(self, value: Any) -> Tensor:
        return (as_tensor(value) - self.loc) / self.scale


class Laplace(_LocScale):
    """The Laplace distribution: density exp(-|x - loc| / scale) / (2 scale)."""

    @property
    def mean(self) -> Tensor:
        """The mean, which is also median and mode."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """2 scale²."""
        return 2 * self.scale * self.scale

    def _standard(self, p: Tensor) -> Tensor:
        return -(p - 0.5).sign() * (-2 * (p - 0.5).abs()).log1p()

    def cdf(self, value: Any) -> Tensor:
        """½ - ½ sign(y)(e^-|y| - 1), with y = (x - loc) / scale."""
        y = self._apart(value)
        return 0.5 - 0.5 * y.sign() * (-y.abs()).expm1()

    def log_prob(self, value: Any) -> Tensor:
        """-|x - loc| / scale - ln(2 scale)."""
        return -self._apart(value).abs() - (2 * self.scale).log()

    def entropy(self) -> Tensor:
        """1 + ln(2 scale)."""
        return 1 + (2 * self.scale).log()

    def kl(self, other: Laplace) -> Tensor:
        """|d| / s' + r e^(-|d| / s) - ln r - 1, with d the distance of the means and r = s / s' (Gil 2011)."""
        ratio, apart = self.scale / other.scale, (self.loc - other.loc).abs()
        return apart / other.scale + ratio * (-apart / self.scale).exp() - ratio.log() - 1


class Cauchy(_LocScale):
    """The Cauchy distribution: density 1 / (π scale (1 + ((x - loc) / scale)²)); it has no mean."""

    def _standard(self, p: Tensor) -> Tensor:
        return (pi * (p - 0.5)).tan()

    def cdf(self, value: Any) -> Tensor:
        """½ + arctan((x - loc) / scale) / π."""
        return 0.5 + self._apart(value).atan() / pi

    def log_prob(self, value: Any) -> Tensor:
        """-ln π - ln scale - ln(1 + ((x - loc) / scale)²)."""
        return -log(pi) - self.scale.log() - (self._apart(value) ** 2).log1p()

    def entropy(self) -> Tensor:
        """ln(4π scale)."""
        return (4 * pi * self.scale).log()

    def kl(self, other: Cauchy) -> Tensor:
        """ln(((s + s')² + (loc - loc')²) / (4 s s')) (Chyzak and Nielsen 2019)."""
        total = (self.scale + other.scale) ** 2 + (self.loc - other.loc) ** 2
        return total.log() - (4 * self.scale * other.scale).log()


class Gumbel(_LocScale):
    """The Gumbel distribution of largest values: distribution function exp(-exp(-(x - loc) / scale))."""

    @property
    def mean(self) -> Tensor:
        """loc + γ·scale."""
        return self.loc + EULER * self.scale

    @property
    def variance(self) -> Tensor:
        """π² scale² / 6."""
        return (pi * pi / 6) * self.scale * self.scale

    def _standard(self, p: Tensor) -> Tensor:
        return -(-p.log()).log()

    def cdf(self, value: Any) -> Tensor:
        """exp(-exp(-(x - loc) / scale))."""
        return (-(-self._apart(value)).exp()).exp()

    def log_prob(self, value: Any) -> Tensor:
        """-y - e^-y - ln scale, with y = (x - loc) / scale."""
        y = self._apart(value)
        return -y - (-y).exp() - self.scale.log()

    def entropy(self) -> Tensor:
        """ln scale + 1 + γ."""
        return self.scale.log() + (1 + EULER)

    def kl(self, other: Gumbel) -> Tensor:
        """-ln r - d + γ r + e^d Γ(1 + r) - (1 + γ), with r = s / s' and d = (loc' - loc) / s' (Gil 2011)."""
        ratio, apart = self.scale / other.scale, (other.loc - self.loc) / other.scale
        return -ratio.log() - apart + EULER * ratio + (apart + (1 + ratio).lgamma()).exp() - (1 + EULER)


class Exponential(Distribution):
    """The exponential distribution: density rate·exp(-rate·x) for x >= 0.

    Args:
        rate: > 0; a floating tensor or number.
    Raises: UsageError for a rate that is not > 0, where its values are known.
    """

    def __init__(self, rate: Any) -> None:
        (self.rate,) = parameters(rate)
        positive("rate", self.rate)
        self.shape = self.rate.shape

    @property
    def mean(self) -> Tensor:
        """1 / rate."""
        return self.rate.reciprocal()

    @property
    def variance(self) -> Tensor:
        """1 / rate²."""
        return self.rate**-2

    def rsample(self, sample_shape: Sequence[int] = (), *, generator: Generator | None = None) -> Tensor:
        """-ln(1 - u) / rate, with u uniform."""
        return self.icdf(open_uniform((*sample_shape, *self.shape), self.rate, generator))

    def icdf(self, value: Any) -> Tensor:
        """Return the quantiles at probabilities."""
        return -(-as_tensor(value)).log1p() / self.rate

    def cdf(self, value: Any) -> Tensor:
        """1 - exp(-rate·x)."""
        return -(-self.rate * as_tensor(value)).expm1()

    def log_prob(self, value: Any) -> Tensor:
        """ln rate - rate·x, -∞ below 0."""
        x = as_tensor(value)
        return where(x < 0, -float("inf"), self.rate.log() - self.rate * x)

    def entropy(self) -> Tensor:
        """1 - ln rate."""
        return 1 - self.rate.log()

    def kl(self, other: Exponential) -> Tensor:
        """r - ln r - 1, with r = rate' / rate."""
        ratio = other.rate / self.rate
        return ratio - ratio.log() - 1


class LogNormal(Distribution):
    """The distribution of eᵘ for a normal u.

    Args:
        loc, scale: mean and standard deviation of u, as for `Normal`.
    """

    def __init__(self, loc: Any, scale: Any) -> None:
        self.base = Normal(loc, scale)
        self.shape = self.base.shape

    @property
    def mean(self) -> Tensor:
        """exp(loc + scale² / 2)."""
        return (self.base.loc + 0.5 * self.base.variance).exp()

    @property
    def variance(self) -> Tensor:
        """(exp(scale²) - 1)·mean²."""
        return self.base.variance.expm1() * self.mean**2

    def rsample(self, sample_shape: Sequence[int] = (), *, generator: Generator | None = None) -> Tensor:
        """Exponentiate a normal sample."""
        return self.base.rsample(sample_shape, generator=generator).exp()

    def cdf(self, value: Any) -> Tensor:
        """Return the distribution function of the normal at ln x."""
        return self.base.cdf(as_tensor(value).log())

    def log_prob(self, value: Any) -> Tensor:
        """ln N(ln x) - ln x."""
        u = as_tensor(value).log()
        return self.base.log_prob(u) - u

    def entropy(self) -> Tensor:
        """½ ln(2πe scale²) + loc."""
        return self.base.entropy() + self.base.loc

    def kl(self, other: LogNormal) -> Tensor:
        """Return the divergence of the normal distributions."""
        return self.base.kl(other.base)


class HalfNormal(Distribution):
    """The distribution of |x| for a normal x of mean 0.

    Args:
        scale: standard deviation of x, > 0.
    """

    def __init__(self, scale: Any) -> None:
        self.base = Normal(0.0, scale)
        self.shape = self.base.shape

    @property
    def mean(self) -> Tensor:
        """scale·√(2/π)."""
        return self.base.scale * (2 / pi) ** 0.5

    @property
    def variance(self) -> Tensor:
        """scale²·(1 - 2/π)."""
        return self.base.variance * (1 - 2 / pi)

    def rsample(self, sample_shape: Sequence[int] = (), *, generator: Generator | None = None) -> Tensor:
        """Return the size of a normal sample."""
        return self.base.rsample(sample_shape, generator=generator).abs()

    def cdf(self, value: Any) -> Tensor:
        """2 Φ(x / scale) - 1."""
        return 2 * self.base.cdf(value) - 1

    def log_prob(self, value: Any) -> Tensor:
        """ln 2 + ln N(x), -∞ below 0."""
        x = as_tensor(value)
        return where(x < 0, -float("inf"), self.base.log_prob(x) + log(2))

    def entropy(self) -> Tensor:
        """½ ln(πe scale² / 2)."""
        return self.base.scale.log() + 0.5 * log(pi * e / 2)

    def kl(self, other: HalfNormal) -> Tensor:
        """Return the divergence of the normal distributions."""
        return self.base.kl(other.base)
