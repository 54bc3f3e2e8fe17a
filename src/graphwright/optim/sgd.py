"""SGD: gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from graphwright.optim.optimizer import HasParameters, Optimizer


class SGD(Optimizer):
    """Stochastic gradient descent; definition and defaults are torch's (see `ops/optimize.py` for the formula).

    Args:
        params, lr, decay_matrices_only, low: see `Optimizer`.
        momentum: μ, decay rate of the running gradient.
        dampening: δ, the gradient enters with 1 - δ; the first step takes it undamped.
        weight_decay: λ of g + λ·θ.
        nesterov: Nesterov momentum; requires momentum > 0 and dampening 0.
        maximize: maximise instead of minimise.
    """

    op = "sgd_step"

    def __init__(
        self,
        params: HasParameters | Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        decay_matrices_only: bool = False,
        low: str = "master",
    ) -> None:
        options = {"momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        options |= {"nesterov": nesterov, "maximize": maximize}
        super().__init__(params, lr, decay_matrices_only=decay_matrices_only, low=low, **options)

    @staticmethod
    def in_range(options: Mapping[str, Any]) -> bool:
        """Also check what `nesterov` requires."""
        ready = not options["nesterov"] or (options["momentum"] > 0 and options["dampening"] == 0)
        return ready and Optimizer.in_range(options)

    def moments(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The running gradient, unless momentum is 0."""
        return ("momentum",) if options["momentum"] else ()
