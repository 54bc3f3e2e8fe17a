"""Activations that combine ops, under torch's names; those of one op are in `op_functions`."""

from __future__ import annotations

from typing import Any

from graphwright.array import float32
from graphwright.autograd import Tensor, as_tensor, training, where
from graphwright.autograd.random import gumbel, rand_like
from graphwright.autograd.reductions import log_softmax, softmax
from graphwright.ops import call
from graphwright.ops.axes import axis_of

__all__ = [
    "celu", "glu", "gumbel_softmax", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "log_softmax", "mish",
    "prelu", "relu6", "rrelu", "selu", "softmax", "softmin", "softshrink", "softsign", "tanhshrink", "threshold",
]  # fmt: skip
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


def relu6(input: Tensor, inplace: bool = False) -> Tensor:
    """min(max(x, 0), 6)."""
    return hardtanh(input, 0.0, 6.0)


def hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    """min(max(x, min_val), max_val)."""
    return input.clamp(min_val, max_val)


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """min(max(x + 3, 0), 6) / 6 (Howard et al. 2019)."""
    return relu6(input + 3.0) / 6.0


def hardswish(input: Tensor, inplace: bool = False) -> Tensor:
    """x·hardsigmoid x (Howard et al. 2019)."""
    return input * hardsigmoid(input)


def selu(input: Tensor, inplace: bool = False) -> Tensor:
    """The scaled ELU of self-normalising networks (Klambauer et al. 2017)."""
    return call("elu", input, alpha=_SELU_ALPHA) * _SELU_SCALE


def celu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """x above 0, alpha(e^(x/alpha) - 1) below (Barron 2017)."""
    return call("elu", input / alpha, alpha=1.0) * alpha


def mish(input: Tensor, inplace: bool = False) -> Tensor:
    """x·tanh(ln(1 + eˣ)) (Misra 2019)."""
    return input * call("softplus", input).tanh()


def softsign(input: Tensor) -> Tensor:
    """x / (1 + |x|)."""
    return input / (input.abs() + 1.0)


def tanhshrink(input: Tensor) -> Tensor:
    """x - tanh x."""
    return input - input.tanh()


def softshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    """x moved by `lambd` towards 0; 0 in between."""
    return input - input.clamp(-lambd, lambd)


def hardshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    """x where |x| > lambd, else 0."""
    return where(input.abs() > lambd, input, 0.0)


def threshold(input: Tensor, threshold: float, value: float, inplace: bool = False) -> Tensor:
    """x above the threshold, else `value`."""
    return where(input > threshold, input, value)


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """max(x, 0) + w·min(x, 0), with a slope for all or for each channel of axis 1 (He et al. 2015)."""
    slopes = weight.reshape(-1, *(1,) * (input.ndim - 2)) if weight.numel() > 1 and input.ndim > 1 else weight
    return where(input > 0.0, input, input * slopes)


def rrelu(
    input: Tensor, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False, inplace: bool = False
) -> Tensor:
    """Leaky ReLU with a random slope for each entry in training, else with the mean slope (Xu et al. 2015)."""
    if not _training(training):
        return call("leaky_relu", input, slope=(lower + upper) / 2)
    return where(input >= 0.0, input, input * (rand_like(input) * (upper - lower) + lower))


_training = training


def glu(input: Tensor, dim: int = -1) -> Tensor:
    """a·σ(b) for the halves a, b of an axis (Dauphin et al. 2017). Raises: ShapeError for an odd size."""
    half = input.shape[axis_of(dim, input.ndim)] // 2
    a, b = input.split(half, dim)
    return a * b.sigmoid()


def softmin(input: Tensor, dim: int = -1, *, dtype: Any = None) -> Tensor:
    """Softmax of -x."""
    return softmax(-input, dim, dtype=dtype)


def gumbel_softmax(logits: Tensor, tau: float = 1.0, hard: bool = False, dim: int = -1) -> Tensor:
    """softmax((logits + Gumbel noise) / tau); with `hard` one-hot, with the gradient of the soft result.

    Source: Jang et al. 2017.
    """
    x = as_tensor(logits)
    noise = gumbel(*x.shape, dtype=x.dtype if x.dtype.is_float else float32)
    soft = softmax((x + noise) / tau, dim)
    if not hard:
        return soft
    largest = (soft == soft.amax(dim, keepdim=True)).to(soft.dtype)
    return largest - soft.detach() + soft
