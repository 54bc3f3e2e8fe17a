"""Functions on parameters and their gradients, under torch's names; `rnn` has those on sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graphwright.autograd import Tensor, Variable, cat, no_grad
from graphwright.autograd.clipping import clip_grad_norm_, clip_grad_value_, get_total_norm
from graphwright.errors import ShapeError
from graphwright.nn.utils import parametrizations, rnn
from graphwright.nn.utils.parametrizations import (
    remove_spectral_norm,
    remove_weight_norm,
    spectral_norm,
    weight_norm,
)
from graphwright.nn.utils.stateless import functional_call

__all__ = [
    "clip_grad_norm_", "clip_grad_value_", "functional_call", "get_total_norm",
    "parameters_to_vector", "parametrizations",
    "remove_spectral_norm", "remove_weight_norm", "rnn", "spectral_norm", "vector_to_parameters", "weight_norm",
]  # fmt: skip


def parameters_to_vector(parameters: Iterable[Tensor]) -> Tensor:
    """Return all entries as one vector, parameter after parameter, each in row-major order; gradients pass."""
    return cat([p.reshape(-1) for p in parameters])


def vector_to_parameters(vec: Tensor, parameters: Iterable[Variable]) -> None:
    """Set parameters from the vector that `parameters_to_vector` makes of them; values are copied, no gradient passes.

    Raises: ShapeError if `vec` is no vector of as many entries as the parameters have; nothing has changed then.
    """
    given: Sequence[Variable] = list(parameters)
    total = sum(p.numel() for p in given)
    if vec.shape != (total,):
        raise ShapeError("the vector does not fit the parameters", expected=(total,), got=vec.shape)
    with no_grad():
        for p, part in zip(given, vec.split([p.numel() for p in given]), strict=True):
            p.assign(part.reshape(p.shape).to(p.dtype).to(p.device))
