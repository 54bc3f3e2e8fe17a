"""The activation modules that are one op, generated from its definition; typed in `op_modules.pyi`."""

from __future__ import annotations

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
        """Apply the op to x; the shape is kept."""
        return call(self.op, x, **self.attrs)


globals().update(surface.modules(Activation))
__all__ = ["Activation", *surface.modules(object)]  # pyright: ignore[reportUnsupportedDunderAll]
