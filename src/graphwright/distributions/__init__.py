"""Probability distributions with differentiable samples, log-probabilities, entropies and divergences."""

from __future__ import annotations

from graphwright.distributions.counts import Binomial, Geometric, Poisson
from graphwright.distributions.discrete import Bernoulli, Categorical
from graphwright.distributions.distribution import Distribution, kl_divergence
from graphwright.distributions.gamma import Beta, Chi2, Dirichlet, Gamma, StudentT
from graphwright.distributions.location_scale import Cauchy, Exponential, Gumbel, HalfNormal, Laplace, LogNormal
from graphwright.distributions.normal import Normal, TanhNormal
from graphwright.distributions.uniform import Uniform
from graphwright.distributions.vectors import Independent, MultivariateNormal, OneHotCategorical

__all__ = [
    "Bernoulli", "Beta", "Binomial", "Categorical", "Cauchy", "Chi2", "Dirichlet", "Distribution", "Exponential",
    "Gamma", "Geometric", "Gumbel", "HalfNormal", "Independent", "Laplace", "LogNormal", "MultivariateNormal",
    "Normal", "OneHotCategorical", "Poisson", "StudentT", "TanhNormal", "Uniform", "kl_divergence",
]  # fmt: skip
