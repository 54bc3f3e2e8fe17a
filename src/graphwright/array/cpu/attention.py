"""Rotary embedding and scaled dot-product attention, forward and backward, one batch element at a time.

The score matrix of a batch element stays in cache. Query heads that share a key head read it without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, copy_to_outputs, kernel, number, statistic
from graphwright.array.dtype import bool_, int64
from graphwright.array.spec import Spec


@kernel("rope_dynamic", host=True)
def rope_dynamic(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Compute the frequencies of dynamic RoPE from the largest position, which the host reads."""
    positions, base = ins
    dim, theta, factor, original = 2 * base.shape[0], attrs["theta"], attrs["factor"], attrs["original"]
    exponent = torch.arange(0, dim, 2, dtype=base.dtype) / dim

    def run() -> None:
        length = int(positions.max()) + 1
        if length <= original:
            outs[0].copy_(base)
            return
        stretched = theta * (factor * length / original - (factor - 1)) ** (dim / (dim - 2))
        outs[0].copy_(1.0 / stretched**exponent)

    return run


@kernel("rope_longer", host=True)
def rope_longer(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Copy operand `long` if the largest position is at least attribute `original`, else `short`; the host reads it."""
    positions, short, long = ins
    return lambda: outs[0].copy_(long if int(positions.max()) + 1 > attrs["original"] else short)


@kernel("rope", work=lambda o, i, a: [Spec((*i[0].shape[:-1], i[1].shape[-1]), o[0].dtype)])
def rope(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    x, out, other = ins[0], outs[0], work[0]
    cos, sin = (t.unsqueeze(1) for t in ins[1:3])  # [B, 1, T, d/2], the same for all heads
    half = cos.shape[-1]
    apart = attrs["style"] == "half"
    first, second = (slice(half), slice(half, 2 * half)) if apart else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    a, b, out_a, out_b = x[..., first], x[..., second], out[..., first], out[..., second]
    rest, out_rest, rests = x[..., 2 * half :], out[..., 2 * half :], 2 * half < x.shape[-1]

    def run() -> None:
        torch.mul(a, cos, out=out_a).sub_(torch.mul(b, sin, out=other))
        torch.mul(b, cos, out=out_b).add_(torch.mul(a, sin, out=other))
        if rests:
            out_rest.copy_(rest)

    return run


class _Attention:
    """Attention probabilities, computed in scratch for one batch element at a time.

    Query i, at position p = start + i, sees key j if j is no padding, j <= p (if causal) and j > p - w (for window w).
    A bias is added to the scores; where it is false or -inf, it hides a key. A sink is the score of one more key.
    With a softcap, `slopes` receives the derivatives of the scores after it by those before.
    """

    def __init__(self, ins: Tensors, attrs: Attrs, work: Tensors, slopes: torch.Tensor | None = None) -> None:
        (q, k), extra = ins[:2], dict(zip(attrs["optional"], ins[3:], strict=False))
        self.mask, self.blind, self.padded, self.base, self.row, self.edge, self.outside, self.bound = work[:8]
        self.peak, self.total, self.wide, self.low = *work[8:11], work[11] if len(work) > 11 else None
        self.p = self.wide if self.low is None else self.low
        self.grouped = _grouped(self.p, k.shape[1])
        self.scale, self.causal, window, cap = (attrs[name] for name in ("scale", "causal", "window", "softcap"))
        self.cap, self.one, self.slopes = None if cap is None else number(cap, self.p), number(1.0, self.p), slopes
        queries, keys = q.shape[-2], k.shape[-2]
        self.column, self.first = torch.arange(keys), torch.arange(queries).unsqueeze(1)
        self.start, self.width = extra.get("q_start"), None if window is None else number(window, self.column)
        if self.start is None:
            self.row = self.first + (keys - queries)
        self.padding = [p.unsqueeze(0) for p in extra["key_mask"]] if "key_mask" in extra else []
        # of a causal mask alone, with a known start, query i sees at least its own key, if there are that many keys
        late = self.causal and ("q_start" in extra or queries > keys)
        self.some_blind = late or bool(extra.keys() & {"key_mask", "bias"})
        sinks = extra.get("sinks") if keys else None
        self.sinks = None if sinks is None else sinks.view(-1, 1, 1)
        self.masked = self.causal or "key_mask" in extra
        bias, self.hidden = extra.get("bias"), torch.tensor(-inf, dtype=self.wide.dtype)
        self.bias = None if bias is None else bias.expand(len(q), -1, -1, -1)

    def prepare(self) -> None:
        """Write the causal and window masks, which all batch elements share."""
        if not self.causal:
            if self.padding:
                self.base.zero_()
            return
        if self.start is not None:
            torch.add(self.first, self.start, out=self.row)
        torch.gt(self.column, self.row, out=self.base)
        if self.width is not None:
            torch.le(self.column, torch.sub(self.row, self.width, out=self.edge), out=self.outside)
            torch.logical_or(self.base, self.outside, out=self.base)
        if not self.padding:
            self._bounded(self.base)

    def _bounded(self, mask: torch.Tensor) -> None:
        """Write upper bounds that mask the scores: -inf where `mask`, else inf. Mark the queries that see no key."""
        self.bound.fill_(inf).masked_fill_(mask, -inf)
        if self.some_blind and self.bias is None:
            torch.all(mask, 1, True, out=self.blind)

    def probabilities(self, batch: int, q: torch.Tensor, k: torch.Tensor) -> None:
        """Write softmax(scale · q kᵀ) of a batch element to `self.p`; NaN for a query that sees no key."""
        if self.padding:
            torch.logical_not(self.padding[batch], out=self.padded)
            self._bounded(torch.logical_or(self.base, self.padded, out=self.mask))
        torch.baddbmm(self.grouped, q, k, beta=0, alpha=self.scale, out=self.grouped)
        if self.cap is not None:
            self._bend(self.cap)
        if self.low is not None:
            self.wide.copy_(self.low)
        if self.masked:  # a minimum takes an eighth of the time of masked_fill_ with a mask for all heads
            torch.minimum(self.wide, self.bound, out=self.wide)
        if self.bias is not None:
            self._add(self.bias[batch])
        if self.sinks is not None:
            self._with_sinks(self.sinks)
        else:
            torch.ops.aten._softmax.out(self.wide, -1, False, out=self.wide)
        if self.low is not None:
            self.low.copy_(self.wide)

    def _add(self, bias: torch.Tensor) -> None:
        """Add a bias to the masked scores, and mark the queries of each head that see no key."""
        if bias.dtype == torch.bool:
            torch.where(bias, self.wide, self.hidden, out=self.wide)
        else:
            self.wide.add_(bias)
        torch.eq(torch.amax(self.wide, -1, True, out=self.peak), -inf, out=self.blind)

    def _with_sinks(self, sinks: torch.Tensor) -> None:
        """Replace scores by their softmax, in which a sink of each head takes part."""
        torch.amax(self.wide, -1, True, out=self.peak)
        torch.maximum(self.peak, sinks, out=self.peak)
        self.wide.sub_(self.peak).exp_()
        torch.sum(self.wide, (-1,), True, out=self.total)
        self.wide.div_(self.total.add_(torch.sub(sinks, self.peak, out=self.peak).exp_()))

    def _bend(self, cap: torch.Tensor) -> None:
        """Replace scores s by cap·tanh(s / cap)."""
        self.p.div_(cap).tanh_()
        if self.slopes is not None:
            torch.mul(self.p, self.p, out=self.slopes).neg_().add_(self.one)
        self.p.mul_(cap)

    def clear(self, rows: torch.Tensor) -> None:
        """Set the rows of queries that see no key to zero in a tensor [H, Tq, .]."""
        if self.some_blind:
            rows.masked_fill_(self.blind, 0.0)


def _score_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    q, wide = ins[0], statistic(ins[0].dtype)
    heads, queries, keys = *q.shape[1:3], ins[1].shape[2]
    one, plane = Spec((queries, 1), int64), Spec((queries, keys), bool_)
    seen = (heads if "bias" in attrs["optional"] else 1, queries, 1)  # the queries without keys are those of a head
    masks = [plane, Spec(seen if "bias" in attrs["optional"] else seen[1:], bool_), Spec((1, keys), bool_), plane]
    kinds = (wide, q.dtype) if q.dtype.is_low else (wide,)
    scores = [Spec((heads, queries, keys), kind) for kind in kinds]
    rows = Spec((heads if {"bias", "sinks"} & set(attrs["optional"]) else 1, queries, 1), wide)
    return [*masks, one, one, plane, Spec((queries, keys), wide), rows, rows, *scores]


def _grouped(t: torch.Tensor, groups: int) -> torch.Tensor:
    """View [H, T, D] as [groups, H / groups · T, D]: the query heads that share a key head become one head."""
    return t.view(groups, -1, t.shape[-1])


@kernel("sdpa", work=_score_work)
def sdpa(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """softmax(scale · q kᵀ, masked) v; q must be contiguous, k and v may be strided."""
    (q, k, v), out, a = ins[:3], outs[0], _Attention(ins, attrs, work)
    groups = k.shape[1]
    parts = [
        (_grouped(q[b], groups), k[b].transpose(1, 2), v[b], out[b], _grouped(out[b], groups)) for b in range(len(q))
    ]

    def run() -> None:
        a.prepare()
        for b, (queries, keys, values, rows, grouped) in enumerate(parts):
            a.probabilities(b, queries, keys)
            torch.bmm(a.grouped, values, out=grouped)
            a.clear(rows)

    return run


def _backward_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    q, scores = ins[0], _score_work(outs, ins, attrs)
    rows = Spec((q.shape[1], q.shape[2], 1), q.dtype)
    slopes = [] if attrs["softcap"] is None else scores[-1:]
    return [*slopes, *scores, scores[-1], Spec((*q.shape[1:3], ins[2].shape[-1]), q.dtype), rows]


@kernel("sdpa_backward", work=_backward_work)
def sdpa_backward(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Compute dq, dk, dv from q, k, v, optional operands, the output and its gradient; P is computed again.

    Dm = rowsum(dO ⊙ O); dV = Pᵀ dO; dS = P ⊙ (dO Vᵀ - Dm), times the slopes of a softcap; dQ = scale · dS K;
    dK = scale · dSᵀ Q.
    """
    *ins, out, grad = ins
    slopes, work = (None, work) if attrs["softcap"] is None else (work[0], work[1:])
    (q, k, v), (dq, dk, dv), (*scores, ds, product, row) = ins[:3], outs, work
    a, scale, groups = _Attention(ins, attrs, scores, slopes), attrs["scale"], k.shape[1]
    transposed, dsg, dst = a.grouped.transpose(1, 2), _grouped(ds, groups), _grouped(ds, groups).transpose(1, 2)
    parts = [
        (
            *(_grouped(t[b], groups) for t in (q, grad, dq)),
            *(k[b], k[b].transpose(1, 2), v[b].transpose(1, 2), dk[b], dv[b], grad[b], out[b]),
        )
        for b in range(len(q))
    ]

    def run() -> None:
        a.prepare()
        for b, (qb, gb, dqb, kb, keys, values, dkb, dvb, gradient, result) in enumerate(parts):
            a.probabilities(b, qb, keys)
            a.clear(a.p)
            torch.sum(torch.mul(gradient, result, out=product), (-1,), True, out=row)
            torch.bmm(transposed, gb, out=dvb)
            torch.bmm(gb, values, out=dsg)
            ds.sub_(row).mul_(a.p)
            if slopes is not None:
                ds.mul_(slopes)
            torch.baddbmm(dqb, dsg, kb, beta=0, alpha=scale, out=dqb)
            torch.baddbmm(dkb, dst, qb, beta=0, alpha=scale, out=dkb)

    return run


@kernel("kv_append", work=lambda o, i, a: [Spec((i[1].shape[2],), int64)] * 2)
def kv_append(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Write entries [B, G, T, D] to a cache [B, G, M, D] from `start` on. Raises: IndexError if they do not fit."""
    cache, rows, start = ins
    positions, room = torch.arange(rows.shape[2]), torch.arange(cache.shape[2])
    return [
        partial(torch.add, positions, start, out=work[0]),
        partial(torch.index_select, room, 0, work[0], out=work[1]),  # raises before anything is written
        *copy_to_outputs(outs, [cache]),
        partial(outs[0].index_copy_, 2, work[0], rows),
    ]


_TILE = 256  # keys per tile, rounded down to whole blocks


def mapped_pages(table: torch.Tensor, first: int, stop: int, block: int, blocks: int) -> torch.Tensor:
    """Return the block numbers of positions first..stop - 1 of a sequence. Raises: IndexError if a block is missing."""
    if stop > first and (stop - 1) // block >= len(table):
        raise IndexError(f"position {stop - 1} is past the block table: {len(table)} blocks of {block} positions")
    pages = table[first // block : -(-stop // block)]
    if len(pages) and (int(pages.min()) < 0 or int(pages.max()) >= blocks):
        raise IndexError(f"the block table has no block in 0..{blocks - 1} for a position in {first}..{stop - 1}")
    return pages


@kernel("kv_append_paged", host=True)
def kv_append_paged(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Write new entries to the blocks of each sequence. If a block is missing, raise IndexError and write nothing."""
    pool, rows, table, lengths = ins
    out, count, block = outs[0], rows.shape[2], pool.shape[2]

    def run() -> None:
        starts = lengths.tolist()
        found = [
            mapped_pages(table[b], start, start + count, block, pool.shape[0]).tolist() if start >= 0 else ()
            for b, start in enumerate(starts)
        ]
        for call in copy_to_outputs(outs, [pool]):
            call()
        for b, pages in enumerate(found):
            done, inside = 0, starts[b] % block
            for page in pages:
                some = min(block - inside, count - done)
                out[page, :, inside : inside + some].copy_(rows[b, :, done : done + some])
                done, inside = done + some, 0

    return run


def _scratch(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    q, k, v = ins[:3]
    (_, groups, block, deep), wide = k.sizes, v.sizes[3]
    blocks = max(_TILE // block, 1)
    queries, rows, keys = q.sizes[2], q.sizes[1] // groups * q.sizes[2], blocks * block
    kind = statistic(q.dtype)
    return [
        Spec((blocks, groups, block, deep), k.dtype),
        Spec((blocks, groups, block, wide), v.dtype),
        *(Spec((groups, n), kind) for n in (keys * deep, keys * wide, rows * deep, rows * keys)),
        *(Spec((groups, rows, n), kind) for n in (1, 1, 1, 1, 1, wide, wide)),
        *(Spec((queries * keys,), bool_) for _ in range(2)),
    ]


@kernel("sdpa_paged", work=_scratch, host=True)
def sdpa_paged(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Compute attention over a paged KV cache with an online softmax, one tile of keys of one sequence at a time."""
    q, k, v, table, lengths, *sinks = ins
    held_k, held_v, tile_k, tile_v, asked, products, best, top, kept, whole, part, mixed, more, hidden, far = work
    out, window, softcap = outs[0], attrs["window"], attrs["softcap"]
    (count, groups, block, deep), queries = k.shape, q.shape[2]
    tile, rows = held_k.shape[0] * block, best.shape[1]
    ahead = torch.arange(tile) - torch.arange(queries).unsqueeze(1)  # key position minus query position
    lowest = torch.finfo(best.dtype).min
    sunk = sinks[0].view(groups, -1, 1, 1).expand(-1, -1, queries, 1) if sinks else None

    def rows_of(held: torch.Tensor, flat: torch.Tensor, pages: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        n, width = len(pages), pool.shape[3]
        torch.index_select(pool, 0, pages, out=held[:n])
        tile_view = flat.view(-1)[: groups * n * block * width].view(groups, n, block, width)
        tile_view.copy_(held[:n].transpose(0, 1))  # the rows of a head are contiguous, in the dtype of the computation
        return tile_view.view(groups, n * block, width)

    def look(b: int, start: int, low: int, high: int) -> None:
        pages = mapped_pages(table[b], low, high, block, count)
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
        torch.maximum(best, top, out=top).clamp_(min=lowest)  # not -inf if the whole tile is masked
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
            if sunk is None:
                best.fill_(-inf)
                whole.zero_()
            else:
                best.view(sunk.shape).copy_(sunk)
                whole.fill_(1.0)
            mixed.zero_()
            stop = start + queries
            first = 0 if window is None else max(start + 1 - window, 0) // tile * tile
            for low in range(first, stop, tile):
                look(b, start, low, min(low + tile, stop))
            out[b].view(groups, rows, -1).copy_(mixed.div_(whole))

    return run
