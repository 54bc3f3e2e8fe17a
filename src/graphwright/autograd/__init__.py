"""Tensors, the tape behind them, backward, and the protocol by which tensor code is traced."""

from __future__ import annotations

from graphwright.autograd.apply import as_tensor
from graphwright.autograd.changes import changes
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
    "changes",
    "enable_grad",
    "full",
    "grad",
    "grad_enabled",
    "no_grad",
    "ones",
    "scope",
    "scoped",
    "tensor",
    "unbroadcast",
    "update",
    "zeros",
]
