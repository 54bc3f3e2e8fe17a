"""Attention over selected blocks in torch: loops over lists and queries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


def select_blocks(ins: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    """Row by row."""
    scores, thresholds, own, *noise = ins
    limits, most, ghosts = thresholds.expand(*scores.shape[:3], 1), attrs["most"], attrs["ghosts"]
    out = torch.full((*scores.shape[:3], 3 + most + ghosts), -1, dtype=torch.int32)
    for n, g, r in torch.cartesian_prod(*map(torch.arange, scores.shape[:3])).tolist():
        at = int(own[r])
        out[n, g, r, 0] = 0
        if at >= 2:
            out[n, g, r, 1] = at - 1
        if at >= 1:
            out[n, g, r, 2] = at
        candidates = [j for j in range(1, at - 1) if j < scores.shape[3]]
        above = [j for j in candidates if scores[n, g, r, j] >= limits[n, g, r, 0] - 1e-6]
        best = sorted(above, key=lambda j: (-float(scores[n, g, r, j]), j))[:most]
        out[n, g, r, 3 : 3 + len(best)] = torch.tensor(sorted(best), dtype=torch.int32)
        if ghosts:
            others = [j for j in candidates if j not in above]
            drawn = sorted(others, key=lambda j: (-float(noise[0][n, g, r, j]), j))[:ghosts]
            out[n, g, r, 3 + most : 3 + most + len(drawn)] = torch.tensor(drawn, dtype=torch.int32)
    return out


def queries(ins: Sequence[torch.Tensor], attrs: dict) -> Iterator[tuple]:
    """Yield (n, h, g, t, row, [(column, key)], e^(score - maximum) [keys], gates [keys]) for each query with keys."""
    q, k, _, blocks, gates, *start = ins
    first = int(start[0]) if start else k.shape[2] - q.shape[2]
    share = q.shape[1] // k.shape[1]
    for n, h, t in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        g, row = h // share, t // attrs["tile"]
        found = [
            (c, j)
            for c, b in enumerate(blocks[n, g, row].tolist())
            for j in range(b * attrs["block"], min((b + 1) * attrs["block"], k.shape[2]))
            if b >= 0 and j <= first + t
        ]
        if found:
            factors = torch.stack([gates[n, g, row, c] for c, _ in found])
            scores = torch.stack([(q[n, h, t] * k[n, g, j]).sum() * attrs["scale"] for _, j in found])
            if bool((factors > 0).any()):
                yield n, h, g, t, row, found, (scores - scores[factors > 0].max().detach()).exp(), factors


def sdpa_selected(ins: Sequence[torch.Tensor], attrs: dict) -> torch.Tensor:
    """Query by query and head by head."""
    q, k, v, _, gates = ins[:5]
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype) + sum(t.sum() * 0 for t in (q, k, v, gates))
    for n, h, g, t, _, found, powers, factors in queries(ins, attrs):
        weights = powers * factors / (powers * factors).sum()
        out[n, h, t] = out[n, h, t] + (weights[:, None] * torch.stack([v[n, g, j] for _, j in found])).sum(0)
    return out


def sdpa_selected_backward(ins: Sequence[torch.Tensor], attrs: dict) -> tuple[torch.Tensor, ...]:
    """Pair by pair: dS = g·p ⊙ (dO·v - dO·out), and the gradient of a gate is the sum of p ⊙ (dO·v - dO·out)."""
    *given, out, grad = ins
    q, k, v, _, gates = given[:5]
    unused = sum(t.sum() * 0 for t in (q, k, v, gates, out, grad))
    dq, dk, dv, dgates = (torch.zeros_like(t) + unused for t in (q, k, v, gates))
    for n, h, g, t, row, found, powers, factors in queries(given, attrs):
        p = powers / (powers * factors).sum()
        for (c, j), each, gate in zip(found, p, factors, strict=True):
            slope = each * ((grad[n, h, t] * v[n, g, j]).sum() - (grad[n, h, t] * out[n, h, t]).sum())
            dgates[n, g, row, c] = dgates[n, g, row, c] + slope
            dv[n, g, j] = dv[n, g, j] + each * gate * grad[n, h, t]
            dq[n, h, t] = dq[n, h, t] + slope * gate * attrs["scale"] * k[n, g, j]
            dk[n, g, j] = dk[n, g, j] + slope * gate * attrs["scale"] * q[n, h, t]
    return dq, dk, dv, dgates
