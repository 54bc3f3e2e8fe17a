"""Cached rows in blocks of a pool: what runs where the VM does not.

A tile of some blocks is looked at at a time, with a running maximum and sum (Milakov and Gimelshein 2018, "Online
normalizer calculation for softmax"), so memory does not grow with the length. Table and lengths are read where they
lie, when the kernel runs: a graph of a device may hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, carry, kernel
from graphwright.array.dtype import bool_, float32
from graphwright.array.spec import Spec

_TILE = 256  # keys that are looked at at once, in whole blocks


def _known(pages: torch.Tensor, blocks: int) -> torch.Tensor:
    """Raises: IndexError unless all of them are blocks of the pool."""
    if len(pages) and (int(pages.min()) < 0 or int(pages.max()) >= blocks):
        raise IndexError("a row has no block in the table")
    return pages


def _pages(table: torch.Tensor, first: int, stop: int, block: int, blocks: int) -> torch.Tensor:
    """The blocks that hold the positions `first`.. of one sequence. Raises: IndexError for one without a block."""
    if stop > first and (stop - 1) // block >= len(table):
        raise IndexError("a row lies behind the last block of the table")
    return _known(table[first // block : -(-stop // block)], blocks)


@kernel("kv_append_paged")
def kv_append_paged(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Raises IndexError for a row without a block, before anything is written."""
    pool, rows, table, lengths = ins
    out, count, block = outs[0], rows.shape[2], pool.shape[2]

    def run() -> None:
        starts = lengths.tolist()
        found = [
            _pages(table[b], start, start + count, block, pool.shape[0]).tolist() if start >= 0 else ()
            for b, start in enumerate(starts)
        ]
        for call in carry(outs, [pool]):
            call()
        for b, pages in enumerate(found):
            done, inside = 0, starts[b] % block
            for page in pages:
                some = min(block - inside, count - done)
                out[page, :, inside : inside + some].copy_(rows[b, :, done : done + some])
                done, inside = done + some, 0

    return [run]


def _scratch(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    q, k, v = ins[:3]
    (_, groups, block, deep), wide = k.sizes, v.sizes[3]
    blocks = max(_TILE // block, 1)
    queries, rows, keys = q.sizes[2], q.sizes[1] // groups * q.sizes[2], blocks * block
    kind = float32 if q.dtype.is_low else q.dtype  # statistics are no 16-bit numbers
    return [
        Spec((blocks, groups, block, deep), k.dtype),
        Spec((blocks, groups, block, wide), v.dtype),
        *(Spec((groups, n), kind) for n in (keys * deep, keys * wide, rows * deep, rows * keys)),
        *(Spec((groups, rows, n), kind) for n in (1, 1, 1, 1, 1, wide, wide)),
        *(Spec((queries * keys,), bool_) for _ in range(2)),
    ]


@kernel("sdpa_paged", work=_scratch)
def sdpa_paged(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """One sequence after the other, tile by tile in the order of its table."""
    q, k, v, table, lengths = ins
    held_k, held_v, tile_k, tile_v, asked, products, best, top, kept, whole, part, mixed, more, hidden, far = work
    out, window, softcap = outs[0], attrs["window"], attrs["softcap"]
    (count, groups, block, deep), queries = k.shape, q.shape[2]
    tile, rows = held_k.shape[0] * block, best.shape[1]
    ahead = torch.arange(tile) - torch.arange(queries).unsqueeze(1)  # how far a key stands in front of a query
    lowest = torch.finfo(best.dtype).min

    def rows_of(held: torch.Tensor, flat: torch.Tensor, pages: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        n, width = len(pages), pool.shape[3]
        torch.index_select(pool, 0, pages, out=held[:n])
        lies = flat.view(-1)[: groups * n * block * width].view(groups, n, block, width)
        lies.copy_(held[:n].transpose(0, 1))  # one head's rows together, in the dtype that is computed in
        return lies.view(groups, n * block, width)

    def look(b: int, start: int, low: int, high: int) -> None:
        pages = _pages(table[b], low, high, block, count)
        n = high - low
        keys, values = (rows_of(h, t, pages, p)[:, :n] for h, t, p in ((held_k, tile_k, k), (held_v, tile_v, v)))
        s = products.view(-1)[: groups * rows * n].view(groups, rows, n)
        torch.bmm(asked.view(groups, rows, deep), keys.transpose(1, 2), out=s)
        if softcap is not None:
            s.div_(softcap).tanh_().mul_(softcap)
        if queries > 1 or window is not None:
            mask, away = (t[: queries * n].view(queries, n) for t in (hidden, far))
            torch.gt(ahead[:, :n], start - low, out=mask)
            if window is not None:
                mask |= torch.le(ahead[:, :n], start - low - window, out=away)
            s.view(groups, -1, queries, n).masked_fill_(mask, -inf)
        torch.amax(s, -1, True, out=top)
        torch.maximum(best, top, out=top).clamp_(min=lowest)  # of a tile that a query sees nothing of: not -inf
        torch.sub(best, top, out=kept).exp_()
        s.sub_(top).exp_()
        torch.sum(s, -1, True, out=part)
        torch.bmm(s, values, out=more)
        whole.mul_(kept).add_(part)
        mixed.mul_(kept).add_(more)
        best.copy_(top)

    def run() -> None:
        for b, start in enumerate(lengths.tolist()):
            if start < 0:
                out[b].zero_()
                continue
            torch.mul(q[b].view(groups, rows, deep), attrs["scale"], out=asked.view(groups, rows, deep))
            best.fill_(-inf)
            whole.zero_()
            mixed.zero_()
            stop = start + queries
            first = 0 if window is None else max(start + 1 - window, 0) // tile * tile
            for low in range(first, stop, tile):
                look(b, start, low, min(low + tile, stop))
            out[b].view(groups, rows, -1).copy_(mixed.div_(whole))

    return [run]
