"""Rotary embedding and scaled dot-product attention, forward and backward, one batch element at a time.

The score matrix of a batch element stays in cache; grouped query heads read their key head by strides, not copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, carry, kernel
from graphwright.array.cpu.norm import statistic
from graphwright.array.dtype import bool_, float32, int64
from graphwright.array.spec import Spec


@kernel("rope_table", work=lambda o, i, a: [o[0]])
def rope_table(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """cos and sin of position · frequency, in the dtype of the frequencies, times the attention factor."""
    positions, frequencies = ins[0], ins[1]
    angle, scale = work[0], torch.tensor(attrs["scale"], dtype=frequencies.dtype)
    calls: list[Call] = [partial(angle.copy_, positions.unsqueeze(-1)), partial(angle.mul_, frequencies)]
    for out, function in zip(outs, (torch.cos, torch.sin), strict=True):
        calls += [partial(function, angle, out=out)]
        if attrs["scale"] != 1.0:
            calls += [partial(out.mul_, scale)]
    return calls


@kernel("rope_dynamic")
def rope_dynamic(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Frequencies for the longest position; reads it on the host and allocates a few scalars per run."""
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


@kernel("rope_longer")
def rope_longer(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Select one of two tables by the longest position; reads it on the host."""
    positions, short, long = ins
    return lambda: outs[0].copy_(long if int(positions.max()) + 1 > attrs["original"] else short)


@kernel("rope", work=lambda o, i, a: [Spec((*i[0].shape[:-1], i[1].shape[-1]), o[0].dtype)])
def rope(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Rotate pairs (a, b), half an axis apart or adjacent: (a·cos - b·sin, b·cos + a·sin)."""
    x, out, other = ins[0], outs[0], work[0]
    cos, sin = (t.unsqueeze(1) for t in ins[1:3])  # [B, 1, T, d/2], the same for all heads
    half = cos.shape[-1]
    apart = attrs["style"] == "half"
    first, second = (slice(half), slice(half, 2 * half)) if apart else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    a, b, out_a, out_b = x[..., first], x[..., second], out[..., first], out[..., second]
    calls: list[Call] = [
        partial(torch.mul, a, cos, out=out_a),
        partial(torch.mul, b, sin, out=other),
        partial(out_a.sub_, other),
        partial(torch.mul, b, cos, out=out_b),
        partial(torch.mul, a, sin, out=other),
        partial(out_b.add_, other),
    ]
    if 2 * half < x.shape[-1]:
        calls.append(partial(out[..., 2 * half :].copy_, x[..., 2 * half :]))
    return calls


class _Visible:
    """Masks of the keys that a query may not read: [Tq, Tk], or [B, Tq, Tk] with padding.

    Query i sees key j iff j <= start + i, with a window w also j > start + i - w, and the key is not padding.
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        extra: dict[str, torch.Tensor],
        attrs: Attrs,
        work: Tensors,
    ) -> None:
        self.calls: list[Call] = []
        queries, keys = q.shape[-2], k.shape[-2]
        self.padding = extra.get("key_mask")
        self.any = attrs["causal"] or self.padding is not None
        # without padding and with a known start, query i sees at least its own key, if there are that many keys
        self.some_blind = self.padding is not None or "q_start" in extra or (attrs["causal"] and queries > keys)
        self.mask, self.blind, self.padded, self.base, row, edge, outside, self.bound = work
        if not self.any:
            return
        column = torch.arange(keys)
        if not attrs["causal"]:
            self.calls.append(self.base.zero_)  # with padding, which `of` adds
            return
        first = torch.arange(queries).unsqueeze(1)
        start = extra.get("q_start")
        if start is None:
            row = first + (keys - queries)
        else:
            self.calls.append(partial(torch.add, first, start, out=row))
        self.calls.append(partial(torch.gt, column, row, out=self.base))
        if attrs["window"] is not None:
            width = torch.tensor(attrs["window"])
            self.calls += [
                partial(torch.sub, row, width, out=edge),
                partial(torch.le, column, edge, out=outside),
                partial(torch.logical_or, self.base, outside, out=self.base),
            ]
        if self.padding is None:
            self.calls += self._bounded(self.base)
            if self.some_blind:
                self.calls.append(partial(torch.all, self.base, 1, True, out=self.blind))

    def _bounded(self, mask: torch.Tensor) -> list[Call]:
        """Return calls that write the upper bound of each score: -infinity where the key is masked."""
        return [partial(self.bound.fill_, float("inf")), partial(self.bound.masked_fill_, mask, float("-inf"))]

    def of(self, batch: int) -> list[Call]:
        """Return calls that prepare `mask` (and `blind`: queries without a key) for one batch element."""
        if self.padding is None:
            return []
        return [
            partial(torch.logical_not, self.padding[batch].unsqueeze(0), out=self.padded),
            partial(torch.logical_or, self.base, self.padded, out=self.mask),
            *self._bounded(self.mask),
            partial(torch.all, self.mask, 1, True, out=self.blind),
        ]

    def softmax(self, scores: torch.Tensor) -> list[Call]:
        """Return calls that turn scores [H, Tq, Tk] into probabilities in place; NaN for a query without a key."""
        calls: list[Call] = []
        if self.any:  # a minimum takes an eighth of the time of masked_fill_ with a mask for all heads
            calls.append(partial(torch.minimum, scores, self.bound, out=scores))
        calls.append(partial(torch.ops.aten._softmax.out, scores, -1, False, out=scores))
        return calls

    def clear(self, rows: torch.Tensor) -> list[Call]:
        """Return calls that write zeros into the rows [H, Tq, .] of queries without a key."""
        return [partial(rows.masked_fill_, self.blind, 0.0)] if self.some_blind else []


def _mask_work(ins: Sequence[Spec]) -> list[Spec]:
    queries, keys = ins[0].shape[-2], ins[1].shape[-2]
    plane = Spec((queries, keys), bool_)
    return [
        plane,
        Spec((queries, 1), bool_),
        Spec((1, keys), bool_),
        plane,
        Spec((queries, 1), int64),
        Spec((queries, 1), int64),
        plane,
        Spec((queries, keys), statistic(ins[0].dtype)),
    ]


_MASKS = 8  # buffers of `_mask_work`


def _visible(ins: Tensors, attrs: Attrs, work: Tensors) -> _Visible:
    extra = dict(zip(attrs["optional"], ins[3:], strict=False))
    return _Visible(ins[0], ins[1], extra, attrs, work)


def _score_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    q, k = ins[0], ins[1]
    plane = (q.shape[1], q.shape[2], k.shape[2])
    wide = [Spec(plane, statistic(q.dtype))]
    return _mask_work(ins) + wide + ([Spec(plane, q.dtype)] if q.dtype.is_low else [])


def _grouped(t: torch.Tensor, groups: int) -> torch.Tensor:
    """View [H, T, D] as [groups, H / groups · T, D]: the query heads that share a key head, stacked."""
    return t.view(groups, -1, t.shape[-1])


def _probabilities(
    q: torch.Tensor, k: torch.Tensor, scale: float, wide: torch.Tensor, low: torch.Tensor | None, visible: _Visible
) -> list[Call]:
    """Return calls for softmax(scale · q kᵀ) of one batch element, into `low` if given, else `wide`."""
    scores = (wide if low is None else low).view(k.shape[0], -1, k.shape[1])
    calls: list[Call] = [partial(torch.baddbmm, scores, q, k.transpose(1, 2), beta=0, alpha=scale, out=scores)]
    if low is not None:
        calls.append(partial(wide.copy_, low))
    calls += visible.softmax(wide)
    if low is not None:
        calls.append(partial(low.copy_, wide))
    return calls


@kernel("sdpa", work=_score_work)
def sdpa(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """softmax(scale · q kᵀ, masked) v; q must be contiguous, k and v may be strided."""
    q, k, v, out = ins[0], ins[1], ins[2], outs[0]
    visible = _visible(ins, attrs, work[:_MASKS])
    wide, low = work[_MASKS], work[_MASKS + 1] if len(work) > _MASKS + 1 else None
    probabilities = (wide if low is None else low).view(k.shape[1], -1, k.shape[2])
    calls = list(visible.calls)
    for b in range(q.shape[0]):
        calls += visible.of(b)
        calls += _probabilities(_grouped(q[b], k.shape[1]), k[b], attrs["scale"], wide, low, visible)
        calls.append(partial(torch.bmm, probabilities, v[b], out=_grouped(out[b], k.shape[1])))
        calls += visible.clear(out[b])
    return calls


def _backward_work(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    q = ins[0]
    scores = _score_work(outs, ins, attrs)
    rows = Spec((q.shape[1], q.shape[2], 1), q.dtype)
    return [*scores, scores[-1], Spec((*q.shape[1:3], ins[2].shape[-1]), q.dtype), rows]


@kernel("sdpa_backward", work=_backward_work)
def sdpa_backward(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """dq, dk, dv from q, k, v, extras, the output and its gradient; recomputes the probabilities.

    Dm = rowsum(dO ⊙ O); dV = Pᵀ dO; dS = P ⊙ (dO Vᵀ - Dm); dQ = scale · dS K; dK = scale · dSᵀ Q.
    """
    *ins, out, grad = ins
    q, k, v = ins[:3]
    dq, dk, dv = outs
    visible = _visible(ins, attrs, work[:_MASKS])
    *scores, ds, product, row = work[_MASKS:]
    wide, low = scores[0], scores[1] if len(scores) > 1 else None
    groups, scale = k.shape[1], attrs["scale"]
    p = wide if low is None else low
    pg, dsg = p.view(groups, -1, k.shape[2]), ds.view(groups, -1, k.shape[2])
    calls = list(visible.calls)
    for b in range(q.shape[0]):
        qb, gb, dqb = (_grouped(t[b], groups) for t in (q, grad, dq))
        calls += visible.of(b)
        calls += _probabilities(qb, k[b], scale, wide, low, visible)
        calls += visible.clear(p)
        calls += [
            partial(torch.mul, grad[b], out[b], out=product),
            partial(torch.sum, product, [-1], True, out=row),
            partial(torch.bmm, pg.transpose(1, 2), gb, out=dv[b]),
            partial(torch.bmm, gb, v[b].transpose(1, 2), out=dsg),
            partial(ds.sub_, row),
            partial(ds.mul_, p),
            partial(torch.baddbmm, dqb, dsg, k[b], beta=0, alpha=scale, out=dqb),
            partial(torch.baddbmm, dk[b], dsg.transpose(1, 2), qb, beta=0, alpha=scale, out=dk[b]),
        ]
    return calls


_TILE = 256  # keys per tile, in whole blocks


def _known(pages: torch.Tensor, blocks: int) -> torch.Tensor:
    """Raises: IndexError unless all ids are blocks of the pool."""
    if len(pages) and (int(pages.min()) < 0 or int(pages.max()) >= blocks):
        raise IndexError("a position has no block in the block table")
    return pages


def _pages(table: torch.Tensor, first: int, stop: int, block: int, blocks: int) -> torch.Tensor:
    """Return the blocks of the positions from `first` on of one sequence. Raises: IndexError if one is missing."""
    if stop > first and (stop - 1) // block >= len(table):
        raise IndexError("a position is past the last block of the table")
    return _known(table[first // block : -(-stop // block)], blocks)


@kernel("kv_append_paged")
def kv_append_paged(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Raises: IndexError for a position without a block, before any write."""
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
    kind = float32 if q.dtype.is_low else q.dtype  # statistics need at least float32
    return [
        Spec((blocks, groups, block, deep), k.dtype),
        Spec((blocks, groups, block, wide), v.dtype),
        *(Spec((groups, n), kind) for n in (keys * deep, keys * wide, rows * deep, rows * keys)),
        *(Spec((groups, rows, n), kind) for n in (1, 1, 1, 1, 1, wide, wide)),
        *(Spec((queries * keys,), bool_) for _ in range(2)),
    ]


@kernel("sdpa_paged", work=_scratch)
def sdpa_paged(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Attend sequence by sequence, tile by tile in the order of the block table."""
    q, k, v, table, lengths = ins
    held_k, held_v, tile_k, tile_v, asked, products, best, top, kept, whole, part, mixed, more, hidden, far = work
    out, window, softcap = outs[0], attrs["window"], attrs["softcap"]
    (count, groups, block, deep), queries = k.shape, q.shape[2]
    tile, rows = held_k.shape[0] * block, best.shape[1]
    ahead = torch.arange(tile) - torch.arange(queries).unsqueeze(1)  # key position minus query position
    lowest = torch.finfo(best.dtype).min

    def rows_of(held: torch.Tensor, flat: torch.Tensor, pages: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        n, width = len(pages), pool.shape[3]
        torch.index_select(pool, 0, pages, out=held[:n])
        tile_view = flat.view(-1)[: groups * n * block * width].view(groups, n, block, width)
        tile_view.copy_(held[:n].transpose(0, 1))  # one head's rows together, in the dtype that is computed in
        return tile_view.view(groups, n * block, width)

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
        torch.maximum(best, top, out=top).clamp_(
            min=lowest
        )  # a fully masked tile gives the lowest finite value, not -inf
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
