"""Pruning a pattern: cutting the edges that carry the least of their rows' attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from graphwright.arguments import checked
from graphwright.errors import BudgetUnreachable, UsageError
from graphwright.graph import EdgeArray
from graphwright.patterns import Pattern
from graphwright.report import Report
from graphwright.settings import Count, Share

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, repr=False)
class Pruned(Report):
    """The edges that `prune` cut.

    Attributes:
        pairs: int32 [n, 3]: plane, query block and key block of each cut edge.
        weights: normalised weight of each before the cut, float64 [n].
        edges: number of edges left.
        density: edges left per pair of blocks of all planes.
        lost: largest sum of weights that a row lost.
    """

    pairs: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float64]
    edges: int
    density: float
    lost: float

    def _text(self) -> str:
        return (
            f"{len(self.pairs)} edges cut, {self.edges} left ({self.density:.1%}); a row lost at most {self.lost:.3g}"
        )


@checked
def prune(
    pattern: Pattern, mass: Share | None = None, relative: Literal["row", "none"] = "none", *,
    target_density: Share | None = None, keep_min: Count = 1, keep_own: bool = True, author: str | None = "pass",
) -> Pruned:  # fmt: skip
    """Cut the edges whose normalised weight is below a threshold; the softmax renormalises what stays.

    The normalised weight of an edge is its `score` divided by the sum of the scores of its row, so it does not depend
    on the scale of queries and keys. Collect masses first: `attend(..., collect="mass")` or `collect(model, inputs)`.

    Args:
        mass: threshold in [0, 1].
        relative: "row": the threshold is this share of the largest weight of the row; "none": of the whole row.
        target_density: choose the threshold so that this many edges per pair of blocks are left, in place of `mass`.
        keep_min: number of edges that each row keeps, the heaviest ones.
        keep_own: keep the edges of a query block to the key blocks at its own positions.
        author: author of the entry in the journal.
    Pinned edges stay, and so do the edges of rows that have no mass yet.
    Raises: UsageError unless one of `mass` and `target_density` is given, or if no edge has a mass;
        BudgetUnreachable if too many edges are kept for the target; then nothing changes.
    """
    if (mass is None) == (target_density is None):
        raise UsageError(
            "one of `mass` and `target_density` is needed", got=f"mass={mass}, target_density={target_density}"
        )
    with pattern.transaction("prune", author):
        edges, pairs = pattern.edges(), pattern.pairs()
        weights, row = normalised(pattern, pairs)
        ranked = weights / np.maximum(_largest(weights, row), _TINY)[row] if relative == "row" else weights
        free = prunable(pattern, pairs, weights, row, keep_min=keep_min, keep_own=keep_own)
        if target_density is not None:
            cut = _lightest(pattern, ranked, free, target_density)
        else:
            cut = free & (ranked < (mass or 0.0))
        pattern.cut(EdgeArray(np.asarray(edges)[cut]))
        left = len(pattern)
    lost = np.bincount(row[cut], weights[cut]).max(initial=0.0)
    planes, (rows, columns) = pattern.planes, pattern.blocks
    return Pruned(pairs[cut], weights[cut], left, left / (planes * rows * columns), float(lost))


_TINY = 1e-300


def normalised(pattern: Pattern, pairs: Array) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return the normalised weight of each edge, NaN in rows without mass, and the number of its row.

    Raises: UsageError if no edge of the pattern has a mass.
    """
    score = np.asarray(pattern.edges["score"]).astype(np.float64)
    if len(score) and not score.any():
        fix = 'attend(..., collect="mass") on a few batches first'
        raise UsageError("no edge has a mass, so none can be called light", where=pattern.name or None,
                         expected="edges with a `score`", fix=fix)  # fmt: skip
    row = pairs[:, 0].astype(np.int64) * pattern.blocks[0] + pairs[:, 1]
    sums = np.bincount(row, score, minlength=1)
    return score / np.where(sums > 0, sums, np.nan)[row], row


def _largest(weights: Array, row: Array) -> Array:
    most = np.zeros(int(row.max(initial=0)) + 1)
    np.fmax.at(most, row, weights)
    return most


def prunable(
    pattern: Pattern, pairs: Array, weights: Array, row: Array, *, keep_min: int, keep_own: bool
) -> npt.NDArray[np.bool_]:
    """Return which edges may be cut: not pinned, not among the heaviest `keep_min` of their row, with a mass."""
    order = np.lexsort((pairs[:, 2], -weights, row))
    starts = np.r_[True, row[order][1:] != row[order][:-1]] if len(row) else np.zeros(0, bool)
    rank = np.empty(len(row), np.int64)
    rank[order] = np.arange(len(row)) - np.maximum.accumulate(np.where(starts, np.arange(len(row)), 0))
    free = (rank >= keep_min) & (np.asarray(pattern.edges["pinned"]) == 0) & ~np.isnan(weights)
    return free & ~own_blocks(pattern, pairs) if keep_own else free


def own_blocks(pattern: Pattern, pairs: Array) -> npt.NDArray[np.bool_]:
    """Return which pairs of blocks have a key at the position of a query."""
    (i0, i1), (j0, j1) = pattern.frame.query_span(pairs[:, 1]), pattern.frame.key_span(pairs[:, 2])
    return (j0 <= i1) & (i0 <= j1)


def _lightest(pattern: Pattern, ranked: Array, free: Array, density: float) -> npt.NDArray[np.bool_]:
    planes, (rows, columns) = pattern.planes, pattern.blocks
    whole = planes * rows * columns
    count = max(0, len(ranked) - round(density * whole))
    chosen = np.flatnonzero(free)
    if count > len(chosen):
        best = (len(ranked) - len(chosen)) / whole
        raise BudgetUnreachable("too many edges are kept for the target density", where=pattern.name or None,
                                asked=density, best=best, fix="unpin edges, or lower keep_min")  # fmt: skip
    cut = np.zeros(len(ranked), bool)
    cut[chosen[np.argsort(ranked[chosen], kind="stable")[:count]]] = True
    return cut
