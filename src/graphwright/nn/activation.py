"""Activations as modules. Those that are one elementwise op are generated from its row, see `op_modules.py`."""

from __future__ import annotations

from graphwright.autograd import Tensor, dropout
from graphwright.errors import UsageError
from graphwright.nn.module import Module
from graphwright.nn.op_modules import *  # noqa: F403
from graphwright.nn.op_modules import Activation


class Softmax(Activation):
    """eˣ / Σ eˣ along one axis."""

    op = "softmax"

    def __init__(self, axis: int = -1) -> None:
        super().__init__(axis=axis)


class LogSoftmax(Activation):
    """x - ln Σ eˣ along one axis."""

    op = "log_softmax"

    def __init__(self, axis: int = -1) -> None:
        super().__init__(axis=axis)


class Dropout(Module):
    """In training x / (1 - p) with probability 1 - p, else 0; in evaluation x (Srivastava et al. 2014).

    Random numbers come from the default generator (`gw.manual_seed`).
    """

    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p <= 1:
            raise UsageError("p must be a probability", expected="0 to 1", got=p)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """[...] to the same shape."""
        return dropout(x, self.p) if self.trains and self.p else x
