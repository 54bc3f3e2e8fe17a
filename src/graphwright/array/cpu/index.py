"""Kernels that gather and scatter by index arrays, or pad, permute, repeat or mirror entries, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from math import prod

import numpy as np
import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, copy_to_outputs, host, kernel, number, out_kernel
from graphwright.array.dtype import bool_, int64
from graphwright.array.spec import Spec, broadcast_shapes


@kernel("embedding")
def embedding(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    table, ids = ins
    return partial(torch.index_select, table, 0, ids.view(-1), out=outs[0].view(ids.numel(), table.shape[1]))


@kernel("embedding_backward")
def embedding_backward(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Sum the gradient rows of each id in order of occurrence, so that results are reproducible."""
    grad, ids = ins
    rows = grad.view(ids.numel(), grad.shape[-1])
    return [outs[0].zero_, partial(outs[0].index_add_, 0, ids.view(-1), rows)]


@kernel("pad_slice")
def pad_slice(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Write the input to `start::step` of one axis and zeros elsewhere: the gradient of a slice."""
    axis, start, step = attrs["axis"] % ins[0].dim(), attrs["start"], attrs["step"]
    stop = start + step * ins[0].shape[axis]
    window = outs[0][(slice(None),) * axis + (slice(start, stop, step),)]
    return [outs[0].zero_, partial(window.copy_, ins[0])]


@kernel("concat")
def concat(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    axis = attrs["axis"]
    parts = outs[0].split_with_sizes([part.shape[axis] for part in ins], axis)
    return [partial(out.copy_, part) for out, part in zip(parts, ins, strict=True)]


kernel("size")(lambda o, i, a, w: partial(o[0].fill_, i[0].shape[a["axis"]]))


class FlatIndices:
    """Index arrays for adjacent axes of sizes n, m.., combined to flat indices into axis 1 of [lead, n·m.., rest].

    Per axis, one look-up in a table of 2n entries checks the bounds, wraps negative indices and applies the stride.
    """

    def __init__(self, shape: Sequence[int], ids: Tensors, axis: int, work: Tensors) -> None:
        start = axis % len(shape)
        sizes = shape[start : start + len(ids)]
        self.block = (prod(shape[:start]), prod(sizes), prod(shape[start + len(ids) :]))
        self.flat = work[0].view(-1)
        self.calls: list[Call] = []
        for k, (index, n) in enumerate(zip(ids, sizes, strict=True)):
            stride = prod(sizes[k + 1 :])
            table = torch.arange(n).repeat(2) * stride  # indices -n..n-1, shifted by n
            moved, found = work[1].view(work[0].shape), self.flat if k == 0 else work[2].view(-1)
            self.calls += [
                partial(torch.add, index.expand(moved.shape), number(n, index), out=moved),
                partial(torch.index_select, table, 0, moved.view(-1), out=found),
            ]
            if k:
                self.calls.append(partial(self.flat.add_, found))

    @staticmethod
    def scratch(ids: Sequence[Spec]) -> list[Spec]:
        """Return the specs of the scratch: flat indices, and the indices of one axis before and after the look-up."""
        shape = broadcast_shapes(*(i.shape for i in ids))
        return [Spec(shape, int64)] * (2 if len(ids) == 1 else 3)

    def array(self, t: torch.Tensor) -> torch.Tensor:
        """View the indexed array as [lead, n·m.., rest], or as [n·m..] if lead and rest are 1."""
        lead, middle, rest = self.block
        return t.view(middle) if lead == rest == 1 else t.view(lead, middle, rest)

    def entries(self, t: torch.Tensor) -> torch.Tensor:
        """View the values at the flat indices as [lead, indices, rest], or as [indices] if lead and rest are 1."""
        lead, _, rest = self.block
        return t.view(-1) if lead == rest == 1 else t.view(lead, len(self.flat), rest)

    @property
    def axis(self) -> int:
        """Index of the middle axis in the views that `array` and `entries` return."""
        return 0 if self.block[0] == self.block[2] == 1 else 1


@kernel("index", lambda o, i, a: FlatIndices.scratch(i[1:]))
def index(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    at = FlatIndices(ins[0].shape, ins[1:], attrs["axis"], work)
    return [*at.calls, partial(torch.index_select, at.array(ins[0]), at.axis, at.flat, out=at.entries(outs[0]))]


@kernel("index_sum", lambda o, i, a: FlatIndices.scratch(i[1:]), widen=True)
def index_sum(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    at = FlatIndices(outs[0].shape, ins[1:], attrs["axis"], work)
    return [*at.calls, outs[0].zero_, partial(at.array(outs[0]).index_add_, at.axis, at.flat, at.entries(ins[0]))]


def _update_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    """Return specs of the scratch: indices, and a copy of the values if they must be broadcast."""
    x, values, *ids = ins
    work, start = FlatIndices.scratch(ids), attrs["axis"] % len(x.shape)
    full = (*x.shape[:start], *work[0].shape, *x.shape[start + len(ids) :])
    return work if values.shape == full else [*work, Spec(full, values.dtype)]


def _update(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> tuple[FlatIndices, torch.Tensor, list[Call]]:
    """Return (indices, one value per index, calls to run before the write, which raise if an index is out of range)."""
    x, values, *ids = ins
    at, full = FlatIndices(x.shape, ids, attrs["axis"], work), work[2 if len(ids) == 1 else 3 :]
    spread: list[Call] = [partial(wide.copy_, values) for wide in full]
    return at, at.entries((*full, values)[0]), [*at.calls, *spread, *copy_to_outputs(outs, [x])]


@kernel("index_put", _update_work, host=True)
def index_put(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Write values at flat indices in order; with ATen's index_copy, the order of duplicates would be undefined."""
    at, values, calls = _update(outs, ins, attrs, work)
    return [*calls, _write(outs[0], at, host(values))]


@kernel("index_add", _update_work, widen=True)
def index_add(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    at, values, calls = _update(outs, ins, attrs, work)
    return [*calls, partial(at.array(outs[0]).index_add_, at.axis, at.flat, values)]


@kernel("index_fill", lambda o, i, a: FlatIndices.scratch(i[1:]), host=True)
def index_fill(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    at = FlatIndices(ins[0].shape, ins[1:], attrs["axis"], work)
    value = host(torch.tensor(attrs["value"], dtype=outs[0].dtype))
    return [*at.calls, *copy_to_outputs(outs, ins[:1]), _write(outs[0], at, value)]


def _write(out: torch.Tensor, at: FlatIndices, values: np.ndarray) -> Call:
    return partial(host(at.array(out)).__setitem__, (slice(None),) * at.axis + (at.flat.numpy(),), values)


kernel("one_hot")(lambda o, i, a, w: [o[0].zero_, partial(o[0].scatter_, -1, i[0].unsqueeze(-1), 1)])


@kernel("bincount")
def bincount(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    ids = ins[0].view(-1)
    return [outs[0].zero_, partial(outs[0].index_add_, 0, ids, torch.ones(1, dtype=torch.int64).expand(len(ids)))]


def _ranks(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    n, size = ins[0].size, attrs["size"]
    return [Spec((n,), bool_), *[Spec((n,), int64)] * 2, Spec((size + 1,), int64), Spec((size,), bool_)]


@kernel("nonzero", _ranks)
def nonzero(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Write the coordinates of the k-th nonzero entry to row k; a spare scratch element takes surplus entries."""
    (x,), (out,), (hit, rank, flat, found, absent), size = ins, outs, work, attrs["size"]
    flat_indices, truths, zero = found[:-1] if size else found[:0], hit.view(x.shape), number(0, x)
    none, one, end = (number(n, rank) for n in (0, 1, size))
    sizes = [(number(max(prod(x.shape[a + 1 :]), 1), rank), number(max(n, 1), rank)) for a, n in enumerate(x.shape)]
    columns = [(out[:, axis], *numbers) for axis, numbers in enumerate(sizes)]

    def run() -> None:
        torch.ne(x, zero, out=truths)
        torch.cumsum(rank.copy_(hit), 0, out=rank).sub_(one)
        torch.clamp(rank, max=size, out=rank)
        torch.where(hit, rank, end, out=rank)
        found.fill_(-1).scatter_(0, rank, torch.arange(len(flat), out=flat))
        torch.lt(flat_indices, none, out=absent)
        for column, stride, n in columns:
            torch.div(flat_indices, stride, rounding_mode="floor", out=column)
            torch.remainder(column, n, out=column).masked_fill_(absent, attrs["fill"])

    return run


out_kernel("gather", lambda i, a: partial(torch.gather, i[0], a["axis"], i[1]))


def _before(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Return the calls before a scatter: check the indices, then copy the array unless the op works in place."""
    return [partial(torch.gather, ins[0], attrs["axis"], ins[1], out=work[0]), *copy_to_outputs(outs, ins[:1])]


# entries are written and added in order
kernel("scatter_sum", widen=True)(lambda o, i, a, w: [o[0].zero_, partial(o[0].scatter_add_, a["axis"], i[1], i[0])])
kernel("scatter", lambda o, i, a: [i[2]])(
    lambda o, i, a, w: [*_before(o, i, a, w), partial(o[0].scatter_, a["axis"], *i[1:])]
)
kernel("scatter_add", lambda o, i, a: [i[2]], widen=True)(
    lambda o, i, a, w: [*_before(o, i, a, w), partial(o[0].scatter_add_, a["axis"], *i[1:])]
)


@kernel("flip", host=True)
def flip(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    axes = {axis % max(ins[0].dim(), 1) for axis in attrs["axes"]}
    index = tuple(slice(None, None, -1 if axis in axes else 1) for axis in range(ins[0].dim()))
    return partial(np.copyto, host(outs[0]), host(ins[0])[index])  # torch has no negative strides


@kernel("roll")
def roll(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Roll x by copies of blocks: each rolled axis is split into two parts, which are swapped."""
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
    """Tile by one copy from a view in which the repeats are axes of stride 0."""
    if not outs[0].numel():
        return []
    x, repeats = ins[0], attrs["repeats"]
    sizes = [1] * (len(repeats) - x.dim()) + list(x.shape)
    ones = [size for n in sizes for size in (1, n)]
    pairs = [size for pair in zip(repeats, sizes, strict=True) for size in pair]
    return [partial(outs[0].view(pairs).copy_, x.view(ones).expand(pairs))]


@kernel("repeat_interleave")
def repeat_interleave(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Repeat entries by one copy from a view in which the repeats are an axis of stride 0."""
    axis, repeats = attrs["axis"] % ins[0].dim(), attrs["repeats"]
    pairs = outs[0].unflatten(axis, (ins[0].shape[axis], repeats))
    return [partial(pairs.copy_, ins[0].unsqueeze(axis + 1).expand(pairs.shape))]


def _widths(attrs: Attrs, rank: int) -> list[tuple[int, int, int]]:
    """Return (axis, width before, width after) of each axis with padding."""
    lead = rank - len(attrs["widths"])
    return [(lead + i, *pair) for i, pair in enumerate(attrs["widths"]) if any(pair)]


def _sources(size: int, before: int, after: int, mode: str) -> torch.Tensor:
    """Return for each entry of a padded axis the index of the input entry that is copied to it."""
    indices, last = torch.arange(-before, size + after), size - 1
    return indices.clamp(0, last) if mode == "replicate" else last - (last - indices.abs()).abs()


def _inner(t: torch.Tensor, widths: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    for axis, before, after in widths:
        t = t.narrow(axis, before, t.shape[axis] - before - after)
    return t


def _between(start: Spec, end: Spec, attrs: Attrs) -> list[Spec]:
    """Return the specs of the intermediate results of padding axis by axis; empty in mode `constant`."""
    if attrs["mode"] == "constant":
        return []
    shape, made = list(start.sizes), []
    for axis, *_ in _widths(attrs, len(shape))[:-1]:
        shape[axis] = end.sizes[axis]
        made.append(Spec(tuple(shape), start.dtype))
    return made


@kernel("pad", lambda o, i, a: _between(i[0], o[0], a))
def pad(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Pad x: in mode `constant`, fill the result and copy x into its middle; else gather entries axis by axis."""
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
    """Copy the middle of the gradient; except in mode `constant`, add the gradients of the padding to its sources."""
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
