"""Distributions of counts: Poisson, Geometric and Binomial; samples have the dtype of the parameter."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.autograd import Generator, Tensor, as_tensor
from graphwright.autograd.create import device_of
from graphwright.distributions.discrete import Bernoulli
from graphwright.distributions.distribution import Distribution, host_generator, parameters, require
from graphwright.distributions.location_scale import open_uniform
from graphwright.errors import UsageError
from graphwright.ops import call


class Poisson(Distribution):
    """The distribution of counts k with probability rateᵏ e^-rate / k!; sampled by numpy, outside traces.

    Args:
        rate: >= 0; a floating tensor or number.
    Raises: UsageError for a negative rate, where its values are known.
    """

    def __init__(self, rate: Any) -> None:
        (self.rate,) = parameters(rate)
        require(self.rate, lambda r: r >= 0, "rate", ">= 0")
        self.shape = self.rate.shape

    @property
    def mean(self) -> Tensor:
        """The rate."""
        return self.rate

    @property
    def variance(self) -> Tensor:
        """The rate."""
        return self.rate

    def _drawn(self, sample_shape: tuple[int, ...], generator: Generator | None) -> Tensor:
        rate = self.rate.detach().concrete("a Poisson sample").to_numpy("float64")
        drawn = np.asarray(host_generator(generator).poisson(rate, (*sample_shape, *self.shape)), "f8")
        return as_tensor(drawn).to(dtype=self.rate.dtype, device=device_of(self.rate))

    def log_prob(self, value: Any) -> Tensor:
        """k ln rate - rate - ln k!."""
        k = as_tensor(value).to(self.rate.dtype)
        return k.xlogy(self.rate) - self.rate - (k + 1).lgamma()

    def entropy(self) -> Tensor:
        """Raise UsageError: the entropy has no closed form."""
        raise UsageError("the entropy of Poisson has no closed form", where="Poisson",
                         fix="estimate it: -d.log_prob(d.sample([n])).mean(0)")  # fmt: skip

    def kl(self, other: Poisson) -> Tensor:
        """rate ln(rate / rate') - rate + rate'."""
        return self.rate * (self.rate.log() - other.rate.log()) - (self.rate - other.rate)


class Geometric(Bernoulli):
    """The number of failures k before the first success of probability p: (1 - p)ᵏ p.

    Args:
        probs: p, in (0, 1].
        logits: ln(p / (1 - p)) in place of probs.
    Raises: UsageError unless one of them is given, and for probs out of range.
    """

    def __init__(self, probs: Any = None, logits: Any = None) -> None:
        super().__init__(logits, probs=probs)
        require(self.probs, lambda p: p > 0, "probs", "> 0")

    @property
    def mean(self) -> Tensor:
        """1 / p - 1."""
        return self.probs.reciprocal() - 1

    @property
    def variance(self) -> Tensor:
        """(1 / p - 1) / p."""
        return self.mean / self.probs

    def _drawn(self, sample_shape: tuple[int, ...], generator: Generator | None) -> Tensor:
        drawn = open_uniform((*sample_shape, *self.shape), self.probs, generator)
        return (drawn.log() / (-self.probs).log1p()).floor()

    def log_prob(self, value: Any) -> Tensor:
        """k ln(1 - p) + ln p."""
        lost, won = call("softplus", self.logits), call("softplus", -self.logits)
        return -as_tensor(value) * lost - won

    def entropy(self) -> Tensor:
        """The entropy of one trial, divided by p."""
        return super().entropy() / self.probs

    def kl(self, other: Geometric) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # of this class
        """The divergence of one trial, divided by p."""
        return super().kl(other) / self.probs


class Binomial(Bernoulli):
    """The number of successes k of n trials of probability p; sampled by numpy, outside traces.

    Args:
        total_count: n, an int >= 0.
        probs: p, 0..1.
        logits: ln(p / (1 - p)) in place of probs.
    Raises: UsageError unless one of them is given, and for values out of range.
    """

    def __init__(self, total_count: int = 1, probs: Any = None, logits: Any = None) -> None:
        if not isinstance(total_count, int) or total_count < 0:
            raise UsageError("invalid number of trials", where="Binomial", expected="an int >= 0", got=total_count)
        super().__init__(logits, probs=probs)
        self.total_count = total_count

    @property
    def mean(self) -> Tensor:
        """n p."""
        return self.total_count * self.probs

    @property
    def variance(self) -> Tensor:
        """n p (1 - p)."""
        return self.mean * (1 - self.probs)

    def _drawn(self, sample_shape: tuple[int, ...], generator: Generator | None) -> Tensor:
        probs = self.probs.detach().concrete("a binomial sample").to_numpy("float64")
        drawn = host_generator(generator).binomial(self.total_count, probs, (*sample_shape, *self.shape))
        return as_tensor(np.asarray(drawn, "f8")).to(dtype=self.probs.dtype, device=device_of(self.probs))

    def log_prob(self, value: Any) -> Tensor:
        """ln(n over k) + k·logits - n·softplus(logits)."""
        k, n = as_tensor(value).to(self.probs.dtype), float(self.total_count)
        ways = as_tensor(n + 1).to(self.probs.dtype).lgamma() - (k + 1).lgamma() - (n - k + 1).lgamma()
        return ways + k * self.logits - n * call("softplus", self.logits)

    def entropy(self) -> Tensor:
        """-Σ p(k) ln p(k) over all k."""
        k = as_tensor(np.arange(self.total_count + 1.0)).to(self.probs.dtype)
        logs = self.log_prob(k.reshape(-1, *(1,) * len(self.shape)))
        return -(logs.exp() * logs).sum(0)

    def kl(self, other: Binomial) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # of this class
        """n times the divergence of one trial. Raises: UsageError for different n."""
        if self.total_count != other.total_count:
            got = f"{self.total_count} and {other.total_count}"
            raise UsageError("the numbers of trials differ", where="Binomial", expected="equal ones", got=got)
        return self.total_count * super().kl(other)
