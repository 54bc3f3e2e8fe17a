"""The kernel table: a name, a function that binds operands to calls, and the scratch it wants.

Invariant: what `bind` returns reads and writes the bound tensors only; running it allocates no tensor memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.dtype import DTYPES, DType
from graphwright.array.spec import Spec

Tensors = Sequence[torch.Tensor]
Bind = Callable[[Tensors, Tensors, Attrs, Tensors], "Call | list[Call]"]
Work = Callable[[Sequence[Spec], Sequence[Spec], Attrs], list[Spec]]


class Kernel(NamedTuple):
    """A row: `bind(outs, ins, attrs, work)` and `work(out specs, in specs, attrs) -> specs`."""

    bind: Bind
    work: Work | None


KERNELS: dict[str, Kernel] = {}
TORCH_DTYPE: dict[DType, torch.dtype] = {d: getattr(torch, name) for name, d in DTYPES.items()}


def torch_dtype(dtype: DType) -> torch.dtype:
    """Torch's name for a DType."""
    return TORCH_DTYPE[dtype]


def kernel(name: str, work: Work | None = None) -> Callable[[Bind], Bind]:
    """Enter a function into the table."""

    def enter(bind: Bind) -> Bind:
        if name in KERNELS:
            raise ValueError(f"kernel {name!r} is defined twice")
        KERNELS[name] = Kernel(bind, work)
        return bind

    return enter


def pointwise(**calls: Callable[..., object]) -> None:
    """Enter kernels that are one ATen call each: all operands, then `out=`."""
    for name, call in calls.items():

        def bind(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors, call: Callable = call) -> Call:
            return partial(call, *ins, out=outs[0])

        kernel(name)(bind)
