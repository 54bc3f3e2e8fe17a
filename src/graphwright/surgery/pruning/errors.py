"""What pruning refuses."""

from __future__ import annotations

from graphwright.errors import UsageError


class NonFiniteWeight(UsageError, ArithmeticError):
    """A weight holds NaN or infinity; `key` and `index` say where."""

    def __init__(self, key: str, index: tuple[int, ...]) -> None:
        super().__init__("a weight is not finite", where=f"{key}{list(index)}", fix="gw.surgery.diagnose(program)")
        self.key, self.index = key, index


class StaleStep(UsageError):
    """A step of a plan whose weights are not those that it was planned for."""


class NothingToPrune(UsageError):
    """No axis that is chosen can be pruned."""
