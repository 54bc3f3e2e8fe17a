"""Tensors, the tape behind them, backward, and the protocol by which tensor code is traced."""

from __future__ import annotations

from graphwright.autograd.apply import as_tensor
from graphwright.autograd.changes import changes
from graphwright.autograd.create import arange, full, ones, tensor, zeros
from graphwright.autograd.einsum import einsum
from graphwright.autograd.engine import backward, grad, unbroadcast
from graphwright.autograd.errors import (
    GradShapeRequired,
    GraphFreed,
    LeafModified,
    ModifiedSinceForward,
    NoTape,
    NotDifferentiable,
    ViewModified,
)
from graphwright.autograd.function import Context, Function
from graphwright.autograd.functions import (
    argsort,
    bincount,
    cat,
    gather,
    index_add,
    index_put,
    index_select,
    lerp,
    matmul,
    maximum,
    minimum,
    nonzero,
    norm,
    one_hot,
    outer,
    pad,
    scatter,
    scatter_add,
    sort,
    stack,
    std,
    topk,
    var,
    where,
)
from graphwright.autograd.hooks import Hook
from graphwright.autograd.memory import Kept, memory
from graphwright.autograd.modes import (
    autocast_dtype,
    autocast_to,
    enable_grad,
    grad_enabled,
    mode,
    no_grad,
    set_grad_enabled,
    training,
)
from graphwright.autograd.recorder import Recorder, Symbol, TraceError, TraceMutation, scope, scoped
from graphwright.autograd.recorder import active as active_recorder
from graphwright.autograd.support import support
from graphwright.autograd.tensor import Tensor
from graphwright.autograd.variable import Parameter, Variable, update

__all__ = [
    "Context",
    "Function",
    "GradShapeRequired",
    "GraphFreed",
    "Hook",
    "Kept",
    "LeafModified",
    "ModifiedSinceForward",
    "NoTape",
    "NotDifferentiable",
    "Parameter",
    "Recorder",
    "Symbol",
    "Tensor",
    "TraceError",
    "TraceMutation",
    "Variable",
    "ViewModified",
    "active_recorder",
    "arange",
    "argsort",
    "as_tensor",
    "autocast_dtype",
    "autocast_to",
    "backward",
    "bincount",
    "cat",
    "changes",
    "einsum",
    "enable_grad",
    "full",
    "gather",
    "grad",
    "grad_enabled",
    "index_add",
    "index_put",
    "index_select",
    "lerp",
    "matmul",
    "maximum",
    "memory",
    "minimum",
    "mode",
    "no_grad",
    "nonzero",
    "norm",
    "one_hot",
    "ones",
    "outer",
    "pad",
    "scatter",
    "scatter_add",
    "scope",
    "scoped",
    "set_grad_enabled",
    "sort",
    "stack",
    "std",
    "support",
    "tensor",
    "topk",
    "training",
    "unbroadcast",
    "update",
    "var",
    "where",
    "zeros",
]
