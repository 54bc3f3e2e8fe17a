"""Residual branches: subgraphs that enter the residual path through a junction and can be removed as a whole.

A branch follows from structure: cutting its edge into the junction leaves nodes with parameters that no output needs.
The measured loss decides which branches go.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphwright.ops import traits
from graphwright.program import Value
from graphwright.program.kinds import INPUT, PARAM
from graphwright.surgery.calibration import Stream, input_dependent
from graphwright.surgery.measure import loss

if TYPE_CHECKING:
    from graphwright.graph import EdgeId, NodeId
    from graphwright.program import Program
    from graphwright.program.editing.transaction import Transaction

SHORTLIST = 8
"""Branches whose loss is measured in each round; the others change the residual stream more."""


@dataclass(frozen=True, slots=True)
class ResidualBranch:
    """A branch into a junction.

    Attributes:
        name: of the edge into the junction, by its ends.
        kind: `attention` if it mixes positions, else `mlp`.
        edge: its handle.
        nodes: nodes that no output needs without it.
        start: the first of them that depends on an input.
    """

    name: str
    kind: str
    edge: EdgeId
    nodes: frozenset[NodeId]
    start: NodeId


def residual_branches(p: Program, inside: Collection[NodeId] | None = None) -> list[ResidualBranch]:
    """Branches whose nodes are all inside a selection, in the order of the computation."""
    needed, moving, found = p.reachable(p.outputs()), input_dependent(p), []
    rank = {n: i for i, n in enumerate(p.order())}
    for junction in p.junctions():
        edges = [e for e in p.in_edges(junction) if junction in needed]
        for edge in edges if len(edges) > 1 else ():
            nodes = _only_through(p, edge, needed)
            computed = [n for n in nodes if n in moving and p.op(n) != INPUT]
            if not computed or not any(p.op(n) == PARAM for n in nodes) or not (inside is None or nodes <= set(inside)):
                continue
            kind = "attention" if any(traits(p.op(n)).attention for n in nodes) else "mlp"
            start = min(computed, key=rank.__getitem__)
            found.append(ResidualBranch(p.path(edge), kind, edge, frozenset(nodes), start))
    return found


def remove_branch(e: Transaction, branch: ResidualBranch) -> None:
    """Cut a branch off its junction and remove its nodes."""
    e.cut(branch.edge)
    e.remove(sorted(branch.nodes, key=e.program.order_labels.key, reverse=True))


def cheapest(
    p: Program, candidates: Sequence[ResidualBranch], stream: Stream, reference: Sequence[np.ndarray] | None = None
) -> tuple[ResidualBranch, float]:
    """The branch whose removal leaves the smallest measured loss, and that loss.

    Each candidate is measured from its own start; the nodes before it are computed once. With many candidates only
    those that rotate the residual stream least (1 - mean cos(before, after)) are measured.
    """
    walk = Stream(p, stream.feeds)
    if len(candidates) > SHORTLIST:
        angles = rotation(p, candidates, Stream(p, stream.feeds))
        candidates = sorted(candidates, key=lambda b: angles[b])[:SHORTLIST]
    best: tuple[ResidualBranch, float] | None = None
    for branch in sorted(candidates, key=lambda b: p.order_labels.key(b.start)):
        walk.advance(branch.start)
        without = p.fork()
        with without.edit("measure without it", author="pass", tool="prune") as e:
            e.cut(branch.edge)
        found = Stream(without, stream.feeds)
        found.live = walk.live
        value = loss(found, reference)
        if best is None or value < best[1]:
            best = branch, value
    assert best is not None
    return best


def rotation(p: Program, candidates: Sequence[ResidualBranch], stream: Stream) -> dict[ResidualBranch, float]:
    """1 - mean cosine of the junction's value with and without each branch."""
    found: dict[ResidualBranch, float] = {}
    for branch in sorted(candidates, key=lambda b: p.order_labels.key(b.start)):
        stream.advance(branch.start)
        whole, part = Value(p.graph.target(branch.edge)), p.edge_value(branch.edge)
        total = rows = 0.0
        for values in stream.read([whole, part]):
            after, added = (a.reshape(-1, a.shape[-1]) for a in (values[v].to_numpy("float32") for v in (whole, part)))
            before = after - added
            norms = np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1)
            total += float(((before * after).sum(axis=1) / np.maximum(norms, 1e-30)).sum())
            rows += len(before)
        found[branch] = 1 - total / max(rows, 1)
    return found


def _only_through(p: Program, edge: EdgeId, needed: Collection[NodeId]) -> set[NodeId]:
    """Nodes that reach an output only through this edge."""
    junction, seen = p.graph.target(edge), set()
    stack = [v.node for v in p.outputs()]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        stack += [p.edge_value(e).node for e in p.in_edges(node) if not (node == junction and e == edge)]
    return {n for n in needed if n not in seen and p.op(n) != INPUT}
