"""Convolution of one group as one product: the windows of all samples of a chunk gathered into a matrix.

A matrix [C · entries, n · places] lies in memory by rows, or turned around with the channels innermost, whichever makes
the runs longer that the gathering copies; products take both without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import torch

from graphwright.array.backend import Call
from graphwright.array.cpu.kernel import Tensors
from graphwright.array.dtype import DType
from graphwright.array.spec import Spec
from graphwright.array.window import Window

COLUMN_BYTES = 1 << 20
"""Of the windows of a chunk; about half of a core's second-level cache."""


def samples_at_once(samples: int, nbytes: int) -> int:
    """How many samples a chunk has whose windows take `nbytes` each."""
    return max(1, min(samples, COLUMN_BYTES // max(nbytes, 1)))


class View(NamedTuple):
    """Scratch as a matrix, and the same as [n, channels, ...]."""

    matrix: torch.Tensor
    samples: torch.Tensor


class Gathered:
    """Windows over x [N, C, sizes...] beside `filters` channels of results or gradients at their places."""

    def __init__(self, window: Window, x: Sequence[int], filters: int, itemsize: int) -> None:
        self.samples, self.channels, *sizes = x
        self.window, self.filters, self.sizes = window, filters, tuple(sizes)
        self.places = window.places(self.sizes)
        self.rows = self.channels * window.entries
        self.last = window.kernel[-1] * self.channels >= self.places[-1]  # the longer runs with channels innermost
        self.blocks = self.last or any(window.padding)
        self.chunk = samples_at_once(self.samples, self.rows * prod(self.places) * itemsize)

    def scratch(self, dtype: DType) -> list[Spec]:
        """Matrix, product, weights, and a block of padded samples if they are copied into one."""
        columns, padded = self.chunk * prod(self.places), self.window.padded(self.sizes)
        sizes = [self.rows * columns, self.filters * columns, self.filters * self.rows]
        sizes += [self.chunk * self.channels * prod(padded)] if self.blocks else []
        return [Spec((n,), dtype) for n in sizes]

    def chunks(self) -> Iterator[slice]:
        """Slices of the samples."""
        return (slice(at, min(at + self.chunk, self.samples)) for at in range(0, self.samples, self.chunk))

    def _view(self, flat: torch.Tensor, n: int, channels: int, kernel: tuple[int, ...]) -> View:
        """As [channels · entries, n · places], and as [n, channels, kernel..., places...]."""
        rank, rows, columns = len(self.places), channels * prod(kernel), n * prod(self.places)
        flat, k = flat[: rows * columns], len(kernel)
        if self.last:
            shaped = flat.view(n, *self.places, *kernel, channels)
            order = (0, 1 + rank + k, *range(1 + rank, 1 + rank + k), *range(1, 1 + rank))
            return View(flat.view(columns, rows).t(), shaped.permute(order))
        shaped = flat.view(channels, *kernel, n, *self.places)
        order = (1 + k, 0, *range(1, 1 + k), *range(2 + k, 2 + k + rank))
        return View(flat.view(rows, columns), shaped.permute(order))

    def product(self, work: Tensors, n: int) -> View:
        """Scratch for [filters, n · places], and as [n, filters, places...]."""
        return self._view(work[1], n, self.filters, ())

    def weights(self, work: Tensors) -> View:
        """Scratch for [filters, C · entries], and as [filters, C, kernel...]."""
        kernel, matrix = self.window.kernel, work[2].view(self.filters, self.rows)
        if not self.last:
            return View(matrix, matrix.view(self.filters, self.channels, *kernel))
        return View(matrix, matrix.view(self.filters, *kernel, self.channels).movedim(-1, 1))

    def start(self, work: Tensors) -> list[Call]:
        """Zeros around the samples of a block."""
        return [work[3].zero_] if any(self.window.padding) else []

    def gather(self, x: torch.Tensor, work: Tensors) -> tuple[list[Call], torch.Tensor]:
        """The matrix of a chunk of samples, and the calls that fill it."""
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
        return [*calls, partial(view.samples.copy_, windows(x, window, self.places))], view.matrix


def windows(samples: torch.Tensor, window: Window, places: tuple[int, ...]) -> torch.Tensor:
    """[n, C, kernel..., places...] over padded samples [n, C, sizes...] of any strides, as a view."""
    strides = samples.stride()
    spatial = strides[2:]
    return samples.as_strided(
        (*samples.shape[:2], *window.kernel, *places),
        (
            *strides[:2],
            *(s * d for s, d in zip(spatial, window.dilation, strict=True)),
            *(s * step for s, step in zip(spatial, window.stride, strict=True)),
        ),
        samples.storage_offset(),
    )


def forward(g: Gathered, x: torch.Tensor, w: torch.Tensor, bias: Tensors, out: torch.Tensor, work: Tensors) -> list:
    """Weights [filters, C, kernel...] times the windows of x (, + bias [filters])."""
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
    """Upstream gradients [n, filters, places...] times the turned windows of x, summed over all samples."""
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


def turned(window: Window) -> Window | None:
    """The window by which the transpose of a convolution of stride 1 is one too, with its kernel turned around."""
    padding = tuple(e - 1 - p for e, p in zip(window.extent, window.padding, strict=True))
    if set(window.stride) != {1} or min(padding) < 0:
        return None
    return Window(window.kernel, window.stride, padding, window.dilation)


def turned_weights(w: torch.Tensor, work: torch.Tensor) -> tuple[list[Call], torch.Tensor]:
    """Weights [C, filters, kernel...] as [filters, C, kernel...], the kernel turned around, and how they are made."""
    flat, backwards = w.flatten(2), torch.arange(prod(w.shape[2:]) - 1, -1, -1)
    calls: list[Call] = [partial(torch.index_select, flat, 2, backwards, out=work.view(flat.shape))]
    return calls, work.view(w.shape).transpose(0, 1)
