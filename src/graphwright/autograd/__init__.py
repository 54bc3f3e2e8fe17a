"""Tensors, their tape, backward, and the protocol by which tensor code is traced."""

from __future__ import annotations

from graphwright.array import changes
from graphwright.autograd.apply import as_tensor
from graphwright.autograd.create import (
    arange,
    empty,
    empty_like,
    eye,
    full,
    full_like,
    linspace,
    ones,
    ones_like,
    tensor,
    zeros,
    zeros_like,
)
from graphwright.autograd.einsum import einsum
from graphwright.autograd.engine import backward, grad, pull_back, unbroadcast
from graphwright.autograd.errors import (
    GradShapeRequired,
    GraphFreed,
    LeafModified,
    ModifiedSinceForward,
    NoTape,
    NotDifferentiable,
    TraceError,
    TraceMutation,
    ViewModified,
)
from graphwright.autograd.function import Context, Function
from graphwright.autograd.functions import cat, matmul, maximum, minimum, outer, pad, stack, tril, triu, where
from graphwright.autograd.indexing import (
    bincount,
    gather,
    index_add,
    index_put,
    index_select,
    nonzero,
    one_hot,
    repeat_interleave,
    scatter,
    scatter_add,
)
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
from graphwright.autograd.pointwise import lerp
from graphwright.autograd.random import (
    Generator,
    bernoulli,
    dropout,
    fork_rng,
    gumbel,
    manual_seed,
    multinomial,
    rand,
    rand_like,
    randint,
    randint_like,
    randn,
    randn_like,
    rng,
    stochastic_round,
)
from graphwright.autograd.recorder import Recorder, Symbol, active_recorder, scope, scoped
from graphwright.autograd.reductions import argsort, norm, sort, std, topk, var
from graphwright.autograd.support import support
from graphwright.autograd.tape import Hook, SavedMemory, memory
from graphwright.autograd.tensor import Tensor
from graphwright.autograd.variable import HostVariable, Parameter, Variable, update

__all__ = ["Context", "Function", "Generator", "GradShapeRequired", "GraphFreed", "Hook", "HostVariable"]
__all__ += ["LeafModified", "ModifiedSinceForward", "NoTape", "NotDifferentiable", "Parameter", "Recorder"]
__all__ += ["SavedMemory", "Symbol", "Tensor", "TraceError", "TraceMutation", "Variable", "ViewModified"]
__all__ += ["active_recorder", "arange", "argsort", "as_tensor", "autocast_dtype", "autocast_to", "backward"]
__all__ += ["bernoulli", "bincount", "cat", "changes", "dropout", "einsum", "empty", "empty_like", "enable_grad"]
__all__ += ["eye", "fork_rng", "full", "full_like", "gather", "grad", "grad_enabled", "gumbel", "index_add"]
__all__ += ["index_put", "index_select", "lerp", "linspace", "manual_seed", "matmul", "maximum", "memory", "minimum"]
__all__ += ["mode", "multinomial", "no_grad", "nonzero", "norm", "one_hot", "ones", "ones_like", "outer", "pad"]
__all__ += ["pull_back", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "repeat_interleave"]
__all__ += ["rng", "scatter", "scatter_add", "scope", "scoped", "set_grad_enabled", "sort", "stack", "std"]
__all__ += ["stochastic_round", "support", "tensor", "topk", "training", "tril", "triu", "unbroadcast", "update"]
__all__ += ["var", "where", "zeros", "zeros_like"]
