"""Block-sparse attention over a pattern's edges: one row of blocks at a time, all batch elements and heads at once.

In float32 the VM's code runs where it is built (see `by_vm.py`), else these kernels, which are the slow reference too.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

import torch

from graphwright.array.backend import Attrs, Call, Needs
from graphwright.array.cpu.block_table import BlockRow, BlockTable
from graphwright.array.cpu.by_vm import by_vm, work_of
from graphwright.array.cpu.kernel import Tensors, kernel
from graphwright.array.formulas.block_attention import FURTHEST, named, planes_of, runs_dense
from graphwright.array.vm.encode import block_attention as forms


class _Scores(NamedTuple):
    """The scores of one row of blocks.

    Attributes:
        row: the edges.
        at: index of the row's query heads and queries in a tensor [N, Hk, H / Hk, Tq, .].
        heads: the row's key heads.
        q, k: [N, G, S, R, d] and [N, G, 1, K, d].
        s: scores [N, G, S, R, K], -inf where a pair is not allowed.
        slope: derivative of s with respect to the scores before the softcap, times the scale.
        gate: the gate of each key's edge [K], or of each pair [R, K], or None.
    """

    row: BlockRow
    at: tuple[slice, slice, slice, slice]
    heads: slice
    q: torch.Tensor
    k: torch.Tensor
    s: torch.Tensor
    slope: torch.Tensor | float
    gate: torch.Tensor | None


class _Rows:
    """Rows of blocks of q and k, computed in float32 or wider."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, table: torch.Tensor, extra: Tensors, attrs: Attrs) -> None:
        self.wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.groups, self.share = k.shape[1], q.shape[1] // k.shape[1]
        self.q, self.k, self.table = self.apart(q), k, table
        self.attrs, self.extra = attrs, named(extra, attrs)
        self.inside = attrs["where"] == "exp"
        self.planes = planes_of(q.shape[1], self.groups, attrs["planes"])
        self.gates = self.extra.get("gates")

    def apart(self, t: torch.Tensor) -> torch.Tensor:
        """View [N, H, ...] as [N, Hk, H / Hk, ...]."""
        return t.unflatten(1, (self.groups, self.share))

    def read(self) -> BlockTable:
        """Return what the table says now. Raises: IndexError if it does not fit the operands."""
        start = None if (given := self.extra.get("q_start")) is None else int(given)
        table = BlockTable(self.table, self.q.shape[3], self.k.shape[2], start)
        if table.planes != len(self.planes):
            raise IndexError(f"the pattern has another number of planes: expected {len(self.planes)}, "
                             f"got {table.planes}")  # fmt: skip
        if self.gates is not None and len(self.gates) < table.gates:
            raise IndexError(f"too few gates: expected {table.gates}, got {len(self.gates)}")
        return table

    def each(self, dense: bool = False) -> Iterator[_Scores]:
        """Yield the scores of all rows; with `dense`, if the algorithm is that, of all queries of a plane at once."""
        table = self.read()
        if dense and runs_dense(self.attrs["algorithm"], table.density, table.block, table.queries * table.keys):
            yield from map(self.scores, table.planes_whole())
        else:
            for plane in range(table.planes):
                yield from map(self.scores, table.rows(plane))

    def scores(self, row: BlockRow) -> _Scores:
        """Compute the scores of one row."""
        heads, own = self.planes[row.plane]
        at = (slice(None), heads, own, row.queries)
        q, k = self.q[at].to(self.wide), self.k[:, heads, row.keys].to(self.wide).unsqueeze(2)
        s, slope, cap = (q @ k.mT) * self.attrs["scale"], self.attrs["scale"], self.attrs["softcap"]
        if cap is not None:
            s = torch.tanh(s / cap) * cap
            slope = (1 - (s / cap).square()) * self.attrs["scale"]
        if row.mask is not None:
            s = s.masked_fill(~row.mask, -inf)
        return _Scores(row, at, heads, q, k, s, slope, self.gate(row))

    def gate(self, row: BlockRow) -> torch.Tensor | None:
        """Return the gate of each key's edge [K], or of each pair [R, K]; None if there are no gates."""
        if self.gates is None:
            return None
        if row.slots is not None:
            return torch.cat([self.gates.to(self.wide), torch.ones(1, dtype=self.wide)])[row.slots]
        slots = torch.tensor(row.gates, dtype=torch.int64)
        values = torch.ones(len(slots), dtype=self.wide)
        values[slots >= 0] = self.gates[slots[slots >= 0]].to(self.wide)
        return values.repeat_interleave(torch.tensor([b - a for _, a, b in row.edges], dtype=torch.int64))

    def collect(self, row: BlockRow, own: torch.Tensor, total: torch.Tensor) -> None:
        """Add to the gradients of gates what each pair [N, G, S, R, K] adds to its own."""
        if row.slots is not None:
            used = row.slots >= 0
            total.index_add_(0, row.slots[used], own.sum((0, 1, 2))[used])
            return
        for slot, value in zip(row.gates, _over(row.edges, own.sum((0, 1, 2, 3))), strict=True):
            if slot >= 0:
                total[slot] += value

    def raised(self, r: _Scores, lse: torch.Tensor) -> torch.Tensor:
        """Return e^(s - lse) [N, G, S, R, K]; 0 for a query that sees nothing. `lse` is [N, H, Tq]."""
        base = self.apart(lse)[r.at].unsqueeze(-1)
        power = r.s - torch.where(base > -inf, base, inf)
        if r.gate is not None and self.inside:  # only the score of a pair with gate 0 can exceed those of the sum
            power = torch.where(r.gate > 0, power, power.clamp(max=FURTHEST))
        return power.exp()

    def logs(self, r: _Scores, lse: torch.Tensor) -> torch.Tensor:
        """Return the logarithms of the softmax weights of a row, -inf where a pair is not allowed or its gate is 0."""
        base = self.apart(lse)[r.at].unsqueeze(-1)
        power = r.s - torch.where(base > -inf, base, inf)
        return power + r.gate.clamp(min=0).log() if r.gate is not None and self.inside else power

    def weights(self, r: _Scores, lse: torch.Tensor) -> torch.Tensor:
        """Return the softmax weights of a row, gates inside the softmax included."""
        e = self.raised(r, lse)
        return e * r.gate.clamp(min=0) if r.gate is not None and self.inside else e


def _over(edges: list[tuple[int, int, int]], t: torch.Tensor) -> list[torch.Tensor]:
    """Return the sums over the keys of each edge; the last axis of t is the keys."""
    return [t[..., a:b].sum(-1) for _, a, b in edges]


_NEEDS = Needs(reads=(3,), allocates=True)


@kernel("block_sdpa", lambda o, i, a: work_of(forms.BLOCK_SDPA, o, i, a), needs=_NEEDS, host=True)
def block_sdpa(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    q, k, v, table, *extra = ins
    rows, (out, lse) = _Rows(q, k, table, extra, attrs), outs
    if (native := by_vm(forms.BLOCK_SDPA, outs, ins, attrs, work, rows.read)) is not None:
        return native
    outs_apart, sums = rows.apart(out), rows.apart(lse)

    def run() -> None:
        for r in rows.each(dense=True):
            s, gate = r.s, r.gate
            if gate is not None and rows.inside:
                s = s.masked_fill(gate <= 0, -inf)
            top = s.amax(-1, True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -inf)
            base = torch.where(top == -inf, 0.0, top)
            e = (s - base).exp()
            if gate is not None and rows.inside:
                e = e * gate.clamp(min=0)
            whole = e.sum(-1, True)
            if gate is not None and not rows.inside:
                e = e * gate
            values = v[:, r.heads, r.row.keys].to(rows.wide).unsqueeze(2)
            mixed = (e @ values) / torch.where(whole == 0, 1.0, whole)
            outs_apart[r.at] = mixed.to(out.dtype)
            sums[r.at] = (base + whole.log()).squeeze(-1)

    return run


@kernel(
    "block_sdpa_backward", lambda o, i, a: work_of(forms.BLOCK_SDPA_BACKWARD, o, i, a), needs=_NEEDS, host=True
)  # fmt: skip
def block_sdpa_backward(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    (q, k, v, table, *extra), (out, lse, g) = ins[:-3], ins[-3:]
    rows = _Rows(q, k, table, extra, attrs)
    if (native := by_vm(forms.BLOCK_SDPA_BACKWARD, outs, ins, attrs, work, rows.read)) is not None:
        return native
    gradients = rows.apart(g)
    results = rows.apart(out)
    lse_slope = None if (given := rows.extra.get("lse_grad")) is None else rows.apart(given)

    def run() -> None:
        sums = [torch.zeros(t.shape, dtype=rows.wide) for t in outs]
        dq = rows.apart(sums[0])
        for r in rows.each(dense=True):
            e = rows.raised(r, lse)
            p = e if r.gate is None or not rows.inside else e * r.gate.clamp(min=0)
            up = gradients[r.at].to(rows.wide)
            values = v[:, r.heads, r.row.keys].to(rows.wide).unsqueeze(2)
            less = (up * results[r.at].to(rows.wide)).sum(-1, True)
            if lse_slope is not None:
                less = less - lse_slope[r.at].to(rows.wide).unsqueeze(-1)
            dp = up @ values.mT
            gate = r.gate if not rows.inside else None
            shown = p if gate is None else p * gate
            sums[2][:, r.heads, r.row.keys] += (shown.mT @ up).sum(2)
            if len(outs) > 3:
                rows.collect(r.row, e * (dp - less) if rows.inside else e * dp, sums[3])
            ds = p * ((dp if gate is None else dp * gate) - less) * r.slope
            dq[r.at] = ds @ r.k
            sums[1][:, r.heads, r.row.keys] += (ds.mT @ r.q).sum(2)
        for to, total in zip(outs, sums, strict=True):
            to.copy_(total)

    return run


@kernel(
    "block_mass", lambda o, i, a: work_of(forms.BLOCK_MASS, o, i, a), needs=Needs(reads=(2,), allocates=True), host=True
)
def block_mass(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    (q, k, table, lse, *extra), (mass,) = ins, outs
    rows, largest = _Rows(q, k, table, extra, attrs), attrs["reduce"] == "max"

    def check() -> None:
        if (slots := rows.read().slots) > len(mass):
            raise IndexError(f"the result is too small for the edges: expected {slots}, got {len(mass)}")

    if (native := by_vm(forms.BLOCK_MASS, outs, ins, attrs, work, check)) is not None:
        return native

    def run() -> None:
        check()
        mass.zero_()
        for r in rows.each():
            p, seen = rows.weights(r, lse), rows.apart(lse)[r.at] > -inf
            for (edge, _, _), found in zip(r.row.edges, _over(r.row.edges, p), strict=True):
                mass[edge] = found.max() if largest else found.sum() / seen.sum().clamp(min=1)

    return run


@kernel(
    "block_gate_gradient", lambda o, i, a: work_of(forms.BLOCK_GATE_GRADIENT, o, i, a),
    needs=Needs(reads=(6, 7), allocates=True), host=True,
)  # fmt: skip
def block_gate_gradient(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    (q, k, v, out, lse, g, pairs, table, *extra), (result,) = ins, outs
    rows = _Rows(q, k, table, extra, attrs)

    def check() -> None:
        for pair in pairs.tolist():
            rows.read().absent(*pair)

    if (native := by_vm(forms.BLOCK_GATE_GRADIENT, outs, ins, attrs, work, check)) is not None:
        return native

    def run() -> None:
        known = rows.read()
        for n, (plane, query, key) in enumerate(pairs.tolist()):
            row = known.absent(plane, query, key)
            r = rows.scores(row)._replace(gate=None)
            up, values = rows.apart(g)[r.at].to(rows.wide), v[:, r.heads, row.keys].to(rows.wide).unsqueeze(2)
            less = (up * rows.apart(out)[r.at].to(rows.wide)).sum(-1, True)
            base = rows.apart(lse)[r.at].unsqueeze(-1)
            e = (r.s - torch.where(base > -inf, base, inf)).clamp(max=FURTHEST).exp()
            result[n] = (e * (up @ values.mT - less)).sum()

    return run


@kernel(
    "block_entropy", lambda o, i, a: work_of(forms.BLOCK_ENTROPY, o, i, a),
    needs=Needs(reads=(2,), allocates=True), host=True,
)  # fmt: skip
def block_entropy(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    (q, k, table, lse, *extra), (entropy,) = ins, outs
    rows = _Rows(q, k, table, extra, attrs)
    if (native := by_vm(forms.BLOCK_ENTROPY, outs, ins, attrs, work, rows.read)) is not None:
        return native

    def run() -> None:
        for r in rows.each(dense=True):
            logs = rows.logs(r, lse)
            rows.apart(entropy)[r.at] = -(logs.exp() * logs.clamp(min=_LOWEST)).sum(-1).to(entropy.dtype)

    return run


_LOWEST = -1e30
"""Stands for the logarithm of 0, so that 0·ln 0 is 0."""


@kernel(
    "block_entropy_backward", lambda o, i, a: work_of(forms.BLOCK_ENTROPY_BACKWARD, o, i, a),
    needs=Needs(reads=(2,), allocates=True), host=True,
)  # fmt: skip
def block_entropy_backward(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    (q, k, table, lse, *extra), g = ins[:-2], ins[-1]
    rows = _Rows(q, k, table, extra, attrs)
    if (native := by_vm(forms.BLOCK_ENTROPY_BACKWARD, outs, ins, attrs, work, rows.read)) is not None:
        return native

    def run() -> None:
        sums = [torch.zeros(t.shape, dtype=rows.wide) for t in outs]
        dq = rows.apart(sums[0])
        slopes = rows.apart(outs[2])
        for r in rows.each(dense=True):
            logs, up = rows.logs(r, lse), rows.apart(g)[r.at].to(rows.wide).unsqueeze(-1)
            change, p = -(logs.clamp(min=_LOWEST) + 1) * up, logs.exp()
            slopes[r.at] = -(p * change).sum(-1).to(lse.dtype)
            if r.gate is not None and rows.inside:
                rows.collect(r.row, torch.where(r.gate > 0, p * change / r.gate, 0.0), sums[3])
            ds = p * change * r.slope
            dq[r.at] = ds @ r.k
            sums[1][:, r.heads, r.row.keys] += (ds.mT @ r.q).sum(2)
        for i, (to, total) in enumerate(zip(outs, sums, strict=True)):
            if i != 2:
                to.copy_(total)

    return run
