"""Layers: linear, embedding, RMSNorm, activations, sequence of layers."""

from __future__ import annotations

from functools import partial
from typing import Any

from graphwright.autograd import Parameter, Tensor
from graphwright.nn import init
from graphwright.nn.module import Module
from graphwright.ops import call


class Linear(Module):
    """x · wᵀ + b: x [..., in_features] to [..., out_features]; weight [out, in], as in torch."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, name: str = "", seed: int = 0
    ) -> None:
        key = f"{name}linear.{in_features}.{out_features}"
        drawn = partial(init.kaiming_uniform, fan_in=in_features, seed=seed)
        self.weight = Parameter(drawn((out_features, in_features), f"{key}.weight"))
        self.bias = Parameter(drawn((out_features,), f"{key}.bias")) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the map."""
        return call("linear", x, self.weight) if self.bias is None else call("linear", x, self.weight, self.bias)


class Embedding(Module):
    """Rows of a table [num, dim] for integer ids of any shape."""

    def __init__(self, num: int, dim: int, *, name: str = "", seed: int = 0) -> None:
        self.weight = Parameter(init.normal((num, dim), f"{name}embedding.{num}.{dim}", std=1.0, seed=seed))

    def forward(self, ids: Tensor) -> Tensor:
        """[...] to [..., dim]."""
        return call("embedding", self.weight, ids)


class RMSNorm(Module):
    """Root-mean-square norm over the last axis, times a weight (Zhang and Sennrich 2019)."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        self.weight = Parameter(init.full((dim,), 1.0))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] to the same."""
        return call("rms_norm", x, self.weight, eps=self.eps)


class _Activation(Module):
    op = ""

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise."""
        return call(self.op, x)


class ReLU(_Activation):
    """max(x, 0)."""

    op = "relu"


class SiLU(_Activation):
    """x·σ(x)."""

    op = "silu"


class Tanh(_Activation):
    """tanh x."""

    op = "tanh"


class Sequential(Module):
    """Layers one after another."""

    def __init__(self, *layers: Module) -> None:
        self.layers = list(layers)

    def forward(self, x: Any) -> Any:
        """Run all layers in order."""
        for layer in self.layers:
            x = layer(x)
        return x
