"""Convolution as unfold, matrix product, fold, in planned scratch: ATen's own overloads allocate despite `out=`.

Samples are taken in chunks whose columns stay in cache. 16-bit operands are widened once, and the result rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from math import prod

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, kernel
from graphwright.array.spec import Spec
from graphwright.array.window import Window

COLUMN_BYTES = 1 << 20
"""Columns of a chunk; about half of a core's second-level cache."""


class Columns:
    """The windows of [N, C, sizes...] as columns [n, C · entries, places], a chunk of n samples at a time."""

    def __init__(self, window: Window, samples: int, channels: int, sizes: tuple[int, ...], itemsize: int) -> None:
        self.window, self.samples, self.channels, self.sizes = window, samples, channels, sizes
        self.places = window.places(sizes)
        per_sample = max(channels * window.entries * prod(self.places) * itemsize, 1)
        self.chunk = max(1, min(samples, COLUMN_BYTES // per_sample))

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
        strides, window = samples.stride(), self.window
        spatial = strides[2:]
        return samples.as_strided(
            (*samples.shape[:2], *window.kernel, *self.places),
            (
                *strides[:2],
                *(s * d for s, d in zip(spatial, window.dilation, strict=True)),
                *(s * step for s, step in zip(spatial, window.stride, strict=True)),
            ),
            samples.storage_offset(),
        )

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


@kernel("conv", lambda o, i, a: _columns(i[1].sizes[2:], i[0], a).scratch(i[0]), widen=True)
def conv(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Weights times the columns of x."""
    (x, w), out, groups = ins[:2], outs[0], attrs["groups"]
    columns = _columns(w.shape[2:], x, attrs)
    weights = w.flatten(1).unflatten(0, (groups, w.shape[0] // groups))
    calls: list[Call] = [block.zero_ for block in work[1:]]
    for part in columns.chunks():
        made, cols = columns.of_samples(x[part], work)
        calls += [*made, *_products(weights, _grouped(cols, groups), _grouped(out[part], groups))]
    return [*calls, *_add_bias(out, ins[2:])]


@kernel("conv_transpose", lambda o, i, a: _columns(i[1].sizes[2:], o[0], a).scratch(i[0]), widen=True)
def conv_transpose(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Transposed weights times x are columns of the result."""
    (x, w), out, groups = ins[:2], outs[0], attrs["groups"]
    columns = _columns(w.shape[2:], out, attrs)
    weights = w.flatten(1).unflatten(0, (groups, w.shape[0] // groups)).transpose(1, 2)
    calls: list[Call] = []
    for part in columns.chunks():
        cols = out[part].flatten(2) if not work else work[0][: len(out[part])]
        calls += _products(weights, _grouped(x[part], groups), _grouped(cols, groups))
        if work:
            calls += columns.fold(cols, out[part], work[1:])
    return [*calls, *_add_bias(out, ins[2:])]


@kernel("conv_weight", lambda o, i, a: _columns(a["kernel"], i[0], a).scratch(i[0]), widen=True)
def conv_weight(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Σ over samples of the gradient times the transposed columns of x."""
    (x, g), groups = ins, attrs["groups"]
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
