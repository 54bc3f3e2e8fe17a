"""Attention over selected blocks: lists of the same length are processed together, each over its own gathered keys.

The arithmetic of a list depends on no other list, so later tokens leave the bits of earlier results unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

import torch

from graphwright.array.backend import Attrs, Call, Needs
from graphwright.array.cpu.by_vm import by_vm, work_of
from graphwright.array.cpu.kernel import Tensors, kernel
from graphwright.array.formulas.selected import STEEPEST
from graphwright.array.spec import Spec
from graphwright.array.vm.encode import selected_attention as forms

GATHERED = 1 << 19
"""Numbers that the gathered keys of one batch of lists may have, about 2 MiB of float32."""


class _Lists(NamedTuple):
    """Some lists of equal length c, with their queries and keys.

    Attributes:
        rows: flat numbers of the lists [m], of [N, G, R].
        blocks: flat numbers of their blocks [m, c], of [N, G, J].
        columns: the columns of these blocks [m, c].
        queries: flat numbers of their queries [m, tile], of [N, G, T], and which of them exist [m, tile].
        p: g·e^(s - max), or with `wide` e^(s - max) [m, tile·H/G, c·block], 0 for keys that are not visible.
        gates: [m, 1, c·block]; total: Σ g·e^(s - max) [m, tile·H/G, 1], 1 where it is 0.
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    columns: torch.Tensor
    queries: torch.Tensor
    exists: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    powers: torch.Tensor
    gates: torch.Tensor
    total: torch.Tensor


class _Selected:
    """The operands of attention over selected blocks, in float32 or wider; keys are padded to whole blocks."""

    def __init__(self, ins: Tensors, attrs: Attrs) -> None:
        q, k, v, self.blocks, gates, *start = ins
        self.wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.batch, self.heads, self.length, self.width = q.shape
        self.groups, self.keys = k.shape[1], k.shape[2]
        self.repeats = self.heads // self.groups
        self.block, self.tile, self.scale = attrs["block"], attrs["tile"], attrs["scale"]
        self.count = -(-self.keys // self.block)
        self.start = int(start[0]) if start else self.keys - self.length
        self.q = self.of_queries(q)
        self.k, self.v = self.of_keys(k), self.of_keys(v)
        self.lists = self.blocks.reshape(-1, self.blocks.shape[3]).long()
        self.gates = gates.reshape(self.lists.shape).to(self.wide)

    def of_queries(self, t: torch.Tensor) -> torch.Tensor:
        """Return values of queries [N, H, T, d] as [N·G·T, H / G, d]."""
        parted = t.to(self.wide).reshape(self.batch, self.groups, self.repeats, self.length, t.shape[3])
        return parted.transpose(2, 3).reshape(-1, self.repeats, t.shape[3])

    def from_queries(self, t: torch.Tensor) -> torch.Tensor:
        """Return values [N·G·T, H / G, d] as [N, H, T, d]."""
        parted = t.view(self.batch, self.groups, self.length, self.repeats, t.shape[2])
        return parted.transpose(2, 3).reshape(self.batch, self.heads, self.length, t.shape[2])

    def of_keys(self, t: torch.Tensor) -> torch.Tensor:
        """Return values of keys [N, G, S, d] as blocks [N·G·J, block, d], padded by zeros."""
        padding = self.count * self.block - self.keys
        padded = torch.nn.functional.pad(t.to(self.wide), (0, 0, 0, padding))
        return padded.reshape(-1, self.block, t.shape[3])

    def from_keys(self, t: torch.Tensor) -> torch.Tensor:
        """Return values of blocks [N·G·J, block, d] as [N, G, S, d]."""
        return t.view(self.batch, self.groups, -1, t.shape[2])[:, :, : self.keys]

    def batches(self, listed: torch.Tensor) -> Iterator[_Lists]:
        """Yield the lists of the blocks where `listed` [N·G·R, K] is true, those of the same length together."""
        counts, order = listed.sum(1), (~listed).to(torch.int8).argsort(dim=1, stable=True)
        for count in counts.unique().tolist():
            if count:
                rows = (counts == count).nonzero().view(-1)
                step = max(GATHERED // (count * self.block * max(self.width, self.v.shape[2])), 1)
                for some in rows.split(step):
                    yield self.batch_of(some, order[some, :count])

    def batch_of(self, rows: torch.Tensor, columns: torch.Tensor) -> _Lists:
        """Return what `_Lists` describes for some lists and their columns [m, c]."""
        parts = self.lists.shape[0] // (self.batch * self.groups)
        part, number = rows // parts, rows % parts
        token = number.unsqueeze(1) * self.tile + torch.arange(self.tile, device=rows.device)
        exists = token < self.length
        token = token.clamp(max=self.length - 1)
        queries = part.unsqueeze(1) * self.length + token
        own = self.lists[rows].gather(1, columns)
        if own.numel() and int(own.max()) >= self.count:
            _lacks_block(own, self.count)
        blocks = part.unsqueeze(1) * self.count + own
        m, c = own.shape
        q = self.q[queries].reshape(m, -1, self.width)
        k, v = (t[blocks].view(m, c * self.block, t.shape[2]) for t in (self.k, self.v))
        at = (own.unsqueeze(2) * self.block + torch.arange(self.block, device=own.device)).view(m, 1, -1)
        seen = (at <= (token + self.start).repeat_interleave(self.repeats, 1).unsqueeze(2)) & (at < self.keys)
        gates = self.gates[rows].gather(1, columns).repeat_interleave(self.block, 1).unsqueeze(1)
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(self.scale).masked_fill_(~seen, -inf)
        most = scores.masked_fill(gates == 0, -inf).amax(2, keepdim=True)
        powers = (scores - most.masked_fill(most == -inf, 0.0)).clamp_(max=STEEPEST).exp_()
        total = (powers * gates).sum(2, keepdim=True)
        return _Lists(rows, blocks, columns, queries, exists, q, k, v, powers, gates, total)

    def blocks_read(self) -> torch.Tensor:
        """Return which blocks have an effect on the result [N·G·R, K]."""
        return (self.lists >= 0) & (self.gates != 0)


def _lacks_block(blocks: torch.Tensor, count: int) -> None:
    raise IndexError(f"a block is out of range: expected below {count}, got {int(blocks.max())}")


def _native(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call | None:
    blocks, count = ins[3], -(-ins[1].shape[2] // attrs["block"])
    return by_vm(forms.SDPA_SELECTED, outs, ins, attrs, work, lambda: _lacks_block(blocks, count))


def _scratch(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    return work_of(forms.SDPA_SELECTED, outs, ins, attrs)


_NEEDS = Needs(reads=(3, 4), allocates=True)


@kernel("sdpa_selected", _scratch, needs=_NEEDS)
def sdpa_selected(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Attend over the blocks with a gate above 0. Raises: IndexError for a block that does not exist."""
    (out,) = outs
    native = _native(outs, ins, attrs, work)

    def run() -> None:
        s = _Selected(ins, attrs)
        made = torch.zeros(s.q.shape[:2] + s.v.shape[2:], dtype=s.wide, device=s.q.device)
        for t in s.batches(s.blocks_read()):
            mixed = torch.bmm(t.powers * t.gates, t.v) / t.total.masked_fill(t.total == 0, 1.0)
            made[t.queries[t.exists]] = mixed.view(*t.queries.shape, s.repeats, -1)[t.exists]
        out.copy_(s.from_queries(made))

    return native or run


@kernel("sdpa_selected_backward", _scratch, needs=_NEEDS)
def sdpa_selected_backward(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Compute the gradients; those of gates for all blocks of the lists, ghosts included."""
    *given, out, g = ins
    native = _native(outs, ins, attrs, work)

    def run() -> None:
        s = _Selected(given, attrs)
        grad, made = s.of_queries(g), s.of_queries(out)
        inner = (grad * made).sum(2, keepdim=True)
        dq, dk, dv = (torch.zeros_like(t) for t in (s.q, s.k, s.v))
        dgates = torch.zeros_like(s.gates)
        for t in s.batches(s.lists >= 0):
            m, c = t.blocks.shape
            here = t.exists.repeat_interleave(s.repeats, 1).unsqueeze(2)
            gives = (grad[t.queries] * t.exists[..., None, None]).view(m, -1, s.v.shape[2])
            known = t.total > 0
            powers = (t.powers / t.total.masked_fill(~known, 1.0)).masked_fill_(~(known & here), 0.0)
            slope = torch.bmm(gives, t.v.transpose(1, 2)) - inner[t.queries].view(m, -1, 1)
            each = powers * slope
            dgates[t.rows.unsqueeze(1), t.columns] = each.view(m, -1, c, s.block).sum((1, 3))
            powers, each = powers * t.gates, each * t.gates * s.scale
            moved = torch.bmm(each, t.k).view(*t.queries.shape, s.repeats, -1)
            dq[t.queries[t.exists]] = moved[t.exists]
            for total, left, right in ((dk, each, t.q), (dv, powers, gives)):
                part = torch.bmm(left.transpose(1, 2), right).view(m * c, s.block, -1)
                total.index_add_(0, t.blocks.view(-1), part)
        found = (s.from_queries(dq), s.from_keys(dk), s.from_keys(dv), dgates.view(given[4].shape))
        for target, value in zip(outs, found, strict=True):
            target.copy_(value)

    return native or run
