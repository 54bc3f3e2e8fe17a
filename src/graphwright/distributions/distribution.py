"""`Distribution`: samples, log-probabilities and entropies of tensors of parameters, eager, traced and compiled.

Invariant: every random number comes from a `gw.Generator`, so a seed determines samples, also in a compiled step.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Number
from typing import Any

import numpy as np

from graphwright.array import CPU, float32, result_type
from graphwright.autograd import Generator, Tensor, as_tensor, no_grad, rng
from graphwright.autograd.shapes import broadcast_tensors
from graphwright.errors import UsageError


class Distribution:
    """Base of distributions: independent variables in the broadcast shape of the parameters.

    Attributes:
        shape: shape of entropies and, per sample, of log-probabilities; `batch_shape` under torch's name.
        event_shape: shape of one variable, () for numbers; a sample has the shape [*shape, *event_shape].
    """

    shape: tuple[int, ...]
    event_shape: tuple[int, ...] = ()

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The shape of entropies, under torch's name."""
        return self.shape

    @property
    def mean(self) -> Tensor:
        """The mean of an entry."""
        raise NotImplementedError(f"{type(self).__name__} does not define the mean")

    def cdf(self, value: Any) -> Tensor:
        """Return the probability of values that are not larger."""
        raise NotImplementedError(f"{type(self).__name__} does not define cdf")

    @property
    def stddev(self) -> Tensor:
        """The standard deviation: the root of the variance."""
        return self.variance.sqrt()

    @property
    def variance(self) -> Tensor:
        """The variance of an entry."""
        raise NotImplementedError(f"{type(self).__name__} does not define the variance")

    def sample(self, sample_shape: Sequence[int] = (), *, generator: Generator | None = None) -> Tensor:
        """Sample without a gradient: [*sample_shape, *shape, *event_shape]; by default from the default generator."""
        with no_grad():
            return self._drawn(tuple(sample_shape), generator)

    def rsample(self, sample_shape: Sequence[int] = (), *, generator: Generator | None = None) -> Tensor:
        """Sample as a differentiable function of the parameters and of noise: [*sample_shape, *shape].

        Raises: UsageError for discrete distributions.
        """
        raise UsageError("a discrete distribution has no differentiable samples", where=type(self).__name__,
                         fix="use sample() and log_prob()")  # fmt: skip

    def rsample_and_log_prob(
        self, sample_shape: Sequence[int] = (), *, generator: Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return a differentiable sample and its log-probability."""
        found = self.rsample(sample_shape, generator=generator)
        return found, self.log_prob(found)

    def log_prob(self, value: Any) -> Tensor:
        """Return the natural logarithm of the density or probability of each entry of a value that broadcasts."""
        raise NotImplementedError(f"{type(self).__name__} does not define log_prob")

    def entropy(self) -> Tensor:
        """Return the entropy in nats: [*shape]. Raises: UsageError if it has no closed form."""
        raise NotImplementedError(f"{type(self).__name__} does not define entropy")

    def kl(self, other: Any) -> Tensor:
        """Return KL(self ‖ other) in nats, for another distribution of this class; see `kl_divergence`."""
        raise NotImplementedError(f"{type(self).__name__} does not define kl")

    def _drawn(self, sample_shape: tuple[int, ...], generator: Generator | None) -> Tensor:
        return self.rsample(sample_shape, generator=generator)


def kl_divergence(p: Distribution, q: Distribution) -> Tensor:
    """Return KL(p ‖ q) = E_p[ln p - ln q] in nats, elementwise. Raises: UsageError for distributions of two classes."""
    if type(p) is not type(q):
        raise UsageError("the KL divergence of these distributions has no closed form",
                         expected=f"another {type(p).__name__}", got=type(q).__name__,
                         fix="estimate it: (p.log_prob(x) - q.log_prob(x)).mean() over x = p.sample([n])")  # fmt: skip
    return p.kl(q)


def parameters(*values: Any) -> tuple[Tensor, ...]:
    """Return parameters as tensors of one floating dtype and shape; Python numbers take the dtype of the others."""
    tensors = [as_tensor(value) for value in values]
    categories = ["python" if isinstance(v, Number) else "array" if as_tensor(v).ndim else "scalar0d" for v in values]
    kind = result_type([(t.dtype, category) for t, category in zip(tensors, categories, strict=True)])
    kind = kind if kind.is_float else float32
    return tuple(t.to(kind) for t in broadcast_tensors(*tensors))


def host_generator(generator: Generator | None) -> np.random.Generator:
    """Return a generator of numpy for one sample, at the next stream of a generator. Raises: TraceError in a trace."""
    key, stream = (generator or rng).draw()
    seed, step = key.concrete("a sample on the host").to_numpy().view(np.uint64)
    return np.random.Generator(np.random.Philox(key=np.array([seed, step << np.uint64(32) | np.uint64(stream)])))


def require(tensor: Tensor, holds: Any, name: str, expected: str) -> None:
    """Raise UsageError unless a parameter's values satisfy a numpy predicate; traced and device values pass."""
    if not tensor.symbolic and tensor.device == CPU and not (right := holds(host := np.asarray(tensor))).all():
        raise UsageError(
            "the parameter is out of range", where=name, expected=expected, got=float(host[~right].flat[0])
        )
