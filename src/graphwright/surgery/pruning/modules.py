"""Whole modules: branches that enter the residual path through a junction, and can be taken off it.

What a branch is follows from structure: an edge into a junction whose cut leaves nodes with parameters that no output
needs any more. Which ones go is decided by the measured loss.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphwright.ops import traits
from graphwright.program import Value
from graphwright.program.kinds import INPUT, PARAM
from graphwright.surgery.calibration import Stream, moving
from graphwright.surgery.measure import loss

if TYPE_CHECKING:
    from graphwright.graph import EdgeId, NodeId
    from graphwright.program import Program
    from graphwright.program.editing.transaction import Transaction

KINDS = ("attention", "mlp")
SHORTLIST = 8
"""Candidates whose loss is measured at each step; the others change the residual stream more."""


@dataclass(frozen=True, slots=True)
class Module:
    """A branch into a junction.

    Attributes:
        name: the edge to cut, by its ends.
        kind: `attention` if it mixes positions, else `mlp`.
        edge: its handle.
        nodes: what no output needs without it.
        start: the first of them that depends on an input.
    """

    name: str
    kind: str
    edge: EdgeId
    nodes: frozenset[NodeId]
    start: NodeId


def modules(p: Program, inside: Collection[NodeId] | None = None) -> list[Module]:
    """Branches whose nodes all lie in a selection, in the order of the computation."""
    needed, moved, found = p.reachable(p.outputs()), moving(p), []
    rank = {n: i for i, n in enumerate(p.order())}
    for junction in p.junctions():
        edges = [e for e in p.in_edges(junction) if junction in needed]
        for edge in edges if len(edges) > 1 else ():
            nodes = _dead(p, edge, needed)
            computed = [n for n in nodes if n in moved and p.op(n) != INPUT]
            if not computed or not any(p.op(n) == PARAM for n in nodes) or not (inside is None or nodes <= set(inside)):
                continue
            kind = "attention" if any(traits(p.op(n)).attention for n in nodes) else "mlp"
            found.append(Module(p.path(edge), kind, edge, frozenset(nodes),
                                min(computed, key=rank.__getitem__)))  # fmt: skip
    return found


def remove_module(e: Transaction, module: Module) -> None:
    """Cut a module off its junction and remove its nodes."""
    e.cut(module.edge)
    e.remove(sorted(module.nodes, key=e.program.order_labels.key, reverse=True))


def cheapest(
    p: Program, candidates: Sequence[Module], stream: Stream, reference: Sequence[np.ndarray] | None = None
) -> tuple[Module, float]:
    """The module whose removal leaves the least measured loss, and that loss.

    Candidates are measured from their own start on; what comes before is computed once. Of many, those are measured
    whose output turns the residual stream least: 1 - mean cos(before, after).
    """
    walk = Stream(p, stream.feeds)
    if len(candidates) > SHORTLIST:
        turned = turning(p, candidates, Stream(p, stream.feeds))
        candidates = sorted(candidates, key=lambda m: turned[m])[:SHORTLIST]
    best: tuple[Module, float] | None = None
    for module in sorted(candidates, key=lambda m: p.order_labels.key(m.start)):
        walk.advance(module.start)
        without = p.fork()
        with without.edit("measure without it", author="pass", tool="prune") as e:
            e.cut(module.edge)
        found = Stream(without, stream.feeds)
        found.live = walk.live
        value = loss(found, reference)
        if best is None or value < best[1]:
            best = module, value
    assert best is not None
    return best


def turning(p: Program, candidates: Sequence[Module], stream: Stream) -> dict[Module, float]:
    """1 - mean cosine of the junction's value with and without a module."""
    found: dict[Module, float] = {}
    for module in sorted(candidates, key=lambda m: p.order_labels.key(m.start)):
        stream.advance(module.start)
        whole, part = Value(p.graph.target(module.edge)), p.edge_value(module.edge)
        total = rows = 0.0
        for values in stream.read([whole, part]):
            after, added = (_rows(values[v].to_numpy("float32")) for v in (whole, part))
            before = after - added
            norms = np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1)
            total += float(((before * after).sum(axis=1) / np.maximum(norms, 1e-30)).sum())
            rows += len(before)
        found[module] = 1 - total / max(rows, 1)
    return found


def _rows(a: np.ndarray) -> np.ndarray:
    return a.reshape(-1, a.shape[-1])


def _dead(p: Program, edge: EdgeId, needed: Collection[NodeId]) -> set[NodeId]:
    """Nodes that only the output through this edge needs."""
    junction, seen = p.graph.target(edge), set()
    stack = [v.node for v in p.outputs()]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        stack += [p.edge_value(e).node for e in p.in_edges(node) if not (node == junction and e == edge)]
    return {n for n in needed if n not in seen and p.op(n) != INPUT}
