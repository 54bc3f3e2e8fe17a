"""Activations as modules, from the `module` cells of ops; `op_modules.pyi` has the signatures."""

from typing import ClassVar

from graphwright.autograd import Tensor
from graphwright.nn.module import Module
from graphwright.ops import call, surface


class Activation(Module):
    """An op of one operand that keeps its shape; attributes of the op are arguments of the subclasses."""

    op: ClassVar[str] = ""

    def __init__(self, **attrs: object) -> None:
        self.attrs = attrs

    def forward(self, x: Tensor) -> Tensor:
        """Apply the op to `x`."""
        return call(self.op, x, **self.attrs)


globals().update(surface.modules(Activation))
