"""The best approximation of low rank: of the weights, or of what the layer makes of its calibration inputs.

With inputs of Gram matrix G = L Lᵀ the output error is ‖(W - W_r) L‖, so the SVD of W L truncates best. Source: Wang et
al. 2024, "SVD-LLM", section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graphwright.surgery.factorise.factors import LowRank
from graphwright.surgery.factorise.tensor_train import rank_within
from graphwright.surgery.matrices import finite

RIDGE = 1e-6
"""Of the mean diagonal of the Gram matrix; added to it, so that it has a Cholesky factor."""


@dataclass(frozen=True, eq=False)
class LowRankFit:
    """One decomposition, from which every rank is read off.

    Attributes:
        u, s, vt: SVD of W, or of W L.
        root: L, or None.
    """

    u: np.ndarray
    s: np.ndarray
    vt: np.ndarray
    root: np.ndarray | None = None

    @staticmethod
    def of(w: np.ndarray, gram: np.ndarray | None = None) -> LowRankFit:
        """Decompose [out, in], for inputs of the Gram matrix Σ x xᵀ / N if given."""
        root = None
        if gram is not None:
            floor = RIDGE * float(np.trace(gram)) / len(gram)
            root = np.linalg.cholesky(gram + (floor or 1.0) * np.eye(len(gram)))
        u, s, vt = np.linalg.svd(w if root is None else w @ root, full_matrices=False)
        return LowRankFit(u, s, vt, root)

    def at(self, rank: int) -> LowRank:
        """The factors of a rank; the root of each singular value goes to either side."""
        half = np.sqrt(self.s[:rank])
        inner = half[:, None] * self.vt[:rank]
        if self.root is not None:
            inner = np.linalg.solve(self.root.T, inner.T).T
        return LowRank(self.u[:, :rank] * half, inner)

    def error(self, rank: int) -> float:
        """‖dropped‖ / ‖all‖ of the singular values: relative error of W, or of the outputs."""
        whole = float(np.linalg.norm(self.s))
        return float(np.linalg.norm(self.s[rank:])) / whole if whole else 0.0

    def rank_for(self, error: float) -> int:
        """The smallest rank of at most this relative error."""
        return rank_within(self.s, error * float(np.linalg.norm(self.s)))


def svd(w: np.ndarray, rank: int) -> LowRank:
    """Truncated SVD of [out, in]; its squared error is the sum of the dropped squared singular values.

    Raises: NonFiniteWeight.
    """
    return LowRankFit.of(finite(np.asarray(w, np.float64))).at(rank)


def asvd(w: np.ndarray, rank: int, gram: np.ndarray) -> LowRank:
    """The rank that loses least of y = x · Wᵀ over inputs of a Gram matrix [in, in]. Raises: NonFiniteWeight."""
    return LowRankFit.of(finite(np.asarray(w, np.float64)), finite(np.asarray(gram, np.float64), "gram")).at(rank)
