"""Activations as modules: each is one op."""

from __future__ import annotations

from typing import ClassVar

from graphwright.autograd import Tensor
from graphwright.nn.module import Module
from graphwright.ops import call


class Activation(Module):
    """An elementwise op of one operand; attributes of the op are arguments of the subclasses."""

    op: ClassVar[str] = ""

    def __init__(self, **attrs: object) -> None:
        self.attrs = attrs

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise."""
        return call(self.op, x, **self.attrs)


class ReLU(Activation):
    """max(x, 0)."""

    op = "relu"


class SiLU(Activation):
    """x·σ(x)."""

    op = "silu"


class Tanh(Activation):
    """tanh x."""

    op = "tanh"


class Sigmoid(Activation):
    """1 / (1 + e⁻ˣ)."""

    op = "sigmoid"


class GELU(Activation):
    """x·Φ(x), or with approximate="tanh" its tanh form."""

    op = "gelu"

    def __init__(self, approximate: str = "none") -> None:
        super().__init__(approximate=approximate)
