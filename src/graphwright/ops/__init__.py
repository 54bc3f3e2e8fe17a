"""The rule tables of all ops; `ops.call(name, ...)` runs them."""

from __future__ import annotations

from graphwright.ops import (
    arrange,
    attention,
    conv,
    elementwise,
    gather,
    index,
    linear,
    loss,
    norm,
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
    "arrange",
    "attention",
    "call",
    "compute",
    "conv",
    "elementwise",
    "gather",
    "get",
    "index",
    "linear",
    "loss",
    "norm",
    "op",
    "pool",
    "reduce",
    "shape",
    "update",
    "writable_over",
]
