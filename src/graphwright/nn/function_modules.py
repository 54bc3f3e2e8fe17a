"""Modules that call one function of `nn.functional`, under torch's names: losses, activations, dropouts.

A class states its function and the number of operands; the other arguments of the function, with their defaults, are
the arguments of the class and attributes of the module. Pools, windows and resampling are in `spatial_modules`.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter as Argument
from inspect import Signature, signature
from typing import Any, ClassVar

from graphwright.autograd import Parameter, Tensor, as_tensor
from graphwright.errors import ShapeError
from graphwright.nn import functional
from graphwright.nn.dropouts import check_probability
from graphwright.nn.initial import full, set_values
from graphwright.nn.module import Buffer, Module

_BUFFERS = ("weight", "pos_weight")


class FunctionModule(Module):
    """Base of modules that call one function on `operands` tensors.

    Arguments `weight` and `pos_weight` are stored as buffers, as in torch, so that they follow `to` and `state_dict`.
    An argument `training` of the function is whether the module trains.

    Args:
        of: the function; a subclass without one is a user's subclass of a module.
        arguments: names of the function's arguments that are arguments of the class, if not all or in another order.
    """

    _function: ClassVar[Callable[..., Tensor]]
    options: ClassVar[tuple[str, ...]] = ()
    __signature__: ClassVar[Signature]

    def __init_subclass__(cls, of: Callable[..., Tensor] | None = None, operands: int = 1, arguments: str = "") -> None:
        if of is None:
            return
        known = signature(of).parameters
        cls._function = staticmethod(of)
        cls.options = tuple(arguments.split() or list(known)[operands:])
        cls.__signature__ = Signature([known[name] for name in cls.options if name != "training"])

        def forward(self: FunctionModule, *operands: Any, **named: Any) -> Tensor:
            """Apply the function to the operands, with the arguments of the module."""
            values = {n: self.trains if n == "training" else getattr(self, n) for n in self.options}
            return self._function(*operands, **{**values, **named})

        names = ["x"] if operands == 1 else list(known)[:operands]
        taken = [Argument(name, Argument.POSITIONAL_OR_KEYWORD) for name in ("self", *names)]
        forward.__signature__ = Signature(taken)  # names the inputs of traces
        cls.forward = forward

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = self.__signature__.bind(*args, **kwargs)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            held = name in _BUFFERS and value is not None
            setattr(self, name, Buffer(as_tensor(value).concrete("a weight of a loss").copy()) if held else value)


# -- losses and distances ----------------------------------------------------------------------------------------------
class L1Loss(FunctionModule, of=functional.l1_loss, operands=2):
    """`functional.l1_loss` as a module."""


class MSELoss(FunctionModule, of=functional.mse_loss, operands=2):
    """`functional.mse_loss` as a module."""


class SmoothL1Loss(FunctionModule, of=functional.smooth_l1_loss, operands=2):
    """`functional.smooth_l1_loss` as a module."""


class HuberLoss(FunctionModule, of=functional.huber_loss, operands=2):
    """`functional.huber_loss` as a module."""


class CrossEntropyLoss(FunctionModule, of=functional.cross_entropy, operands=2):
    """`functional.cross_entropy` as a module."""


class NLLLoss(FunctionModule, of=functional.nll_loss, operands=2):
    """`functional.nll_loss` as a module."""


class BCELoss(FunctionModule, of=functional.binary_cross_entropy, operands=2):
    """`functional.binary_cross_entropy` as a module."""


class BCEWithLogitsLoss(FunctionModule, of=functional.binary_cross_entropy_with_logits, operands=2):
    """`functional.binary_cross_entropy_with_logits` as a module."""


class KLDivLoss(FunctionModule, of=functional.kl_div, operands=2):
    """`functional.kl_div` as a module."""


class PoissonNLLLoss(FunctionModule, of=functional.poisson_nll_loss, operands=2):
    """`functional.poisson_nll_loss` as a module."""


class GaussianNLLLoss(FunctionModule, of=functional.gaussian_nll_loss, operands=3):
    """`functional.gaussian_nll_loss` as a module."""


class CosineEmbeddingLoss(FunctionModule, of=functional.cosine_embedding_loss, operands=3):
    """`functional.cosine_embedding_loss` as a module."""


class MarginRankingLoss(FunctionModule, of=functional.margin_ranking_loss, operands=3):
    """`functional.margin_ranking_loss` as a module."""


class HingeEmbeddingLoss(FunctionModule, of=functional.hinge_embedding_loss, operands=2):
    """`functional.hinge_embedding_loss` as a module."""


class SoftMarginLoss(FunctionModule, of=functional.soft_margin_loss, operands=2):
    """`functional.soft_margin_loss` as a module."""


class MultiMarginLoss(FunctionModule, of=functional.multi_margin_loss, operands=2):
    """`functional.multi_margin_loss` as a module."""


class MultiLabelSoftMarginLoss(FunctionModule, of=functional.multilabel_soft_margin_loss, operands=2):
    """`functional.multilabel_soft_margin_loss` as a module."""


class TripletMarginLoss(FunctionModule, of=functional.triplet_margin_loss, operands=3):
    """`functional.triplet_margin_loss` as a module."""


class MultiLabelMarginLoss(FunctionModule, of=functional.multilabel_margin_loss, operands=2):
    """`functional.multilabel_margin_loss` as a module."""


class TripletMarginWithDistanceLoss(FunctionModule, of=functional.triplet_margin_with_distance_loss, operands=3):
    """`functional.triplet_margin_with_distance_loss` as a module."""


class CTCLoss(FunctionModule, of=functional.ctc_loss, operands=4):
    """`functional.ctc_loss` as a module."""


class CosineSimilarity(FunctionModule, of=functional.cosine_similarity, operands=2):
    """`functional.cosine_similarity` as a module."""


class PairwiseDistance(FunctionModule, of=functional.pairwise_distance, operands=2):
    """`functional.pairwise_distance` as a module."""


# -- activations -------------------------------------------------------------------------------------------------------
class ReLU(FunctionModule, of=functional.relu):
    """`functional.relu` as a module."""


class LeakyReLU(FunctionModule, of=functional.leaky_relu):
    """`functional.leaky_relu` as a module."""


class ELU(FunctionModule, of=functional.elu):
    """`functional.elu` as a module."""


class SiLU(FunctionModule, of=functional.silu):
    """`functional.silu` as a module."""


class GELU(FunctionModule, of=functional.gelu):
    """`functional.gelu` as a module."""


class Softplus(FunctionModule, of=functional.softplus):
    """`functional.softplus` as a module."""


class Sigmoid(FunctionModule, of=functional.sigmoid):
    """`functional.sigmoid` as a module."""


class Tanh(FunctionModule, of=functional.tanh):
    """`functional.tanh` as a module."""


class LogSigmoid(FunctionModule, of=functional.logsigmoid):
    """`functional.logsigmoid` as a module."""


class ReLU6(FunctionModule, of=functional.relu6):
    """`functional.relu6` as a module."""


class Hardtanh(FunctionModule, of=functional.hardtanh):
    """`functional.hardtanh` as a module."""


class Hardsigmoid(FunctionModule, of=functional.hardsigmoid):
    """`functional.hardsigmoid` as a module."""


class Hardswish(FunctionModule, of=functional.hardswish):
    """`functional.hardswish` as a module."""


class SELU(FunctionModule, of=functional.selu):
    """`functional.selu` as a module."""


class CELU(FunctionModule, of=functional.celu):
    """`functional.celu` as a module."""


class Mish(FunctionModule, of=functional.mish):
    """`functional.mish` as a module."""


class Softsign(FunctionModule, of=functional.softsign):
    """`functional.softsign` as a module."""


class Tanhshrink(FunctionModule, of=functional.tanhshrink):
    """`functional.tanhshrink` as a module."""


class Softshrink(FunctionModule, of=functional.softshrink):
    """`functional.softshrink` as a module."""


class Hardshrink(FunctionModule, of=functional.hardshrink):
    """`functional.hardshrink` as a module."""


class Threshold(FunctionModule, of=functional.threshold):
    """`functional.threshold` as a module."""


class GLU(FunctionModule, of=functional.glu):
    """`functional.glu` as a module."""


class PReLU(Module):
    """max(x, 0) + w·min(x, 0), with a trained slope for all entries, or one per channel (He et al. 2015)."""

    def __init__(self, num_parameters: int = 1, init: float = 0.25) -> None:
        self.weight, self.init = Parameter(full((num_parameters,), init)), init

    @property
    def num_parameters(self) -> int:
        """Number of slopes."""
        return self.weight.shape[0]

    def reset_parameters(self) -> None:
        """Set the slopes to `init`."""
        set_values(self.weight, full(self.weight.shape, self.init))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to x [N, C, ...]; the shape is kept."""
        return functional.prelu(x, self.weight)


class RReLU(FunctionModule, of=functional.rrelu, arguments="lower upper training inplace"):
    """`functional.rrelu` as a module."""


class _Softmax(Module):
    _function: ClassVar[Callable[..., Tensor]]

    def __init_subclass__(cls, of: Callable[..., Tensor] | None = None) -> None:
        if of is not None:
            cls._function = staticmethod(of)

    def __init__(self, dim: int | None = None) -> None:
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x along `dim`; None is axis 0 of 0, 1 or 3 axes and axis 1 of others, as in torch."""
        return self._function(x, (0 if x.ndim in (0, 1, 3) else 1) if self.dim is None else self.dim)


class Softmax(_Softmax, of=functional.softmax):
    """`functional.softmax` as a module."""


class LogSoftmax(_Softmax, of=functional.log_softmax):
    """`functional.log_softmax` as a module."""


class Softmin(_Softmax, of=functional.softmin):
    """`functional.softmin` as a module."""


class Softmax2d(Module):
    """Softmax over the channels of [N, C, H, W] or [C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x over its channels. Raises: ShapeError for another number of axes."""
        if x.ndim not in (3, 4):
            expected = "[N, C, H, W] or [C, H, W]"
            raise ShapeError("wrong number of axes", where="Softmax2d", expected=expected, got=x.spec)
        return functional.softmax(x, -3)


# -- dropouts ----------------------------------------------------------------------------------------------------------
class _Dropout(FunctionModule):
    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        check_probability(p)
        self.p, self.inplace = p, inplace


class Dropout(_Dropout, of=functional.dropout):
    """`functional.dropout` as a module."""


class Dropout1d(_Dropout, of=functional.dropout1d):
    """`functional.dropout1d` as a module."""


class Dropout2d(_Dropout, of=functional.dropout2d):
    """`functional.dropout2d` as a module."""


class Dropout3d(_Dropout, of=functional.dropout3d):
    """`functional.dropout3d` as a module."""


class AlphaDropout(_Dropout, of=functional.alpha_dropout):
    """`functional.alpha_dropout` as a module."""


class FeatureAlphaDropout(_Dropout, of=functional.feature_alpha_dropout):
    """`functional.feature_alpha_dropout` as a module."""
