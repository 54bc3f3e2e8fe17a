"""The definitions of all ops; `ops.call(name, ...)` runs an op."""

from __future__ import annotations

from graphwright.ops import (
    activation,
    arrange,
    attention,
    block_attention,
    collective,
    conv,
    elementwise,
    experts,
    gate,
    identity,
    index,
    linear,
    loss,
    norm,
    optimize,
    pool,
    random,
    reduce,
    routed_attention,
    sampling,
    scan,
    selected_attention,
    shape,
    special,
)
from graphwright.ops.call import call, compute, writable_over
from graphwright.ops.explain import explain
from graphwright.ops.registry import OPS, Attrs, Cost, Op, Saves, Traits, UnknownOp, get, op, result_names, traits

__all__ = ["OPS", "Attrs", "Cost", "Op", "Saves", "Traits", "UnknownOp", "activation", "arrange", "attention"]
__all__ += [
    "block_attention",
    "call",
    "collective",
    "compute",
    "conv",
    "elementwise",
    "experts",
    "explain",
    "gate",
    "get",
    "identity",
    "index",
    "linear",
    "loss",
    "norm",
]
__all__ += [
    "op",
    "optimize",
    "pool",
    "random",
    "reduce",
    "result_names",
    "routed_attention",
    "sampling",
    "scan",
    "selected_attention",
    "shape",
    "special",
    "traits",
]
__all__ += ["writable_over"]
