"""What can go wrong with a structure that is trained, and what is probably not meant."""

from __future__ import annotations

from graphwright.errors import ComputeError, UsageError


class NotScalar(UsageError):
    """A loss that is not one number."""


class GatesUnused(UsageError):
    """A loss to which no gate makes a difference."""


class WouldDisconnect(UsageError):
    """Cuts that would leave an output without any input."""


class Diverged(ComputeError):
    """Steps in a row whose loss or gradients were not finite."""


class NoTaskTerm(UserWarning):
    """An objective of penalties alone: its optimum is to cut everything."""


class GatesCannotClose(UserWarning):
    """So few steps, or so small a rate, that no gate can get from its start to closed."""


class ClippedStart(UserWarning):
    """A start so near to 0 or 1 that it was moved."""
