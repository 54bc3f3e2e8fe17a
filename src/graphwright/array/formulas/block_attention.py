"""Operands of block-sparse attention, and the choice of its algorithm, which ops and kernels share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from graphwright.array.formulas.experts import Choice

ALGORITHMS = ("block", "dense", "reference")
"""Values of the attribute `algorithm` other than "auto"."""
FEW = 3
"""The most queries of a block that are multiplied by each key on its own, not as a tile."""
PACKED = 16
"""The number of queries from which on keys are packed."""
PARTS = 8
"""Heads, or parts of their queries, among which gradients are shared."""
FURTHEST = 60.0
"""The largest exponent score - log-sum-exp of a pair with gate 0, whose score may exceed every score in the sum."""


def planes_of(heads: int, groups: int, planes: int) -> list[tuple[slice, slice]]:
    """Return for each plane its key heads and, among the query heads of each of them, its own."""
    share = heads // groups
    if planes == 1:
        return [(slice(0, groups), slice(0, share))]
    if planes == groups:
        return [(slice(g, g + 1), slice(0, share)) for g in range(groups)]
    return [(slice(h // share, h // share + 1), slice(h % share, h % share + 1)) for h in range(heads)]


def named(extra: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optional operands by name."""
    return dict(zip(attrs["optional"], extra, strict=True))


def runs_dense(algorithm: str, density: float, block: int, pairs: int) -> bool:
    """Return whether ATen's kernels take all `pairs` of a plane at once, with a mask, instead of row by row.

    `density` is that of the edges among the pairs of blocks. "auto" does so where it was measured to be faster, in
    patterns without large blocks, unless the mask would be large.
    """
    fits = pairs <= MOST_PAIRS and density >= DENSE_FROM.get(block, DENSE_FROM[2] if block < SMALL else inf)
    return algorithm == "dense" or (algorithm == "auto" and fits)


SMALL, MOST_PAIRS, DENSE_FROM = 8, 1 << 20, {1: 0.0, 2: 0.2}
"""Size of blocks from which on rows are always faster; the most pairs; size of blocks -> least density.

Measured in float64 with 4 heads of 64: at 256 tokens, rows of blocks of 1 take 1.2 to 1.9 times as long as all pairs at
densities of 1 to 0.02; rows of blocks of 4 as long at 0.2; rows of blocks of 16 and 64 at most a third.
"""


def algorithm_of(q: Any, attrs: Mapping[str, Any]) -> Choice:
    """Return how an op runs for queries q, which have the fields `shape` and `dtype`."""
    if attrs["algorithm"] != "auto":
        return Choice(attrs["algorithm"], "as asked for")
    return Choice("block", "the work grows with the edges")
