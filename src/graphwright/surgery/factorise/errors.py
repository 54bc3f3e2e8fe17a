"""What factorising refuses."""

from __future__ import annotations

from graphwright.errors import UsageError


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
