"""Attention of routed heads: the tokens of a head in a sequence are packed, and attend in tiles of queries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import log, sqrt
from typing import Any, NamedTuple

import torch

from graphwright.array.backend import Attrs, Call, Needs
from graphwright.array.cpu.attention import mapped_pages
from graphwright.array.cpu.experts import checked_runs
from graphwright.array.cpu.kernel import Tensors, kernel
from graphwright.array.formulas.experts import CACHED_WIDTH, ENTRY_WIDTH, FIRST_ENTRY, FIRST_HEAD, HEAD_WIDTH

QUERIES = 128
"""Queries of a tile: the keys after its last query are not read."""


class _Packed(NamedTuple):
    """The tokens of one head in one sequence: flat rows, pairs, and what was computed from them."""

    rows: torch.Tensor
    pairs: torch.Tensor
    x: torch.Tensor  # [S, C]
    turn: tuple[torch.Tensor, torch.Tensor] | None  # cos and sin [S, d/2]
    q: torch.Tensor  # [S, d], rotated, as k
    k: torch.Tensor
    v: torch.Tensor


class _Tokens:
    """Tokens of sequences, and the runs of heads. All is computed in float32 or wider."""

    def __init__(self, x: torch.Tensor, runs: Tensors, positions: torch.Tensor, theta: float | None) -> None:
        self.offsets, self.rows, self.pairs = runs
        self.wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        self.batch, self.time, width = x.shape
        self.x, self.positions, self.theta = x.view(-1, width), positions, theta

    def runs(self, pairs: int) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """Yield (head, sequence, flat rows, pairs) for each head and sequence that has tokens; pairs are below `pairs`.

        The rows ascend.
        """
        ends = checked_runs(self.offsets, self.rows, self.pairs, len(self.x), pairs)
        starts = torch.arange(1, self.batch, device=self.rows.device) * self.time
        for e, (a, b) in enumerate(pairwise(ends)):
            if a == b:
                continue
            rows, own = self.rows[a:b], self.pairs[a:b]
            bounds = [0, *torch.searchsorted(rows, starts).tolist(), b - a]
            for sequence, (i, j) in enumerate(pairwise(bounds)):
                if i < j:
                    yield e, sequence, rows[i:j], own[i:j]

    def turn(self, sequence: int, rows: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return cos and sin [S, width/2] of the angles of a sequence's tokens; None if nothing is rotated."""
        if self.theta is None:
            return None
        own, half = self.positions[sequence if len(self.positions) > 1 else 0], width // 2
        powers = torch.arange(half, dtype=self.wide, device=own.device) * (-log(self.theta) / half)
        angle = own[rows % self.time].to(self.wide).unsqueeze(1) * powers.exp()
        return angle.cos(), angle.sin()


class _Heads(_Tokens):
    """What forward and backward share."""

    def __init__(self, ins: Tensors, theta: float | None) -> None:
        super().__init__(ins[0], ins[1:4], ins[5], theta)
        self.weights, self.matrices = ins[4].view(-1), ins[FIRST_HEAD:]

    def head(self, e: int) -> list[torch.Tensor]:
        """Return q, k, v, o of a head."""
        return [m.to(self.wide) for m in self.matrices[e * HEAD_WIDTH : (e + 1) * HEAD_WIDTH]]

    def packed(self) -> Iterator[tuple[int, list[torch.Tensor], _Packed]]:
        """Yield (head, its matrices, its tokens) for each head and sequence that has some."""
        for e, sequence, rows, pairs in self.runs(len(self.weights)):
            matrices = self.head(e)
            x = self.x[rows].to(self.wide)
            q, k, v = (x @ m.t() for m in matrices[:3])
            turn = self.turn(sequence, rows, q.shape[1])
            if turn is not None:
                q, k = (_rotated(t, *turn) for t in (q, k))
            yield e, matrices, _Packed(rows, pairs, x, turn, q, k, v)

    def share(self, t: _Packed) -> torch.Tensor:
        """Return the weights of the tokens [S, 1]."""
        return self.weights[t.pairs].to(self.wide).unsqueeze(1)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, 1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), 1)


def _tiles(t: _Packed) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Yield (queries, keys, shares of attention [queries, keys]) in tiles of queries."""
    scale = 1 / sqrt(t.q.shape[1])
    for start in range(0, len(t.q), QUERIES):
        queries, keys = slice(start, min(start + QUERIES, len(t.q))), slice(0, min(start + QUERIES, len(t.q)))
        scores = (t.q[queries] @ t.k[keys].t()).mul_(scale)
        scores[:, queries].masked_fill_(torch.ones_like(scores[:, queries], dtype=torch.bool).triu_(1), -torch.inf)
        yield queries, keys, scores.softmax(1)


_NEEDS = Needs(reads=(1, 2, 3, 5), allocates=True)


@kernel("routed_attention", needs=_NEEDS)
def routed_attention(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    heads, (out,) = _Heads(ins, attrs["theta"]), outs

    def run() -> None:
        total = torch.zeros(heads.x.shape, dtype=heads.wide, device=out.device)
        for _, (*_, o), t in heads.packed():
            mixed = torch.cat([shown @ t.v[keys] for _, keys, shown in _tiles(t)])
            total.index_add_(0, t.rows, (mixed @ o.t()).mul_(heads.share(t)))
        out.copy_(total.view(out.shape))

    return run


@kernel("routed_attention_backward", needs=Needs(reads=(2, 3, 4, 6), allocates=True))
def routed_attention_backward(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    heads, g = _Heads(ins[1:], attrs["theta"]), ins[0].view(-1, ins[0].shape[-1])
    found: dict[int, Any] = dict(zip(attrs["wanted"], outs, strict=True))

    def run() -> None:
        sums = {slot: torch.zeros(out.shape, dtype=heads.wide, device=out.device) for slot, out in found.items()}
        for e, matrices, t in heads.packed():
            _gradients(sums, FIRST_HEAD + e * HEAD_WIDTH, matrices, t, g[t.rows].to(heads.wide), heads.share(t))
        for slot, out in found.items():
            out.copy_(sums[slot])

    return run


def _gradients(
    sums: dict[int, torch.Tensor], first: int, matrices: list[torch.Tensor], t: _Packed, g: torch.Tensor,
    share: torch.Tensor,
) -> None:  # fmt: skip
    """Add the gradients of one head in one sequence; `sums` maps the number of an operand to its gradient."""
    q, k, v, o = matrices
    back = (g @ o).mul_(share)
    dq, dk, dv = (torch.zeros_like(x) for x in (t.q, t.k, t.v))
    mixed = torch.empty_like(t.v)
    for queries, keys, shown in _tiles(t):
        mixed[queries] = shown @ t.v[keys]
        dv[keys] += shown.t() @ back[queries]
        slope = back[queries] @ t.v[keys].t()
        slope = shown * (slope - (slope * shown).sum(1, keepdim=True)) / sqrt(t.q.shape[1])
        dq[queries] = slope @ t.k[keys]
        dk[keys] += slope.t() @ t.q[queries]
    if t.turn is not None:
        dq, dk = (_rotated(x, t.turn[0], -t.turn[1]) for x in (dq, dk))
    if 4 in sums:
        sums[4].view(-1)[t.pairs] = ((mixed @ o.t()) * g).sum(1).to(sums[4].dtype)
    for slot, grad in enumerate((dq, dk, dv), first):
        if slot in sums:
            sums[slot] += grad.t() @ t.x
    if first + 3 in sums:
        sums[first + 3] += (g * share).t() @ mixed
    if 0 in sums:
        sums[0].view(-1, t.x.shape[1]).index_add_(0, t.rows, dq @ q + dk @ k + dv @ v)


@kernel("routed_entries", needs=Needs(reads=(1, 2, 3, 4), allocates=True))
def routed_entries(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    tokens, matrices = _Tokens(ins[0], ins[1:4], ins[4], attrs["theta"]), ins[FIRST_ENTRY:]
    keys, values = (out.view(-1, out.shape[3]) for out in outs)
    key_columns, value_columns = (_slices(matrices[i::ENTRY_WIDTH], 0) for i in range(ENTRY_WIDTH))

    def run() -> None:
        for out in (keys, values):
            out.zero_()
        for e, sequence, rows, _ in tokens.runs(len(tokens.rows)):
            k, v = (m.to(tokens.wide) for m in matrices[e * ENTRY_WIDTH : (e + 1) * ENTRY_WIDTH])
            x = tokens.x[rows].to(tokens.wide)
            turn, key = tokens.turn(sequence, rows, len(k)), x @ k.t()
            keys[rows, key_columns[e]] = (key if turn is None else _rotated(key, *turn)).to(keys.dtype)
            keys[rows, key_columns[-1].stop + e] = 1.0
            values[rows, value_columns[e]] = (x @ v.t()).to(values.dtype)

    return run


@kernel("routed_attention_cached", needs=Needs(reads=(1, 2, 3, 5, 8, 9), allocates=True))
def routed_attention_cached(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Attend over the entries that a head has in the cache. Raises: IndexError if a block is missing."""
    x, offsets, rows, pairs, weights, positions, keys, values, table, lengths, *matrices = ins
    tokens, (out,), weights = _Tokens(x, (offsets, rows, pairs), positions, attrs["theta"]), outs, weights.view(-1)
    keys, values, (blocks, _, block, _) = keys.view(-1, keys.shape[3]), values.view(-1, values.shape[3]), keys.shape
    key_columns, value_columns = _slices(matrices[::CACHED_WIDTH], 0), _slices(matrices[1::CACHED_WIDTH], 1)

    def entries(sequence: int, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the flat indices [n] of a sequence's entries in the cache, and which heads have them, bool [n, E]."""
        stop = start + tokens.time
        found = mapped_pages(table[sequence], 0, stop, block, blocks).long().unsqueeze(1) * block
        found = found + torch.arange(block, device=table.device)
        slots = found.view(-1)[:stop]
        return slots, keys[:, key_columns[-1].stop :][slots] > 0.5

    def run() -> None:
        total = torch.zeros(tokens.x.shape, dtype=tokens.wide, device=out.device)
        starts = lengths.tolist()
        known = {s: entries(s, start) for s, start in enumerate(starts) if start >= 0}
        for e, sequence, rows, pairs in tokens.runs(len(weights)):
            if sequence not in known:
                continue
            slots, used = known[sequence]
            q, o = (m.to(tokens.wide) for m in matrices[e * CACHED_WIDTH : (e + 1) * CACHED_WIDTH])
            turn, query = tokens.turn(sequence, rows, len(q)), tokens.x[rows].to(tokens.wide) @ q.t()
            query = query if turn is None else _rotated(query, *turn)
            (at,) = used[:, e].nonzero(as_tuple=True)
            k, v = (
                t[:, part[e]][slots[at]].to(tokens.wide) for t, part in ((keys, key_columns), (values, value_columns))
            )
            scores = (query @ k.t()).mul_(1 / sqrt(query.shape[1]))
            scores.masked_fill_(at > (rows % tokens.time + starts[sequence]).unsqueeze(1), -torch.inf)
            share = weights[pairs].to(tokens.wide).unsqueeze(1)
            total.index_add_(0, rows, (scores.softmax(1) @ v @ o.t()).mul_(share))
        out.copy_(total.view(out.shape))

    return run


def _slices(matrices: Sequence[torch.Tensor], axis: int) -> list[slice]:
    """Return the columns of each head in rows that hold the results of all: its matrix has as many along `axis`."""
    ends = list(accumulate((m.shape[axis] for m in matrices), initial=0))
    return [slice(a, b) for a, b in pairwise(ends)]
