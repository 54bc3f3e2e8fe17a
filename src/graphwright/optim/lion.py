"""Lion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from graphwright.optim.optimizer import HasParameters, Optimizer


class Lion(Optimizer):
    """Updates of equal size along the sign of a momentum (Chen et al. 2023, algorithm 2; formula in `ops/optimize.py`).

    Args:
        params, lr, decay_matrices_only, low: see `Optimizer`; the paper takes a third to a tenth of Adam's lr.
        betas: decay rates of the direction and of the momentum, in [0, 1).
        weight_decay: λ of θ(1 - lr·λ); the paper takes three to ten times Adam's.
        maximize: maximise instead of minimise.
    """

    op = "lion_step"

    def __init__(
        self,
        params: HasParameters | Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        decay_matrices_only: bool = False,
        low: str = "master",
    ) -> None:
        options = {"betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, lr, decay_matrices_only=decay_matrices_only, low=low, **options)

    def moments(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The momentum."""
        return ("m",)
