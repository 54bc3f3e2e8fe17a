"""Modules written with tensors: parameters by dotted name, the same code eager, traced and compiled."""

from __future__ import annotations

from graphwright.autograd import Parameter
from graphwright.nn import functional, init
from graphwright.nn.activation import GELU, Activation, ReLU, Sigmoid, SiLU, Tanh
from graphwright.nn.container import Flatten, ModuleDict, ModuleList, Residual, Sequential
from graphwright.nn.linear import Embedding, Linear
from graphwright.nn.module import Buffer, Module
from graphwright.nn.norm import RMSNorm

__all__ = [
    "GELU",
    "Activation",
    "Buffer",
    "Embedding",
    "Flatten",
    "Linear",
    "Module",
    "ModuleDict",
    "ModuleList",
    "Parameter",
    "RMSNorm",
    "ReLU",
    "Residual",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Tanh",
    "functional",
    "init",
]
