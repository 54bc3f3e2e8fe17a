"""Muon."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from graphwright.errors import ShapeError
from graphwright.ops.optimize import MUON_ADJUST
from graphwright.optim.optimizer import HasParameters, Optimizer


class Muon(Optimizer):
    """Orthogonalised momentum for the matrices of hidden layers (Jordan et al. 2024; see `ops/optimize.py`).

    Definition and defaults are those of `torch.optim.Muon`, except that it iterates in bfloat16.

    Args:
        params: matrices only; embeddings, heads, norms and biases need another optimizer.
        lr, low: see `Optimizer`.
        weight_decay: λ of θ(1 - lr·λ).
        momentum: μ, decay rate of the running gradient, in [0, 1).
        nesterov: Nesterov momentum.
        iterations: number of Newton-Schulz iterations.
        eps: lower bound of the norm in the division.
        adjust: factor of the update of [r, c]: `original`: √max(1, r/c); `match_rms_adamw`: 0.2·√max(r, c), for the lr
            and weight decay of AdamW.
        maximize: maximise instead of minimise.
    Raises: ShapeError for a parameter of another rank; UsageError as `Optimizer`.
    """

    op = "muon_step"

    def __init__(
        self,
        params: HasParameters | Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        iterations: int = 5,
        eps: float = 1e-7,
        adjust: str = "original",
        maximize: bool = False,
        low: str = "master",
    ) -> None:
        options = {"weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "iterations": iterations}
        options |= {"eps": eps, "adjust": adjust, "maximize": maximize}
        super().__init__(params, lr, low=low, **options)
        for p in self.parameters():
            if p.ndim != 2:
                raise ShapeError(
                    "Muon needs matrices", where=p.name or None, got=p.spec, fix="use AdamW for the others"
                )

    @staticmethod
    def in_range(options: Mapping[str, Any]) -> bool:
        """Also check that momentum is below 1 and `adjust` is known."""
        return options["momentum"] < 1 and options["adjust"] in MUON_ADJUST and Optimizer.in_range(options)

    def moments(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The running gradient."""
        return ("momentum",)
