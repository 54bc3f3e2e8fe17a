"""Normalisations."""

from __future__ import annotations

from graphwright.autograd import Parameter, Tensor
from graphwright.nn import init
from graphwright.nn.module import Module
from graphwright.ops import call


class RMSNorm(Module):
    """Root-mean-square norm over the last axis, times a weight (Zhang and Sennrich 2019)."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        self.weight = Parameter(init.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] to the same."""
        return call("rms_norm", x, self.weight, eps=self.eps)
