"""Adam and AdamW."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from graphwright.optim.optimizer import HasParameters, Optimizer


class Adam(Optimizer):
    """Adam (Kingma and Ba 2015, algorithm 1), weight decay added to the gradient; definition and defaults are torch's.

    Args:
        params, lr, decay_matrices_only, low: see `Optimizer`.
        betas: decay rates of the moments, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: λ of g + λ·θ.
        amsgrad: divide by the largest second moment so far (Reddi, Kale and Kumar 2018).
        maximize: maximise instead of minimise.
    """

    op = "adam_step"

    def __init__(
        self,
        params: HasParameters | Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        decay_matrices_only: bool = False,
        low: str = "master",
    ) -> None:
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize}
        super().__init__(params, lr, decay_matrices_only=decay_matrices_only, low=low, **options)

    def moments(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """First and second moment, and with amsgrad the largest second moment."""
        return ("m", "v", "largest_v") if options["amsgrad"] else ("m", "v")


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2); definition and defaults are torch's.

    Args:
        params, lr, decay_matrices_only, low: see `Optimizer`.
        weight_decay: λ of θ(1 - lr·λ).
        betas, eps, amsgrad, maximize: see `Adam`.
    """

    op = "adamw_step"

    def __init__(
        self,
        params: HasParameters | Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        decay_matrices_only: bool = False,
        low: str = "master",
    ) -> None:
        flags = {"amsgrad": amsgrad, "maximize": maximize, "decay_matrices_only": decay_matrices_only}
        super().__init__(params, lr, betas, eps, weight_decay, low=low, **flags)
