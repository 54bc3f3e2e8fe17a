"""Modules written with tensors: parameters by dotted name, the same code eager, traced and compiled."""

from __future__ import annotations

from graphwright.autograd import Parameter
from graphwright.nn import functional, init
from graphwright.nn.as_module import as_module
from graphwright.nn.layers import Embedding, Linear, ReLU, RMSNorm, Sequential, SiLU, Tanh
from graphwright.nn.module import Module

__all__ = [
    "Embedding",
    "Linear",
    "Module",
    "Parameter",
    "RMSNorm",
    "ReLU",
    "Sequential",
    "SiLU",
    "Tanh",
    "as_module",
    "functional",
    "init",
]
