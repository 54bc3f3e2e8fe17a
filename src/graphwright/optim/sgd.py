"""Gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from graphwright.optim.optimizer import HasParameters, Optimizer


class SGD(Optimizer):
    """Stochastic gradient descent; definition and defaults are torch's (see `ops/optimize.py` for the formula).

    Args:
        params, lr, decay_matrices_only, low: see `Optimizer`.
        momentum: μ.
        dampening: δ; the first step takes the whole gradient.
        weight_decay: λ of g + λ·θ.
        nesterov: look ahead; needs momentum > 0 and dampening 0.
        maximize: climb instead of descend.
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
        super().__init__(
            params,
            lr,
            decay_matrices_only=decay_matrices_only,
            low=low,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
        )

    @staticmethod
    def in_range(options: Mapping[str, Any]) -> bool:
        """Numbers from 0 up; see `nesterov`."""
        ready = not options["nesterov"] or (options["momentum"] > 0 and options["dampening"] == 0)
        return ready and all(options[n] >= 0 for n in ("lr", "momentum", "weight_decay"))

    def moments(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The running gradient, if there is momentum."""
        return ("momentum",) if options["momentum"] else ()
