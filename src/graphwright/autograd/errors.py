"""What can go wrong with a tape, by name."""

from __future__ import annotations

from typing import Unpack

from graphwright.errors import ComputeError, Facts, UsageError


class GradShapeRequired(UsageError):
    """Backward from a tensor of several elements needs a gradient to start from."""


class GraphFreed(ComputeError):
    """The saved values of this tape were used by an earlier backward."""


class NoTape(UsageError):
    """The tensor does not depend on anything that requires a gradient."""


class NotDifferentiable(UsageError):
    """A gradient was asked for through an op that has none."""


class LeafModified(UsageError):
    """A leaf that wants a gradient would be written over while operations are taped."""


class ViewModified(UsageError):
    """A taped value would be written over while another tensor shows the same memory."""


class ModifiedSinceForward(ComputeError):
    """A value that backward needs was overwritten after the forward pass.

    Attributes:
        op: the operation that saved it.
        value: which of its operands or results it is.
        line: `file:line` at which the operation ran.
    """

    def __init__(self, what: str, *, op: str = "", value: str = "", line: str = "", **facts: Unpack[Facts]) -> None:
        super().__init__(what, **facts)
        self.op, self.value, self.line = op, value, line
