"""What orthogonalising refuses."""

from __future__ import annotations

from graphwright.errors import UsageError


class NotRotation(UsageError):
    """A matrix that is not orthogonal, or has determinant -1, where a rotation is needed."""


class NotAbsorbable(UsageError):
    """A factor cannot be merged into the neighbouring linear map; `between` names the op that stands in the way."""

    def __init__(self, what: str, *, between: str, where: object = None, fix: str | None = None) -> None:
        super().__init__(what, where=where, got=between, fix=fix)
        self.between = between
