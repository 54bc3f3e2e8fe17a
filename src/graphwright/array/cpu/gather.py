"""Entries by place along one axis, an index for each entry."""

from __future__ import annotations

from functools import partial

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, carry, kernel


@kernel("gather")
def gather(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Entries by place along an axis."""
    return partial(torch.gather, ins[0], attrs["axis"], ins[1], out=outs[0])


@kernel("scatter_sum", widen=True)
def scatter_sum(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Zeros with each entry added at its place, in the order of the entries."""
    return [outs[0].zero_, partial(outs[0].scatter_add_, attrs["axis"], ins[1], ins[0])]


def _checked(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Calls before a write: an index out of range raises here, then the array is carried over."""
    return [partial(torch.gather, ins[0], attrs["axis"], ins[1], out=work[0]), *carry(outs, ins[:1])]


@kernel("scatter", lambda o, i, a: [i[2]])
def scatter(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Values written at their places, in order."""
    return [*_checked(outs, ins, attrs, work), partial(outs[0].scatter_, attrs["axis"], *ins[1:])]


@kernel("scatter_add", lambda o, i, a: [i[2]], widen=True)
def scatter_add(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Values added at their places, in order."""
    return [*_checked(outs, ins, attrs, work), partial(outs[0].scatter_add_, attrs["axis"], *ins[1:])]
