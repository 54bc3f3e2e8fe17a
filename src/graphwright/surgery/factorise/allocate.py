"""Allocation of parameters to layers, rank by rank where a parameter saves most error."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def allocate(
    spectra: Sequence[np.ndarray],
    shapes: Sequence[tuple[int, int]],
    budget: int,
    importance: Sequence[float] | None = None,
    min_rank: int = 1,
    max_rank: int | None = None,
) -> list[int | None]:
    """Ranks that minimise the dropped Σ w σ² within `budget` parameters; None for a layer that stays dense.

    A rank of an [m, n] layer costs m + n parameters and saves w σ². Ranks that save most per parameter are taken first;
    spectra descend, so a layer's ranks are taken in order. A layer whose factors would not be smaller stays dense.

    Args:
        spectra: descending singular values per layer.
        shapes: (m, n) per layer.
        budget: parameters of all layers together.
        importance: w per layer; 1 by default.
        min_rank, max_rank: of every layer.
    """
    weights = [1.0] * len(spectra) if importance is None else list(importance)
    dense: set[int] = set()
    while True:
        left = budget - sum(shapes[i][0] * shapes[i][1] for i in dense)
        ranks = _greedy(spectra, shapes, left, weights, min_rank, max_rank, dense)
        grown = {i for i, r in enumerate(ranks) if r is not None and r * sum(shapes[i]) >= shapes[i][0] * shapes[i][1]}
        if not grown:
            return ranks
        dense.add(min(grown))


def _greedy(
    spectra: Sequence[np.ndarray],
    shapes: Sequence[tuple[int, int]],
    budget: int,
    weights: Sequence[float],
    min_rank: int,
    max_rank: int | None,
    dense: set[int],
) -> list[int | None]:
    ranks: list[int | None] = [None if i in dense else min_rank for i in range(len(spectra))]
    left = budget - sum(min_rank * sum(shapes[i]) for i in range(len(spectra)) if i not in dense)
    items = [
        (-weights[i] * float(sigma) ** 2 / sum(shapes[i]), i, r)
        for i, s in enumerate(spectra)
        if i not in dense
        for r, sigma in enumerate(np.asarray(s)[:max_rank])
        if r >= min_rank
    ]
    closed: set[int] = set()
    for _, i, r in sorted(items):
        cost = sum(shapes[i])
        if i in closed or cost > left:
            closed.add(i)  # later ranks save less, and ranks are taken without gaps
            continue
        ranks[i], left = r + 1, left - cost
    return ranks
