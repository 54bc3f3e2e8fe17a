"""Cached rows in blocks of a pool: what runs where the VM does not. The table is read on the host."""

from __future__ import annotations

from dataclasses import replace

import torch

from graphwright.array.backend import Attrs, Call, Needs
from graphwright.array.cpu.kernel import Tensors, carry, kernel

_PLACES = Needs(reads=(2, 3))


def _places(table: torch.Tensor, first: int, count: int, block: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Block and row of positions `first`.. of one sequence. Raises: IndexError for one without a block."""
    at = torch.arange(first, first + count)
    if count and int(at[-1]) // block >= len(table):
        raise IndexError("a row lies behind the last block of the table")
    pages = table[at // block].long()
    if count and (int(pages.min()) < 0 or int(pages.max()) >= blocks):
        raise IndexError("a row has no block in the table")
    return pages, at % block


@kernel("kv_append_paged", needs=_PLACES)
def kv_append_paged(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Raises IndexError for a row without a block, before anything is written."""
    pool, rows, table, lengths = ins
    out = outs[0]

    def run() -> None:
        starts = lengths.tolist()
        places = [
            _places(table[b], start, rows.shape[2], pool.shape[2], pool.shape[0]) if start >= 0 else None
            for b, start in enumerate(starts)
        ]
        for call in carry(outs, [pool]):
            call()
        for b, place in enumerate(places):
            if place is not None:
                out[place[0], :, place[1]] = rows[b].transpose(0, 1)

    return [run]


@kernel("sdpa_paged", needs=replace(_PLACES, allocates=True))
def sdpa_paged(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Gathers the rows of one sequence at a time."""
    q, k, v, table, lengths = ins
    out, groups = outs[0], k.shape[1]

    def run() -> None:
        for b, start in enumerate(lengths.tolist()):
            if start < 0:
                out[b].zero_()
                continue
            queries = q.shape[2]
            pages, inside = _places(table[b], 0, start + queries, k.shape[2], k.shape[0])
            keys, values = (t[pages, :, inside].transpose(0, 1) for t in (k, v))
            scores = attrs["scale"] * (q[b].view(groups, -1, q.shape[3]) @ keys.transpose(1, 2))
            scores = scores.view(q.shape[1], queries, -1)
            at, place = torch.arange(start + queries), start + torch.arange(queries).unsqueeze(1)
            hidden = at > place
            if attrs["window"] is not None:
                hidden |= at <= place - attrs["window"]
            weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
            torch.bmm(weights.view(groups, -1, weights.shape[2]), values, out=out[b].view(groups, -1, out.shape[3]))

    return [run]
