"""Rows by index, slices put into place, pieces joined."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import numpy as np
import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, carry, host, kernel
from graphwright.array.dtype import bool_, int64
from graphwright.array.spec import Spec, broadcast_shapes


@kernel("embedding")
def embedding(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Rows of a table [V, D] for ids of any shape."""
    table, ids = ins
    return partial(torch.index_select, table, 0, ids.view(-1), out=outs[0].view(ids.numel(), table.shape[1]))


@kernel("embedding_backward")
def embedding_backward(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Σ of the gradient rows per id, in index order, so that repeats add up the same way every time."""
    grad, ids = ins
    rows = grad.view(ids.numel(), grad.shape[-1])
    return [outs[0].zero_, partial(outs[0].index_add_, 0, ids.view(-1), rows)]


@kernel("pad_slice")
def pad_slice(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Zeros with the input at `start::step` of one axis: the transpose of a slice."""
    axis, start, step = attrs["axis"] % ins[0].dim(), attrs["start"], attrs["step"]
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


class Places:
    """Index arrays for consecutive axes of an array [lead, n·m.., rest], as one flat index into its middle axis.

    Checking, counting from the end and multiplying by the stride are one look-up in a table of 2n entries per axis.
    """

    def __init__(self, shape: Sequence[int], ids: Tensors, axis: int, work: Tensors) -> None:
        start = axis % len(shape)
        sizes = shape[start : start + len(ids)]
        self.block = (prod(shape[:start]), prod(sizes), prod(shape[start + len(ids) :]))
        self.flat = work[0].view(-1)
        self.calls: list[Call] = []
        for k, (index, n) in enumerate(zip(ids, sizes, strict=True)):
            stride = prod(sizes[k + 1 :])
            table = torch.arange(n).repeat(2) * stride  # the place -n..n-1, moved up by n
            moved, found = work[1].view(work[0].shape), self.flat if k == 0 else work[2].view(-1)
            self.calls += [
                partial(torch.add, index.expand(moved.shape), torch.tensor(n), out=moved),
                partial(torch.index_select, table, 0, moved.view(-1), out=found),
            ]
            if k:
                self.calls.append(partial(self.flat.add_, found))

    @staticmethod
    def scratch(ids: Sequence[Spec]) -> list[Spec]:
        """Flat places, places of one axis before and after the look-up."""
        shape = broadcast_shapes(*(i.shape for i in ids))
        return [Spec(shape, int64)] * (2 if len(ids) == 1 else 3)

    def array(self, t: torch.Tensor) -> torch.Tensor:
        """The array that is read or written, as [lead, n·m.., rest]; as fewer axes where those have one entry."""
        lead, middle, rest = self.block
        return t.view(middle) if lead == rest == 1 else t.view(lead, middle, rest)

    def entries(self, t: torch.Tensor) -> torch.Tensor:
        """One entry per place."""
        lead, _, rest = self.block
        return t.view(-1) if lead == rest == 1 else t.view(lead, len(self.flat), rest)

    @property
    def axis(self) -> int:
        """The middle axis."""
        return 0 if self.block[0] == self.block[2] == 1 else 1


@kernel("index", lambda o, i, a: Places.scratch(i[1:]))
def index(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Entries at flat places."""
    places = Places(ins[0].shape, ins[1:], attrs["axis"], work)
    x, out = places.array(ins[0]), places.entries(outs[0])
    return [*places.calls, partial(torch.index_select, x, places.axis, places.flat, out=out)]


@kernel("index_sum", lambda o, i, a: Places.scratch(i[1:]), widen=True)
def index_sum(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Zeros with entries added at flat places, in order."""
    places = Places(outs[0].shape, ins[1:], attrs["axis"], work)
    add = partial(places.array(outs[0]).index_add_, places.axis, places.flat, places.entries(ins[0]))
    return [*places.calls, outs[0].zero_, add]


def _update_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    """Places, and the values spread over them if they are fewer."""
    x, values, *ids = ins
    work = Places.scratch(ids)
    start = attrs["axis"] % len(x.shape)
    full = (*x.shape[:start], *work[0].shape, *x.shape[start + len(ids) :])
    return work if values.shape == full else [*work, Spec(full, values.dtype)]


def _update(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> tuple[Places, torch.Tensor, list[Call]]:
    """Places, values for each of them, and the calls that come first; an index out of range raises before a write."""
    x, values, *ids = ins
    places = Places(x.shape, ids, attrs["axis"], work)
    calls = list(places.calls)
    for full in work[2 if len(ids) == 1 else 3 :]:
        calls.append(partial(full.copy_, values))
        values = full
    return places, places.entries(values), [*calls, *carry(outs, [x])]


@kernel("index_put", _update_work)
def index_put(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Values written at flat places in order: ATen's index_copy may write repeats in any."""
    places, values, calls = _update(outs, ins, attrs, work)
    return [*calls, _write(outs[0], places, host(values))]


@kernel("index_add", _update_work, widen=True)
def index_add(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Values added at flat places, in order."""
    places, values, calls = _update(outs, ins, attrs, work)
    return [*calls, partial(places.array(outs[0]).index_add_, places.axis, places.flat, values)]


@kernel("index_fill", lambda o, i, a: Places.scratch(i[1:]))
def index_fill(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """One value at flat places."""
    places = Places(ins[0].shape, ins[1:], attrs["axis"], work)
    value = host(torch.tensor(attrs["value"], dtype=outs[0].dtype))
    return [*places.calls, *carry(outs, ins[:1]), _write(outs[0], places, value)]


def _write(out: torch.Tensor, places: Places, values: np.ndarray) -> Call:
    target = host(places.array(out))
    return partial(target.__setitem__, (slice(None),) * places.axis + (places.flat.numpy(),), values)


@kernel("one_hot")
def one_hot(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Ones at the ids."""
    out, ids = outs[0], ins[0].unsqueeze(-1)
    return [out.zero_, partial(out.scatter_, -1, ids, 1)]


@kernel("bincount")
def bincount(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """One added at each id."""
    ids = ins[0].view(-1)
    return [outs[0].zero_, partial(outs[0].index_add_, 0, ids, torch.ones(1, dtype=torch.int64).expand(len(ids)))]


def _ranks(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    n, size = ins[0].size, attrs["size"]
    return [Spec((n,), bool_), *[Spec((n,), int64)] * 2, Spec((size + 1,), int64), Spec((size,), bool_)]


@kernel("nonzero", _ranks)
def nonzero(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Each entry that is not 0 writes its flat place at its rank; others, and those past `size`, at one spare end."""
    (x,), (out,), (hit, rank, flat, found, absent) = ins, outs, work
    size, places = attrs["size"], found[:-1] if attrs["size"] else found[:0]
    calls: list[Call] = [
        partial(torch.ne, x, torch.zeros((), dtype=x.dtype), out=hit.view(x.shape)),
        partial(rank.copy_, hit),
        partial(torch.cumsum, rank, 0, out=rank),
        partial(rank.sub_, torch.tensor(1)),
        partial(torch.clamp, rank, max=size, out=rank),
        partial(torch.where, hit, rank, torch.tensor(size), out=rank),
        partial(torch.arange, len(flat), out=flat),
        partial(found.fill_, -1),
        partial(found.scatter_, 0, rank, flat),
        partial(torch.lt, places, torch.tensor(0), out=absent),
    ]
    for axis, n in enumerate(x.shape):
        column, stride = out[:, axis], torch.tensor(max(prod(x.shape[axis + 1 :]), 1))
        calls += [
            partial(torch.div, places, stride, rounding_mode="floor", out=column),
            partial(torch.remainder, column, torch.tensor(max(n, 1)), out=column),
            partial(column.masked_fill_, absent, attrs["fill"]),
        ]
    return calls


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
