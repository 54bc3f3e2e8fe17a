"""Distributions of vectors: independent entries of another distribution, the multivariate normal, one-hot vectors."""

from __future__ import annotations

from collections.abc import Sequence
from math import log, pi
from typing import Any

from graphwright.autograd import Generator, Tensor, as_tensor, linalg, one_hot, randn
from graphwright.autograd.create import device_of
from graphwright.distributions.discrete import Categorical
from graphwright.distributions.distribution import Distribution, parameters
from graphwright.errors import ShapeError, UsageError


class Independent(Distribution):
    """A distribution whose last axes are those of one variable: log-probabilities and entropies are summed over them.

    Args:
        base_distribution: the distribution of the entries.
        reinterpreted_batch_ndims: number of axes of its shape.
    Raises: UsageError for more axes than it has.
    """

    def __init__(self, base_distribution: Distribution, reinterpreted_batch_ndims: int) -> None:
        self.base_dist, self.count = base_distribution, reinterpreted_batch_ndims
        have = len(base_distribution.shape)
        if not 0 <= self.count <= have:
            raise UsageError("too many axes", where="Independent", expected=f"0 to {have}", got=self.count)
        first = have - self.count
        self.shape = base_distribution.shape[:first]
        self.event_shape = (*base_distribution.shape[first:], *base_distribution.event_shape)

    @property
    def mean(self) -> Tensor:
        """The means of the entries."""
        return self.base_dist.mean

    @property
    def variance(self) -> Tensor:
        """The variances of the entries."""
        return self.base_dist.variance

    def _drawn(self, sample_shape: tuple[int, ...], generator: Generator | None) -> Tensor:
        return self.base_dist.sample(sample_shape, generator=generator)

    def rsample(self, sample_shape: Sequence[int] = (), *, generator: Generator | None = None) -> Tensor:
        """Sample the entries."""
        return self.base_dist.rsample(sample_shape, generator=generator)

    def log_prob(self, value: Any) -> Tensor:
        """Sum the log-probabilities of the entries."""
        return self._summed(self.base_dist.log_prob(value))

    def entropy(self) -> Tensor:
        """Sum the entropies of the entries."""
        return self._summed(self.base_dist.entropy())

    def kl(self, other: Independent) -> Tensor:
        """Sum the divergences of the entries. Raises: UsageError for distributions of different classes or axes."""
        if type(self.base_dist) is not type(other.base_dist) or self.count != other.count:
            expected, got = (f"{type(d.base_dist).__name__} over {d.count} axes" for d in (self, other))
            raise UsageError("the distributions of the entries differ", where="Independent", expected=expected, got=got)
        return self._summed(self.base_dist.kl(other.base_dist))

    def _summed(self, x: Tensor) -> Tensor:
        return x.sum(tuple(range(-self.count, 0))) if self.count else x


class MultivariateNormal(Distribution):
    """The normal distribution of vectors [K], by its covariance, the inverse of that, or a factor L of it; by numpy.

    Args:
        loc: mean [..., K].
        covariance_matrix, precision_matrix, scale_tril: [..., K, K], exactly one; the covariance is L Lᵀ.
    Raises: UsageError unless one is given; ShapeError; ComputeError if the matrix is not positive definite.
    """

    def __init__(
        self, loc: Any, covariance_matrix: Any = None, precision_matrix: Any = None, scale_tril: Any = None
    ) -> None:
        given = [m for m in (covariance_matrix, precision_matrix, scale_tril) if m is not None]
        if len(given) != 1:
            expected = "one of covariance_matrix, precision_matrix and scale_tril"
            raise UsageError("give one matrix", where="MultivariateNormal", expected=expected, got=len(given))
        (mean,), (matrix,) = parameters(loc), parameters(given[0])
        if mean.ndim < 1 or matrix.ndim < 2 or matrix.shape[-2:] != (mean.shape[-1],) * 2:
            got = f"{mean.spec}, {matrix.spec}"
            raise ShapeError("the operands do not fit", where="MultivariateNormal", expected="[..., K] and [..., K, K]",
                             got=got)  # fmt: skip
        if precision_matrix is not None:
            matrix = linalg.inv(matrix)
        factor = matrix if scale_tril is not None else linalg.cholesky(matrix)
        self.loc, _ = parameters(mean, factor.select(-1, 0))
        self.shape, self.event_shape = self.loc.shape[:-1], self.loc.shape[-1:]
        self.scale_tril = factor.expand(*self.shape, *factor.shape[-2:])

    @property
    def mean(self) -> Tensor:
        """The mean, which is also the mode."""
        return self.loc

    @property
    def covariance_matrix(self) -> Tensor:
        """The covariance L Lᵀ."""
        return self.scale_tril @ self.scale_tril.mT

    @property
    def variance(self) -> Tensor:
        """The diagonal of the covariance."""
        return (self.scale_tril**2).sum(-1)

    def rsample(self, sample_shape: Sequence[int] = (), *, generator: Generator | None = None) -> Tensor:
        """loc + L ε, with ε from the standard normal distribution."""
        shape = (*sample_shape, *self.loc.shape)
        noise = randn(shape, dtype=self.loc.dtype, generator=generator, device=device_of(self.loc))
        return self.loc + (self.scale_tril @ noise.unsqueeze(-1)).squeeze(-1)

    def _half_log_det(self) -> Tensor:
        return self.scale_tril.diagonal(0, -2, -1).log().sum(-1)

    def log_prob(self, value: Any) -> Tensor:
        """-½ ‖L⁻¹(x - loc)‖² - ln det L - K/2 ln 2π."""
        apart = (as_tensor(value) - self.loc).unsqueeze(-1)
        factor = self.scale_tril.expand(*apart.shape[:-2], *self.scale_tril.shape[-2:])
        solved = linalg.solve_triangular(factor, apart, upper=False)
        return -0.5 * ((solved**2).sum((-2, -1)) + self.loc.shape[-1] * log(2 * pi)) - self._half_log_det()

    def entropy(self) -> Tensor:
        """K/2 ln(2πe) + ln det L."""
        return 0.5 * self.loc.shape[-1] * (1 + log(2 * pi)) + self._half_log_det()

    def kl(self, other: MultivariateNormal) -> Tensor:
        """½ (‖L'⁻¹L‖² + ‖L'⁻¹(loc' - loc)‖² - K) + ln det L' - ln det L."""
        shape = (*(self.loc - other.loc).shape[:-1], *self.scale_tril.shape[-2:])
        mine, theirs = self.scale_tril.expand(*shape), other.scale_tril.expand(*shape)
        apart = (other.loc - self.loc).unsqueeze(-1)
        ratio, moved = (linalg.solve_triangular(theirs, x, upper=False) for x in (mine, apart))
        total = (ratio**2).sum((-2, -1)) + (moved**2).sum((-2, -1)) - float(self.loc.shape[-1])
        return 0.5 * total + other._half_log_det() - self._half_log_det()


class OneHotCategorical(Distribution):
    """The distribution of one-hot vectors [K] of the classes of a `Categorical`.

    Args:
        probs: [..., K], >= 0, normalised.
        logits: [..., K] in place of probs.
    Raises: as `Categorical`.
    """

    def __init__(self, probs: Any = None, logits: Any = None) -> None:
        self.base = Categorical(logits, probs=probs)
        self.shape, self.event_shape = self.base.shape, self.base.logits.shape[-1:]

    @property
    def logits(self) -> Tensor:
        """ln of the probabilities [..., K]."""
        return self.base.logits

    @property
    def probs(self) -> Tensor:
        """The probabilities [..., K]."""
        return self.base.probs

    @property
    def mean(self) -> Tensor:
        """The probabilities."""
        return self.probs

    @property
    def variance(self) -> Tensor:
        """p (1 - p) of each class."""
        return self.probs * (1 - self.probs)

    def _drawn(self, sample_shape: tuple[int, ...], generator: Generator | None) -> Tensor:
        return one_hot(self.base.sample(sample_shape, generator=generator), self.event_shape[0]).to(self.logits.dtype)

    def log_prob(self, value: Any) -> Tensor:
        """Return the log-probability of the class of each vector."""
        return self.base.log_prob(as_tensor(value).argmax(-1))

    def entropy(self) -> Tensor:
        """-Σ p ln p."""
        return self.base.entropy()

    def kl(self, other: OneHotCategorical) -> Tensor:
        """Return the divergence of the classes."""
        return self.base.kl(other.base)
