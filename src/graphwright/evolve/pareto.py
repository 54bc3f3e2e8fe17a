"""NSGA-II: Pareto fronts and crowding distances.

Objectives are float64 [N, M] and are maximised; negate an objective to minimise it.
Source: Deb, Pratap, Agarwal and Meyarivan 2002, "A fast and elitist multiobjective genetic algorithm: NSGA-II".
"""

from __future__ import annotations

from typing import Any

import numpy as np


def dominates(objectives: np.ndarray) -> Any:
    """Return a matrix [i, j], bool [N, N]: True if i is worse than j in no objective and better in at least one."""
    a, b = objectives[:, None], objectives[None]
    return (a >= b).all(-1) & (a > b).any(-1)


def fronts(objectives: np.ndarray) -> np.ndarray:
    """Return the front index of each member, int64 [N]: 0 if nothing dominates it, 1 if only front 0 does, ..."""
    over = dominates(objectives)
    rank = np.full(len(objectives), -1, np.int64)
    front = 0
    while (rank < 0).any():
        free = (rank < 0) & ~over[rank < 0].any(0)
        rank[free] = front
        front += 1
    return rank


def crowding(objectives: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Compute crowding distances within fronts, float64 [N]; inf for the best and worst of a front in an objective."""
    room = np.zeros(len(objectives))
    for front in range(int(rank.max(initial=-1)) + 1):
        rows = np.flatnonzero(rank == front)
        for values in objectives[rows].T:
            order = np.argsort(values, kind="stable")
            ends, span = rows[order], values[order[-1]] - values[order[0]]
            room[ends[[0, -1]]] = np.inf
            if span > 0:
                room[ends[1:-1]] += (values[order[2:]] - values[order[:-2]]) / span
    return room


def survivors(objectives: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the best `count` members, int64: by front, then larger crowding distance, then index."""
    rank = fronts(objectives)
    room = crowding(objectives, rank)
    return np.lexsort((np.arange(len(rank)), -room, rank))[:count]
