"""Distributions of integers: Categorical over K classes and Bernoulli over 0 and 1."""

from __future__ import annotations

from typing import Any

from graphwright.array import broadcast_shapes, finfo
from graphwright.autograd import Generator, Tensor, as_tensor, bernoulli, gather, gumbel, where
from graphwright.autograd.create import device_of
from graphwright.distributions.distribution import Distribution, parameters, require
from graphwright.errors import ShapeError, UsageError
from graphwright.ops import call


def _given(name: str, logits: Any, probs: Any) -> Tensor:
    """Return the one parameter that is given, floating. Raises: UsageError unless one is."""
    if (logits is None) == (probs is None):
        raise UsageError("give either logits or probs", where=name, got="neither" if logits is None else "both")
    return parameters(probs if logits is None else logits)[0]


class Categorical(Distribution):
    """The distribution of class ids 0..K-1 with probabilities softmax(logits).

    Args:
        logits: [..., K], unnormalised; -∞ excludes a class.
        probs: [..., K] in place of logits, >= 0 with a positive sum, which is normalised.

    Attributes:
        logits: ln of the probabilities [..., K].
    Raises: UsageError unless one of them is given, and for negative probs; ShapeError without an axis of classes.
    """

    def __init__(self, logits: Any = None, *, probs: Any = None) -> None:
        given = _given("Categorical", logits, probs)
        if not given.ndim:
            raise ShapeError("there is no axis of classes", where="Categorical", expected="[..., K]", got=given.spec)
        if logits is None:
            require(given, lambda p: p >= 0, "probs", ">= 0")
            require(given.sum(-1), lambda total: total > 0, "the sum of probs", "> 0")
            self.logits = (given / given.sum(-1, keepdim=True)).log()
        else:
            self.logits = call("log_softmax", given, axis=-1)
        self.shape = given.shape[:-1]

    @property
    def probs(self) -> Tensor:
        """The probabilities [..., K]."""
        return self.logits.exp()

    @property
    def mode(self) -> Tensor:
        """The most likely class, int64."""
        return self.logits.argmax(-1)

    def _drawn(self, sample_shape: tuple[int, ...], generator: Generator | None) -> Tensor:
        shape = (*sample_shape, *self.logits.shape)
        noise = gumbel(shape, dtype=self.logits.dtype, generator=generator, device=device_of(self.logits))
        return (self.logits + noise).argmax(-1)

    def log_prob(self, value: Any) -> Tensor:
        """Return the logits at class ids that broadcast, int64 [...]."""
        ids = as_tensor(value)
        shape = broadcast_shapes(ids.shape, self.shape)
        rows = self.logits.expand(*shape, self.logits.shape[-1])
        return gather(rows, -1, ids.expand(*shape).unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """-Σ p ln p, to which classes of probability 0 contribute 0."""
        return -(self.probs * self.logits.clamp(min=finfo(self.logits.dtype).min)).sum(-1)

    def kl(self, other: Categorical) -> Tensor:
        """Σ p (ln p - ln q); ∞ if q excludes a class that p does not."""
        lowest = finfo(self.logits.dtype).min
        terms = self.probs * (self.logits.clamp(min=lowest) - other.logits.clamp(min=lowest))
        lost = (other.logits == -float("inf")) & (self.logits > -float("inf"))
        return where(lost, float("inf"), terms).sum(-1)


class Bernoulli(Distribution):
    """The distribution of 1 with probability p = σ(logits), else 0; samples have the dtype of the parameter.

    Args:
        logits: ln(p / (1 - p)), floating.
        probs: p in place of logits, 0..1; its logits are finite, as if p were at least one rounding step from 0 and 1.
    Raises: UsageError unless one of them is given, and for probs outside 0..1.
    """

    def __init__(self, logits: Any = None, *, probs: Any = None) -> None:
        given = _given("Bernoulli", logits, probs)
        if logits is None:
            require(given, lambda p: (p >= 0) & (p <= 1), "probs", "0..1")
            eps = finfo(given.dtype).eps
            inner = given.clamp(eps, 1 - eps)
            self.logits, self.probs = inner.log() - (-inner).log1p(), given
        else:
            self.logits, self.probs = given, given.sigmoid()
        self.shape = given.shape

    @property
    def mean(self) -> Tensor:
        """The probability p."""
        return self.probs

    @property
    def variance(self) -> Tensor:
        """p (1 - p)."""
        return self.probs * (1 - self.probs)

    def _drawn(self, sample_shape: tuple[int, ...], generator: Generator | None) -> Tensor:
        return bernoulli(self.probs.expand(*sample_shape, *self.shape).contiguous(), generator=generator)

    def log_prob(self, value: Any) -> Tensor:
        """x·logits - softplus(logits)."""
        return as_tensor(value) * self.logits - call("softplus", self.logits)

    def entropy(self) -> Tensor:
        """softplus(logits) - p·logits."""
        return call("softplus", self.logits) - self.probs * self.logits

    def kl(self, other: Bernoulli) -> Tensor:
        """p (ln p - ln q) + (1 - p)(ln (1 - p) - ln (1 - q))."""
        gap = [call("softplus", sign * other.logits) - call("softplus", sign * self.logits) for sign in (-1, 1)]
        return self.probs * gap[0] + (1 - self.probs) * gap[1]
