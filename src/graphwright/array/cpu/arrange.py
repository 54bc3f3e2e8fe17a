"""Copies that permute, repeat or mirror entries, and sums over repeated entries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

import numpy as np
import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, host, kernel, out_kernel
from graphwright.array.spec import Spec


@kernel("flip")
def flip(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    axes = {axis % ins[0].dim() for axis in attrs["axes"]}
    index = tuple(slice(None, None, -1 if axis in axes else 1) for axis in range(ins[0].dim()))
    return partial(np.copyto, host(outs[0]), host(ins[0])[index])  # torch has no negative strides


@kernel("roll")
def roll(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Exchange two pieces along each axis."""
    x, out = ins[0], outs[0]
    if not x.numel():
        return []
    pieces = []
    for shift, axis in zip(attrs["shifts"], attrs["axes"], strict=True):
        size = x.shape[axis]
        at = shift % size
        pieces.append([(axis, 0, at, size - at)] + ([(axis, size - at, 0, at)] if at else []))
    calls: list[Call] = []
    for choice in product(*pieces):
        source, target = x, out
        for axis, start, to, size in choice:
            source, target = source.narrow(axis, start, size), target.narrow(axis, to, size)
        calls.append(partial(target.copy_, source))
    return calls


@kernel("tile")
def tile(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Copy once from a view in which repeats are axes of stride 0."""
    if not outs[0].numel():
        return []
    x, repeats = ins[0], attrs["repeats"]
    sizes = [1] * (len(repeats) - x.dim()) + list(x.shape)
    ones = [size for n in sizes for size in (1, n)]
    pairs = [size for pair in zip(repeats, sizes, strict=True) for size in pair]
    return [partial(outs[0].view(pairs).copy_, x.view(ones).expand(pairs))]


@kernel("repeat_interleave")
def repeat_interleave(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Copy once from a view in which the repeats are an axis of stride 0."""
    axis, repeats = attrs["axis"] % ins[0].dim(), attrs["repeats"]
    pairs = outs[0].unflatten(axis, (ins[0].shape[axis], repeats))
    return [partial(pairs.copy_, ins[0].unsqueeze(axis + 1).expand(pairs.shape))]


def _widths(attrs: Attrs, rank: int) -> list[tuple[int, int, int]]:
    """Return the padded axes with their widths before and after."""
    lead = rank - len(attrs["widths"])
    return [(lead + i, *pair) for i, pair in enumerate(attrs["widths"]) if any(pair)]


def _sources(size: int, before: int, after: int, mode: str) -> torch.Tensor:
    """Return the source index of each entry of a padded axis."""
    indices, last = torch.arange(-before, size + after), size - 1
    return indices.clamp(0, last) if mode == "replicate" else last - (last - indices.abs()).abs()


def _inner(t: torch.Tensor, widths: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    for axis, before, after in widths:
        t = t.narrow(axis, before, t.shape[axis] - before - after)
    return t


def _between(start: Spec, end: Spec, attrs: Attrs) -> list[Spec]:
    """Return the part inside the padding, axis by axis."""
    if attrs["mode"] == "constant":
        return []
    shape, made = list(start.sizes), []
    for axis, *_ in _widths(attrs, len(shape))[:-1]:
        shape[axis] = end.sizes[axis]
        made.append(Spec(tuple(shape), start.dtype))
    return made


@kernel("pad", lambda o, i, a: _between(i[0], o[0], a))
def pad(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Pad with a value around a copy, or index by index along each axis."""
    x, widths = ins[0], _widths(attrs, ins[0].dim())
    if attrs["mode"] == "constant":
        return [partial(outs[0].fill_, attrs["value"]), partial(_inner(outs[0], widths).copy_, x)]
    if not widths:
        return [partial(outs[0].copy_, x)]
    calls: list[Call] = []
    for (axis, before, after), target in zip(widths, [*work, outs[0]], strict=True):
        indices = _sources(x.shape[axis], before, after, attrs["mode"])
        calls.append(partial(torch.index_select, x, axis, indices, out=target))
        x = target
    return calls


@kernel("pad_backward", lambda o, i, a: _between(i[0], o[0], a), widen=True)
def pad_backward(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Return the inner part, or add every padded entry to its source along each axis."""
    g, widths = ins[0], _widths(attrs, ins[0].dim())
    if attrs["mode"] == "constant" or not widths:
        return [partial(outs[0].copy_, _inner(g, widths))]
    calls: list[Call] = []
    for (axis, before, after), target in zip(widths, [*work, outs[0]], strict=True):
        indices = _sources(target.shape[axis], before, after, attrs["mode"])
        calls += [target.zero_, partial(target.index_add_, axis, indices, g)]
        g = target
    return calls


out_kernel("tril", lambda i, a: partial(torch.tril, i[0], a["diagonal"]))
out_kernel("triu", lambda i, a: partial(torch.triu, i[0], a["diagonal"]))
out_kernel("iota", lambda i, a: partial(torch.arange, i[0].shape[a["axis"]]))
