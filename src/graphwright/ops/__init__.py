"""The rule tables of all ops; `ops.call(name, ...)` runs them."""

from __future__ import annotations

from graphwright.ops import (
    activation,
    arrange,
    attention,
    choose,
    conv,
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
    shape,
)
from graphwright.ops import attention as paged
from graphwright.ops import attention as update
from graphwright.ops import elementwise as arithmetic
from graphwright.ops import elementwise as compare
from graphwright.ops import elementwise as functions
from graphwright.ops import index as gather
from graphwright.ops import linear as grouped
from graphwright.ops import linear as solve
from graphwright.ops import norm as softmax
from graphwright.ops import reduce as sort
from graphwright.ops.call import call, compute, writable_over
from graphwright.ops.explain import explain
from graphwright.ops.registry import OPS, Attrs, Cost, Op, Saves, Traits, UnknownOp, get, op

__all__ = [
    "OPS",
    "Attrs",
    "Cost",
    "Op",
    "Saves",
    "Traits",
    "UnknownOp",
    "activation",
    "arithmetic",
    "arrange",
    "attention",
    "call",
    "choose",
    "compare",
    "compute",
    "conv",
    "explain",
    "functions",
    "gate",
    "gather",
    "get",
    "grouped",
    "identity",
    "index",
    "linear",
    "loss",
    "norm",
    "op",
    "optimize",
    "paged",
    "pool",
    "random",
    "reduce",
    "shape",
    "softmax",
    "solve",
    "sort",
    "update",
    "writable_over",
]
