"""Errors and warnings of trained structure."""

from __future__ import annotations

from graphwright.errors import UsageError


class NotScalar(UsageError):
    """A loss or penalty is not a scalar."""


class GatesUnused(UsageError):
    """The loss does not depend on any gate."""


class WouldDisconnect(UsageError):
    """Cuts would disconnect an output from all inputs."""


class NoTaskTerm(UserWarning):
    """The objective consists of penalties only, so its optimum is to cut everything."""


class GatesCannotClose(UserWarning):
    """The number of steps or the learning rate is too small for any gate to close."""


class ClippedStart(UserWarning):
    """An initial probability close to 0 or 1 was clipped."""
