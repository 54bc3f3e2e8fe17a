"""NSGA-II: fronts of members that nobody dominates, and how crowded a member stands.

Objectives are float64 [N, M], all to be raised; negate what is to be lowered.
Source: Deb, Pratap, Agarwal and Meyarivan 2002, "A fast and elitist multiobjective genetic algorithm: NSGA-II".
"""

from __future__ import annotations

from typing import Any

import numpy as np


def dominates(objectives: np.ndarray) -> Any:
    """Bool [N, N]: whether i is nowhere worse than j, and somewhere better."""
    a, b = objectives[:, None], objectives[None]
    return (a >= b).all(-1) & (a > b).any(-1)


def fronts(objectives: np.ndarray) -> np.ndarray:
    """The front of each member, int64 [N]: 0 for those that nobody dominates, then those left without them, ..."""
    over = dominates(objectives)
    rank = np.full(len(objectives), -1, np.int64)
    front = 0
    while (rank < 0).any():
        free = (rank < 0) & ~over[rank < 0].any(0)
        rank[free] = front
        front += 1
    return rank


def crowding(objectives: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Room around each member within its front, float64 [N]; infinite at the ends of an objective."""
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
    """Who goes on, int64 [count]: by fronts, the last one by crowding, ties by place; best first."""
    rank = fronts(objectives)
    room = crowding(objectives, rank)
    return np.lexsort((np.arange(len(rank)), -room, rank))[:count]
