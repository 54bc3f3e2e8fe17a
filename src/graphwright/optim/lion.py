"""Lion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from graphwright.optim.optimizer import HasParameters, Optimizer


class Lion(Optimizer):
    """Steps of one size, along the sign of a momentum (Chen et al. 2023, algorithm 2; formula in `ops/optimize.py`).

    Args:
        params, lr, decay_matrices_only, low: see `Optimizer`; the paper takes a third to a tenth of Adam's lr.
        betas: of the direction and of the momentum, in [0, 1).
        weight_decay: λ of θ(1 - lr·λ); three to ten times Adam's, as lr is smaller.
        maximize: climb instead of descend.
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
        super().__init__(
            params,
            lr,
            decay_matrices_only=decay_matrices_only,
            low=low,
            betas=betas,
            weight_decay=weight_decay,
            maximize=maximize,
        )

    @staticmethod
    def in_range(options: Mapping[str, Any]) -> bool:
        """Numbers from 0 up, betas below 1."""
        betas = tuple(options["betas"])
        return len(betas) == 2 and all(0 <= b < 1 for b in betas) and min(options["lr"], options["weight_decay"]) >= 0

    def attrs(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """As the op has them: β1 and β2 apart."""
        beta1, beta2 = options["betas"]
        return {"beta1": beta1, "beta2": beta2, **{n: v for n, v in super().attrs(options).items() if n != "betas"}}

    def moments(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The momentum."""
        return ("m",)
