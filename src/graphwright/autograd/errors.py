"""Errors of tapes, in-place writes and traces."""

from __future__ import annotations

from typing import Unpack

from graphwright.errors import ComputeError, Facts, UsageError


class GradShapeRequired(UsageError):
    """Backward from a tensor of several elements needs an initial gradient."""


class GraphFreed(ComputeError):
    """The saved values of this tape were freed by an earlier backward."""


class NoTape(UsageError):
    """The tensor does not depend on anything that requires a gradient."""


class NotDifferentiable(UsageError):
    """A gradient was requested through an op that has none."""


class LeafModified(UsageError):
    """An in-place write to a leaf that requires a gradient, while the tape is recorded."""


class ViewModified(UsageError):
    """An in-place write to a taped value whose memory another tensor shares."""


class ModifiedSinceForward(ComputeError):
    """A value that backward needs was overwritten after the forward pass.

    Attributes:
        op: the operation that saved the value.
        value: which operand or result of that operation it is.
        line: `file:line` at which the operation ran.
    """

    def __init__(self, what: str, *, op: str = "", value: str = "", line: str = "", **facts: Unpack[Facts]) -> None:
        super().__init__(what, **facts)
        self.op, self.value, self.line = op, value, line


class TraceError(UsageError):
    """Traced code requested a value that is known only when the program runs."""


class TraceMutation(TraceError):
    """Traced code would overwrite memory that another value shares."""
