"""Graphwright: open a neural network as a graph, edit it while it runs, export it with proof.

>>> import graphwright as gw
>>> model = gw.open("bundled")
>>> with model.program.edit("drop a branch") as e:
...     e.cut("layers.1.mlp.down -> layers.1.out")
>>> model.program.undo()
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from graphwright.errors import GraphwrightError

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from graphwright import amp, data, models, nn, optim, program
    from graphwright.array import Device, NDArray, bfloat16, bool_, float16, float32, float64, int64
    from graphwright.autograd import (
        Function,
        Parameter,
        Tensor,
        einsum,
        enable_grad,
        grad,
        matmul,
        mode,
        no_grad,
        set_grad_enabled,
        stack,
        tensor,
        topk,
        where,
    )
    from graphwright.graph import Graph
    from graphwright.models import Model, open
    from graphwright.ops import op
    from graphwright.optim import load_state, save_state
    from graphwright.plan import Plan, compile
    from graphwright.program import Builder, Program, load, replay, trace

_HOME = {
    "Builder": "program",
    "Device": "array",
    "Function": "autograd",
    "Graph": "graph",
    "Model": "models",
    "NDArray": "array",
    "Parameter": "autograd",
    "Plan": "plan",
    "Program": "program",
    "Tensor": "autograd",
    "bfloat16": "array",
    "bool_": "array",
    "compile": "plan",
    "einsum": "autograd",
    "enable_grad": "autograd",
    "float16": "array",
    "float32": "array",
    "float64": "array",
    "grad": "autograd",
    "int64": "array",
    "load": "program",
    "load_state": "optim",
    "matmul": "autograd",
    "mode": "autograd",
    "no_grad": "autograd",
    "op": "ops",
    "open": "models",
    "replay": "program",
    "save_state": "optim",
    "set_grad_enabled": "autograd",
    "stack": "autograd",
    "tape": "program",
    "tensor": "autograd",
    "topk": "autograd",
    "trace": "program",
    "where": "autograd",
}
"""Public name -> the folder it lives in."""
_MODULES = ("amp", "array", "autograd", "data", "graph", "models", "nn", "ops", "optim", "plan", "program", "testing")

__all__ = [
    "Builder",
    "Device",
    "Function",
    "Graph",
    "GraphwrightError",
    "Model",
    "NDArray",
    "Parameter",
    "Plan",
    "Program",
    "Tensor",
    "__version__",
    "amp",
    "bfloat16",
    "bool_",
    "compile",
    "data",
    "einsum",
    "enable_grad",
    "float16",
    "float32",
    "float64",
    "grad",
    "int64",
    "load",
    "load_state",
    "matmul",
    "mode",
    "models",
    "nn",
    "no_grad",
    "op",
    "open",
    "optim",
    "program",
    "replay",
    "save_state",
    "set_grad_enabled",
    "stack",
    "tape",
    "tensor",
    "topk",
    "trace",
    "where",
]


def __getattr__(name: str) -> Any:
    """Submodules and public names load at their first use, so that looking at a model imports no torch."""
    if name in _MODULES:
        return import_module(f"graphwright.{name}")
    if name in _HOME:
        if _HOME[name] == "program":  # a Program is planned by the layer above it: load it too
            import_module("graphwright.plan")
        value = getattr(import_module(f"graphwright.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'graphwright' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})


logging.getLogger(__name__).addHandler(logging.NullHandler())  # what is shown is the application's choice
