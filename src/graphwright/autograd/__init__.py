"""Tensors, their tape, backward, and the protocol by which tensor code is traced."""

from __future__ import annotations

from graphwright.array import NDArray, changes
from graphwright.autograd import func, functional, linalg, names
from graphwright.autograd.apply import as_tensor
from graphwright.autograd.counting import bincount, one_hot
from graphwright.autograd.create import (
    arange,
    asarray,
    empty,
    empty_like,
    eye,
    from_numpy,
    full,
    full_like,
    get_default_dtype,
    linspace,
    logspace,
    ones,
    ones_like,
    scalar_tensor,
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
from graphwright.autograd.func import vmap
from graphwright.autograd.function import Context, Function
from graphwright.autograd.functions import cat, matmul, maximum, minimum, outer, pad, stack, tril, triu, where
from graphwright.autograd.indexing import (
    gather,
    index_add,
    index_put,
    index_select,
    nonzero,
    repeat_interleave,
    scatter,
    scatter_add,
)
from graphwright.autograd.modes import (
    autocast_dtype,
    autocast_to,
    enable_grad,
    inference_mode,
    is_grad_enabled,
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
    normal,
    rand,
    rand_like,
    randint,
    randint_like,
    randn,
    randn_like,
    randperm,
    rng,
    stochastic_round,
)
from graphwright.autograd.recorder import Recorder, Symbol, active_recorder, scope, scoped
from graphwright.autograd.reductions import argsort, norm, sort, std, topk, var
from graphwright.autograd.seeds import get_rng_state, initial_seed, seed, set_rng_state
from graphwright.autograd.support import support
from graphwright.autograd.tape import Hook, SavedMemory, memory
from graphwright.autograd.tensor import Tensor
from graphwright.autograd.variable import HostVariable, Parameter, Variable, update

names.add_methods(Tensor)
NDArray.tensors = Tensor

__all__ = ["Context", "Function", "Generator", "GradShapeRequired", "GraphFreed", "Hook", "HostVariable"]
__all__ += ["LeafModified", "ModifiedSinceForward", "NoTape", "NotDifferentiable", "Parameter", "Recorder"]
__all__ += ["SavedMemory", "Symbol", "Tensor", "TraceError", "TraceMutation", "Variable", "ViewModified"]
__all__ += ["active_recorder", "arange", "argsort", "as_tensor", "asarray", "autocast_dtype", "autocast_to"]
__all__ += ["backward", "bernoulli", "bincount", "cat", "changes", "dropout", "einsum", "empty", "empty_like"]
__all__ += ["enable_grad", "eye", "fork_rng", "from_numpy", "full", "full_like", "gather", "get_default_dtype"]
__all__ += ["func", "functional", "get_rng_state", "initial_seed", "seed", "set_rng_state", "vmap"]
__all__ += ["grad", "gumbel", "index_add", "index_put", "index_select", "inference_mode", "is_grad_enabled", "lerp"]
__all__ += ["linalg", "linspace", "logspace", "manual_seed", "matmul", "maximum", "memory", "minimum", "mode"]
__all__ += ["multinomial"]
__all__ += ["no_grad", "nonzero", "norm", "normal", "one_hot", "ones", "ones_like", "outer", "pad", "pull_back"]
__all__ += ["rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "repeat_interleave"]
__all__ += ["rng", "scalar_tensor", "scatter", "scatter_add", "scope", "scoped", "set_grad_enabled", "sort"]
__all__ += ["stack", "std", "stochastic_round", "support", "tensor", "topk", "training", "tril", "triu"]
__all__ += ["unbroadcast", "update", "var", "where", "zeros", "zeros_like"]
