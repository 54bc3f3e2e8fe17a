"""Activations as modules: each is one op."""

from __future__ import annotations

from typing import ClassVar

from graphwright.autograd import Tensor, dropout
from graphwright.errors import UsageError
from graphwright.nn.module import Module
from graphwright.ops import call


class Activation(Module):
    """An op of one operand that keeps its shape; attributes of the op are arguments of the subclasses."""

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


class LeakyReLU(Activation):
    """x, or slope · x where x < 0."""

    op = "leaky_relu"

    def __init__(self, slope: float = 0.01) -> None:
        super().__init__(slope=slope)


class ELU(Activation):
    """x, or alpha · (eˣ - 1) where x < 0."""

    op = "elu"

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__(alpha=alpha)


class Softplus(Activation):
    """ln(1 + eˣ)."""

    op = "softplus"


class LogSigmoid(Activation):
    """ln σ(x)."""

    op = "logsigmoid"


class Softmax(Activation):
    """eˣ / Σ eˣ over one axis."""

    op = "softmax"

    def __init__(self, axis: int = -1) -> None:
        super().__init__(axis=axis)


class LogSoftmax(Activation):
    """x - ln Σ eˣ over one axis."""

    op = "log_softmax"

    def __init__(self, axis: int = -1) -> None:
        super().__init__(axis=axis)


class Dropout(Module):
    """In training x / (1 - p) where a uniform number is at least p, else 0; in evaluation x (Srivastava et al. 2014).

    Numbers come from the running generator (`gw.manual_seed`); no mask is kept.
    """

    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p <= 1:
            raise UsageError("p is a probability", expected="0 to 1", got=p)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """The shape stays."""
        return dropout(x, self.p) if self.trains and self.p else x
