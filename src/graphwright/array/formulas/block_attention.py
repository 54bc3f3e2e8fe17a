"""Operands of block-sparse attention, and the choice of its algorithm, which ops and kernels share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphwright.array.formulas.experts import Choice

ALGORITHMS = ("block", "dense", "reference")
"""Values of the attribute `algorithm` other than "auto"."""
TABLED = frozenset({"block_sdpa", "block_sdpa_backward", "block_mass", "block_entropy", "block_entropy_backward"})
"""Ops whose kernels read a pattern's table wherever they run."""
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


def runs_dense(algorithm: str, density: float, block: int) -> bool:
    """Return whether ATen's kernels take all pairs at once: measured where rows of blocks are not compiled code."""
    return algorithm == "dense" or (algorithm == "auto" and density >= DENSE_FROM.get(block, DENSE))


DENSE, DENSE_FROM = 0.5, {1: 0.02}
"""The density from which on masked products of all pairs are faster than ATen's row by row; size of blocks -> other."""


def algorithm_of(q: Any, attrs: Mapping[str, Any]) -> Choice:
    """Return how an op runs for queries q, which have the fields `shape` and `dtype`."""
    if attrs["algorithm"] != "auto":
        return Choice(attrs["algorithm"], "as asked for")
    return Choice("block", "the work grows with the edges")
