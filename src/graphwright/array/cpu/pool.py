"""Pooling by ATen's 2-d kernels, and resampling axis by axis. Taps: the entries, with weights, that a result sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, kernel
from graphwright.array.layout import Window, trailing
from graphwright.array.spec import Spec

aten = torch.ops.aten


def _planes(t: torch.Tensor, rank: int) -> torch.Tensor:
    """View [..., H, W] (rank 2) as planes [N, H, W], or [..., W] (rank 1) as planes [N, 1, W] of one row."""
    lead = t.dim() - rank
    return t.view(prod(t.shape[:lead]), *(1,) * (2 - rank), *t.shape[lead:])


def _pairs(attrs: Attrs) -> list[list[int]]:
    """Return kernel, stride, padding and dilation as pairs of ints, for ATen's 2-d kernels."""
    w = Window.of(attrs["kernel"], attrs)
    facts = ((1, w.kernel), (1, w.stride), (0, w.padding), (1, w.dilation))
    return [[alone] * (2 - len(sizes)) + list(sizes) for alone, sizes in facts]


def _blocks(planes: int, size: int) -> Iterator[tuple[slice, int]]:
    """Split `planes` planes of `size` entries into slices that fit in cache; yield (slice, how many to interleave)."""
    abreast = min(max(8192 // size, 16), 64)  # measured: 64 planes of 8 x 8, 16 of 32 x 32
    step = max((1 << 18) // size // abreast, 1) * abreast
    at = 0
    while at < planes:
        count = min(step, planes - at)
        wide = min(abreast, count)
        count -= count % wide
        yield slice(at, at + count), wide
        at += count


def _max_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    """Return specs of the scratch: the interleaved planes of one slice, for the operand and for each result."""
    arrays, rank = [ins[0], *outs], len(attrs["kernel"])
    if not outs[0].size:
        return []
    sizes = [prod(trailing(a.sizes, rank)) for a in arrays]
    most = max((block.stop - block.start for block, _ in _blocks(prod(ins[0].sizes[:-rank]), sizes[0])), default=0)
    return [Spec((most * size,), a.dtype) for a, size in zip(arrays, sizes, strict=True)]


@kernel("max_pool", _max_work)
def max_pool(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Compute the maximum of each window and its index in the plane; planes are interleaved, which is faster."""
    if not outs[0].numel():
        return []
    x, best, indices = (_planes(t, len(attrs["kernel"])) for t in (ins[0], *outs))
    calls: list[Call] = []
    for block, wide in _blocks(len(x), prod(x.shape[1:])):
        given, *made = (t[block].unflatten(0, (-1, wide)) for t in (x, best, indices))
        transposed, *results = (
            w[: t.numel()].view(len(t), *t.shape[2:], wide).movedim(-1, 1)
            for w, t in zip(work, (given, *made), strict=True)
        )
        pool = partial(aten.max_pool2d_with_indices.out, transposed, *_pairs(attrs))
        calls += [partial(transposed.copy_, given), partial(pool, out=results[0], indices=results[1])]
        calls += [partial(t.copy_, r) for t, r in zip(made, results, strict=True)]
    return calls


def _average(attrs: Attrs) -> tuple[Any, ...]:
    """Return ATen's arguments kernel, stride, padding, ceil_mode, count_include_pad and divisor_override."""
    return (*_pairs(attrs)[:3], False, attrs["count_include_pad"], None)


@kernel("avg_pool", widen=True)
def avg_pool(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    x, out = (_planes(t, len(attrs["kernel"])) for t in (ins[0], outs[0]))
    return [partial(aten.avg_pool2d.out, x, *_average(attrs), out=out)] if out.numel() else []


@kernel("avg_pool_backward", widen=True)
def avg_pool_backward(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Spread each gradient evenly over its window; ATen reads only the sizes of its second operand."""
    g, out = (_planes(t, len(attrs["kernel"])) for t in (ins[0], outs[0]))
    backward: Any = aten.avg_pool2d_backward.grad_input
    return [partial(backward, g, out, *_average(attrs), grad_input=out)] if out.numel() else []


def _means(n: int, m: int) -> tuple[np.ndarray, np.ndarray]:
    """Return taps (indices, weights), both [t, i]: result i is the mean of entries floor(i·n/m) to ceil((i+1)·n/m) - 1.

    All results have equally many taps: a shorter window repeats its last entry and divides that entry's weight.
    """
    i = np.arange(m)
    start, end = i * n // m, -(-(i + 1) * n // m)
    count, longest = end - start, int((end - start).max())
    t = np.arange(longest)[:, None]
    shared = np.where(t >= count - 1, longest - count + 1, 1)  # a weight of 0 would make NaN of an infinity
    return np.minimum(start + t, end - 1), 1.0 / (count * shared)


def _between(n: int, m: int, align_corners: bool) -> tuple[np.ndarray, np.ndarray]:
    i = np.arange(m, dtype=np.float64)
    at = i * ((n - 1) / max(m - 1, 1)) if align_corners else np.maximum((i + 0.5) * (n / m) - 0.5, 0.0)
    low = np.minimum(np.floor(at).astype(np.int64), n - 1)
    part = at - low
    return np.stack([low, np.minimum(low + 1, n - 1)]), np.stack([1.0 - part, part])


def _taps(n: int, m: int, attrs: Attrs, like: torch.Tensor, axis: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the taps (index, weight) that resample an axis from n to m entries.

    Result i is the sum of weight[i] · x[index[i]] over the taps. Weights are shaped to broadcast along the axis.
    """
    mode = attrs.get("mode", "mean")
    if mode == "nearest":
        indices, weights = (np.arange(m) * n // m)[None], np.ones((1, m))
    else:
        indices, weights = _means(n, m) if mode == "mean" else _between(n, m, attrs["align_corners"])
    shape = (-1, *(1,) * (like.dim() - 1 - axis))
    wide = torch.as_tensor(weights).to(like.dtype)
    return [(torch.as_tensor(p), w.view(shape)) for p, w in zip(indices, wide, strict=True)]


def _stages(start: Sequence[int], end: Sequence[int], rank: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return (axis, shape of the array after this axis is resampled) for each of the last `rank` axes."""
    shape, stages = list(start), []
    for axis in range(len(start) - rank, len(start)):
        shape[axis] = end[axis]
        stages.append((axis, tuple(shape)))
    return stages


def _forward_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    """Return specs of scratch: per resampled axis, the entries that one tap gathers; then the intermediate results."""
    stages = _stages(ins[0].sizes, outs[0].sizes, len(attrs["sizes"]))
    return [Spec(s, outs[0].dtype) for _, s in (*stages, *stages[:-1])]


def _backward_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    """Return specs of scratch: per resampled axis, the gradients that one tap adds; then the intermediate results."""
    stages = _stages(ins[0].sizes, outs[0].sizes, len(attrs["sizes"]))
    return [Spec(s, outs[0].dtype) for s in (ins[0].shape, *(s for _, s in stages[:-1]), *(s for _, s in stages[:-1]))]


@kernel("adaptive_avg_pool", _forward_work, widen=True)
@kernel("interpolate", _forward_work, widen=True)
def resample(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Resample axis by axis: compute each entry as the weighted sum of its taps, in order."""
    calls: list[Call] = []
    stages, x = _stages(ins[0].shape, outs[0].shape, len(attrs["sizes"])), ins[0]
    for (axis, shape), part, target in zip(stages, work, [*work[len(stages) :], outs[0]], strict=False):
        (indices, weight), *others = _taps(x.shape[axis], shape[axis], attrs, x, axis)
        calls += [partial(torch.index_select, x, axis, indices, out=target), partial(target.mul_, weight)]
        for indices, weight in others:
            calls += [partial(torch.index_select, x, axis, indices, out=part), partial(target.addcmul_, part, weight)]
        x = target
    return calls


@kernel("adaptive_avg_pool_backward", _backward_work, widen=True)
@kernel("interpolate_backward", _backward_work, widen=True)
def resample_backward(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Compute the gradient of `resample` axis by axis: add each gradient, weighted, to the taps of its entry."""
    calls: list[Call] = []
    stages, g = _stages(ins[0].shape, outs[0].shape, len(attrs["sizes"])), ins[0]
    for (axis, shape), part, target in zip(stages, work, [*work[len(stages) :], outs[0]], strict=False):
        calls.append(target.zero_)
        for indices, weight in _taps(shape[axis], g.shape[axis], attrs, g, axis):
            calls += [partial(torch.mul, g, weight, out=part), partial(target.index_add_, axis, indices, part)]
        g = target
    return calls
