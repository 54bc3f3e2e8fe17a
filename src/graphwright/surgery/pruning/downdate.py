"""Taking columns out of a product and refitting the others, many times: changes are gathered into matrix products."""

from __future__ import annotations

import numpy as np

GATHERED = 64
"""Columns that go before the matrices are brought up to date."""


class Downdate:
    """W [out, columns] and H⁻¹ from which columns go: W -= W_J P, H⁻¹ -= (H⁻¹)_:J P with P = [(H⁻¹)_JJ]⁻¹ (H⁻¹)_J:.

    Both lag behind by V P and C P, the changes since they were last brought up to date. The squared norms of W's
    columns and the diagonal of H⁻¹ do not: a step reads the matrices and writes vectors.
    """

    def __init__(self, w: np.ndarray, inverse: np.ndarray) -> None:
        self._w, self._inverse = np.array(w, np.float64), np.array(inverse, np.float64)
        self._place = np.arange(w.shape[1])  # where a column stands now; -1: it is gone
        self._reset()

    def _reset(self) -> None:
        self._norms = np.einsum("oi,oi->i", self._w, self._w)
        self._diagonal = np.diag(self._inverse).copy()
        out, columns = self._w.shape
        self._v, self._c, self._p = np.zeros((out, 0)), np.zeros((columns, 0)), np.zeros((0, columns))

    def scores(self, columns: np.ndarray) -> np.ndarray:
        """`obs` of units [units, columns of one]: tr W_J [(H⁻¹)_JJ]⁻¹ W_Jᵀ each, float64 [units].

        Source: Hassibi and Stork 1993, with a block for a unit of several columns.
        """
        if columns.shape[1] == 1:
            at = self._place[columns[:, 0]]
            return np.maximum(self._norms[at], 0.0) / self._diagonal[at]
        self._settle()
        blocks = [(self._w[:, at].T, self._inverse[np.ix_(at, at)]) for at in self._place[columns]]
        return np.array([np.sum(w * np.linalg.solve(h, w)) for w, h in blocks])

    def remove(self, columns: np.ndarray) -> None:
        """Take columns out together."""
        j = self._place[columns]
        rows = self._inverse[j] - self._c[j] @ self._p
        mine = self._w[:, j] - self._v @ self._p[:, j]
        pivot = np.linalg.solve(rows[:, j], rows)
        shared = mine.T @ self._w - (mine.T @ self._v) @ self._p
        self._norms += (((mine.T @ mine) @ pivot - 2.0 * shared) * pivot).sum(axis=0)
        self._diagonal -= (rows * pivot).sum(axis=0)
        self._v, self._c = np.hstack([self._v, mine]), np.hstack([self._c, rows.T])
        self._p = np.vstack([self._p, pivot])
        self._place[columns] = -1
        if len(self._p) >= GATHERED:
            self._settle()

    def _settle(self) -> None:
        """Bring both up to date, without the columns that are gone."""
        if not len(self._p):
            return
        stay = self._place[self._place >= 0]
        self._place[self._place >= 0] = np.arange(len(stay))
        self._w = self._w[:, stay] - self._v @ self._p[:, stay]
        self._inverse = self._inverse[np.ix_(stay, stay)] - self._c[stay] @ self._p[:, stay]
        self._reset()
