"""Moving a tensor to another device, with a gradient that moves back."""

from __future__ import annotations

from typing import Any

from graphwright.array import Device
from graphwright.autograd.function import Function
from graphwright.autograd.tensor import Tensor


class Moved(Function):
    """The same values on another device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: Device) -> Tensor:
        """Copy."""
        ctx.source = x.device
        return Tensor(x._array("to(device)").to(device))

    @staticmethod
    def vjp(ctx: Any, g: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor, None]:
        """Copy back."""
        return moved(g, ctx.source), None


def moved(x: Tensor, device: Device) -> Tensor:
    """Itself if it lies there, else `Moved`. Raises: TraceError for a symbol, which lies nowhere."""
    return x if x.device == device else Moved.apply(x, device)
