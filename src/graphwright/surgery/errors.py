"""What pruning refuses."""

from __future__ import annotations

from graphwright.errors import UsageError


class StaleStep(UsageError):
    """A step of a plan whose weights are not those that it was planned for."""


class NothingToPrune(UsageError):
    """No axis that is chosen can be pruned."""


class NotRotation(UsageError):
    """A matrix that is not orthogonal, or has determinant -1, where a rotation is needed."""


class NotAbsorbable(UsageError):
    """A factor cannot be merged into the neighbouring linear map; `between` names the op that stands in the way."""

    def __init__(self, what: str, *, between: str, where: object = None, fix: str | None = None) -> None:
        super().__init__(what, where=where, got=between, fix=fix)
        self.between = between


class NotFactorable(UsageError):
    """A shape that does not split into as many modes as asked for."""

    def __init__(self, shape: tuple[int, ...], order: int, where: object = None) -> None:
        super().__init__(
            "the shape does not split into this many modes",
            where=where,
            expected=f"{order} factors above 1 of each side",
            got="x".join(map(str, shape)),
            fix="pad=True pads with zeros, which are cut off again",
        )
        self.shape, self.order = shape, order


class CompressionWouldGrow(UsageError):
    """Factors within the budget that are no smaller than the matrix."""

    def __init__(self, ratio: float, where: object = None) -> None:
        super().__init__(
            "factors within this budget are not smaller than the matrix",
            where=where,
            expected="a ratio above 1 of parameters before and after",
            got=f"{ratio:.4g}",
            fix="a larger error, or leave it dense",
        )
        self.ratio = ratio
