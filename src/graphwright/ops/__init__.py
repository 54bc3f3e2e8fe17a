"""The rule tables of all ops; `ops.call(name, ...)` runs them."""

from __future__ import annotations

from graphwright.ops import (
    attention,
    conv,
    elementwise,
    index,
    linear,
    loss,
    norm,
    optimize,
    pool,
    reduce,
    shape,
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
    "attention",
    "call",
    "compute",
    "conv",
    "elementwise",
    "get",
    "index",
    "linear",
    "loss",
    "norm",
    "op",
    "optimize",
    "pool",
    "reduce",
    "shape",
    "update",
    "writable_over",
]
