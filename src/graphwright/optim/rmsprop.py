"""RMSprop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from graphwright.optim.optimizer import HasParameters, Optimizer


class RMSprop(Optimizer):
    """Gradients over the root of their running mean square (Graves 2013, eq. 38 to 45); as torch has it.

    Args:
        params, lr, decay_matrices_only, low: see `Optimizer`.
        alpha: of the running mean square, in [0, 1).
        eps: added to the root.
        weight_decay: λ of g + λ·θ.
        momentum: of the scaled gradient.
        centered: take the square of the running mean off first.
        maximize: climb instead of descend.
    """

    op = "rmsprop_step"

    def __init__(
        self,
        params: HasParameters | Iterable[Any],
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
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
            alpha=alpha,
            eps=eps,
            weight_decay=weight_decay,
            momentum=momentum,
            centered=centered,
            maximize=maximize,
        )

    @staticmethod
    def in_range(options: Mapping[str, Any]) -> bool:
        """Numbers from 0 up, alpha below 1."""
        return 0 <= options["alpha"] < 1 and all(options[n] >= 0 for n in ("lr", "eps", "weight_decay", "momentum"))

    def moments(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Mean square, momentum if there is one, mean if centered."""
        wanted = (("mean_square", True), ("momentum", options["momentum"]), ("mean", options["centered"]))
        return tuple(name for name, used in wanted if used)
