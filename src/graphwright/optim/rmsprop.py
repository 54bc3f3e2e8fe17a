"""RMSprop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from graphwright.optim.optimizer import HasParameters, Optimizer


class RMSprop(Optimizer):
    """Gradients divided by the root of their running mean square (Graves 2013, eq. 38 to 45); torch's definition.

    Args:
        params, lr, decay_matrices_only, low: see `Optimizer`.
        alpha: decay rate of the running mean square, in [0, 1).
        eps: added to the root.
        weight_decay: λ of g + λ·θ.
        momentum: decay rate of the sum of scaled gradients.
        centered: subtract the squared running mean from the mean square.
        maximize: maximise instead of minimise.
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
        options = {"alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        options |= {"centered": centered, "maximize": maximize}
        super().__init__(params, lr, decay_matrices_only=decay_matrices_only, low=low, **options)

    def moments(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Mean square, momentum if it is not 0, mean if centered."""
        wanted = (("mean_square", True), ("momentum", options["momentum"]), ("mean", options["centered"]))
        return tuple(name for name, used in wanted if used)
