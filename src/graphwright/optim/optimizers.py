"""The optimizers; their formulas are ops of `ops/optimize.py`. Names of arguments and defaults are torch's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

from graphwright.errors import ShapeError
from graphwright.ops.optimize import MUON_ADJUST
from graphwright.optim.optimizer import CommonOptions, Optimizer, Params
from graphwright.signatures import keywords

Betas = tuple[float, float]


class Adam(Optimizer):
    """Adam (Kingma and Ba 2015, algorithm 1), as `torch.optim.Adam`: weight decay is added to the gradient.

    Args:
        params, lr, decay_matrices_only, low, lazy: see `Optimizer`.
        betas: decay rates of the moments, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: λ; the gradient g of a weight θ becomes g + λ·θ.
        amsgrad: divide by the largest second moment so far (Reddi, Kale and Kumar 2018).
        maximize: maximise instead of minimise.
    """

    op = "adam_step"
    moment_names: ClassVar[Mapping[str, str | None]] = {"m": None, "v": None, "largest_v": "amsgrad"}

    @keywords(Optimizer.__init__)
    def __init__(
        self, params: Params, lr: float = 1e-3, betas: Betas = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, *, amsgrad: bool = False, maximize: bool = False,
        **common: Unpack[CommonOptions],
    ) -> None:  # fmt: skip
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize}
        super().__init__(params, lr, options, **common)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2), as `torch.optim.AdamW`.

    Args:
        params, lr, decay_matrices_only, low, lazy: see `Optimizer`.
        weight_decay: λ; each step first multiplies the weights by 1 - lr·λ.
        betas, eps, amsgrad, maximize: see `Adam`.
    """

    op = "adamw_step"

    @keywords(Optimizer.__init__)
    def __init__(
        self, params: Params, lr: float = 1e-3, betas: Betas = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.01, *, amsgrad: bool = False, maximize: bool = False,
        **common: Unpack[CommonOptions],
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad=amsgrad, maximize=maximize, **common)


class Adadelta(Optimizer):
    """Adadelta, as `torch.optim.Adadelta`: steps in the unit of the weights (Zeiler 2012, algorithm 1).

    Args:
        params, lr, decay_matrices_only, low, lazy: see `Optimizer`.
        rho: decay rate of the running means of squared gradients and squared steps, in [0, 1].
        eps: added to both means under the root.
        weight_decay: λ; the gradient g of a weight θ becomes g + λ·θ.
        maximize: maximise instead of minimise.
    """

    op = "adadelta_step"
    moment_names: ClassVar[Mapping[str, str | None]] = {"mean_square": None, "mean_square_step": None}

    @keywords(Optimizer.__init__)
    def __init__(
        self, params: Params, lr: float = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0, *,
        maximize: bool = False, **common: Unpack[CommonOptions],
    ) -> None:  # fmt: skip
        options = {"rho": rho, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, lr, options, **common)

    @classmethod
    def _out_of_range(cls, options: Mapping[str, Any]) -> dict[str, str]:
        return super()._out_of_range(options) | ({} if 0 <= options["rho"] <= 1 else {"rho": "a number in [0, 1]"})


class Adagrad(Optimizer):
    """Adagrad, as `torch.optim.Adagrad`: gradient / root of the sum of its squares (Duchi, Hazan and Singer 2011).

    Args:
        params, lr, decay_matrices_only, low, lazy: see `Optimizer`.
        lr_decay: δ; the rate of step t is lr / (1 + (t-1)·δ).
        weight_decay: λ; the gradient g of a weight θ becomes g + λ·θ.
        initial_accumulator_value: the sum of squares before the first step; the moment `square_sum` is without it.
        eps: added to the root.
        maximize: maximise instead of minimise.
    """

    op = "adagrad_step"
    moment_names: ClassVar[Mapping[str, str | None]] = {"square_sum": None}

    @keywords(Optimizer.__init__)
    def __init__(
        self, params: Params, lr: float = 1e-2, lr_decay: float = 0.0, weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0, eps: float = 1e-10, *, maximize: bool = False,
        **common: Unpack[CommonOptions],
    ) -> None:  # fmt: skip
        options = {"lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps, "maximize": maximize}
        options["initial_accumulator_value"] = initial_accumulator_value
        super().__init__(params, lr, options, **common)


class Adamax(Optimizer):
    """Adam with the infinity norm, as `torch.optim.Adamax` (Kingma and Ba 2015, algorithm 2).

    Args:
        params, lr, decay_matrices_only, low, lazy: see `Optimizer`.
        betas: decay rates of the first moment and of the norm, in [0, 1).
        eps: added to the size of each gradient.
        weight_decay: λ; the gradient g of a weight θ becomes g + λ·θ.
        maximize: maximise instead of minimise.
    """

    op = "adamax_step"
    moment_names: ClassVar[Mapping[str, str | None]] = {"m": None, "norm": None}

    @keywords(Optimizer.__init__)
    def __init__(
        self, params: Params, lr: float = 2e-3, betas: Betas = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, *, maximize: bool = False, **common: Unpack[CommonOptions],
    ) -> None:  # fmt: skip
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, lr, options, **common)


class ASGD(Optimizer):
    """Averaged SGD, as `torch.optim.ASGD` (Polyak and Juditsky 1992); the average is the moment `average`.

    Args:
        params, lr, decay_matrices_only, low, lazy: see `Optimizer`.
        lambd: each step first multiplies the weights by 1 - lambd·η.
        alpha: exponent of the rate η = lr / (1 + lambd·lr·t)^alpha of step t + 1.
        t0: the average starts after so many steps; until then it is the weights.
        weight_decay: λ; the gradient g of a weight θ becomes g + λ·θ.
        maximize: maximise instead of minimise.
    """

    op = "asgd_step"
    moment_names: ClassVar[Mapping[str, str | None]] = {"average": None, "eta": None}
    numbers = frozenset({"eta"})

    @keywords(Optimizer.__init__)
    def __init__(
        self, params: Params, lr: float = 1e-2, lambd: float = 1e-4, alpha: float = 0.75, t0: float = 1e6,
        weight_decay: float = 0.0, *, maximize: bool = False, **common: Unpack[CommonOptions],
    ) -> None:  # fmt: skip
        options = {"lambd": lambd, "alpha": alpha, "t0": t0, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, lr, options, **common)


class Lion(Optimizer):
    """Lion: updates of equal size along the sign of a momentum (Chen et al. 2023, algorithm 2).

    Args:
        params, lr, decay_matrices_only, low, lazy: see `Optimizer`; the paper uses a third to a tenth of Adam's lr.
        betas: decay rates of the direction and of the momentum, in [0, 1).
        weight_decay: λ; each step first multiplies the weights by 1 - lr·λ. The paper uses 3 to 10 times Adam's value.
        maximize: maximise instead of minimise.
    """

    op = "lion_step"
    moment_names: ClassVar[Mapping[str, str | None]] = {"m": None}

    @keywords(Optimizer.__init__)
    def __init__(
        self, params: Params, lr: float = 1e-4, betas: Betas = (0.9, 0.99), weight_decay: float = 0.0, *,
        maximize: bool = False, **common: Unpack[CommonOptions],
    ) -> None:  # fmt: skip
        options = {"betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, lr, options, **common)


class Muon(Optimizer):
    """Orthogonalised momentum for the matrices of hidden layers (Jordan et al. 2024).

    Definition and defaults are those of `torch.optim.Muon`, except that it iterates in bfloat16.

    Args:
        params: matrices only; embeddings, heads, norms and biases need another optimizer.
        lr, low, lazy: see `Optimizer`.
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

    op, of_matrices = "muon_step", True
    moment_names: ClassVar[Mapping[str, str | None]] = {"momentum": None}

    def __init__(
        self, params: Params, lr: float = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95,
        nesterov: bool = True, *, iterations: int = 5, eps: float = 1e-7, adjust: str = "original",
        maximize: bool = False, low: str = "master", lazy: bool = False,
    ) -> None:  # fmt: skip
        options = {"weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "iterations": iterations}
        super().__init__(
            params, lr, {**options, "eps": eps, "adjust": adjust, "maximize": maximize}, low=low, lazy=lazy
        )
        for p in self.parameters():
            if p.ndim != 2:
                fix = "pass only matrices to Muon, and the other parameters to AdamW"
                raise ShapeError("the parameter is not a matrix", where=p.name or None, got=p.spec, fix=fix)

    @classmethod
    def _out_of_range(cls, options: Mapping[str, Any]) -> dict[str, str]:
        wrong = super()._out_of_range(options) | ({} if options["momentum"] < 1 else {"momentum": "in [0, 1)"})
        return wrong if options["adjust"] in MUON_ADJUST else {**wrong, "adjust": " or ".join(MUON_ADJUST)}


class NAdam(Optimizer):
    """Adam with Nesterov momentum, as `torch.optim.NAdam` (Dozat 2016, algorithm 2).

    Args:
        params, lr, decay_matrices_only, low, lazy: see `Optimizer`.
        betas, eps: see `Adam`.
        weight_decay: λ; the gradient g of a weight θ becomes g + λ·θ.
        momentum_decay: ψ; the momentum of step t is β1·(1 - 0.96^(t·ψ)/2).
        decoupled_weight_decay: multiply the weights by 1 - lr·λ instead, as AdamW does.
        maximize: maximise instead of minimise.
    """

    op = "nadam_step"
    moment_names: ClassVar[Mapping[str, str | None]] = {"m": None, "v": None, "momentum_product": None}
    numbers = frozenset({"momentum_product"})

    @keywords(Optimizer.__init__)
    def __init__(
        self, params: Params, lr: float = 2e-3, betas: Betas = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, momentum_decay: float = 4e-3, decoupled_weight_decay: bool = False, *,
        maximize: bool = False, **common: Unpack[CommonOptions],
    ) -> None:  # fmt: skip
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "momentum_decay": momentum_decay}
        options |= {"decoupled_weight_decay": decoupled_weight_decay, "maximize": maximize}
        super().__init__(params, lr, options, **common)


class RAdam(Optimizer):
    """Adam whose rate is rectified in the first steps, as `torch.optim.RAdam` (Liu et al. 2020, algorithm 2).

    Args:
        params, lr, decay_matrices_only, low, lazy: see `Optimizer`.
        betas, eps: see `Adam`.
        weight_decay: λ; the gradient g of a weight θ becomes g + λ·θ.
        decoupled_weight_decay: multiply the weights by 1 - lr·λ instead, as AdamW does.
        maximize: maximise instead of minimise.
    """

    op = "radam_step"
    moment_names: ClassVar[Mapping[str, str | None]] = {"m": None, "v": None}

    @keywords(Optimizer.__init__)
    def __init__(
        self, params: Params, lr: float = 1e-3, betas: Betas = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, decoupled_weight_decay: bool = False, *, maximize: bool = False,
        **common: Unpack[CommonOptions],
    ) -> None:  # fmt: skip
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        options["decoupled_weight_decay"] = decoupled_weight_decay
        super().__init__(params, lr, options, **common)


class RMSprop(Optimizer):
    """RMSprop, as `torch.optim.RMSprop`: gradient / root of its running mean square (Graves 2013, eq. 38 to 45).

    Args:
        params, lr, decay_matrices_only, low, lazy: see `Optimizer`.
        alpha: decay rate of the running mean square, in [0, 1).
        eps: added to the root.
        weight_decay: λ; the gradient g of a weight θ becomes g + λ·θ.
        momentum: decay rate of the sum of scaled gradients.
        centered: subtract the squared running mean from the mean square.
        maximize: maximise instead of minimise.
    """

    op = "rmsprop_step"
    moment_names: ClassVar[Mapping[str, str | None]] = {"mean_square": None, "momentum": "momentum", "mean": "centered"}

    @keywords(Optimizer.__init__)
    def __init__(
        self, params: Params, lr: float = 1e-2, alpha: float = 0.99, eps: float = 1e-8, weight_decay: float = 0.0,
        momentum: float = 0.0, centered: bool = False, *, maximize: bool = False,
        **common: Unpack[CommonOptions],
    ) -> None:  # fmt: skip
        options = {"alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        options |= {"centered": centered, "maximize": maximize}
        super().__init__(params, lr, options, **common)

    @classmethod
    def _out_of_range(cls, options: Mapping[str, Any]) -> dict[str, str]:
        wrong = {} if 0 <= options["alpha"] < 1 else {"alpha": "a number in [0, 1)"}
        return super()._out_of_range(options) | wrong


class Rprop(Optimizer):
    """Rprop, as `torch.optim.Rprop`: a step size per weight, and of the gradient only the sign. For whole batches.

    Args:
        params, low, lazy: see `Optimizer`.
        lr: the first step size; later values have no effect.
        etas: factors of a step size when the sign of the gradient changes, in (0, 1), and when it stays, > 1.
        step_sizes: smallest and largest step size.
        maximize: maximise instead of minimise.
    Source: Riedmiller and Braun 1993, without going back after a change of sign.
    """

    op = "rprop_step"
    moment_names: ClassVar[Mapping[str, str | None]] = {"gradient": None, "step_size": None}

    def __init__(
        self, params: Params, lr: float = 1e-2, etas: Betas = (0.5, 1.2), step_sizes: Betas = (1e-6, 50.0), *,
        maximize: bool = False, low: str = "master", lazy: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, {"etas": etas, "step_sizes": step_sizes, "maximize": maximize}, low=low, lazy=lazy)

    def attrs(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes of the op for a group's options."""
        (down, up), (smallest, largest) = options["etas"], options["step_sizes"]
        flat = {"down": down, "up": up, "smallest": smallest, "largest": largest}
        return {**flat, "maximize": options["maximize"]}

    @classmethod
    def _out_of_range(cls, options: Mapping[str, Any]) -> dict[str, str]:
        wrong, etas, sizes = super()._out_of_range(options), tuple(options["etas"]), tuple(options["step_sizes"])
        if len(etas) != 2 or not 0 < etas[0] < 1 < etas[1]:
            wrong["etas"] = "a number in (0, 1) and one > 1"
        return wrong if len(sizes) == 2 and 0 <= sizes[0] <= sizes[1] else {**wrong, "step_sizes": "0 <= least <= most"}


class SGD(Optimizer):
    """Stochastic gradient descent, as `torch.optim.SGD`.

    Args:
        params, lr, decay_matrices_only, low, lazy: see `Optimizer`.
        momentum: μ, decay rate of the running gradient.
        dampening: δ; a gradient is multiplied by 1 - δ when it is added to the momentum, except in the first step.
        weight_decay: λ; the gradient g of a weight θ becomes g + λ·θ.
        nesterov: Nesterov momentum; requires momentum > 0 and dampening 0.
        maximize: maximise instead of minimise.
    """

    op = "sgd_step"
    moment_names: ClassVar[Mapping[str, str | None]] = {"momentum": "momentum"}

    @keywords(Optimizer.__init__)
    def __init__(
        self, params: Params, lr: float = 1e-3, momentum: float = 0.0, dampening: float = 0.0,
        weight_decay: float = 0.0, nesterov: bool = False, *, maximize: bool = False,
        **common: Unpack[CommonOptions],
    ) -> None:  # fmt: skip
        options = {"momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        options |= {"nesterov": nesterov, "maximize": maximize}
        super().__init__(params, lr, options, **common)

    @classmethod
    def _out_of_range(cls, options: Mapping[str, Any]) -> dict[str, str]:
        ready = not options["nesterov"] or (options["momentum"] > 0 and options["dampening"] == 0)
        wrong = {} if ready else {"nesterov": "False, or momentum > 0 and dampening 0"}
        return super()._out_of_range(options) | wrong
