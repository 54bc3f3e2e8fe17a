"""Convolution by ATen's kernels, which allocate, where they are faster; else as unfold, matrix product and fold.

The latter need scratch alone. Columns are the windows of the input (im2col). Samples are processed in chunks whose
columns stay in cache. With one group and short rows of positions, a chunk needs one matrix product; else there is one
per sample and group. 16-bit operands are widened to float32 once, and the result is rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, product
from math import prod
from typing import Any, NamedTuple

import torch

from graphwright.array.backend import Attrs, Call, Fresh, Needs
from graphwright.array.cpu.kernel import Tensors, kernel
from graphwright.array.cpu.norm import by_channel
from graphwright.array.dtype import DType
from graphwright.array.layout import Window, per_axis
from graphwright.array.spec import Spec

COLUMN_BYTES = 1 << 20
"""Bytes of the columns of a chunk; about half of a core's second-level cache."""


class Columns:
    """The windows of an input of shape x = [N, C, sizes...] as columns [n, C · entries, positions], in chunks of n."""

    def __init__(self, window: Window, x: Sequence[int], itemsize: int) -> None:
        self.samples, self.channels, *sizes = x
        self.window, self.sizes = window, tuple(sizes)
        self.positions, self.padded = window.counts(self.sizes), window.padded(self.sizes)
        self.rows = self.channels * window.entries
        nbytes = self.rows * prod(self.positions) * itemsize
        self.chunk = max(1, min(self.samples, COLUMN_BYTES // max(nbytes, 1)))

    def chunks(self) -> Iterator[slice]:
        """Return slices of the batch axis, one for each chunk of samples."""
        return (slice(at, min(at + self.chunk, self.samples)) for at in range(0, self.samples, self.chunk))

    def inner(self, block: torch.Tensor) -> torch.Tensor:
        """Return the view of padded samples that leaves out the padding."""
        pads = zip(self.window.padding, self.sizes, strict=True)
        return block[(..., *(slice(p, p + n) for p, n in pads))]

    def windows(self, samples: torch.Tensor) -> torch.Tensor:
        """View padded samples [n, C, sizes...] of any strides as [n, C, kernel..., positions...]."""
        lead, strides = samples.stride()[:2], samples.stride()[2:]
        steps = (
            s * step for by in (self.window.dilation, self.window.stride) for s, step in zip(strides, by, strict=True)
        )
        shape = (*samples.shape[:2], *self.window.kernel, *self.positions)
        return samples.as_strided(shape, (*lead, *steps), samples.storage_offset())

    def unfold(self, x: torch.Tensor, columns: torch.Tensor, block: Tensors) -> list[Call]:
        """Return calls that write the windows of x to `columns`; `block`: scratch for x with padding, empty without."""
        calls: list[Call] = []
        for padded in block:
            calls.append(partial(self.inner(padded[: len(x)]).copy_, x))
            x = padded[: len(x)]
        views = self.windows(x)
        return [*calls, partial(columns.view(views.shape).copy_, views)]

    def of_samples(self, x: torch.Tensor, work: Tensors) -> tuple[list[Call], torch.Tensor]:
        """Return (calls that write the columns of samples x to scratch, the columns [n, C · entries, positions])."""
        if not work:
            return [], x.flatten(2)
        columns = work[0][: len(x)]
        return self.unfold(x, columns, work[1:]), columns

    def fold(self, columns: torch.Tensor, out: torch.Tensor, block: Tensors) -> list[Call]:
        """Return calls that set each entry of `out` to the sum of the column entries that `unfold` copies from it."""
        target = block[0][: len(out)] if block else out
        views = self.windows(target)
        parts = columns.view(views.shape)
        entries = [(slice(None), slice(None), *entry) for entry in product(*map(range, self.window.kernel))]
        added = (partial(views[at].add_, parts[at]) for at in entries)
        return [target.zero_, *added, *(partial(out.copy_, self.inner(b[: len(out)])) for b in block)]

    def scratch(self, dtype: DType) -> list[Spec]:
        """Return specs of the scratch: a chunk's columns and padded samples; empty if the columns are the samples."""
        if self.window.plain:
            return []
        columns = Spec((self.chunk, self.rows, prod(self.positions)), dtype)
        padded = Spec((self.chunk, self.channels, *self.padded), dtype)
        return [columns, padded] if any(self.window.padding) else [columns]


class MatrixView(NamedTuple):
    """Two views of one scratch buffer: as a matrix, and as samples [n, channels, ...]."""

    matrix: torch.Tensor
    samples: torch.Tensor


class Gathered(Columns):
    """The columns of a whole chunk as one matrix, to multiply it by `filters` rows of weights or gradients."""

    def __init__(self, window: Window, x: Sequence[int], itemsize: int, filters: int) -> None:
        super().__init__(window, x, itemsize)
        self.filters = filters
        self.last = window.kernel[-1] * self.channels >= self.positions[-1]  # channels innermost: longer copies

    def scratch(self, dtype: DType) -> list[Spec]:
        """Return specs of the scratch: columns, product, weights, and samples if these are padded or permuted first."""
        columns, blocks = self.chunk * prod(self.positions), self.last or any(self.window.padding)
        sizes = [self.rows * columns, self.filters * columns, self.filters * self.rows]
        sizes += [self.chunk * self.channels * prod(self.padded)] if blocks else []
        return [Spec((n,), dtype) for n in sizes]

    def _view(self, flat: torch.Tensor, n: int, channels: int, kernel: tuple[int, ...]) -> MatrixView:
        """View `flat` as [channels · entries, n · positions] and as [n, channels, kernel..., positions...]."""
        rank, rows, columns = len(self.positions), channels * prod(kernel), n * prod(self.positions)
        flat, k = flat[: rows * columns], len(kernel)
        if self.last:
            shaped = flat.view(n, *self.positions, *kernel, channels)
            order = (0, 1 + rank + k, *range(1 + rank, 1 + rank + k), *range(1, 1 + rank))
            return MatrixView(flat.view(columns, rows).t(), shaped.permute(order))
        shaped = flat.view(channels, *kernel, n, *self.positions)
        order = (1 + k, 0, *range(1, 1 + k), *range(2 + k, 2 + k + rank))
        return MatrixView(flat.view(rows, columns), shaped.permute(order))

    def product(self, work: Tensors, n: int) -> MatrixView:
        """Return the scratch of the product viewed as [filters, n · positions] and as [n, filters, positions...]."""
        return self._view(work[1], n, self.filters, ())

    def weights(self, work: Tensors) -> MatrixView:
        """Return the scratch of the weights viewed as [filters, C · entries] and as [filters, C, kernel...]."""
        kernel, matrix = self.window.kernel, work[2].view(self.filters, self.rows)
        if not self.last:
            return MatrixView(matrix, matrix.view(self.filters, self.channels, *kernel))
        return MatrixView(matrix, matrix.view(self.filters, *kernel, self.channels).movedim(-1, 1))

    def start(self, work: Tensors) -> list[Call]:
        """Return the call that zeroes the scratch of padded samples; empty without padding."""
        return [work[3].zero_] if any(self.window.padding) else []

    def gather(self, x: torch.Tensor, work: Tensors) -> tuple[list[Call], torch.Tensor]:
        """Return (calls that write the columns of samples x to scratch, their matrix [C · entries, n · positions])."""
        calls: list[Call] = []
        n = len(x)
        for block in work[3:4]:
            flat = block[: n * self.channels * prod(self.padded)]
            order = (n, *self.padded, self.channels) if self.last else (n, self.channels, *self.padded)
            whole = flat.view(order).movedim(-1, 1) if self.last else flat.view(order)
            calls.append(partial(self.inner(whole).copy_, x))
            x = whole
        view = self._view(work[0], n, self.channels, self.window.kernel)
        return [*calls, partial(view.samples.copy_, self.windows(x))], view.matrix

    def forward(self, x: torch.Tensor, w: torch.Tensor, bias: Tensors, out: torch.Tensor, work: Tensors) -> list[Call]:
        """Return calls that multiply weights [filters, C, kernel...] by the windows of x and add the bias, if any."""
        weights = self.weights(work)
        calls: list[Call] = [partial(weights.samples.copy_, w), *self.start(work)]
        for part in self.chunks():
            gathering, matrix = self.gather(x[part], work)
            made = self.product(work, len(x[part]))
            calls += [*gathering, partial(torch.mm, weights.matrix, matrix, out=made.matrix)]
            added = [partial(torch.add, made.samples, wide, out=out[part]) for wide in by_channel(bias, out)]
            calls += added or [partial(out[part].copy_, made.samples)]
        return calls

    def weight_gradient(self, x: torch.Tensor, upstream: torch.Tensor, out: torch.Tensor, work: Tensors) -> list[Call]:
        """Return calls that compute the weight gradient from upstream gradients [N, filters, positions...] and x."""
        if not self.samples:
            return [out.zero_]
        total = self.weights(work)
        calls = self.start(work)
        for part in self.chunks():
            gathering, matrix = self.gather(x[part], work)
            given = self.product(work, len(x[part]))
            first = partial(torch.mm, given.matrix, matrix.t(), out=total.matrix)
            add = partial(total.matrix.addmm_, given.matrix, matrix.t()) if part.start else first
            calls += [*gathering, partial(given.samples.copy_, upstream[part]), add]
        return [*calls, partial(out.copy_, total.samples)]


def _grouped(t: torch.Tensor, groups: int) -> torch.Tensor:
    """View [n, C, positions...] as [n, groups, C / groups, positions]."""
    return t.flatten(2).unflatten(1, (groups, t.shape[1] // groups))


def _products(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> list[Call]:
    """Return calls for out[n, group] = a[group] @ b[n, group]: one call if there is one group, else one per sample."""
    if len(a) == 1:
        return [partial(torch.bmm, a.expand(len(b), *a.shape[1:]), b[:, 0], out=out[:, 0])]
    return [partial(torch.bmm, a, b[n], out=out[n]) for n in range(len(b))]


def _shape(x: Spec | torch.Tensor) -> Sequence[int]:
    return x.sizes if isinstance(x, Spec) else x.shape


def _columns(weight: Sequence[int], x: Spec | torch.Tensor, attrs: Attrs) -> Columns:
    return Columns(Window.of(weight, attrs), _shape(x), x.dtype.itemsize)


SHORT = 16
"""Positions per row below which one product per chunk is faster, because copies run along rows (measured)."""


def _gathered(
    kernel: Sequence[int], x: Spec | torch.Tensor, filters: int, attrs: Attrs, *, transposed: bool = False
) -> Gathered | None:
    """Return `Gathered` for one product per chunk; None if there are several groups or rows of positions are long.

    With `transposed`, the columns are for a convolution with the flipped kernel that computes a transposed convolution.
    Then return None also if the stride is not 1, or if x has more than twice as many channels as the result.
    """
    window = Window.of(kernel, attrs)
    if attrs["groups"] > 1 or window.plain:
        return None
    if transposed:
        padding = tuple(e - 1 - p for e, p in zip(window.extent, window.padding, strict=True))
        if set(window.stride) != {1} or min(padding) < 0 or _shape(x)[1] > 2 * filters:
            return None
        window = Window(window.kernel, window.stride, padding, window.dilation)
    gathered = Gathered(window, _shape(x), x.dtype.itemsize, filters)
    return gathered if gathered.positions[-1] < SHORT else None


LARGE = 8_000_000
"""FLOPs from which ATen's kernel is faster for one group (measured)."""


def _direct(name: str, made: Sequence[int], weight: Sequence[int], dtype: Any, attrs: Attrs) -> tuple[Any, ...] | None:
    """Return the arguments of `torch.convolution` after the operands, or None if columns are faster (measured).

    Args:
        name: the op: the limits of the three differ.
        made: shape of the array with an entry per window: y of `conv`, x of `conv_transpose`, g of `conv_weight`.
        weight: shape [O, C / groups, kernel...] or, of `conv_transpose`, [I, O / groups, kernel...].
    """
    window, groups, transposed = Window.of(weight[2:], attrs), attrs["groups"], name == "conv_transpose"
    flops = 2 * prod(made) * prod(weight[1:])
    if dtype.itemsize != 4 or len(window.kernel) > 3 or not flops:
        return None
    if window.plain:
        faster = made[0] > 1 and prod(made[2:]) == 1
    elif name == "conv_weight":
        few = made[0] * prod(made[2:]) < weight[0]  # the copy of the result takes as long as the product
        faster = window.entries <= 9 if groups > 1 else flops >= LARGE and not few
    elif transposed and all(s >= e for s, e in zip(window.stride, window.extent, strict=True)):
        faster = False
    else:
        faster = groups > 1 or (flops >= LARGE and (not transposed or set(window.stride) == {1}))
    rest = per_axis(attrs.get("output_padding", 0), len(window.kernel), "output_padding")
    return (window.stride, window.padding, window.dilation, transposed, rest, groups) if faster else None


def _forward(x: Spec | torch.Tensor, w: Spec | torch.Tensor, attrs: Attrs) -> tuple[Any, ...] | None:
    """Return `_direct` of `conv` or, if there is `output_padding`, of `conv_transpose`."""
    shape, weight = _shape(x), _shape(w)
    if "output_padding" in attrs:
        return _direct("conv_transpose", shape, weight, x.dtype, attrs)
    made = (shape[0], weight[0], *Window.of(weight[2:], attrs).counts(shape[2:]))
    return _direct("conv", made, weight, x.dtype, attrs)


def _fresh(ins: Tensors, attrs: Attrs) -> Fresh | None:
    given: Any = _forward(ins[0], ins[1], attrs)
    return given and (lambda x, w, b=None, **_: torch.convolution(x, w, b, *given).contiguous())


def _conv_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    (x, w), kernel = ins[:2], ins[1].sizes[2:]
    if _forward(x, w, attrs):
        return []
    return (_gathered(kernel, x, w.sizes[0], attrs) or _columns(kernel, x, attrs)).scratch(x.dtype)


_NEEDS = Needs(allocates=True)


@kernel("conv", _conv_work, widen=True, fresh=_fresh, needs=_NEEDS)
def conv(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    (x, w), out, groups = ins[:2], outs[0], attrs["groups"]
    if direct := _fresh(ins, attrs):
        return [lambda: out.copy_(direct(*ins))]
    gathered = _gathered(w.shape[2:], x, len(w), attrs)
    if gathered is not None:
        return gathered.forward(x, w, ins[2:], out, work)
    columns = _columns(w.shape[2:], x, attrs)
    weights = w.flatten(1).unflatten(0, (groups, w.shape[0] // groups))
    calls: list[Call] = [block.zero_ for block in work[1:]]
    for part in columns.chunks():
        made, cols = columns.of_samples(x[part], work)
        calls += [*made, *_products(weights, _grouped(cols, groups), _grouped(out[part], groups))]
    return [*calls, *(partial(out.add_, b) for b in by_channel(ins[2:], out))]


def _transpose_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    (x, w), kernel = ins[:2], ins[1].sizes[2:]
    if _forward(x, w, attrs):
        return []
    gathered = _gathered(kernel, x, w.sizes[1], attrs, transposed=True)
    return [*gathered.scratch(x.dtype), w] if gathered else _columns(kernel, outs[0], attrs).scratch(x.dtype)


@kernel("conv_transpose", _transpose_work, widen=True, fresh=_fresh, needs=_NEEDS)
def conv_transpose(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Convolve with the flipped kernel (stride 1, one group, short rows), else fold the product of weights and x."""
    (x, w), out, groups = ins[:2], outs[0], attrs["groups"]
    if direct := _fresh(ins, attrs):
        return [lambda: out.copy_(direct(*ins))]
    gathered = _gathered(w.shape[2:], x, w.shape[1], attrs, transposed=True)
    if gathered is not None:
        flat, backwards = w.flatten(2), torch.arange(prod(w.shape[2:]) - 1, -1, -1)
        flip = partial(torch.index_select, flat, 2, backwards, out=work[-1].view(flat.shape))
        weights = work[-1].view(w.shape).transpose(0, 1)  # [filters, C, kernel...]
        return [flip, *gathered.forward(x, weights, ins[2:], out, work[:-1])]
    columns = _columns(w.shape[2:], out, attrs)
    weights = w.flatten(1).unflatten(0, (groups, w.shape[0] // groups)).transpose(1, 2)
    calls: list[Call] = []
    for part in columns.chunks():
        cols = out[part].flatten(2) if not work else work[0][: len(out[part])]
        calls += _products(weights, _grouped(x[part], groups), _grouped(cols, groups))
        if work:
            calls += columns.fold(cols, out[part], work[1:])
    return [*calls, *(partial(out.add_, b) for b in by_channel(ins[2:], out))]


def _weight_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    (x, g), kernel = ins, attrs["kernel"]
    if _direct("conv_weight", g.sizes, outs[0].sizes, x.dtype, attrs):
        return []
    return (_gathered(kernel, x, g.sizes[1], attrs) or _columns(kernel, x, attrs)).scratch(x.dtype)


@kernel("conv_weight", _weight_work, widen=True, needs=_NEEDS)
def conv_weight(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    (x, g), out, groups = ins, outs[0], attrs["groups"]
    if given := _direct("conv_weight", g.shape, out.shape, x.dtype, attrs):
        gradients = torch.ops.aten.convolution_backward  # of its third operand only the shape is read
        return [lambda: out.copy_(gradients(g, x, out, None, *given, (False, True, False))[1])]
    gathered = _gathered(attrs["kernel"], x, g.shape[1], attrs)
    if gathered is not None:
        return gathered.weight_gradient(x, g, out, work)
    columns = _columns(attrs["kernel"], x, attrs)
    total = out.flatten(1).unflatten(0, (groups, g.shape[1] // groups))
    calls: list[Call] = [total.zero_, *(block.zero_ for block in work[1:])]
    for part in columns.chunks():
        made, cols = columns.of_samples(x[part], work)
        upstream, cols = _grouped(g[part], groups), _grouped(cols, groups).transpose(2, 3)
        calls += [*made, *(partial(total.baddbmm_, upstream[n], cols[n]) for n in range(len(cols)))]
    return calls


@kernel("unfold", lambda o, i, a: _columns(a["kernel"], i[0], a).scratch(i[0].dtype)[1:])
def unfold(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    columns = _columns(attrs["kernel"], ins[0], attrs)
    chunks = [columns.unfold(ins[0][part], outs[0][part], work) for part in columns.chunks()]
    return [*(block.zero_ for block in work), *chain.from_iterable(chunks)]


@kernel("fold", lambda o, i, a: _columns(a["kernel"], o[0], a).scratch(o[0].dtype)[1:], widen=True)
def fold(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    columns = _columns(attrs["kernel"], outs[0], attrs)
    chunks = [columns.fold(ins[0][part], outs[0][part], work) for part in columns.chunks()]
    return list(chain.from_iterable(chunks))
