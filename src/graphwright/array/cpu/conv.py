"""Convolution as unfold, matrix product, fold, in planned scratch: ATen's own overloads allocate despite `out=`.

One group is one product over all samples where rows of places are short (`gathered.py`), else a product per sample,
over columns made here. Samples are taken in chunks whose columns stay in cache. 16-bit operands are widened once, and
the result rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from math import prod

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.gathered import (
    Gathered,
    forward,
    samples_at_once,
    turned,
    turned_weights,
    weight_gradient,
    windows,
)
from graphwright.array.cpu.kernel import Tensors, kernel
from graphwright.array.spec import Spec
from graphwright.array.window import Window


class Columns:
    """The windows of [N, C, sizes...] as columns [n, C · entries, places], a chunk of n samples at a time."""

    def __init__(self, window: Window, samples: int, channels: int, sizes: tuple[int, ...], itemsize: int) -> None:
        self.window, self.samples, self.channels, self.sizes = window, samples, channels, sizes
        self.places = window.places(sizes)
        self.chunk = samples_at_once(samples, channels * window.entries * prod(self.places) * itemsize)

    @staticmethod
    def of(window: Window, x: Spec | torch.Tensor) -> Columns:
        """For an operand or a result [N, C, sizes...]."""
        samples, channels, *sizes = x.sizes if isinstance(x, Spec) else x.shape
        return Columns(window, samples, channels, tuple(sizes), x.dtype.itemsize)

    @property
    def shape(self) -> tuple[int, ...]:
        """Columns of a chunk."""
        return (self.chunk, self.channels * self.window.entries, prod(self.places))

    @property
    def padded(self) -> tuple[int, ...]:
        """A chunk of samples with their padding."""
        return (self.chunk, self.channels, *self.window.padded(self.sizes))

    @property
    def pads(self) -> bool:
        """True if samples are copied into a padded block."""
        return any(self.window.padding)

    def chunks(self) -> Iterator[slice]:
        """Slices of the samples."""
        return (slice(at, min(at + self.chunk, self.samples)) for at in range(0, self.samples, self.chunk))

    def inner(self, block: torch.Tensor, count: int) -> torch.Tensor:
        """The samples inside a padded block."""
        pads = zip(self.window.padding, self.sizes, strict=True)
        return block[(slice(count), slice(None), *(slice(p, p + n) for p, n in pads))]

    def windows(self, samples: torch.Tensor) -> torch.Tensor:
        """[n, C, kernel..., places...] over padded samples, as a view."""
        return windows(samples, self.window, self.places)

    def unfold(self, x: torch.Tensor, columns: torch.Tensor, block: Tensors) -> list[Call]:
        """Calls that write the columns of a chunk of samples; a padded block is zero around its samples."""
        calls: list[Call] = []
        for padded in block:
            inner = self.inner(padded, len(x))
            calls.append(partial(inner.copy_, x))
            x = padded[: len(x)]
        views = self.windows(x)
        return [*calls, partial(columns.view(views.shape).copy_, views)]

    def of_samples(self, x: torch.Tensor, work: Tensors) -> tuple[list[Call], torch.Tensor]:
        """The columns [n, C · entries, places] of a chunk, and the calls that write them into the scratch."""
        if not work:
            return [], x.flatten(2)
        columns = work[0][: len(x)]
        return self.unfold(x, columns, work[1:]), columns

    def fold(self, columns: torch.Tensor, out: torch.Tensor, block: Tensors) -> list[Call]:
        """Calls that write the sum of a chunk's columns at their places; one addition per entry of the kernel."""
        target = block[0][: len(out)] if block else out
        views = self.windows(target)
        parts = columns.view(views.shape)
        calls: list[Call] = [target.zero_]
        for entry in product(*map(range, self.window.kernel)):
            at = (slice(None), slice(None), *entry)
            calls.append(partial(views[at].add_, parts[at]))
        return [*calls, *(partial(out.copy_, self.inner(b, len(out))) for b in block)]

    def scratch(self, like: Spec) -> list[Spec]:
        """Columns of a chunk, and its padded samples; nothing where samples are their own columns."""
        if self.window.plain:
            return []
        return [Spec(self.shape, like.dtype)] + ([Spec(self.padded, like.dtype)] if self.pads else [])


def _grouped(t: torch.Tensor, groups: int) -> torch.Tensor:
    """[n, C, places...] as [n, groups, C / groups, places]."""
    return t.flatten(2).unflatten(1, (groups, t.shape[1] // groups))


def _products(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> list[Call]:
    """out[n, group] = a[group] @ b[n, group]: one batched product over samples, or over groups."""
    if len(a) == 1:
        return [partial(torch.bmm, a.expand(len(b), *a.shape[1:]), b[:, 0], out=out[:, 0])]
    return [partial(torch.bmm, a, b[n], out=out[n]) for n in range(len(b))]


def _columns(weight: Sequence[int], x: Spec | torch.Tensor, attrs: Attrs) -> Columns:
    return Columns.of(Window.of(weight, attrs), x)


def _add_bias(out: torch.Tensor, bias: Tensors) -> list[Call]:
    return [partial(out.add_, b.view(-1, *(1,) * (out.dim() - 2))) for b in bias]


SHORT = 16
"""Places in a row below which one product for all samples is faster: copies run along rows (measured)."""


def _gathered(
    kernel: Sequence[int], x: Spec | torch.Tensor, filters: int, attrs: Attrs, *, turns: bool = False
) -> Gathered | None:
    """For one group of windows over x that have short rows of places, else None.

    With `turns` for the transpose of the convolution by them, unless it would gather far more than that scatters.
    """
    window, shape = Window.of(kernel, attrs), x.sizes if isinstance(x, Spec) else x.shape
    taken = turned(window) if turns else window
    if attrs["groups"] > 1 or window.plain or taken is None or (turns and shape[1] > 2 * filters):
        return None
    gathered = Gathered(taken, shape, filters, x.dtype.itemsize)
    return gathered if gathered.places[-1] < SHORT else None


def _conv_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    (x, w), kernel = ins[:2], ins[1].sizes[2:]
    gathered = _gathered(kernel, x, w.sizes[0], attrs)
    return _columns(kernel, x, attrs).scratch(x) if gathered is None else gathered.scratch(x.dtype)


@kernel("conv", _conv_work, widen=True)
def conv(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Weights times the columns of x."""
    (x, w), out, groups = ins[:2], outs[0], attrs["groups"]
    gathered = _gathered(w.shape[2:], x, len(w), attrs)
    if gathered is not None:
        return forward(gathered, x, w, ins[2:], out, work)
    columns = _columns(w.shape[2:], x, attrs)
    weights = w.flatten(1).unflatten(0, (groups, w.shape[0] // groups))
    calls: list[Call] = [block.zero_ for block in work[1:]]
    for part in columns.chunks():
        made, cols = columns.of_samples(x[part], work)
        calls += [*made, *_products(weights, _grouped(cols, groups), _grouped(out[part], groups))]
    return [*calls, *_add_bias(out, ins[2:])]


def _transpose_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    (x, w), kernel = ins[:2], ins[1].sizes[2:]
    gathered = _gathered(kernel, x, w.sizes[1], attrs, turns=True)
    return _columns(kernel, outs[0], attrs).scratch(x) if gathered is None else [*gathered.scratch(x.dtype), w]


@kernel("conv_transpose", _transpose_work, widen=True)
def conv_transpose(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Transposed weights times x are columns of the result; with stride 1 a convolution by turned weights."""
    (x, w), out, groups = ins[:2], outs[0], attrs["groups"]
    gathered = _gathered(w.shape[2:], x, w.shape[1], attrs, turns=True)
    if gathered is not None:
        turning, weights = turned_weights(w, work[-1])
        return [*turning, *forward(gathered, x, weights, ins[2:], out, work)]
    columns = _columns(w.shape[2:], out, attrs)
    weights = w.flatten(1).unflatten(0, (groups, w.shape[0] // groups)).transpose(1, 2)
    calls: list[Call] = []
    for part in columns.chunks():
        cols = out[part].flatten(2) if not work else work[0][: len(out[part])]
        calls += _products(weights, _grouped(x[part], groups), _grouped(cols, groups))
        if work:
            calls += columns.fold(cols, out[part], work[1:])
    return [*calls, *_add_bias(out, ins[2:])]


def _weight_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    x, g = ins
    gathered = _gathered(attrs["kernel"], x, g.sizes[1], attrs)
    return _columns(attrs["kernel"], x, attrs).scratch(x) if gathered is None else gathered.scratch(x.dtype)


@kernel("conv_weight", _weight_work, widen=True)
def conv_weight(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Σ over samples of the gradient times the transposed columns of x."""
    (x, g), groups = ins, attrs["groups"]
    gathered = _gathered(attrs["kernel"], x, g.shape[1], attrs)
    if gathered is not None:
        return weight_gradient(gathered, x, g, outs[0], work)
    columns = _columns(attrs["kernel"], x, attrs)
    total = outs[0].flatten(1).unflatten(0, (groups, g.shape[1] // groups))
    calls: list[Call] = [total.zero_, *(block.zero_ for block in work[1:])]
    for part in columns.chunks():
        made, cols = columns.of_samples(x[part], work)
        upstream, cols = _grouped(g[part], groups), _grouped(cols, groups).transpose(2, 3)
        calls += [*made, *(partial(total.baddbmm_, upstream[n], cols[n]) for n in range(len(cols)))]
    return calls


@kernel("unfold", lambda o, i, a: _columns(a["kernel"], i[0], a).scratch(i[0])[1:])
def unfold(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Windows as columns."""
    columns = _columns(attrs["kernel"], ins[0], attrs)
    calls: list[Call] = [block.zero_ for block in work]
    for part in columns.chunks():
        calls += columns.unfold(ins[0][part], outs[0][part], work)
    return calls


@kernel("fold", lambda o, i, a: _columns(a["kernel"], o[0], a).scratch(o[0])[1:], widen=True)
def fold(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Columns summed at the places of their windows."""
    columns = _columns(attrs["kernel"], outs[0], attrs)
    calls: list[Call] = []
    for part in columns.chunks():
        calls += columns.fold(ins[0][part], outs[0][part], work)
    return calls
