"""Distributions of gamma variables: Gamma, Chi2, Beta, Dirichlet and StudentT.

Samples are drawn by numpy on the host, outside traces and without a gradient; log-probabilities are tensor code.
"""

from __future__ import annotations

from math import log, pi
from typing import Any

import numpy as np

from graphwright.autograd import Generator, Tensor, as_tensor, where
from graphwright.autograd.create import device_of
from graphwright.distributions.distribution import Distribution, host_generator, parameters
from graphwright.distributions.location_scale import positive
from graphwright.errors import ShapeError, UsageError


def _standard(shape: tuple[int, ...], concentration: Tensor, generator: Generator | None) -> Tensor:
    """Sample gamma distributions of rate 1, at least the smallest normal number (Marsaglia and Tsang 2000)."""
    alpha = concentration.detach().concrete("a gamma sample").to_numpy("float64")
    drawn = np.maximum(host_generator(generator).standard_gamma(alpha, shape), np.finfo("f4").tiny)
    return as_tensor(drawn).to(dtype=concentration.dtype, device=device_of(concentration))


class _WithoutPath(Distribution):
    def rsample(self, sample_shape: Any = (), *, generator: Generator | None = None) -> Tensor:
        """Raise UsageError: samples have no gradient."""
        raise UsageError("samples of this distribution have no gradient", where=type(self).__name__,
                         fix="use sample() and log_prob()")  # fmt: skip


class Gamma(_WithoutPath):
    """The gamma distribution: density rateᵃ xᵃ⁻¹ e^(-rate·x) / Γ(a) for x > 0, with a = concentration.

    Args:
        concentration, rate: > 0; floating tensors or numbers that broadcast.
    Raises: UsageError for values that are not > 0, where they are known.
    """

    def __init__(self, concentration: Any, rate: Any) -> None:
        self.concentration, self.rate = parameters(concentration, rate)
        positive("concentration", self.concentration)
        positive("rate", self.rate)
        self.shape = self.rate.shape

    @property
    def mean(self) -> Tensor:
        """concentration / rate."""
        return self.concentration / self.rate

    @property
    def variance(self) -> Tensor:
        """concentration / rate²."""
        return self.concentration / self.rate**2

    def _drawn(self, sample_shape: tuple[int, ...], generator: Generator | None) -> Tensor:
        return _standard((*sample_shape, *self.shape), self.concentration, generator) / self.rate

    def log_prob(self, value: Any) -> Tensor:
        """a ln rate + (a - 1) ln x - rate·x - ln Γ(a)."""
        x, a = as_tensor(value), self.concentration
        return a * self.rate.log() + (a - 1) * x.log() - self.rate * x - a.lgamma()

    def entropy(self) -> Tensor:
        """a - ln rate + ln Γ(a) + (1 - a) ψ(a)."""
        a = self.concentration
        return a - self.rate.log() + a.lgamma() + (1 - a) * a.digamma()

    def kl(self, other: Gamma) -> Tensor:
        """a' ln(b / b') + ln(Γ(a') / Γ(a)) + (a - a') ψ(a) + (b' - b) a / b, with rates b."""
        a, b, c, d = self.concentration, self.rate, other.concentration, other.rate
        return c * (b / d).log() + c.lgamma() - a.lgamma() + (a - c) * a.digamma() + (d - b) * (a / b)


class Chi2(Gamma):
    """The chi-squared distribution of `df` degrees of freedom, > 0: Gamma(df / 2, ½)."""

    def __init__(self, df: Any) -> None:
        (self.df,) = parameters(df)
        super().__init__(0.5 * self.df, 0.5)


class Beta(_WithoutPath):
    """The beta distribution: density in proportion to xᵃ⁻¹ (1 - x)ᵇ⁻¹ for 0 < x < 1.

    Args:
        concentration1, concentration0: a and b, > 0; floating tensors or numbers that broadcast.
    Raises: UsageError for values that are not > 0, where they are known.
    """

    def __init__(self, concentration1: Any, concentration0: Any) -> None:
        self.concentration1, self.concentration0 = parameters(concentration1, concentration0)
        positive("concentration1", self.concentration1)
        positive("concentration0", self.concentration0)
        self.shape = self.concentration1.shape

    @property
    def mean(self) -> Tensor:
        """a / (a + b)."""
        return self.concentration1 / (self.concentration1 + self.concentration0)

    @property
    def variance(self) -> Tensor:
        """a b / ((a + b)² (a + b + 1))."""
        total = self.concentration1 + self.concentration0
        return self.concentration1 * self.concentration0 / (total**2 * (total + 1))

    def _drawn(self, sample_shape: tuple[int, ...], generator: Generator | None) -> Tensor:
        shape = (*sample_shape, *self.shape)
        x, y = (_standard(shape, c, generator) for c in (self.concentration1, self.concentration0))
        return x / (x + y)

    def _log_beta(self) -> Tensor:
        a, b = self.concentration1, self.concentration0
        return a.lgamma() + b.lgamma() - (a + b).lgamma()

    def log_prob(self, value: Any) -> Tensor:
        """(a - 1) ln x + (b - 1) ln(1 - x) - ln B(a, b)."""
        x = as_tensor(value)
        return (self.concentration1 - 1) * x.log() + (self.concentration0 - 1) * (-x).log1p() - self._log_beta()

    def entropy(self) -> Tensor:
        """ln B(a, b) - (a - 1) ψ(a) - (b - 1) ψ(b) + (a + b - 2) ψ(a + b)."""
        a, b = self.concentration1, self.concentration0
        own = self._log_beta() - (a - 1) * a.digamma() - (b - 1) * b.digamma()
        return own + (a + b - 2) * (a + b).digamma()

    def kl(self, other: Beta) -> Tensor:
        """ln(B' / B) + (a - a') ψ(a) + (b - b') ψ(b) + (a' - a + b' - b) ψ(a + b)."""
        a, b, c, d = self.concentration1, self.concentration0, other.concentration1, other.concentration0
        ratio = other._log_beta() - self._log_beta()
        return ratio + (a - c) * a.digamma() + (b - d) * b.digamma() + (c - a + d - b) * (a + b).digamma()


class Dirichlet(_WithoutPath):
    """The Dirichlet distribution of K numbers > 0 with sum 1; density in proportion to Π xₖ^(cₖ - 1).

    Args:
        concentration: c [..., K], > 0.
    Raises: UsageError for values that are not > 0, where they are known; ShapeError without an axis.
    """

    def __init__(self, concentration: Any) -> None:
        (self.concentration,) = parameters(concentration)
        if not self.concentration.ndim:
            got = self.concentration.spec
            raise ShapeError("there is no axis of concentrations", where="Dirichlet", expected="[..., K]", got=got)
        positive("concentration", self.concentration)
        self.shape, self.event_shape = self.concentration.shape[:-1], self.concentration.shape[-1:]

    @property
    def mean(self) -> Tensor:
        """c / Σc."""
        return self.concentration / self.concentration.sum(-1, keepdim=True)

    @property
    def variance(self) -> Tensor:
        """mean (1 - mean) / (Σc + 1)."""
        return self.mean * (1 - self.mean) / (self.concentration.sum(-1, keepdim=True) + 1)

    def _drawn(self, sample_shape: tuple[int, ...], generator: Generator | None) -> Tensor:
        drawn = _standard((*sample_shape, *self.concentration.shape), self.concentration, generator)
        return drawn / drawn.sum(-1, keepdim=True)

    def log_prob(self, value: Any) -> Tensor:
        """Σ (c - 1) ln x + ln Γ(Σc) - Σ ln Γ(c)."""
        c = self.concentration
        return ((c - 1) * as_tensor(value).log()).sum(-1) + c.sum(-1).lgamma() - c.lgamma().sum(-1)

    def entropy(self) -> Tensor:
        """Σ ln Γ(c) - ln Γ(Σc) - (K - Σc) ψ(Σc) - Σ (c - 1) ψ(c)."""
        c = self.concentration
        total = c.sum(-1)
        own = c.lgamma().sum(-1) - total.lgamma() - ((c - 1) * c.digamma()).sum(-1)
        return own - (float(c.shape[-1]) - total) * total.digamma()

    def kl(self, other: Dirichlet) -> Tensor:
        """ln(Γ(Σc) / Γ(Σc')) - Σ ln(Γ(c) / Γ(c')) + Σ (c - c')(ψ(c) - ψ(Σc))."""
        a, b = self.concentration, other.concentration
        slopes = a.digamma() - a.sum(-1, keepdim=True).digamma()
        own = a.sum(-1).lgamma() - b.sum(-1).lgamma() - (a.lgamma() - b.lgamma()).sum(-1)
        return own + ((a - b) * slopes).sum(-1)


class StudentT(_WithoutPath):
    """Student's t: loc + scale·z / √(g / df) for a normal z and a chi-squared g.

    Args:
        df: degrees of freedom, > 0.
        loc, scale: floating tensors or numbers that broadcast; scale > 0.
    Raises: UsageError for values that are not > 0, where they are known.
    """

    def __init__(self, df: Any, loc: Any = 0.0, scale: Any = 1.0) -> None:
        self.df, self.loc, self.scale = parameters(df, loc, scale)
        positive("df", self.df)
        positive("scale", self.scale)
        self.shape = self.df.shape

    @property
    def mean(self) -> Tensor:
        """loc; NaN for df <= 1."""
        return where(self.df > 1, self.loc, float("nan"))

    @property
    def variance(self) -> Tensor:
        """scale²·df / (df - 2); ∞ for df <= 2, NaN for df <= 1."""
        wide = where(self.df > 2, self.scale**2 * self.df / (self.df - 2), float("inf"))
        return where(self.df > 1, wide, float("nan"))

    def _drawn(self, sample_shape: tuple[int, ...], generator: Generator | None) -> Tensor:
        shape = (*sample_shape, *self.shape)
        normal = as_tensor(host_generator(generator).standard_normal(shape))
        chi2 = 2 * _standard(shape, 0.5 * self.df, generator)
        return (
            self.loc + self.scale * normal.to(dtype=self.df.dtype, device=device_of(self.df)) * (self.df / chi2).sqrt()
        )

    def log_prob(self, value: Any) -> Tensor:
        """-½ (df + 1) ln(1 + y² / df) - ln(scale √(π df) Γ(df/2) / Γ((df+1)/2)), with y = (x - loc) / scale."""
        y = (as_tensor(value) - self.loc) / self.scale
        size = self.scale.log() + 0.5 * self.df.log() + 0.5 * log(pi)
        size = size + (0.5 * self.df).lgamma() - (0.5 * (self.df + 1)).lgamma()
        return -0.5 * (self.df + 1) * (y**2 / self.df).log1p() - size

    def entropy(self) -> Tensor:
        """½ (df + 1)(ψ((df+1)/2) - ψ(df/2)) + ln(√df B(½, df/2)) + ln scale."""
        half, more = 0.5 * self.df, 0.5 * (self.df + 1)
        beta = 0.5 * log(pi) + half.lgamma() - more.lgamma()
        return self.scale.log() + more * (more.digamma() - half.digamma()) + 0.5 * self.df.log() + beta

    def kl(self, other: StudentT) -> Tensor:
        """Raise UsageError: the divergence has no closed form."""
        raise UsageError("the divergence of StudentT has no closed form", where="StudentT",
                         fix="estimate it: (p.log_prob(x) - q.log_prob(x)).mean() over x = p.sample([n])")  # fmt: skip
