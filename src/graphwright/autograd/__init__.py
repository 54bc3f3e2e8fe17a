"""Tensors, the tape behind them, backward, and the protocol by which tensor code is traced."""

from __future__ import annotations

from graphwright.autograd.apply import as_tensor
from graphwright.autograd.create import arange, full, ones, tensor, zeros
from graphwright.autograd.engine import (
    GradShapeRequired,
    GraphFreed,
    ModifiedSinceForward,
    NoTape,
    NotDifferentiable,
    backward,
    grad,
    unbroadcast,
)
from graphwright.autograd.functions import lerp, matmul, maximum, minimum, norm, outer, stack, std, var, where
from graphwright.autograd.modes import autocast_dtype, autocast_to, enable_grad, grad_enabled, no_grad
from graphwright.autograd.recorder import Recorder, Symbol, TraceError, scope, scoped
from graphwright.autograd.recorder import active as active_recorder
from graphwright.autograd.tensor import Tensor
from graphwright.autograd.variable import Parameter, Variable, update

__all__ = [
    "GradShapeRequired",
    "GraphFreed",
    "ModifiedSinceForward",
    "NoTape",
    "NotDifferentiable",
    "Parameter",
    "Recorder",
    "Symbol",
    "Tensor",
    "TraceError",
    "Variable",
    "active_recorder",
    "arange",
    "as_tensor",
    "autocast_dtype",
    "autocast_to",
    "backward",
    "enable_grad",
    "full",
    "grad",
    "grad_enabled",
    "lerp",
    "matmul",
    "maximum",
    "minimum",
    "no_grad",
    "norm",
    "ones",
    "outer",
    "scope",
    "scoped",
    "stack",
    "std",
    "tensor",
    "unbroadcast",
    "update",
    "var",
    "where",
    "zeros",
]
