"""Adam, AdamW, Lion, Muon, RMSprop and SGD; their formulas are ops of `ops/optimize.py`. The defaults are torch's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from graphwright.errors import ShapeError
from graphwright.ops.optimize import MUON_ADJUST
from graphwright.optim.optimizer import Optimizer, Params

Betas = tuple[float, float]


class Adam(Optimizer):
    """Adam (Kingma and Ba 2015, algorithm 1), as `torch.optim.Adam`: weight decay is added to the gradient.

    Args:
        params, lr, decay_matrices_only, low: see `Optimizer`.
        betas: decay rates of the moments, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: λ; the gradient g of a weight θ becomes g + λ·θ.
        amsgrad: divide by the largest second moment so far (Reddi, Kale and Kumar 2018).
        maximize: maximise instead of minimise.
    """

    op = "adam_step"
    moment_names: ClassVar[Mapping[str, str | None]] = {"m": None, "v": None, "largest_v": "amsgrad"}

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: Betas = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, *, amsgrad: bool = False, maximize: bool = False,
        decay_matrices_only: bool = False, low: str = "master",
    ) -> None:  # fmt: skip
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize}
        super().__init__(params, lr, options, decay_matrices_only=decay_matrices_only, low=low)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2), as `torch.optim.AdamW`.

    Args:
        params, lr, decay_matrices_only, low: see `Optimizer`.
        weight_decay: λ; each step first multiplies the weights by 1 - lr·λ.
        betas, eps, amsgrad, maximize: see `Adam`.
    """

    op = "adamw_step"

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: Betas = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.01, *, amsgrad: bool = False, maximize: bool = False,
        decay_matrices_only: bool = False, low: str = "master",
    ) -> None:  # fmt: skip
        flags = {"amsgrad": amsgrad, "maximize": maximize, "decay_matrices_only": decay_matrices_only}
        super().__init__(params, lr, betas, eps, weight_decay, low=low, **flags)


class Lion(Optimizer):
    """Lion: updates of equal size along the sign of a momentum (Chen et al. 2023, algorithm 2).

    Args:
        params, lr, decay_matrices_only, low: see `Optimizer`; the paper uses a third to a tenth of Adam's lr.
        betas: decay rates of the direction and of the momentum, in [0, 1).
        weight_decay: λ; each step first multiplies the weights by 1 - lr·λ. The paper uses 3 to 10 times Adam's value.
        maximize: maximise instead of minimise.
    """

    op = "lion_step"
    moment_names: ClassVar[Mapping[str, str | None]] = {"m": None}

    def __init__(
        self, params: Params, lr: float = 1e-4, betas: Betas = (0.9, 0.99), weight_decay: float = 0.0, *,
        maximize: bool = False, decay_matrices_only: bool = False, low: str = "master",
    ) -> None:  # fmt: skip
        options = {"betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, lr, options, decay_matrices_only=decay_matrices_only, low=low)


class Muon(Optimizer):
    """Orthogonalised momentum for the matrices of hidden layers (Jordan et al. 2024).

    Definition and defaults are those of `torch.optim.Muon`, except that it iterates in bfloat16.

    Args:
        params: matrices only; embeddings, heads, norms and biases need another optimizer.
        lr, low: see `Optimizer`.
        weight_decay: λ; each step first multiplies the weights by 1 - lr·λ.
        momentum: μ, decay rate of the running gradient, in [0, 1).
        nesterov: Nesterov momentum.
        iterations: number of Newton-Schulz iterations.
        eps: lower bound of the norm in the division.
        adjust: scale of the update of an [r, c] matrix: `original`: √max(1, r/c); `match_rms_adamw`: 0.2·√max(r, c),
            so that lr and weight decay of AdamW can be used.
        maximize: maximise instead of minimise.
    Raises: ShapeError for a parameter that is not a matrix; UsageError as `Optimizer`.
    """

    op = "muon_step"
    moment_names: ClassVar[Mapping[str, str | None]] = {"momentum": None}

    def __init__(
        self, params: Params, lr: float = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95,
        nesterov: bool = True, *, iterations: int = 5, eps: float = 1e-7, adjust: str = "original",
        maximize: bool = False, low: str = "master",
    ) -> None:  # fmt: skip
        options = {"weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "iterations": iterations}
        super().__init__(params, lr, {**options, "eps": eps, "adjust": adjust, "maximize": maximize}, low=low)
        for p in self.parameters():
            if p.ndim != 2:
                fix = "pass only matrices to Muon, and the other parameters to AdamW"
                raise ShapeError("the parameter is not a matrix", where=p.name or None, got=p.spec, fix=fix)

    @staticmethod
    def in_range(options: Mapping[str, Any]) -> bool:
        """Return True if the options are valid; also check that momentum is below 1 and `adjust` is known."""
        return not Muon._out_of_range(options)

    @staticmethod
    def _out_of_range(options: Mapping[str, Any]) -> dict[str, str]:
        wrong = Optimizer._out_of_range(options) | ({} if options["momentum"] < 1 else {"momentum": "in [0, 1)"})
        return wrong if options["adjust"] in MUON_ADJUST else {**wrong, "adjust": " or ".join(MUON_ADJUST)}


class RMSprop(Optimizer):
    """RMSprop, as `torch.optim.RMSprop`: gradient / root of its running mean square (Graves 2013, eq. 38 to 45).

    Args:
        params, lr, decay_matrices_only, low: see `Optimizer`.
        alpha: decay rate of the running mean square, in [0, 1).
        eps: added to the root.
        weight_decay: λ; the gradient g of a weight θ becomes g + λ·θ.
        momentum: decay rate of the sum of scaled gradients.
        centered: subtract the squared running mean from the mean square.
        maximize: maximise instead of minimise.
    """

    op = "rmsprop_step"
    moment_names: ClassVar[Mapping[str, str | None]] = {"mean_square": None, "momentum": "momentum", "mean": "centered"}

    def __init__(
        self, params: Params, lr: float = 1e-2, alpha: float = 0.99, eps: float = 1e-8, weight_decay: float = 0.0,
        momentum: float = 0.0, centered: bool = False, *, maximize: bool = False,
        decay_matrices_only: bool = False, low: str = "master",
    ) -> None:  # fmt: skip
        options = {"alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        options |= {"centered": centered, "maximize": maximize}
        super().__init__(params, lr, options, decay_matrices_only=decay_matrices_only, low=low)


class SGD(Optimizer):
    """Stochastic gradient descent, as `torch.optim.SGD`.

    Args:
        params, lr, decay_matrices_only, low: see `Optimizer`.
        momentum: μ, decay rate of the running gradient.
        dampening: δ; a gradient is multiplied by 1 - δ when it is added to the momentum, except in the first step.
        weight_decay: λ; the gradient g of a weight θ becomes g + λ·θ.
        nesterov: Nesterov momentum; requires momentum > 0 and dampening 0.
        maximize: maximise instead of minimise.
    """

    op = "sgd_step"
    moment_names: ClassVar[Mapping[str, str | None]] = {"momentum": "momentum"}

    def __init__(
        self, params: Params, lr: float = 1e-3, momentum: float = 0.0, dampening: float = 0.0,
        weight_decay: float = 0.0, nesterov: bool = False, *, maximize: bool = False,
        decay_matrices_only: bool = False, low: str = "master",
    ) -> None:  # fmt: skip
        options = {"momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        options |= {"nesterov": nesterov, "maximize": maximize}
        super().__init__(params, lr, options, decay_matrices_only=decay_matrices_only, low=low)

    @staticmethod
    def in_range(options: Mapping[str, Any]) -> bool:
        """Return True if the options are valid; also check that `nesterov` has momentum > 0 and dampening 0."""
        return not SGD._out_of_range(options)

    @staticmethod
    def _out_of_range(options: Mapping[str, Any]) -> dict[str, str]:
        ready = not options["nesterov"] or (options["momentum"] > 0 and options["dampening"] == 0)
        wrong = {} if ready else {"nesterov": "False, or momentum > 0 and dampening 0"}
        return Optimizer._out_of_range(options) | wrong
