"""Which tokens can influence which through layers of sparse attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from graphwright.arguments import checked
from graphwright.patterns import Pattern, PatternShape
from graphwright.report import Report
from graphwright.settings import AtLeastOne


@dataclass(frozen=True, repr=False)
class Reach(Report):
    """Which tokens influence which after some layers, each with a residual path.

    Attributes:
        layers: number of layers.
        matrix: bool [tokens, tokens]: the result at row i depends on the input at column j.
        causal: True if later tokens may not influence earlier ones.
    """

    layers: int
    matrix: npt.NDArray[np.bool_]
    causal: bool
    HIDDEN: ClassVar = ("matrix",)
    FIGURES: ClassVar = ("widest", "missing")

    @cached_property
    def unreachable(self) -> npt.NDArray[np.int64]:
        """Pairs (row, column) without influence, int64 [n, 2]; those of later tokens are left out if causal."""
        absent = ~self.matrix
        return np.argwhere(np.tril(absent) if self.causal else absent)

    @property
    def widest(self) -> int:
        """The largest number of tokens that influence one."""
        return int(self.matrix.sum(1).max(initial=0))

    @property
    def missing(self) -> int:
        """The number of pairs without influence."""
        return len(self.unreachable)

    def _text(self) -> str:
        tokens = len(self.matrix)
        return (f"after {self.layers} layers at most {self.widest} of {tokens} tokens influence one; "
                f"{self.missing} pairs have no path")  # fmt: skip


@checked
def reach(pattern: Pattern | Sequence[Pattern], layers: AtLeastOne = 1) -> Reach:
    """Return which tokens can influence which: a token influences itself, and what sees one that it influences.

    Args:
        pattern: the pattern of every layer, or a list with one per layer, the first layer first, repeated `layers`
            times. All planes of a pattern count.
        layers: number of layers.
    Needs tokens² bytes. Raises: PatternShape unless queries and keys are the same tokens.
    """
    stack: list[Any] = [pattern] if isinstance(pattern, Pattern) else list(pattern)
    size = stack[0].tokens[0] if stack else 0
    for each in stack:
        if each.tokens != (size, size) or each.q_start:
            raise PatternShape(
                "queries and keys are not the same tokens", expected=(size, size), got=each.tokens, fix=None
            )
    known: dict[int, npt.NDArray[np.bool_]] = {}
    rows = np.packbits(np.eye(size, dtype=bool), axis=1)
    for each in stack * layers:
        if id(each) not in known:
            known[id(each)] = each.to_dense().any(0) | np.eye(size, dtype=bool)
        rows = np.stack([np.bitwise_or.reduce(rows[seen], axis=0) for seen in known[id(each)]])
    matrix = np.unpackbits(rows, axis=1, count=size).astype(bool)
    return Reach(layers * len(stack), matrix, all(each.causal for each in stack))
