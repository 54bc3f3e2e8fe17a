"""Mixtures of experts: tokens grouped by expert, and the weighted sums of the experts' results.

Counts and offsets stay on the device. The results of all pairs of a token and an expert are stored in the order of the
runs; then a program adds those of its tokens, in the order of their pairs, so that no two programs add to one entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors
from graphwright.array.dtype import int64
from graphwright.array.formulas.experts import ACTS, FIRST, KINDS, LIMIT, SLOPE, experts_of
from graphwright.array.spec import Spec
from graphwright.array.triton.block_attention import product
from graphwright.array.triton.grouped import find_group
from graphwright.array.triton.kernel import ALL_REGISTERS, Launch, compiled, kernel, one_float
from graphwright.array.triton.rows import all_aligned, along_two, multiple, narrow, tanh, wide

SCANNED = 1024
"""Entries of a choice that a program of `dispatch` reads at once."""
ROWS, COLUMNS, INNER = 64, 64, 32
"""Tile of a program, and how many terms of its sums it reads at once."""
TOKENS, CHANNELS = 8, 256
"""Tokens, and channels of each, that a program adds up."""
CLAMP, FACTOR = tl.constexpr(LIMIT), tl.constexpr(SLOPE)


@triton.jit
def _chosen(choice, at, count, expert, experts, columns, MASK: tl.constexpr):
    """Return whether entries `at` choose an expert, their rows and pairs; of a mask, the entries are the rows."""
    there = at < count
    if MASK:
        pair = at.to(tl.int64) * experts + expert
        hit = tl.load(choice + pair, mask=there, other=0) != 0
        return there & hit, at.to(tl.int64), pair
    else:
        hit = tl.load(choice + at, mask=there, other=-1) == expert
        return there & hit, (at // columns).to(tl.int64), at.to(tl.int64)


@compiled
def count_choices(
    choice, counts, count: tl.int32, experts: tl.int32, columns: tl.int32, MASK: tl.constexpr, SCANNED: tl.constexpr
):  # fmt: skip
    """Count the tokens of an expert; a program for each."""
    expert = tl.program_id(0)
    total = tl.zeros([SCANNED], tl.int32)
    for first in range(0, count, SCANNED):
        hit, _, _ = _chosen(choice, first + tl.arange(0, SCANNED), count, expert, experts, columns, MASK)
        total += hit.to(tl.int32)
    tl.store(counts + expert, tl.sum(total, 0).to(tl.int64), mask=expert < experts)


@compiled
def list_choices(
    choice, counts, offsets, rows, pairs, count: tl.int32, experts: tl.int32, columns: tl.int32,
    MASK: tl.constexpr, SCANNED: tl.constexpr,
):  # fmt: skip
    """Write the end of the run of an expert, and its rows and pairs in ascending order; a program for each."""
    expert = tl.program_id(0)
    sums = tl.zeros([SCANNED], tl.int64)
    for first in range(0, expert, SCANNED):
        at = first + tl.arange(0, SCANNED)
        sums += tl.load(counts + at, mask=at < expert, other=0).to(tl.int64)
    start = tl.sum(sums, 0)
    own = tl.load(counts + expert, mask=expert < experts, other=0).to(tl.int64)
    tl.store(offsets + expert + 1, start + own, mask=expert < experts)
    tl.store(offsets, start, mask=expert < 1)
    for first in range(0, count, SCANNED):
        hit, row, pair = _chosen(choice, first + tl.arange(0, SCANNED), count, expert, experts, columns, MASK)
        rank = tl.cumsum(hit.to(tl.int32), 0)
        to = start + rank - 1
        tl.store(rows + to, row, mask=hit)
        tl.store(pairs + to, pair, mask=hit)
        start += tl.sum(hit.to(tl.int32), 0)


def _takes_dispatch(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    return "" if all(t.is_contiguous() for t in (*ins, *outs)) else "an operand is not contiguous"


@kernel("dispatch", lambda outs, ins, attrs: [Spec((attrs["experts"],), int64)], takes=_takes_dispatch)
def dispatch(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Group tokens by expert. Ids of no expert are left out; the CPU raises an error for those that are not -1."""
    (choice,), (offsets, rows, pairs), (counts,), experts = ins, outs, work, attrs["experts"]
    masked, columns = choice.dtype == torch.bool, max(choice.shape[1], 1)
    count = choice.shape[0] if masked else choice.numel()
    constants = {"MASK": masked, "SCANNED": SCANNED}
    of = choice.view(torch.uint8) if masked else choice
    return [
        rows.zero_,
        pairs.zero_,
        Launch(count_choices, (experts,), (of, counts, count, experts, columns), constants),
        Launch(list_choices, (experts,), (of, counts, offsets, rows, pairs, count, experts, columns), constants),
    ]


@triton.jit
def _activated(x, ACT: tl.constexpr):
    """Return the activation of the number ACT in `ACTS`."""
    if ACT == 0:
        return x / (1.0 + tl.exp(-x))
    elif ACT == 1:
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == 2:
        return tanh(x)
    elif ACT == 3:
        return 1.0 / (1.0 + tl.exp(-x))
    elif ACT == 4:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        t = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * t))


@triton.jit
def _matrix(table, expert, experts, which, like, ALIGNED: tl.constexpr):
    """Return the address of a matrix (0 gate, 2 up, 4 down) or bias (1, 3, 5) of an expert."""
    address = tl.load(table + expert * 6 + which, mask=expert < experts, other=0).to(like.dtype)
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def _bias(table, expert, experts, which, like, column, there, BIAS: tl.constexpr):
    """Return entries of a bias of an expert in float32, 0 without biases."""
    if BIAS:
        return tl.load(_matrix(table, expert, experts, which, like, False) + column, mask=there, other=0.0).to(
            tl.float32
        )
    else:
        return tl.zeros(column.shape, tl.float32)


@compiled
def expert_hidden(
    x, offsets, rows, table, sizes, hidden, pairs: tl.int64, tokens: tl.int64, experts: tl.int32, width: tl.int32,
    widest: tl.int32, tiles: tl.int32, x_row: tl.int64,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, KIND: tl.constexpr, ACT: tl.constexpr,
    BIAS: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the hidden layer [pairs, widest] of all runs: a program per (tile of a run, tile of hidden neurons)."""
    width, widest, x_row = multiple(width, ALIGNED), multiple(widest, ALIGNED), multiple(x_row, ALIGNED)
    tile, part = along_two(tiles)
    expert, first, stop = find_group(offsets, tile, experts, pairs, ROWS)
    at = first + tl.arange(0, ROWS)
    present = (at < stop) & (at * 0 + expert < experts)
    token = tl.load(rows + at, mask=present, other=0)
    present = present & (token >= 0) & (token < tokens)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    size = tl.load(sizes + expert, mask=expert < experts, other=0)
    there = column < size
    up_at = _matrix(table, expert, experts, 2, x, ALIGNED) + column.to(tl.int64)[None, :] * width
    gate_at = _matrix(table, expert, experts, 0, x, ALIGNED) + column.to(tl.int64)[None, :] * width
    x_at = x + token[:, None] * x_row
    v = tl.zeros([ROWS, COLUMNS], tl.float32)
    a = tl.zeros([ROWS, COLUMNS], tl.float32)
    if expert < experts:
        for term_at in range(0, width, INNER):
            term = term_at + tl.arange(0, INNER)
            inside = (term < width)[:, None] & there[None, :]
            given = tl.load(x_at + term[None, :], mask=present[:, None] & (term < width)[None, :], other=0.0)
            v += product(given, tl.load(up_at + term[:, None], mask=inside, other=0.0), WIDE)
            if KIND > 0:
                a += product(given, tl.load(gate_at + term[:, None], mask=inside, other=0.0), WIDE)
        v += _bias(table, expert, experts, 3, x, column, there, BIAS)[None, :]
        if KIND > 0:
            a += _bias(table, expert, experts, 1, x, column, there, BIAS)[None, :]
    if KIND == 0:
        made = _activated(v, ACT)
    elif KIND == 1:
        made = _activated(a, ACT) * v
    else:
        low = tl.minimum(a, CLAMP)
        made = (tl.minimum(-tl.minimum(-v, CLAMP), CLAMP) + 1.0) * low / (1.0 + tl.exp(-(low * FACTOR)))
    to = hidden + at[:, None] * widest + column[None, :]
    tl.store(to, narrow(made, hidden), mask=present[:, None] & there[None, :])


@compiled
def expert_results(
    hidden, offsets, table, sizes, out, pairs: tl.int64, experts: tl.int32, width: tl.int32, widest: tl.int32,
    tiles: tl.int32, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, BIAS: tl.constexpr,
    ALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the results [pairs, width] of all runs from their hidden layer; programs as in `expert_hidden`."""
    width, widest = multiple(width, ALIGNED), multiple(widest, ALIGNED)
    tile, part = along_two(tiles)
    expert, first, stop = find_group(offsets, tile, experts, pairs, ROWS)
    at = first + tl.arange(0, ROWS)
    present = (at < stop) & (at * 0 + expert < experts)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    there = column < width
    size = multiple(tl.load(sizes + expert, mask=expert < experts, other=0), ALIGNED)
    down_at = _matrix(table, expert, experts, 4, hidden, ALIGNED) + column.to(tl.int64)[None, :] * size
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for term_at in range(0, size, INNER):
        term = term_at + tl.arange(0, INNER)
        inside = term < size
        given_at = hidden + at[:, None] * widest + term[None, :]
        given = tl.load(given_at, mask=present[:, None] & inside[None, :], other=0.0)
        matrix = tl.load(down_at + term[:, None], mask=inside[:, None] & there[None, :], other=0.0)
        total += product(given, matrix, WIDE)
    if expert < experts:
        total += _bias(table, expert, experts, 5, hidden, column, there, BIAS)[None, :]
    to = out + at[:, None] * width + column[None, :]
    tl.store(to, narrow(total, out), mask=present[:, None] & there[None, :])


@compiled
def invert_pairs(offsets, pairs, index, count: tl.int64, weights: tl.int64, experts: tl.int32, SCANNED: tl.constexpr):
    """Write to `index` [weights] where in the runs each pair is."""
    at = tl.program_id(0).to(tl.int64) * SCANNED + tl.arange(0, SCANNED)
    stop = tl.minimum(tl.load(offsets + experts, mask=experts > 0, other=0), count)
    pair = tl.load(pairs + at, mask=at < stop, other=-1).to(tl.int64)
    tl.store(index + pair, at, mask=(at < stop) & (pair >= 0) & (pair < weights))


@compiled
def add_pairs(
    results, weights, index, out, tokens: tl.int64, columns: tl.int32, width: tl.int32,
    tiles: tl.int32, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Add weights[pair]·results[index[pair]] of each token, in the order of its pairs; index -1 is none."""
    width = multiple(width, ALIGNED)
    tile, part = along_two(tiles)
    token = tile.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    channel = part * CHANNELS + tl.arange(0, CHANNELS)
    present, there = token < tokens, channel < width
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for k in range(0, columns):
        at = tl.load(index + token * columns + k, mask=present, other=-1)
        share = wide(tl.load(weights + token * columns + k, mask=present & (at >= 0), other=0.0))
        inside = (at >= 0)[:, None] & there[None, :]
        made = tl.load(results + at[:, None] * width + channel[None, :], mask=inside, other=0.0)
        total += tl.where((at >= 0)[:, None], wide(made) * share.to(tl.float32)[:, None], 0.0)
    tl.store(
        out + token[:, None] * width + channel[None, :], narrow(total, out), mask=present[:, None] & there[None, :]
    )


def _takes(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    x, _, rows, _, weights, *matrices = ins
    if not all(t.is_contiguous() for t in (*ins, *outs)):
        return "an operand is not contiguous"
    if x.dtype == torch.float64 or weights.dtype == torch.float64:
        return "no kernel for float64"
    if weights.dim() != 2 or weights.shape[0] != x.shape[0] or weights.numel() != rows.numel():
        return "the weights do not have one entry per pair, [N, k]"
    if weights.shape[1] > 64:
        return f"{weights.shape[1]} experts of each token"
    return one_float([x, *matrices, *outs])


def _scratch(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    """Return scratch: hidden layer and results of all pairs, and where each pair is."""
    x, rows, pairs = ins[0], ins[2].sizes[0], ins[4].size
    widest = max(e.up.sizes[0] for e in experts_of(ins[FIRST:], attrs))
    return [Spec((rows, widest), x.dtype), Spec((rows, x.sizes[1]), x.dtype), Spec((pairs,), int64)]


@kernel("expert_mlp", _scratch, takes=_takes)
def expert_mlp(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    (x, offsets, rows, pairs, weights), (out,), (hidden, results, index) = ins[:FIRST], outs, work
    found, (tokens, width), count = experts_of(ins[FIRST:], attrs), x.shape, len(rows)
    experts, sizes = len(found), [e.up.shape[0] for e in found]
    table = torch.tensor([[0 if t is None else t.data_ptr() for t in e] for e in found]).to(x.device)
    inner = torch.tensor(sizes).to(x.device)
    matrices = [t for e in found for t in (e.gate, e.up, e.down) if t is not None]
    aligned = all_aligned(width, *sizes) and all(t.data_ptr() % 16 == 0 for t in matrices)
    shared: dict[str, Any] = {"ROWS": ROWS, "COLUMNS": COLUMNS, "INNER": INNER, "BIAS": attrs["bias"],
                              "ALIGNED": aligned, "WIDE": knobs.runtime.interpret}  # fmt: skip
    act = {"KIND": KINDS.index(attrs["kind"]), "ACT": ACTS.index(attrs["act"])}
    half = COLUMNS if x.element_size() == 2 and aligned else COLUMNS // 2  # two sums; more addresses if not aligned
    tiles, columns, widest = -(-count // ROWS) + experts, weights.shape[1], hidden.shape[1]
    first = (x, offsets, rows, table, inner, hidden, count, tokens, experts, width, widest, tiles, width)
    second = (hidden, offsets, table, inner, results, count, experts, width, widest, tiles)
    inverse = (offsets, pairs, index, count, weights.numel(), experts)
    last = -(-tokens // TOKENS)
    total = (results, weights, index, out, tokens, columns, width, last)
    added = {"TOKENS": TOKENS, "CHANNELS": CHANNELS, "ALIGNED": all_aligned(width)}
    return [
        lambda: index.fill_(-1),
        Launch(invert_pairs, (-(-count // SCANNED),), inverse, {"SCANNED": SCANNED}),
        Launch(
            expert_hidden, (tiles * -(-widest // half),), first, {**shared, **act, "COLUMNS": half}, 4, 3, ALL_REGISTERS
        ),
        Launch(expert_results, (tiles * -(-width // COLUMNS),), second, shared, stages=3),
        Launch(add_pairs, (last * -(-width // CHANNELS),), total, added),
    ]
