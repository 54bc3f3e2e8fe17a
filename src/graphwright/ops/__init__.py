"""The rule tables of all ops; `ops.call(name, ...)` runs them."""

from __future__ import annotations

from graphwright.ops import (
    activation,
    arithmetic,
    attention,
    compare,
    conv,
    functions,
    identity,
    index,
    linear,
    loss,
    norm,
    pool,
    reduce,
    shape,
    softmax,
    sort,
    update,
)
from graphwright.ops.call import call, compute, writable_over
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
    "attention",
    "call",
    "compare",
    "compute",
    "conv",
    "functions",
    "get",
    "identity",
    "index",
    "linear",
    "loss",
    "norm",
    "op",
    "pool",
    "reduce",
    "shape",
    "softmax",
    "sort",
    "update",
    "writable_over",
]
