"""The second moment of what a product reads: all that scores and least squares need to know of the data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from graphwright.errors import NonFinite
from graphwright.surgery.calibration import ROWS

RIDGE, MOST_RIDGE = 1e-4, 0.1
"""What is added to the diagonal, in units of its mean: at first, and at most."""


@dataclass(frozen=True, slots=True)
class Gram:
    """Σ a aᵀ / N of inputs a, and their mean.

    Attributes:
        second: [m, m] float64.
        mean: [m] float64.
        rows: N.
    """

    second: np.ndarray
    mean: np.ndarray
    rows: int

    @staticmethod
    def of(chunks: Iterable[np.ndarray]) -> Gram:
        """From rows [n, m] in chunks; products of 2048 rows in float32, summed in float64. Raises: NonFinite."""
        total, mean, count = np.zeros((0, 0)), np.zeros(0), 0
        for chunk in chunks:
            for start in range(0, len(chunk), ROWS):
                a = chunk[start : start + ROWS]
                product = (a.T @ a).astype(np.float64)
                total = total + product if count else product
                mean = mean + a.sum(axis=0, dtype=np.float64) if count else a.sum(axis=0, dtype=np.float64)
                count += len(a)
        if not np.isfinite(total).all():
            raise NonFinite("activations of the calibration data are not finite", where="gram")
        return Gram(total / max(count, 1), mean / max(count, 1), count)

    def centred(self) -> np.ndarray:
        """The covariance: what is left to a product that has a bias to adjust."""
        return self.second - np.outer(self.mean, self.mean)


def regularised(h: np.ndarray, ridge: float | None = None) -> tuple[np.ndarray, float]:
    """H + λ I that has a Cholesky factor, and λ in units of the mean of the diagonal.

    Args:
        ridge: this λ; by default 1e-4, ten times as much where that is not enough, up to 0.1.
    Raises: numpy.linalg.LinAlgError if no λ up to 0.1 is enough.
    """
    scale = float(np.mean(np.diag(h))) or 1.0
    share = RIDGE if ridge is None else ridge
    while True:
        wide = h + share * scale * np.eye(len(h))
        try:
            np.linalg.cholesky(wide)
            return wide, share
        except np.linalg.LinAlgError:
            if ridge is not None or share >= MOST_RIDGE:
                raise
            share *= 10
