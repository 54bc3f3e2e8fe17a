"""Muon."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from graphwright.errors import ShapeError
from graphwright.ops.optimize import MUON_ADJUST
from graphwright.optim.optimizer import HasParameters, Optimizer


class Muon(Optimizer):
    """Momentum, nearly orthogonalised, for the matrices of hidden layers (Jordan et al. 2024; see `ops/optimize.py`).

    Definition and defaults are those of `torch.optim.Muon`, which iterates in bfloat16; here in the parameter's dtype.

    Args:
        params: matrices alone; embeddings, heads, norms and biases go to another optimizer.
        lr, low: see `Optimizer`.
        weight_decay: λ of θ(1 - lr·λ).
        momentum: μ, in [0, 1).
        nesterov: look ahead.
        iterations: of Newton and Schulz.
        eps: least norm that is divided by.
        adjust: size of a step: `original`, times √max(1, r/c) for [r, c]; `match_rms_adamw`, times 0.2·√max(r, c), to
            which lr and weight decay of AdamW fit.
        maximize: climb instead of descend.
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
        super().__init__(
            params,
            lr,
            low=low,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            iterations=iterations,
            eps=eps,
            adjust=adjust,
            maximize=maximize,
        )
        for p in self.parameters():
            if p.ndim != 2:
                raise ShapeError("Muon trains matrices", where=p.name or None, got=p.spec, fix="AdamW for the others")

    @staticmethod
    def in_range(options: Mapping[str, Any]) -> bool:
        """Numbers from 0 up, momentum below 1, a known adjustment."""
        numbers = (options[n] for n in ("lr", "weight_decay", "momentum", "iterations", "eps"))
        return all(n >= 0 for n in numbers) and options["momentum"] < 1 and options["adjust"] in MUON_ADJUST

    def moments(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The running gradient."""
        return ("momentum",)
