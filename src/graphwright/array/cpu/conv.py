"""Convolution as unfold, matrix product and fold in planned scratch: ATen's own overloads allocate despite `out=`.

A convolution with one group and short rows of positions is one product over all samples; others are one product per
sample over columns made here. Samples are processed in chunks whose columns stay in cache. 16-bit operands are widened
once, and the result is rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import NamedTuple

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, kernel
from graphwright.array.dtype import DType
from graphwright.array.layout import Window
from graphwright.array.spec import Spec

COLUMN_BYTES = 1 << 20
"""Bytes of the windows of a chunk; about half of a core's second-level cache."""


def samples_at_once(samples: int, nbytes: int) -> int:
    """Return the number of samples per chunk if the windows of one take `nbytes`."""
    return max(1, min(samples, COLUMN_BYTES // max(nbytes, 1)))


class View(NamedTuple):
    """Return scratch as a matrix and as [n, channels, ...]."""

    matrix: torch.Tensor
    samples: torch.Tensor


class Gathered:
    """Windows over x [N, C, sizes...] with `filters` channels of results or gradients at their positions."""

    def __init__(self, window: Window, x: Sequence[int], filters: int, itemsize: int) -> None:
        self.samples, self.channels, *sizes = x
        self.window, self.filters, self.sizes = window, filters, tuple(sizes)
        self.positions = window.counts(self.sizes)
        self.rows = self.channels * window.entries
        self.last = window.kernel[-1] * self.channels >= self.positions[-1]  # longer runs with channels innermost
        self.blocks = self.last or any(window.padding)
        self.chunk = samples_at_once(self.samples, self.rows * prod(self.positions) * itemsize)

    def scratch(self, dtype: DType) -> list[Spec]:
        """Return scratch: matrix, product, weights, and a block of padded samples if they are copied into one."""
        columns, padded = self.chunk * prod(self.positions), self.window.padded(self.sizes)
        sizes = [self.rows * columns, self.filters * columns, self.filters * self.rows]
        sizes += [self.chunk * self.channels * prod(padded)] if self.blocks else []
        return [Spec((n,), dtype) for n in sizes]

    def chunks(self) -> Iterator[slice]:
        """Return the slices of the samples."""
        return (slice(at, min(at + self.chunk, self.samples)) for at in range(0, self.samples, self.chunk))

    def _view(self, flat: torch.Tensor, n: int, channels: int, kernel: tuple[int, ...]) -> View:
        """View as [channels · entries, n · positions] and as [n, channels, kernel..., positions...]."""
        rank, rows, columns = len(self.positions), channels * prod(kernel), n * prod(self.positions)
        flat, k = flat[: rows * columns], len(kernel)
        if self.last:
            shaped = flat.view(n, *self.positions, *kernel, channels)
            order = (0, 1 + rank + k, *range(1 + rank, 1 + rank + k), *range(1, 1 + rank))
            return View(flat.view(columns, rows).t(), shaped.permute(order))
        shaped = flat.view(channels, *kernel, n, *self.positions)
        order = (1 + k, 0, *range(1, 1 + k), *range(2 + k, 2 + k + rank))
        return View(flat.view(rows, columns), shaped.permute(order))

    def product(self, work: Tensors, n: int) -> View:
        """Return scratch for [filters, n · positions], and as [n, filters, positions...]."""
        return self._view(work[1], n, self.filters, ())

    def weights(self, work: Tensors) -> View:
        """Return scratch for [filters, C · entries], and as [filters, C, kernel...]."""
        kernel, matrix = self.window.kernel, work[2].view(self.filters, self.rows)
        if not self.last:
            return View(matrix, matrix.view(self.filters, self.channels, *kernel))
        return View(matrix, matrix.view(self.filters, *kernel, self.channels).movedim(-1, 1))

    def start(self, work: Tensors) -> list[Call]:
        """Zero the padding around the samples of a block."""
        return [work[3].zero_] if any(self.window.padding) else []

    def gather(self, x: torch.Tensor, work: Tensors) -> tuple[list[Call], torch.Tensor]:
        """Return the matrix of a chunk of samples, and the calls that fill it."""
        calls: list[Call] = []
        n, window = len(x), self.window
        if self.blocks:
            padded = window.padded(self.sizes)
            block = work[3][: n * self.channels * prod(padded)]
            if self.last:
                whole = block.view(n, *padded, self.channels).movedim(-1, 1)
            else:
                whole = block.view(n, self.channels, *padded)
            inner = zip(window.padding, self.sizes, strict=True)
            calls.append(partial(whole[(..., *(slice(p, p + size) for p, size in inner))].copy_, x))
            x = whole
        view = self._view(work[0], n, self.channels, window.kernel)
        return [*calls, partial(view.samples.copy_, windows(x, window, self.positions))], view.matrix


def windows(samples: torch.Tensor, window: Window, positions: tuple[int, ...]) -> torch.Tensor:
    """View padded samples [n, C, sizes...] of any strides as [n, C, kernel..., positions...]."""
    strides = samples.stride()
    spatial = strides[2:]
    return samples.as_strided(
        (*samples.shape[:2], *window.kernel, *positions),
        (
            *strides[:2],
            *(s * d for s, d in zip(spatial, window.dilation, strict=True)),
            *(s * step for s, step in zip(spatial, window.stride, strict=True)),
        ),
        samples.storage_offset(),
    )


def forward(g: Gathered, x: torch.Tensor, w: torch.Tensor, bias: Tensors, out: torch.Tensor, work: Tensors) -> list:
    """Multiply weights [filters, C, kernel...] by the windows of x (, + bias [filters])."""
    weights = g.weights(work)
    calls: list[Call] = [partial(weights.samples.copy_, w), *g.start(work)]
    for part in g.chunks():
        gathering, matrix = g.gather(x[part], work)
        made = g.product(work, len(x[part]))
        calls += [*gathering, partial(torch.mm, weights.matrix, matrix, out=made.matrix)]
        if bias:
            wide = bias[0].view(-1, *(1,) * (out.dim() - 2))
            calls.append(partial(torch.add, made.samples, wide, out=out[part]))
        else:
            calls.append(partial(out[part].copy_, made.samples))
    return calls


def weight_gradient(g: Gathered, x: torch.Tensor, upstream: torch.Tensor, out: torch.Tensor, work: Tensors) -> list:
    """Sum upstream gradients [n, filters, positions...] times the windows of x over all samples."""
    if not g.samples:
        return [out.zero_]
    total = g.weights(work)
    calls = g.start(work)
    for part in g.chunks():
        gathering, matrix = g.gather(x[part], work)
        given = g.product(work, len(x[part]))
        add = partial(total.matrix.addmm_ if part.start else torch.mm, given.matrix, matrix.t())
        calls += [*gathering, partial(given.samples.copy_, upstream[part])]
        calls.append(add if part.start else partial(add, out=total.matrix))
    return [*calls, partial(out.copy_, total.samples)]


def flipped_window(window: Window) -> Window | None:
    """Return the window by which the transpose of a stride-1 convolution is a convolution with a flipped kernel."""
    padding = tuple(e - 1 - p for e, p in zip(window.extent, window.padding, strict=True))
    if set(window.stride) != {1} or min(padding) < 0:
        return None
    return Window(window.kernel, window.stride, padding, window.dilation)


def flipped_weights(w: torch.Tensor, work: torch.Tensor) -> tuple[list[Call], torch.Tensor]:
    """Return weights [C, filters, kernel...] as [filters, C, kernel...] with flipped kernel, and the calls for it."""
    flat, backwards = w.flatten(2), torch.arange(prod(w.shape[2:]) - 1, -1, -1)
    calls: list[Call] = [partial(torch.index_select, flat, 2, backwards, out=work.view(flat.shape))]
    return calls, work.view(w.shape).transpose(0, 1)


class Columns:
    """The windows of [N, C, sizes...] as columns [n, C · entries, positions], a chunk of n samples at a time."""

    def __init__(self, window: Window, samples: int, channels: int, sizes: tuple[int, ...], itemsize: int) -> None:
        self.window, self.samples, self.channels, self.sizes = window, samples, channels, sizes
        self.positions = window.counts(sizes)
        self.chunk = samples_at_once(samples, channels * window.entries * prod(self.positions) * itemsize)

    @staticmethod
    def of(window: Window, x: Spec | torch.Tensor) -> Columns:
        """Make columns for an operand or a result [N, C, sizes...]."""
        samples, channels, *sizes = x.sizes if isinstance(x, Spec) else x.shape
        return Columns(window, samples, channels, tuple(sizes), x.dtype.itemsize)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the columns of a chunk."""
        return (self.chunk, self.channels * self.window.entries, prod(self.positions))

    @property
    def padded(self) -> tuple[int, ...]:
        """Return a chunk of samples with their padding."""
        return (self.chunk, self.channels, *self.window.padded(self.sizes))

    @property
    def pads(self) -> bool:
        """True if samples are copied into a padded block."""
        return any(self.window.padding)

    def chunks(self) -> Iterator[slice]:
        """Return the slices of the samples."""
        return (slice(at, min(at + self.chunk, self.samples)) for at in range(0, self.samples, self.chunk))

    def inner(self, block: torch.Tensor, count: int) -> torch.Tensor:
        """Return the samples inside a padded block."""
        pads = zip(self.window.padding, self.sizes, strict=True)
        return block[(slice(count), slice(None), *(slice(p, p + n) for p, n in pads))]

    def windows(self, samples: torch.Tensor) -> torch.Tensor:
        """View padded samples as [n, C, kernel..., positions...]."""
        return windows(samples, self.window, self.positions)

    def unfold(self, x: torch.Tensor, columns: torch.Tensor, block: Tensors) -> list[Call]:
        """Return calls that write the columns of a chunk of samples; a padded block is zero around its samples."""
        calls: list[Call] = []
        for padded in block:
            inner = self.inner(padded, len(x))
            calls.append(partial(inner.copy_, x))
            x = padded[: len(x)]
        views = self.windows(x)
        return [*calls, partial(columns.view(views.shape).copy_, views)]

    def of_samples(self, x: torch.Tensor, work: Tensors) -> tuple[list[Call], torch.Tensor]:
        """Return the columns [n, C · entries, positions] of a chunk, and the calls that write them into the scratch."""
        if not work:
            return [], x.flatten(2)
        columns = work[0][: len(x)]
        return self.unfold(x, columns, work[1:]), columns

    def fold(self, columns: torch.Tensor, out: torch.Tensor, block: Tensors) -> list[Call]:
        """Return calls that add a chunk's columns at their positions; one addition per entry of the kernel."""
        target = block[0][: len(out)] if block else out
        views = self.windows(target)
        parts = columns.view(views.shape)
        calls: list[Call] = [target.zero_]
        for entry in product(*map(range, self.window.kernel)):
            at = (slice(None), slice(None), *entry)
            calls.append(partial(views[at].add_, parts[at]))
        return [*calls, *(partial(out.copy_, self.inner(b, len(out))) for b in block)]

    def scratch(self, like: Spec) -> list[Spec]:
        """Return scratch for the columns of a chunk and its padded samples; none if samples are their own columns."""
        if self.window.plain:
            return []
        return [Spec(self.shape, like.dtype)] + ([Spec(self.padded, like.dtype)] if self.pads else [])


def _grouped(t: torch.Tensor, groups: int) -> torch.Tensor:
    """View [n, C, positions...] as [n, groups, C / groups, positions]."""
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
"""Positions per row below which one product for all samples is faster: copies run along rows (measured)."""


def _gathered(
    kernel: Sequence[int], x: Spec | torch.Tensor, filters: int, attrs: Attrs, *, turns: bool = False
) -> Gathered | None:
    """Return gathered windows for one group with short rows of positions, else None.

    With `turns`, for the transpose of the convolution, unless it would gather far more than that scatters.
    """
    window, shape = Window.of(kernel, attrs), x.sizes if isinstance(x, Spec) else x.shape
    taken = flipped_window(window) if turns else window
    if attrs["groups"] > 1 or window.plain or taken is None or (turns and shape[1] > 2 * filters):
        return None
    gathered = Gathered(taken, shape, filters, x.dtype.itemsize)
    return gathered if gathered.positions[-1] < SHORT else None


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
    """Multiply transposed weights by x into columns of the result; with stride 1, convolve with flipped weights."""
    (x, w), out, groups = ins[:2], outs[0], attrs["groups"]
    gathered = _gathered(w.shape[2:], x, w.shape[1], attrs, turns=True)
    if gathered is not None:
        flipping, weights = flipped_weights(w, work[-1])
        return [*flipping, *forward(gathered, x, weights, ins[2:], out, work)]
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
    """Sum over samples of the gradient times the transposed columns of x."""
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
    """Unfold windows into columns."""
    columns = _columns(attrs["kernel"], ins[0], attrs)
    calls: list[Call] = [block.zero_ for block in work]
    for part in columns.chunks():
        calls += columns.unfold(ins[0][part], outs[0][part], work)
    return calls


@kernel("fold", lambda o, i, a: _columns(a["kernel"], o[0], a).scratch(o[0])[1:], widen=True)
def fold(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Add columns at the positions of their windows."""
    columns = _columns(attrs["kernel"], outs[0], attrs)
    calls: list[Call] = []
    for part in columns.chunks():
        calls += columns.fold(ins[0][part], outs[0][part], work)
    return calls
