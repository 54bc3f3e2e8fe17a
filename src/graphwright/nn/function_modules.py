"""Modules that call one function of `nn.functional`: losses and activations, under torch's names.

A class states its function and the number of operands; the other arguments of the function, with their defaults, are
the arguments of the class and attributes of the module.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Signature, signature
from typing import Any, ClassVar

from graphwright.autograd import Parameter, Tensor, as_tensor
from graphwright.nn import functional
from graphwright.nn.init import full
from graphwright.nn.module import Buffer, Module

_BUFFERS = ("weight", "pos_weight")


class FunctionModule(Module):
    """Base of modules that call one function on `operands` tensors.

    Arguments `weight` and `pos_weight` are stored as buffers, as in torch, so that they follow `to` and `state_dict`.
    """

    _function: ClassVar[Callable[..., Tensor]]
    options: ClassVar[tuple[str, ...]] = ()
    __signature__: ClassVar[Signature]

    def __init_subclass__(cls, of: Callable[..., Tensor], operands: int = 1) -> None:
        given = list(signature(of).parameters.values())[operands:]
        cls._function = staticmethod(of)
        cls.options = tuple(a.name for a in given)
        cls.__signature__ = Signature(given)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = self.__signature__.bind(*args, **kwargs)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            held = name in _BUFFERS and value is not None
            setattr(self, name, Buffer(as_tensor(value).concrete("a weight of a loss").copy()) if held else value)

    def forward(self, *operands: Any) -> Tensor:
        """Apply the function to the operands, with the arguments of the module."""
        return type(self)._function(*operands, **{name: getattr(self, name) for name in self.options})


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


class CosineSimilarity(FunctionModule, of=functional.cosine_similarity, operands=2):
    """`functional.cosine_similarity` as a module."""


class PairwiseDistance(FunctionModule, of=functional.pairwise_distance, operands=2):
    """`functional.pairwise_distance` as a module."""


# -- activations -------------------------------------------------------------------------------------------------------
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


class Softmin(FunctionModule, of=functional.softmin):
    """`functional.softmin` as a module."""


class PReLU(Module):
    """max(x, 0) + w·min(x, 0), with a trained slope for all entries, or one per channel (He et al. 2015)."""

    def __init__(self, num_parameters: int = 1, init: float = 0.25) -> None:
        self.weight = Parameter(full((num_parameters,), init))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to x [N, C, ...]; the shape is kept."""
        return functional.prelu(x, self.weight)


class RReLU(Module):
    """Leaky ReLU with a random slope for each entry in training, else with the mean slope (Xu et al. 2015)."""

    def __init__(self, lower: float = 1.0 / 8, upper: float = 1.0 / 3) -> None:
        self.lower, self.upper = lower, upper

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to x of any shape."""
        return functional.rrelu(x, self.lower, self.upper, self.trains)
