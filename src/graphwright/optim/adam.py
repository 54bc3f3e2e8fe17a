"""Adam and AdamW; one fused call steps all parameters of a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from graphwright.optim.optimizer import HasParameters, Optimizer


class _Adam(Optimizer):
    @staticmethod
    def in_range(options: Mapping[str, Any]) -> bool:
        """Numbers from 0 up, betas below 1."""
        betas = tuple(options["betas"])
        numbers = (options["lr"], options["eps"], options["weight_decay"])
        return all(n >= 0 for n in numbers) and len(betas) == 2 and all(0 <= b < 1 for b in betas)

    def attrs(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """As the op has them: β1 and β2 apart."""
        beta1, beta2 = options["betas"]
        return {"beta1": beta1, "beta2": beta2, **{n: v for n, v in super().attrs(options).items() if n != "betas"}}

    def moments(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """First and second moment, and the largest second one with amsgrad."""
        return ("m", "v", "largest_v") if options["amsgrad"] else ("m", "v")


class Adam(_Adam):
    """Adam (Kingma and Ba 2015, algorithm 1), weight decay added to the gradient; definition and defaults are torch's.

    Args:
        params, lr, decay_matrices_only, low: see `Optimizer`.
        betas: of the moments, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: λ of g + λ·θ.
        amsgrad: divide by the largest second moment so far (Reddi, Kale and Kumar 2018).
        maximize: climb instead of descend.
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
        super().__init__(
            params,
            lr,
            decay_matrices_only=decay_matrices_only,
            low=low,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
        )


class AdamW(_Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2); definition and defaults are torch's.

    Args:
        params, lr, decay_matrices_only, low: see `Optimizer`.
        weight_decay: λ of θ(1 - lr·λ).
        betas, eps, amsgrad, maximize: see `Adam`.
    A 16-bit parameter has float32 master weights unless `low` says otherwise; one that was changed from outside, by an
    edit or undo, is trained on from its new value.
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
        super().__init__(
            params,
            lr,
            decay_matrices_only=decay_matrices_only,
            low=low,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
        )
