"""Dropout."""

from __future__ import annotations

from graphwright.autograd import Tensor, dropout
from graphwright.errors import UsageError
from graphwright.nn.module import Module


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
