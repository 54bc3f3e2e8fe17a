"""Probability distributions with differentiable samples, log-probabilities, entropies and divergences."""

from __future__ import annotations

from graphwright.distributions.discrete import Bernoulli, Categorical
from graphwright.distributions.distribution import Distribution, kl_divergence
from graphwright.distributions.normal import Normal, TanhNormal
from graphwright.distributions.uniform import Uniform

__all__ = ["Bernoulli", "Categorical", "Distribution", "Normal", "TanhNormal", "Uniform", "kl_divergence"]
