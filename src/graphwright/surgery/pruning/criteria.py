"""Scores: what removing a unit costs, by the columns of the product that reads it.

A unit is a block J of columns of W [out, columns]. All scores are squared, so that those of different methods rank
alike and sums of them mean something:

    random      uniform, of a seed
    magnitude   Σ |W_J|²
    wanda       tr W_J H_JJ W_Jᵀ, for one column ‖w_j‖² H_jj: the mean square of what the unit adds to the output
    obs         tr W_J [(H⁻¹)_JJ]⁻¹ W_Jᵀ, for one column ‖w_j‖² / (H⁻¹)_jj: the error when the others make up for it
    taylor      (Σ a_j ∂L/∂a_j)²: what the loss would change to first order
    greedy      obs, one unit after the other, the weights of the others and H⁻¹ brought up to date each time

Sources: Sun et al. 2024 (wanda), Hassibi and Stork 1993 (obs), Molchanov et al. 2019 (taylor).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from graphwright.errors import UsageError
from graphwright.surgery.pruning.restore import Downdate, regularised

if TYPE_CHECKING:
    from graphwright.surgery.pruning.restore import Gram

METHODS = ("greedy", "obs", "wanda", "magnitude", "taylor", "random")
ROUNDS = 512
"""Rounds in which `greedy` removes the units of a large axis; of up to 512 units, one goes at a time."""


def need_method(method: str) -> None:
    """Raises: UsageError for a score that there is not."""
    if method not in METHODS:
        raise UsageError("no such score", expected=", ".join(METHODS), got=method)


def magnitude(matrix: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """[units]: Σ |W_J|²."""
    return squared(matrix)[columns].sum(axis=1)


def squared(matrix: np.ndarray) -> np.ndarray:
    """[columns] float64: Σ w² of each column of a float matrix, in blocks of rows that stay in the cache."""
    total = np.zeros(matrix.shape[1])
    for start in range(0, len(matrix), 64):
        block = matrix[start : start + 64].astype(np.float64)
        total += np.einsum("oi,oi->i", block, block)
    return total


def wanda(matrix: np.ndarray, columns: np.ndarray, h: np.ndarray) -> np.ndarray:
    """[units]: tr W_J H_JJ W_Jᵀ."""
    if columns.shape[1] == 1:
        return squared(matrix)[columns[:, 0]] * np.diag(h)[columns[:, 0]]
    return np.array([np.einsum("oi,ij,oj->", matrix[:, j], h[np.ix_(j, j)], matrix[:, j]) for j in columns])


def taylor(effect: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """[units]: (Σ a ∂L/∂a)² over the unit's columns, given the sum for each column."""
    return effect[columns].sum(axis=1) ** 2


def greedy(
    matrix: np.ndarray, columns: np.ndarray, h: np.ndarray, *, most: int | None = None, ridge: float | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Units in the order in which they are best removed, the others refitted each time.

    Exact under the quadratic model: W -= W_J [(H⁻¹)_JJ]⁻¹ (H⁻¹)_J: and H⁻¹ -= (H⁻¹)_:J [(H⁻¹)_JJ]⁻¹ (H⁻¹)_J:.

    Args:
        matrix, columns: the product, and which of its columns each unit owns.
        h: [columns, columns] second moment (or covariance).
        most: how many to remove; all but one by default.
        ridge: see `regularised`.
    Returns: units [most] in order, the growth of the squared error by each, and the scores [units] at the start.
    """
    left = np.ones(len(columns), bool)
    most = len(columns) - 1 if most is None else most
    step = max(len(columns) // ROUNDS, 1)
    state = Downdate(matrix, np.linalg.inv(regularised(h, ridge)[0]))
    first = state.scores(columns)
    order, growth = np.zeros(0, np.int64), np.zeros(0)
    while len(order) < most:
        units = np.flatnonzero(left)
        scored = state.scores(columns[units])
        cheapest = np.argsort(scored, kind="stable")[: min(step, most - len(order))]
        gone = units[cheapest]
        state.remove(columns[gone].reshape(-1))
        left[gone] = False
        order, growth = np.append(order, gone), np.append(growth, scored[cheapest])
    return order, growth, first


def of_units(
    matrix: np.ndarray,
    columns: np.ndarray,
    gram: Gram | None,
    method: str,
    *,
    bias: bool = False,
    ridge: float | None = None,
    seed: Sequence[int] = (0,),
) -> np.ndarray:
    """[units] by one method; `gram` is needed by `wanda` and `obs`. Raises: UsageError."""
    need_method(method)
    if method == "random":
        return np.random.default_rng(list(seed)).random(len(columns))
    if method == "magnitude":
        return magnitude(matrix, columns)
    assert gram is not None
    h = gram.centred() if bias else gram.second
    if method == "wanda":
        return wanda(matrix, columns, gram.second)
    return Downdate(matrix, np.linalg.inv(regularised(h, ridge)[0])).scores(columns)
