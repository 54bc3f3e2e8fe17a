"""Kinds of dropout under torch's names; `gw.mode` overrides their argument `training`."""

from __future__ import annotations

from graphwright.autograd import Tensor, bernoulli, full, training
from graphwright.autograd import dropout as drop
from graphwright.autograd.names import overwritten
from graphwright.errors import ShapeError, UsageError

__all__ = ["alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"]
_SATURATED = -1.7580993408473766
"""The value to which SELU saturates: -scale·alpha (Klambauer et al. 2017)."""
trains = training


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """In training x / (1 - p) with probability 1 - p, else 0; otherwise x. Raises: UsageError for p outside [0, 1]."""
    check_probability(p)
    if not p or not trains(training):
        return input
    return overwritten(input, drop, p) if inplace else drop(input, p)


def _channels(rank: int):  # the type is inferred: Callable would lose the keywords
    def dropout_channels(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        check_probability(p)
        if input.ndim not in (rank + 1, rank + 2):
            expected = f"[N, C, ...] or [C, ...] with {rank} spatial axes"
            raise ShapeError("the input has a wrong number of axes", expected=expected, got=input.spec)
        if not p or not trains(training):
            return input
        kept = (*input.shape[: input.ndim - rank], *(1,) * rank)
        apply = lambda x: x * drop(full(kept, 1.0, x.dtype), p)  # noqa: E731
        return overwritten(input, apply) if inplace else apply(input)

    dropout_channels.__name__ = dropout_channels.__qualname__ = f"dropout{rank}d"
    dropout_channels.__doc__ = f"Dropout of whole channels of an input with {rank} spatial axes (Tompson et al. 2015)."
    return dropout_channels


dropout1d, dropout2d, dropout3d = _channels(1), _channels(2), _channels(3)


def alpha_dropout(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    """Dropout that keeps mean 0 and variance 1, for SELU (Klambauer et al. 2017)."""
    return _alpha(input, p, training, inplace, input.shape)


def feature_alpha_dropout(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    """`alpha_dropout` of whole channels of [N, C, ...]."""
    return _alpha(input, p, training, inplace, (*input.shape[:2], *(1,) * (input.ndim - 2)))


def _alpha(input: Tensor, p: float, training: bool, inplace: bool, shape: tuple[int, ...]) -> Tensor:
    check_probability(p)
    if not p or not trains(training):
        return input
    if p == 1:
        return overwritten(input, lambda x: x * 0.0) if inplace else input * 0.0
    scale = ((_SATURATED * _SATURATED * p + 1.0) * (1.0 - p)) ** -0.5

    def apply(x: Tensor) -> Tensor:
        kept = bernoulli(full(shape, 1.0 - p, x.dtype))
        return (x * kept + (1.0 - kept) * _SATURATED) * scale - scale * p * _SATURATED

    return overwritten(input, apply) if inplace else apply(input)


def check_probability(p: float) -> None:
    """Raise UsageError for p outside [0, 1]."""
    if not 0 <= p <= 1:
        raise UsageError("p is not a probability", where="dropout", expected="0 to 1", got=p)
