"""What pruning refuses."""

from __future__ import annotations

from graphwright.errors import UsageError


class StaleStep(UsageError):
    """A step of a plan whose weights are not those that it was planned for."""


class NothingToPrune(UsageError):
    """No axis that is chosen can be pruned."""
