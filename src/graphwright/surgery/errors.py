"""Errors of surgery."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from graphwright.errors import UsageError


class StaleStep(UsageError):
    """A planned step cannot be applied: its weights changed after planning, or its module no longer exists."""


class NothingToPrune(UsageError):
    """No selected axis can be pruned."""


class NotRotation(UsageError):
    """The matrix is not orthogonal, or has determinant -1, but a rotation is required."""


class NotAbsorbable(UsageError):
    """A factor cannot be merged into the next linear map; `between` names the op that prevents it."""

    def __init__(self, what: str, *, between: str, where: object = None, fix: str | None = None) -> None:
        super().__init__(what, where=where, got=between, fix=fix)
        self.between = between


class NotFactorable(UsageError):
    """A size is not a product of the requested number of integers above 1."""

    def __init__(self, shape: tuple[int, ...], order: int, where: object = None) -> None:
        sizes = "x".join(map(str, shape))
        super().__init__(f"the size is not a product of {order} factors above 1", where=where, got=sizes,
                         expected=f"a product of {order} integers > 1", fix="pad with zeros by pad=True")  # fmt: skip
        self.shape, self.order = shape, order


class CompressionWouldGrow(UsageError):
    """The factors that meet the budget have at least as many parameters as the matrix."""

    def __init__(self, ratio: float, where: object = None) -> None:
        super().__init__("the factors within this budget are not smaller than the matrix", where=where,
                         expected="parameters of the matrix / of its factors > 1", got=f"{ratio:.4g}",
                         fix="allow a larger error, or leave the matrix dense")  # fmt: skip
        self.ratio = ratio


def check_choices(given: Mapping[str, Any], known: Mapping[str, Collection[str]]) -> None:
    """Raise UsageError for the first option whose value in `given` is not one of its `known` values."""
    for name, values in known.items():
        if given[name] not in tuple(values):  # a tuple, because the given value may have no hash
            raise UsageError(f"unknown value of {name}", where=name, expected=", ".join(values), got=given[name])
