"""Least-squares restoring: refit the weights of a linear map W in the columns that remain after a cut.

With H = E[a aᵀ] of the map's input a and S the remaining columns, the new weights minimise the mean squared error of
the output: W_S = W H[:,S] (H[S,S] + λI)⁻¹. If the map has a bias, it absorbs the means, and H is the covariance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphwright.array import NDArray
from graphwright.errors import NonFinite
from graphwright.program.editing.transaction import Transaction
from graphwright.surgery.calibration import ROWS
from graphwright.surgery.pruning.prunable import Consumer

if TYPE_CHECKING:
    from graphwright.program.program import Program


BATCH = 64
"""Number of removed columns that are collected before the matrices are updated."""


class Downdate:
    """Weights W [out, columns] and an inverse Hessian H⁻¹, from which sets J of columns are removed one after another.

    A removal is W -= W_J P and H⁻¹ -= (H⁻¹)_:J P with P = [(H⁻¹)_JJ]⁻¹ (H⁻¹)_J:. `remove` only appends its factors to
    `_v`, `_c` and `_p`, and updates the squared norms of W's columns and the diagonal of H⁻¹. After several removals,
    `_flush` subtracts the products: W = `_w` - `_v` `_p` and H⁻¹ = `_inverse` - `_c` `_p`.
    """

    def __init__(self, w: np.ndarray, inverse: np.ndarray) -> None:
        self._w, self._inverse = np.array(w, np.float64), np.array(inverse, np.float64)
        self._index = np.arange(w.shape[1])  # current index of a column; -1: removed
        self._reset()

    def _reset(self) -> None:
        self._norms = np.einsum("oi,oi->i", self._w, self._w)
        self._diagonal = np.diag(self._inverse).copy()
        out, columns = self._w.shape
        self._v, self._c, self._p = np.zeros((out, 0)), np.zeros((columns, 0)), np.zeros((0, columns))

    def scores(self, columns: np.ndarray) -> np.ndarray:
        """Return the `obs` scores [units] of units with columns [units, columns per unit]: tr W_J [(H⁻¹)_JJ]⁻¹ W_Jᵀ.

        Source: Hassibi and Stork 1993, extended to blocks of several columns per unit.
        """
        if columns.shape[1] == 1:
            at = self._index[columns[:, 0]]
            return np.maximum(self._norms[at], 0.0) / self._diagonal[at]
        self._flush()
        blocks = [(self._w[:, at].T, self._inverse[np.ix_(at, at)]) for at in self._index[columns]]
        return np.array([np.sum(w * np.linalg.solve(h, w)) for w, h in blocks])

    def remove(self, columns: np.ndarray) -> None:
        """Remove the given columns together, and refit the others."""
        j = self._index[columns]
        rows = self._inverse[j] - self._c[j] @ self._p
        mine = self._w[:, j] - self._v @ self._p[:, j]
        pivot = np.linalg.solve(rows[:, j], rows)
        shared = mine.T @ self._w - (mine.T @ self._v) @ self._p
        self._norms += (((mine.T @ mine) @ pivot - 2.0 * shared) * pivot).sum(axis=0)
        self._diagonal -= (rows * pivot).sum(axis=0)
        self._v, self._c = np.hstack([self._v, mine]), np.hstack([self._c, rows.T])
        self._p = np.vstack([self._p, pivot])
        self._index[columns] = -1
        if len(self._p) >= BATCH:
            self._flush()

    def _flush(self) -> None:
        """Apply the collected removals to W and H⁻¹, and drop the removed columns."""
        if not len(self._p):
            return
        left = self._index[self._index >= 0]
        self._index[self._index >= 0] = np.arange(len(left))
        self._w = self._w[:, left] - self._v @ self._p[:, left]
        self._inverse = self._inverse[np.ix_(left, left)] - self._c[left] @ self._p[:, left]
        self._reset()


RIDGE, MOST_RIDGE = 1e-4, 0.1
"""Smallest and largest λ that is added to the diagonal, in units of the diagonal's mean."""


@dataclass(frozen=True, slots=True)
class Gram:
    """Second moment Σ a aᵀ / N [m, m] and mean [m] of N = `rows` input vectors a, in float64."""

    second: np.ndarray
    mean: np.ndarray
    rows: int

    def centred(self) -> np.ndarray:
        """Return the covariance of the inputs, for a linear map whose bias absorbs the means."""
        return self.second - np.outer(self.mean, self.mean)


@dataclass(frozen=True, slots=True)
class GramSum:
    """Σ a aᵀ [m, m] and Σ a [m] over N = `rows` input vectors a, in float64; zero for no vectors."""

    second: np.ndarray | float = 0.0
    first: np.ndarray | float = 0.0
    rows: int = 0

    @staticmethod
    def of(chunk: np.ndarray) -> GramSum:
        """Sum over a chunk of rows [n, m]: aᵀa of 2048 rows at a time in their dtype, added up in float64."""
        found = GramSum()
        for a in (chunk[i : i + ROWS] for i in range(0, len(chunk), ROWS)):
            found += GramSum((a.T @ a).astype(np.float64), a.sum(axis=0, dtype=np.float64), len(a))
        return found

    def __add__(self, other: GramSum) -> GramSum:
        return GramSum(self.second + other.second, self.first + other.first, self.rows + other.rows)

    def moments(self) -> Gram:
        """Return the moments. Raises: NonFinite if the vectors contain NaN or infinity."""
        second, first, count = np.asarray(self.second), np.asarray(self.first), max(self.rows, 1)
        if not np.isfinite(second).all():
            raise NonFinite("inputs of a linear map contain NaN or infinity on the calibration data",
                            fix="find the cause by gw.surgery.diagnose(model, text=...)")  # fmt: skip
        return Gram(second / count, first / count, self.rows)


def regularised(h: np.ndarray, ridge: float | None = None) -> tuple[np.ndarray, float]:
    """Return H + λ I, which has a Cholesky factor, and the ridge: λ / (mean of the diagonal of H).

    Args:
        ridge: by default the first of 1e-4, 1e-3, 1e-2 and 0.1 for which a Cholesky factor exists. If none does, H has
            negative eigenvalues, which are rounding (of inputs that hardly vary), and count as 0.
    Raises: numpy.linalg.LinAlgError if there is no Cholesky factor for `ridge`.
    """
    scale = float(np.mean(np.diag(h))) or 1.0
    share = RIDGE if ridge is None else ridge
    while True:
        wide = h + share * scale * np.eye(len(h))
        try:
            np.linalg.cholesky(wide)
            return wide, share
        except np.linalg.LinAlgError:
            if ridge is not None:
                raise
            if share >= MOST_RIDGE:
                break
            share *= 10
    values, vectors = np.linalg.eigh(h)
    h = (vectors * np.maximum(values, 0.0)) @ vectors.T
    return h + share * (float(np.mean(np.diag(h))) or 1.0) * np.eye(len(h)), share


@dataclass(frozen=True, slots=True)
class Restored:
    """Least-squares weights of one linear map.

    Attributes:
        matrix: new weights [out, remaining columns].
        shift: change of the bias [out]; zero without a bias.
        ridge: λ of the fit, relative to the mean of the diagonal of H.
        error, plain: mean squared error of the output, relative to its mean square, with the new weights and with the
            old weights.
    """

    matrix: np.ndarray
    shift: np.ndarray
    ridge: float
    error: float
    plain: float

    @property
    def improves(self) -> bool:
        """Whether the new weights have a smaller error than the old weights."""
        return self.error < self.plain


def restored(
    matrix: np.ndarray, gram: Gram, keep: np.ndarray, *, bias: bool = False, ridge: float | None = None
) -> Restored:
    """Fit the weights of the remaining columns of a linear map by least squares.

    Args:
        matrix: W [out, columns] before the cut.
        gram: moments of the map's input.
        keep: indices of the remaining columns, ascending.
        bias: whether the map has a bias to adjust.
        ridge: λ, relative to the mean of the diagonal of H; by default 1e-4, or up to 0.1 if H is nearly singular.
    """
    h = gram.centred() if bias else gram.second
    wide, share = regularised(h[np.ix_(keep, keep)], ridge)
    made = np.linalg.solve(wide, h[keep] @ matrix.T).T
    shift = matrix @ gram.mean - made @ gram.mean[keep] if bias else np.zeros(len(matrix))
    error, plain = error_of(matrix, made, gram, keep, shift), error_of(matrix, matrix[:, keep], gram, keep)
    return Restored(made, shift, share, error, plain)


def error_of(
    matrix: np.ndarray, made: np.ndarray, gram: Gram, keep: np.ndarray, shift: np.ndarray | float = 0.0
) -> float:
    """Return the relative mean squared error of W a under new weights W' = `made` of the columns S = `keep`.

    The error is E |W a - W' a_S - s|² = tr D H Dᵀ - 2 sᵀ D μ + |s|² for D = W - W', divided by E |W a|². `gram` has
    H = E[a aᵀ] and μ = E[a] of the input a; s is a change of the bias.
    """
    difference = matrix.copy()
    difference[:, keep] -= made
    moved = np.broadcast_to(shift, len(matrix))
    lost = np.einsum("oi,ij,oj->", difference, gram.second, difference, optimize=True)
    lost += float(moved @ moved) - 2 * float(moved @ (difference @ gram.mean))
    return float(max(lost, 0.0) / max(energy(matrix, gram), 1e-300))


def energy(matrix: np.ndarray, gram: Gram) -> float:
    """Return E |W a|², the mean square of the output summed over its entries."""
    return float(np.einsum("oi,ij,oj->", matrix, gram.second, matrix, optimize=True))


@dataclass(frozen=True, slots=True)
class ProductCut:
    """A linear map as it was before units of its input are cut.

    Attributes:
        matrix, bias: the weights [out, columns], and the bias [out] or zeros.
        columns: indices of the columns that remain.
    """

    consumer: Consumer
    matrix: np.ndarray
    bias: np.ndarray
    columns: np.ndarray

    @staticmethod
    def of(p: Program, c: Consumer, keep: np.ndarray) -> ProductCut:
        """Record a linear map before the cut; `keep` is a mask of the remaining units."""
        matrix = c.matrix(p)
        bias = np.zeros(len(matrix)) if c.bias is None else p.weights.array(c.bias).to_numpy("float64")
        return ProductCut(c, matrix, bias, c.remaining(keep, matrix.shape[1]))

    def set_weights(self, e: Transaction, fit: Restored) -> dict[str, NDArray]:
        """Set the fitted weights after the cut, in an open edit. Returns: a dict from key to stored value."""
        c, p = self.consumer, e.program
        e.set_weight(c.key, c.shaped(fit.matrix, p.weights.array(c.key).shape))
        if c.bias is not None:
            e.set_weight(c.bias, self.bias + fit.shift)
        return {k: p.weights.array(k) for k in (c.key, c.bias) if k is not None}

    def plain(self, gram: Gram) -> float:
        """Return the relative mean squared error of the output if the remaining columns keep their old weights."""
        return error_of(self.matrix, self.matrix[:, self.columns], gram, self.columns)

    def error(self, p: Program, gram: Gram) -> float:
        """Return the relative mean squared error of the output with the weights that `p` stores now."""
        c = self.consumer
        shift = 0.0 if c.bias is None else p.weights.array(c.bias).to_numpy("float64") - self.bias
        return error_of(self.matrix, c.matrix(p), gram, self.columns, shift)
