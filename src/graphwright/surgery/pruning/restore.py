"""Least squares: the weights with which a product makes the best of the columns that are left to it.

With H = E[a aᵀ] of what the product reads and S the columns that stay, the new weights minimise the mean squared error
of the output: W_S = W H[:,S] (H[S,S] + λI)⁻¹. A bias takes the means: H is then the covariance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graphwright.array import NDArray
from graphwright.program import Program
from graphwright.program.editing.transaction import Transaction
from graphwright.surgery.pruning.consumers import Consumer
from graphwright.surgery.pruning.gram import Gram, regularised


@dataclass(frozen=True, slots=True)
class Restored:
    """What least squares found for one product.

    Attributes:
        matrix: [out, columns that stay].
        shift: what is added to the bias [out]; zero where there is none.
        ridge: λ in units of the mean diagonal.
        error, plain: mean squared error of the output relative to the output's mean square, with these weights and
            with those that were there.
    """

    matrix: np.ndarray
    shift: np.ndarray
    ridge: float
    error: float
    plain: float

    @property
    def worth(self) -> bool:
        """Whether these weights are better than those that were there."""
        return self.error < self.plain


def restored(
    matrix: np.ndarray, gram: Gram, keep: np.ndarray, *, bias: bool = False, ridge: float | None = None
) -> Restored:
    """The best weights for the columns that stay.

    Args:
        matrix: W [out, columns].
        gram: of what the product reads.
        keep: columns that stay, rising.
        bias: whether the product has a bias to adjust.
        ridge: see `regularised`.
    """
    h = gram.centred() if bias else gram.second
    wide, share = regularised(h[np.ix_(keep, keep)], ridge)
    made = np.linalg.solve(wide, h[keep] @ matrix.T).T
    shift = matrix @ gram.mean - made @ gram.mean[keep] if bias else np.zeros(len(matrix))
    return Restored(
        made, shift, share, error_of(matrix, made, gram, keep, shift), error_of(matrix, matrix[:, keep], gram, keep)
    )


def error_of(
    matrix: np.ndarray, made: np.ndarray, gram: Gram, keep: np.ndarray, shift: np.ndarray | float = 0.0
) -> float:
    """Mean squared error of an output with other weights, relative to the output's mean square.

    E |W a - W' a_S - s|² = tr D H Dᵀ - 2 sᵀ D μ + |s|², with D the difference of the weights.
    """
    difference = matrix.copy()
    difference[:, keep] -= made
    moved = np.broadcast_to(shift, len(matrix))
    lost = np.einsum("oi,ij,oj->", difference, gram.second, difference, optimize=True)
    lost += float(moved @ moved) - 2 * float(moved @ (difference @ gram.mean))
    return float(max(lost, 0.0) / max(energy(matrix, gram), 1e-300))


def energy(matrix: np.ndarray, gram: Gram) -> float:
    """Mean square of the output, summed over its entries."""
    return float(np.einsum("oi,ij,oj->", matrix, gram.second, matrix, optimize=True))


@dataclass(frozen=True, slots=True)
class Change:
    """A product around a cut: as it was before, and which of its columns stay.

    Attributes:
        consumer: the product.
        matrix: [out, columns] before.
        bias: [out] before; zeros if it has none.
        columns: those that stay.
    """

    consumer: Consumer
    matrix: np.ndarray
    bias: np.ndarray
    columns: np.ndarray

    @staticmethod
    def of(p: Program, c: Consumer, keep: np.ndarray) -> Change:
        """Before the cut; `keep` is a mask of the units."""
        matrix = c.matrix(p)
        bias = np.zeros(len(matrix)) if c.bias is None else p.weights.array(c.bias).to_numpy("float64")
        return Change(c, matrix, bias, c.kept(keep, matrix.shape[1]))

    def put(self, e: Transaction, fit: Restored) -> dict[str, NDArray]:
        """Set the fitted weights behind the cut, in an open edit. Returns key -> value as it is stored."""
        c, p = self.consumer, e.program
        e.set_weight(c.key, c.shaped(fit.matrix, p.weights.array(c.key).shape))
        if c.bias is not None:
            e.set_weight(c.bias, self.bias + fit.shift)
        return {k: p.weights.array(k) for k in (c.key, c.bias) if k is not None}

    def plain(self, gram: Gram) -> float:
        """Relative error of the output with the weights that were there."""
        return error_of(self.matrix, self.matrix[:, self.columns], gram, self.columns)

    def error(self, p: Program, gram: Gram) -> float:
        """Relative error of the output with the weights as they are stored now."""
        c = self.consumer
        shift = 0.0 if c.bias is None else p.weights.array(c.bias).to_numpy("float64") - self.bias
        return error_of(self.matrix, c.matrix(p), gram, self.columns, shift)
