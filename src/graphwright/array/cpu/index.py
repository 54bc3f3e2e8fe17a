"""Rows by index, slices put into place, pieces joined."""

from __future__ import annotations

from functools import partial

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, kernel


@kernel("embedding")
def embedding(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Rows of a table [V, D] for ids of any shape."""
    table, ids = ins
    return partial(torch.index_select, table, 0, ids.view(-1), out=outs[0].view(-1, table.shape[1]))


@kernel("embedding_backward")
def embedding_backward(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Σ of the gradient rows per id, in index order, so that repeats add up the same way every time."""
    grad, ids = ins
    rows = grad.view(-1, grad.shape[-1])
    return [outs[0].zero_, partial(outs[0].index_add_, 0, ids.view(-1), rows)]


@kernel("pad_slice")
def pad_slice(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Zeros with the input at `start::step` of one axis: the transpose of a slice."""
    axis, start, step = attrs["axis"], attrs["start"], attrs["step"]
    stop = start + step * ins[0].shape[axis]
    window = outs[0][(slice(None),) * axis + (slice(start, stop, step),)]
    return [outs[0].zero_, partial(window.copy_, ins[0])]


@kernel("concat")
def concat(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Inputs behind one another along an axis."""
    calls: list[Call] = []
    at, axis = 0, attrs["axis"]
    for part in ins:
        calls.append(partial(outs[0].narrow(axis, at, part.shape[axis]).copy_, part))
        at += part.shape[axis]
    return calls


@kernel("size")
def size(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """The size of an axis, known when the call is bound."""
    return partial(outs[0].fill_, ins[0].shape[attrs["axis"]])


@kernel("gather")
def gather(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Entries by place along an axis."""
    return partial(torch.gather, ins[0], attrs["axis"], ins[1], out=outs[0])


@kernel("scatter_sum", widen=True)
def scatter_sum(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Zeros with each entry added at its place, in the order of the entries."""
    return [outs[0].zero_, partial(outs[0].scatter_add_, attrs["axis"], ins[1], ins[0])]
