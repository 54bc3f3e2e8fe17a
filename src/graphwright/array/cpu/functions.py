"""Functions of one variable: one ATen `out=` call each."""

from __future__ import annotations

import torch

from graphwright.array.cpu.kernel import pointwise

pointwise(
    exp=torch.exp,
    expm1=torch.expm1,
    log=torch.log,
    log1p=torch.log1p,
    sqrt=torch.sqrt,
    rsqrt=torch.rsqrt,
    reciprocal=torch.reciprocal,
    sin=torch.sin,
    cos=torch.cos,
    tanh=torch.tanh,
    erf=torch.erf,
)
