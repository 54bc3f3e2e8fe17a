"""Attention of routed heads: the tokens of a head in a sequence are packed, and attend in tiles of queries."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import log, sqrt
from typing import Any, NamedTuple

import torch

from graphwright.array.backend import Attrs, Call, Needs
from graphwright.array.cpu.experts import checked_runs
from graphwright.array.cpu.kernel import Tensors, kernel
from graphwright.array.formulas.experts import FIRST_HEAD, HEAD_WIDTH

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


class _Heads:
    """What forward and backward share. All is computed in float32 or wider."""

    def __init__(self, ins: Tensors, theta: float | None) -> None:
        x, self.offsets, self.rows, self.pairs, weights, self.positions = ins[:FIRST_HEAD]
        self.wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        self.batch, self.time, width = x.shape
        self.x, self.weights = x.view(-1, width), weights.view(-1)
        self.theta, self.matrices = theta, ins[FIRST_HEAD:]

    def head(self, e: int) -> list[torch.Tensor]:
        """Return q, k, v, o of a head."""
        return [m.to(self.wide) for m in self.matrices[e * HEAD_WIDTH : (e + 1) * HEAD_WIDTH]]

    def packed(self) -> Iterator[tuple[int, list[torch.Tensor], _Packed]]:
        """Yield (head, its matrices, its tokens) for each head and sequence that has some."""
        ends = checked_runs(self.offsets, self.rows, self.pairs, len(self.x), len(self.weights))
        starts = torch.arange(1, self.batch) * self.time
        for e, (a, b) in enumerate(pairwise(ends)):
            if a == b:
                continue
            rows, pairs, matrices = self.rows[a:b], self.pairs[a:b], self.head(e)
            bounds = [0, *torch.searchsorted(rows, starts).tolist(), b - a]
            for i, j in pairwise(bounds):
                if i < j:
                    yield e, matrices, self.pack(rows[i:j], pairs[i:j], matrices)

    def pack(self, rows: torch.Tensor, pairs: torch.Tensor, matrices: list[torch.Tensor]) -> _Packed:
        """Gather the tokens of one sequence and make queries, keys and values."""
        x = self.x[rows].to(self.wide)
        q, k, v = (x @ m.t() for m in matrices[:3])
        if self.theta is None:
            return _Packed(rows, pairs, x, None, q, k, v)
        own, half = self.positions[int(rows[0]) // self.time if len(self.positions) > 1 else 0], q.shape[1] // 2
        powers = torch.arange(half, dtype=self.wide) * (-log(self.theta) / half)
        angle = own[rows % self.time].to(self.wide).unsqueeze(1) * powers.exp()
        cos, sin = angle.cos(), angle.sin()
        return _Packed(rows, pairs, x, (cos, sin), _rotated(q, cos, sin), _rotated(k, cos, sin), v)

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
        total = torch.zeros(heads.x.shape, dtype=heads.wide)
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
        sums = {slot: torch.zeros(out.shape, dtype=heads.wide) for slot, out in found.items()}
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
