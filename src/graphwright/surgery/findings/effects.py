"""Rules about blocks that raise the loss on a text, and about attention heads in another order than their partners."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from math import log
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.graph import EdgeId, NodeId
from graphwright.program.editing.transaction import Transaction
from graphwright.program.weights import as_array
from graphwright.surgery.findings.diagnosis import Diagnosis, stepped
from graphwright.surgery.findings.finding import Finding, Fix, Severity, cut
from graphwright.surgery.findings.heads import HeadProjection, attention_parts
from graphwright.surgery.findings.tensors import restore
from graphwright.surgery.walks import flood

if TYPE_CHECKING:
    from graphwright.program.program import Program
    from graphwright.program.run import PatchPoint

KIND = "harmful_block"
TARGETS = "diagnose.targets"
"""Name of the input of target tokens, on the fork that runs a text."""
_FEWEST = 30
"""Fewest tokens whose standard error is taken for that of any text."""


def harmful_block(d: Diagnosis) -> Iterator[Finding]:
    """Report the block of a trained language model that helps least on the text, if it is harmful or useless.

    A block is an edge into a junction from a node other than a junction. Its effect on a token is the loss of the token
    with the edge's value 0, minus the loss without that; its score is the mean effect in standard errors. A block is
    harmful if its score is below -`limits.errors`; useless, if its score is below 2 and the median score of all blocks
    is above twice `limits.errors`. Models whose loss is near that of a uniform guess are not examined, nor are texts of
    fewer than 30 tokens.
    """
    p, probe = d.program, d.probe
    if probe is None or TARGETS not in probe.inputs or not p.valid:
        return
    before, vocabulary = _token_losses(d, {}), p.spec(p.output("logits")).shape[-1]
    if before.size < _FEWEST or not isinstance(vocabulary, int) or not before.mean() < 0.9 * log(vocabulary):
        return
    edges = [e for n in p.junctions() if p.graph.in_degree(n) > 1 for e in p.in_edges(n) if _block(p, e)]
    found: list[tuple[float, float, EdgeId]] = []
    for edge in stepped(probe.step, "testing blocks", edges):
        effect = _token_losses(d, _without(d, edge)) - before
        if error := float(effect.std(ddof=1) / np.sqrt(effect.size)):
            found.append((float(effect.mean()) / error, error, edge))
    if found:
        score, error, edge = min(found)
        usual = float(np.median([s for s, *_ in found]))
        if score < -d.limits.errors or (score < 2 and usual > 2 * d.limits.errors):
            yield _weak(d, edge, score, error, float(before.mean()))


def _block(p: Program, edge: EdgeId) -> bool:
    source = p.graph.source(edge)
    return not p.is_junction(source) and bool(p.operands(source)) and any(map(p.is_junction, _above(p, source)))


def _above(p: Program, node: NodeId) -> list[NodeId]:
    """Return a node and the nodes that it depends on, without passing through junctions."""
    return flood([node], lambda n: () if p.is_junction(n) else (v.node for v in p.operands(n)))


def _without(d: Diagnosis, edge: EdgeId) -> dict[PatchPoint, Any]:
    """Return a patch that sets the value of an edge to 0."""
    assert d.probe is not None
    value = d.probe.run(d.program).value(d.program.edge_value(edge))
    return {edge: as_array(np.zeros(value.shape, np.float32), value.dtype)}


def _token_losses(d: Diagnosis, patch: Mapping[PatchPoint, Any], p: Program | None = None) -> np.ndarray:
    """Return the cross-entropy in nats of each target token of the text, in float64."""
    assert d.probe is not None
    p = p or d.program
    feeds = {name: x for name, x in d.probe.inputs.items() if name in p.input_names()}
    logits = p.run(feeds, keep="outputs", patch=patch)["logits"].to_numpy("float64")
    shifted = logits - logits.max(axis=-1, keepdims=True)
    scores = np.take_along_axis(shifted, np.asarray(d.probe.inputs[TARGETS])[..., None], -1)[..., 0]
    return (np.log(np.exp(shifted).sum(axis=-1)) - scores).ravel()


def _weak(d: Diagnosis, edge: EdgeId, score: float, error: float, loss: float) -> Finding:
    p = d.program
    inside, params = _above(p, p.graph.source(edge)), set(p.params())
    changed = [fix for n in inside if n in params for fix in restore(d, p.key(n))]
    fixes = [cut(p, edge, keeps=False)]
    if changed:
        what = f"restore {len(changed)} weights of the block from the checkpoint"
        fixes = [Fix(what, lambda e: [fix.apply(e) for fix in changed], edges=0), *fixes]
    reordered = [fix for node in inside if (fix := _reordered(d, node, loss)) is not None]
    what = (
        "the model predicts the text better without this block" if score < 0 else "the block does not help on the text"
    )
    if reordered:
        what += ", but its attention works with its heads in another order"
    severity = Severity.WARNING if score < -d.limits.errors or reordered else Severity.INFO
    return Finding.of(p, KIND, severity, what, p.graph.source(edge), edges=(edge,), where=p.path(edge),
                      expected="a higher loss without the block", got=f"{score * error:+.4f} ± {error:.4f} nats",
                      witness={"loss": loss, "effect": score * error, "standard_error": error},
                      fixes=(*reordered, *fixes))  # fmt: skip


def _reordered(d: Diagnosis, node: NodeId, loss: float) -> Fix | None:
    """Return a fix that reorders the heads of one projection of an attention so that the loss falls; None without one.

    Heads are exchanged in pairs, as long as the loss falls by `limits.harm` of itself; `limits.swaps` bounds the runs.
    """
    p = d.program
    parts = attention_parts(p, node) if node in set(p.of_traits(attention=True)) else {}
    pairs = {name: list(combinations(range(part.heads), 2)) for name, part in parts.items()}
    if not parts or sum(map(len, pairs.values())) > d.limits.swaps:
        return None
    best: tuple[float, str, list[int]] | None = None
    for name, part in parts.items():
        order, reached = list(range(part.heads)), loss
        while True:
            tried = [(_loss_with(d, part, _swapped(order, i, j)), _swapped(order, i, j)) for i, j in pairs[name]]
            found = min(tried, default=(reached, order))
            if found[0] >= reached * (1 - d.limits.harm):
                break
            reached, order = found
        if reached < loss and (best is None or reached < best[0]):
            best = reached, name, order
    if best is None:
        return None
    _, name, order = best
    what = f"take the heads of {p.key(parts[name].weight)} in the order {order}"
    return Fix(what, lambda e: reorder(e, parts[name], order))


def _swapped(order: list[int], i: int, j: int) -> list[int]:
    made = list(order)
    made[i], made[j] = made[j], made[i]
    return made


def _loss_with(d: Diagnosis, part: HeadProjection, order: list[int]) -> float:
    twin = d.program.fork()
    with twin.edit("another order of heads", author="pass", keep_undo=False) as e:
        reorder(e, part, order)
    return float(_token_losses(d, {}, twin).mean())


def reorder(e: Transaction, part: HeadProjection, order: list[int]) -> None:
    """Reorder the heads of a projection, bias included: head `order[h]` becomes head h."""

    def ordered(values: np.ndarray, dim: int) -> np.ndarray:
        made, rows = np.moveaxis(values.copy(), dim, 0), np.moveaxis(values, dim, 0)
        for to, source in enumerate(order):
            made[part.slice(to)] = rows[part.slice(source)]
        return np.moveaxis(made, 0, dim)

    e.set_weight(part.weight, lambda values: ordered(values, part.dim))
    if part.bias is not None:
        e.set_weight(part.bias, lambda values: ordered(values, 0))


def head_order(d: Diagnosis) -> Iterator[Finding]:
    """Report projections of an attention that hold the heads of the opened checkpoint in different orders."""
    p = d.program
    if d.model is None or d.model.checkpoint is None or not p.valid:
        return
    source = d.model.original.weights
    for node in p.of_traits(attention=True):
        parts, orders = attention_parts(p, node), {}
        for name, part in parts.items():
            key = p.key(part.weight)
            if source.has_key(key) and source[key].spec == p.weights[key].spec:
                before, now = source.array(key).to_numpy(bits=True), p.weights.array(key).to_numpy(bits=True)
                if (order := _order(part, now, before)) is not None:
                    orders[name] = order
        for name in sorted(_disagreeing(orders)):
            part, order = parts[name], orders[name]
            key, back = p.key(part.weight), [order.index(h) for h in range(len(order))]
            fix = Fix(f"take the heads of {key} in the order {back}",
                      lambda e, part=part, back=back: reorder(e, part, back), edges=1)  # fmt: skip
            what = "the heads are in another order than in the projections that work with them"
            yield Finding.of(p, "head_order", Severity.WARNING, what, part.weight, node, fixes=(fix,), got=str(order),
                             expected="the order of the checkpoint", witness={"key": key, "order": order})  # fmt: skip


def _disagreeing(orders: Mapping[str, list[int]]) -> set[str]:
    """Return the reordered projections (q, k, v, o) whose order differs from that of a projection they work with."""
    odd: set[str] = set()
    for one, two in (("q", "o"), ("k", "v"), ("q", "k"), ("o", "v")):
        if {one, two} <= orders.keys():
            queries, group = len(orders[one]), len(orders[one]) // len(orders[two])
            wide = [h // group for h in orders[one]], [orders[two][h // group] for h in range(queries)]
            if wide[0] != wide[1]:
                odd |= {
                    n
                    for n, order in zip((one, two), wide, strict=True)
                    if order != [h // group for h in range(queries)]
                }
    return odd


def _order(part: HeadProjection, now: np.ndarray, before: np.ndarray) -> list[int] | None:
    """Return for each head now the head of the checkpoint with the same bits; None if one has none."""

    def head(values: np.ndarray, h: int) -> bytes:
        return np.ascontiguousarray(np.moveaxis(values, part.dim, 0)[part.slice(h)]).tobytes()

    held = {head(before, h): h for h in range(part.heads)}
    found = [held.get(head(now, h)) for h in range(part.heads)]
    return [h for h in found if h is not None] if None not in found else None
