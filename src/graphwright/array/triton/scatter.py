"""Entries gathered by index along an axis, and written or added there: in the order of the operands, without atomics.

A program that writes has entries of the result, and compares their numbers with all indices of their line.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
import triton.language as tl

from graphwright.array.backend import Attrs
from graphwright.array.cpu.kernel import Tensors
from graphwright.array.triton.kernel import Launch, compiled, kernel, one_float
from graphwright.array.triton.reduce import exact
from graphwright.array.triton.rows import along_two, narrow

BLOCK = 512
"""Entries that a program gathers."""
LINES, OWN = 8, 128
"""Lines, and entries of each, that a program writes."""
MOST = 1024
"""Most indices of a line."""


@compiled
def gather_entries(x, index, out, size: tl.int64, entries: tl.int32, indices: tl.int32, inner: tl.int32,
                   BLOCK: tl.constexpr):  # fmt: skip
    """Copy x[o, index[o, t, i], i] of x [outer, entries, inner] to [o, t, i]; NaN for an index out of range."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    index_at = tl.load(index + at, mask=inside, other=0).to(tl.int64)
    known = (index_at >= 0) & (index_at < entries)
    outer, i = at // inner // indices, at % inner
    values = tl.load(x + (outer * entries + index_at) * inner + i, mask=inside & known, other=0)
    if x.dtype.element_ty.is_floating():
        values = tl.where(known, values, float("nan")).to(values.dtype)
    tl.store(out + at, values, mask=inside)


@compiled
def scatter_entries(
    x, index, values, out, lines: tl.int32, entries: tl.int32, indices: tl.int32, inner: tl.int32,
    tiles: tl.int32, LINES: tl.constexpr, OWN: tl.constexpr, BASE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Add values [outer, indices, inner] to entries of x (0 without BASE), or replace those, by index in each line."""
    tile, part = along_two(tiles)
    line = tile * LINES + tl.arange(0, LINES)
    own = (part * OWN + tl.arange(0, OWN))[None, :]
    present = line < lines
    outer, i = (line // inner).to(tl.int64), (line % inner).to(tl.int64)
    at = (outer[:, None] * entries + own) * inner + i[:, None]
    inside = present[:, None] & (own < entries)
    total = exact(tl.load(x + at, mask=inside & BASE, other=0))
    for t in range(0, indices):
        source = (outer * indices + t) * inner + i
        hit = tl.load(index + source, mask=present, other=-1)[:, None] == own
        value = exact(tl.load(values + source, mask=present, other=0))[:, None]
        if ADD:
            total += tl.where(hit, value, 0)
        else:
            total = tl.where(hit, value, total)
    tl.store(out + at, narrow(total, out), mask=inside)


class _Lines(NamedTuple):
    """Sizes of arrays along and beside an axis."""

    outer: int
    entries: int
    indices: int
    inner: int


def _lines(x: torch.Tensor, index: torch.Tensor, attrs: Attrs) -> _Lines | str:
    if x.dim() == 0 or index.dim() != x.dim():
        return "the operand or the index has no axes"
    axis = attrs["axis"] % x.dim()
    before, after = (slice(0, axis), slice(axis + 1, None))
    if x.shape[before] != index.shape[before] or x.shape[after] != index.shape[after]:
        return "the index is shorter than the operand beside the axis"
    return _Lines(prod(x.shape[before]), x.shape[axis], index.shape[axis], prod(x.shape[after]))


def _known(found: _Lines | str) -> _Lines:
    assert isinstance(found, _Lines), found
    return found


def _reason(whole: torch.Tensor, index: torch.Tensor, tensors: Tensors, attrs: Attrs) -> str:
    if not all(t.is_contiguous() for t in tensors):
        return "an operand is not contiguous"
    found = _lines(whole, index, attrs)
    return found if isinstance(found, str) else ""


def _raw(t: torch.Tensor) -> torch.Tensor:
    """View a bool tensor as bytes."""
    return t.view(torch.uint8) if t.dtype == torch.bool else t


@kernel("gather", takes=lambda outs, ins, attrs: _reason(*ins, (*ins, *outs), attrs))
def gather(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Launch:
    (x, index), (out,) = map(_raw, ins), map(_raw, outs)
    a = _known(_lines(x, index, attrs))
    args = (x, index, out, out.numel(), a.entries, max(a.indices, 1), max(a.inner, 1))
    return Launch(gather_entries, (-(-out.numel() // BLOCK),), args, {"BLOCK": BLOCK})


def _takes(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    index, (out,) = ins[1], outs
    found = _reason(out, index, (*ins, *outs), attrs)
    if found or _known(_lines(out, index, attrs)).indices > MOST:
        return found or f"more than {MOST} indices in a line"
    return one_float([ins[0], out])


def _scattered(x: torch.Tensor | None, index: torch.Tensor, values: torch.Tensor, out: torch.Tensor, attrs: Attrs,
               add: bool) -> Launch:  # fmt: skip
    a = _known(_lines(out, index, attrs))
    lines = a.outer * a.inner
    tiles = -(-lines // LINES)
    constants: dict[str, Any] = {"LINES": LINES, "OWN": OWN, "BASE": x is not None, "ADD": add}
    args = (out if x is None else x, index, values, out, lines, a.entries, a.indices, max(a.inner, 1), tiles)
    return Launch(scatter_entries, (tiles * -(-a.entries // OWN),), args, constants)


@kernel("scatter_sum", takes=_takes)
def scatter_sum(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Launch:
    return _scattered(None, ins[1], ins[0], outs[0], attrs, add=True)


@kernel("scatter_add", takes=_takes)
def scatter_add(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Launch:
    return _scattered(*ins, outs[0], attrs, add=True)


@kernel("scatter", takes=_takes)
def scatter(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Launch:
    """Write values by index; of equal indices the last one counts."""
    return _scattered(*ins, outs[0], attrs, add=False)
