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

from graphwright import verbs
from graphwright.errors import GraphwrightError

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from graphwright import amp, data, evolve, models, nn, optim, program, structure, surgery
    from graphwright.array import Device, NDArray, bfloat16, bool_, float16, float32, float64, int64
    from graphwright.autograd import (
        Function,
        Generator,
        Parameter,
        Tensor,
        arange,
        bernoulli,
        bincount,
        cat,
        dropout,
        einsum,
        empty,
        empty_like,
        enable_grad,
        eye,
        fork_rng,
        full,
        full_like,
        gather,
        grad,
        gumbel,
        index_add,
        index_put,
        index_select,
        linspace,
        manual_seed,
        matmul,
        mode,
        multinomial,
        no_grad,
        nonzero,
        one_hot,
        ones,
        ones_like,
        pad,
        rand,
        rand_like,
        randint,
        randint_like,
        randn,
        randn_like,
        repeat_interleave,
        rng,
        scatter,
        scatter_add,
        set_grad_enabled,
        stack,
        tensor,
        topk,
        tril,
        triu,
        where,
        zeros,
        zeros_like,
    )
    from graphwright.graph import Graph
    from graphwright.models import Model, open
    from graphwright.ops import op
    from graphwright.optim import compile_step, load_state, save_state
    from graphwright.plan import Plan, compile
    from graphwright.program import Builder, Program, State, load, replay, tape, trace

_HOME = {
    "Builder": "program",
    "Device": "array",
    "Function": "autograd",
    "Generator": "autograd",
    "Graph": "graph",
    "Model": "models",
    "NDArray": "array",
    "Parameter": "autograd",
    "Plan": "plan",
    "Program": "program",
    "State": "program",
    "Tensor": "autograd",
    "arange": "autograd",
    "bernoulli": "autograd",
    "bfloat16": "array",
    "bincount": "autograd",
    "bool_": "array",
    "cat": "autograd",
    "compile": "plan",
    "compile_step": "optim",
    "dropout": "autograd",
    "empty": "autograd",
    "empty_like": "autograd",
    "einsum": "autograd",
    "enable_grad": "autograd",
    "eye": "autograd",
    "float16": "array",
    "float32": "array",
    "float64": "array",
    "fork_rng": "autograd",
    "full": "autograd",
    "full_like": "autograd",
    "gather": "autograd",
    "grad": "autograd",
    "gumbel": "autograd",
    "index_add": "autograd",
    "index_put": "autograd",
    "index_select": "autograd",
    "int64": "array",
    "linspace": "autograd",
    "load": "program",
    "manual_seed": "autograd",
    "load_state": "optim",
    "matmul": "autograd",
    "mode": "autograd",
    "multinomial": "autograd",
    "no_grad": "autograd",
    "nonzero": "autograd",
    "one_hot": "autograd",
    "ones": "autograd",
    "ones_like": "autograd",
    "op": "ops",
    "open": "models",
    "pad": "autograd",
    "rand": "autograd",
    "rand_like": "autograd",
    "randint": "autograd",
    "randint_like": "autograd",
    "randn": "autograd",
    "randn_like": "autograd",
    "replay": "program",
    "repeat_interleave": "autograd",
    "rng": "autograd",
    "scatter": "autograd",
    "scatter_add": "autograd",
    "save_state": "optim",
    "set_grad_enabled": "autograd",
    "stack": "autograd",
    "tape": "program",
    "tensor": "autograd",
    "topk": "autograd",
    "trace": "program",
    "tril": "autograd",
    "triu": "autograd",
    "where": "autograd",
    "zeros": "autograd",
    "zeros_like": "autograd",
}
"""Public name -> the folder it lives in."""
_MODULES = (
    "amp",
    "array",
    "autograd",
    "data",
    "evolve",
    "graph",
    "models",
    "nn",
    "ops",
    "optim",
    "plan",
    "program",
    "structure",
    "surgery",
    "testing",
)

__all__ = [
    "Builder",
    "Device",
    "Function",
    "Generator",
    "Graph",
    "GraphwrightError",
    "Model",
    "NDArray",
    "Parameter",
    "Plan",
    "Program",
    "State",
    "Tensor",
    "__version__",
    "amp",
    "arange",
    "bernoulli",
    "bfloat16",
    "bincount",
    "bool_",
    "cat",
    "compile",
    "compile_step",
    "data",
    "dropout",
    "einsum",
    "empty",
    "empty_like",
    "enable_grad",
    "evolve",
    "eye",
    "float16",
    "float32",
    "float64",
    "fork_rng",
    "full",
    "full_like",
    "gather",
    "grad",
    "gumbel",
    "index_add",
    "index_put",
    "index_select",
    "int64",
    "linspace",
    "load",
    "load_state",
    "manual_seed",
    "matmul",
    "mode",
    "models",
    "multinomial",
    "nn",
    "no_grad",
    "nonzero",
    "one_hot",
    "ones",
    "ones_like",
    "op",
    "open",
    "optim",
    "pad",
    "program",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "repeat_interleave",
    "replay",
    "rng",
    "save_state",
    "scatter",
    "scatter_add",
    "set_grad_enabled",
    "stack",
    "structure",
    "surgery",
    "tape",
    "tensor",
    "topk",
    "trace",
    "tril",
    "triu",
    "where",
    "zeros",
    "zeros_like",
]


def __getattr__(name: str) -> Any:
    """Submodules and public names load at their first use, so that looking at a model imports no torch."""
    if name in _MODULES:
        return import_module(f"graphwright.{name}")
    if name in _HOME:
        value = getattr(import_module(f"graphwright.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'graphwright' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})


verbs.register("compile_program", "graphwright.plan:compile_program")
verbs.register("to_onnx", "graphwright.models.onnx:save_onnx")
verbs.register("orthogonalize", "graphwright.surgery:orthogonalize")
verbs.register("compress", "graphwright.surgery:compress")
verbs.register("constraint", "graphwright.surgery.constraints.constraint:from_json")
verbs.register("diagnose", "graphwright.surgery:diagnose_model")

verbs.register("prune", "graphwright.surgery:prune")
logging.getLogger(__name__).addHandler(logging.NullHandler())  # what is shown is the application's choice
