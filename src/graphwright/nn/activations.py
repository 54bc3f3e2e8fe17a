"""Activations that combine ops, under torch's names; those of one op are in `op_functions`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from graphwright.array import float32
from graphwright.autograd import Tensor, as_tensor, training, where
from graphwright.autograd.create import device_of
from graphwright.autograd.functions import cast_like
from graphwright.autograd.names import overwritten
from graphwright.autograd.random import gumbel, rand_like
from graphwright.autograd.reductions import log_softmax, softmax
from graphwright.errors import ShapeError, UsageError
from graphwright.ops import call
from graphwright.ops.axes import axis_of

__all__ = [
    "celu", "elu", "glu", "gumbel_softmax", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu",
    "log_softmax", "mish", "prelu", "relu", "relu6", "rrelu", "selu", "silu", "softmax", "softmin", "softplus",
    "softshrink", "softsign", "tanhshrink", "threshold",
]  # fmt: skip
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """max(x, 0), also of integers; gradient 0 at 0."""
    return overwritten(input, _RELU) if inplace else _RELU(input)


_RELU = partial(call, "relu")


def leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    """x above 0, else negative_slope·x."""
    return _either(input, partial(call, "leaky_relu", slope=float(negative_slope)), inplace)


def elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """x above 0, else alpha·(eˣ - 1) (Clevert et al. 2016)."""
    return _either(input, partial(call, "elu", alpha=float(alpha)), inplace)


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """x·σ(x)."""
    return _either(input, partial(call, "silu"), inplace)


def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """ln(1 + e^(beta·x)) / beta; x where beta·x exceeds `threshold`, unless that is 20: the formula is exact."""
    made = call("softplus", input) if beta == 1 else call("softplus", input * beta) / beta
    return made if threshold == 20 else where(input * beta > threshold, input, made)


def relu6(input: Tensor, inplace: bool = False) -> Tensor:
    """min(max(x, 0), 6)."""
    return hardtanh(input, 0.0, 6.0, inplace)


def hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    """min(max(x, min_val), max_val); gradient 0 at the bounds and beyond. Raises: UsageError for exchanged bounds."""
    if min_val > max_val:
        got = f"{min_val}, {max_val}"
        raise UsageError("the bounds are exchanged", where="hardtanh", expected="min_val <= max_val", got=got)
    if not input.dtype.is_float:
        min_val, max_val = int(min_val), int(max_val)
    return _either(input, partial(call, "clamp", low=min_val, high=max_val, gradient="inside"), inplace)


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """min(max(x + 3, 0), 6) / 6 (Howard et al. 2019)."""
    return _either(input, lambda x: relu6(x + 3.0) / 6.0, inplace)


def hardswish(input: Tensor, inplace: bool = False) -> Tensor:
    """x·hardsigmoid x (Howard et al. 2019)."""
    return _either(input, lambda x: x * hardsigmoid(x), inplace)


def selu(input: Tensor, inplace: bool = False) -> Tensor:
    """The scaled ELU of self-normalising networks (Klambauer et al. 2017)."""
    return _either(input, lambda x: call("elu", x, alpha=_SELU_ALPHA) * _SELU_SCALE, inplace)


def celu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """x above 0, alpha(e^(x/alpha) - 1) below (Barron 2017). Raises: UsageError for alpha ≤ 0."""
    if alpha <= 0:
        raise UsageError("alpha is not positive", where="celu", expected="> 0", got=alpha)
    return _either(input, lambda x: call("elu", x / alpha, alpha=1.0) * alpha, inplace)


def mish(input: Tensor, inplace: bool = False) -> Tensor:
    """x·tanh(ln(1 + eˣ)) (Misra 2019)."""
    return _either(input, lambda x: x * call("softplus", x).tanh(), inplace)


def softsign(input: Tensor) -> Tensor:
    """x / (1 + |x|)."""
    return input / (input.abs() + 1.0)


def tanhshrink(input: Tensor) -> Tensor:
    """x - tanh x."""
    return input - input.tanh()


def softshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    """x moved by `lambd` towards 0; 0 in between. Raises: UsageError for lambd below 0."""
    if lambd < 0:
        raise UsageError("lambd is negative", where="softshrink", expected=">= 0", got=lambd)
    return input - input.clamp(-lambd, lambd)


def hardshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    """x where |x| > lambd, else 0."""
    return where((input >= -lambd) & (input <= lambd), cast_like(0.0, input), input)


def threshold(input: Tensor, threshold: float, value: float, inplace: bool = False) -> Tensor:
    """x above the threshold, else `value`."""
    return _either(input, lambda x: where(x <= threshold, cast_like(value, x), x), inplace)


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """max(x, 0) + w·min(x, 0), with a slope for all or for each channel of axis 1 (He et al. 2015)."""
    channels = input.shape[1] if input.ndim > 1 else 1
    if weight.ndim > 1 or weight.numel() not in (1, channels):
        what, expected = "the weight does not fit the channels", f"[1] or [{channels}]"
        raise ShapeError(what, where="prelu", expected=expected, got=f"{weight.spec} for {input.spec}")
    slopes = weight.reshape(-1, *(1,) * (input.ndim - 2)) if weight.numel() > 1 and input.ndim > 1 else weight.reshape()
    return where(input > 0.0, input, input * slopes)


def rrelu(
    input: Tensor, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False, inplace: bool = False
) -> Tensor:
    """Leaky ReLU with a random slope for each entry in training, else with the mean slope (Xu et al. 2015).

    Raises: UsageError for lower above upper.
    """
    if lower > upper:
        raise UsageError("the bounds of the slope are exchanged", where="rrelu", expected="lower <= upper", got=lower)
    if not _training(training):
        return leaky_relu(input, (lower + upper) / 2, inplace)
    drawn = lambda x: where(x >= 0.0, x, x * (rand_like(x) * (upper - lower) + lower))  # noqa: E731
    return _either(input, drawn, inplace)


def _either(x: Tensor, function: Callable[[Tensor], Tensor], inplace: bool) -> Tensor:
    return overwritten(x, function) if inplace else function(x)


_training = training


def glu(input: Tensor, dim: int = -1) -> Tensor:
    """a·σ(b) for the halves a, b of an axis (Dauphin et al. 2017). Raises: ShapeError for an odd size."""
    if not input.ndim or input.shape[axis_of(dim, input.ndim)] % 2:
        raise ShapeError("the axis has no halves", where="glu", expected="an even size", got=input.spec)
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
    noise = gumbel(*x.shape, dtype=x.dtype if x.dtype.is_float else float32, device=device_of(x))
    soft = softmax((x + noise) / tau, dim)
    if not hard:
        return soft
    largest = (soft * 0.0).detach().scatter(dim, soft.argmax(dim, keepdim=True), value=1.0)
    return largest - soft.detach() + soft
