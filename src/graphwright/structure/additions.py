"""Absent edges ranked by their gain: one backward pass scores all of them, without inserting any.

An edge u -> v that adds y_u to junction v changes the loss to first order by n = Σ ⟨dL/dy_v, y_u⟩; its gain is -n.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import from_numpy
from graphwright.autograd import Tensor, enable_grad, grad
from graphwright.ops import traits
from graphwright.program import Value
from graphwright.program.kinds import ASSIGN, INPUT, SOURCES
from graphwright.program.run import check_feeds
from graphwright.structure.policy import Proposal

if TYPE_CHECKING:
    from graphwright.program import Program
    from graphwright.structure.graph import DifferentiableGraph, Task
    from graphwright.structure.losses import Terms

_STEP = 1e-2
"""Relative step of the second difference along a message; its square is well above float32 rounding."""


def absent(p: Program) -> list[tuple[Value, Value]]:
    """(source, junction) pairs of equal spec without an edge, where an edge would close no cycle.

    Sources are inputs and results of ops, except products with gates.
    """
    order = {node: i for i, node in enumerate(p.order())}
    there = {(p.edge_value(e), p.graph.target(e)) for j in p.junctions() for e in p.in_edges(j)}
    sites = {site: p.operands(site)[0] for gate in p.gates().values() for site in gate.sites}
    there |= {(sites[v.node], j) for v, j in there if v.node in sites}
    none = SOURCES - {INPUT} | {ASSIGN}
    sources = [Value(n) for n in p.nodes() if p.op(n) not in none and not traits(p.op(n)).gates
               and n not in sites and p.specs(n)[0].dtype.is_float]  # fmt: skip
    found = []
    for junction in p.junctions():
        after = p.dependents([junction])
        for value in sources:
            fits = p.spec(value) == p.spec(junction) and value.node not in after
            if fits and (value, junction) not in there:
                found.append((value, Value(junction)))
    return sorted(found, key=lambda pair: (order[pair[1].node], order[pair[0].node]))


def gains(
    view: DifferentiableGraph, task: Task, batch: Mapping[str, Any], *, newton: bool = False
) -> list[tuple[str, float]]:
    """(edge, gain) of all absent edges, the largest first, in units of the loss.

    Args:
        newton: gains to second order: n²/(2d) for n < 0, with d the second difference of the loss along the edge.
    """
    p = view.program
    pairs = absent(p)
    if not pairs:
        return []
    feeds = {n: v if isinstance(v, Tensor) else Tensor(from_numpy(np.asarray(v))) for n, v in batch.items()}
    dims = check_feeds(p, {n: feeds[n] for n in p.input_names()})[1]
    junctions, sources = (list(dict.fromkeys(ends)) for ends in zip(*((j, s) for s, j in pairs), strict=True))
    probed = p.fork()
    with probed.edit("a zero input for every junction, to take gradients of the sums") as e:
        probes = {j: e.input(f"probe.{p.path(j)}", p.spec(j).shape, p.spec(j).dtype) for j in junctions}
        for j, probe in probes.items():
            e.connect(probe, j.node)
    zeros = {j: np.zeros(p.spec(j).bind(dims).sizes, p.spec(j).dtype.numpy) for j in junctions}
    leaves = {j: Tensor(from_numpy(zero), True) for j, zero in zeros.items()}
    seen = type(view)(probed, view.seed)

    def loss(moved: Mapping[Value, Tensor]) -> tuple[Tensor, Terms]:
        given = {probed.path(probes[j]): moved.get(j, leaves[j]) for j in junctions}
        found, _, terms = seen.evaluate({**feeds, **given}, task, keep=sources)
        return found, terms

    with enable_grad():
        here, terms = loss({})
        slopes = grad(here, [leaves[j] for j in junctions], allow_unused=True)
    by = {j: None if g is None else g.numpy("float64") for j, g in zip(junctions, slopes, strict=True)}
    carried = {s: terms.values[s].numpy("float64") for s in sources}
    found = []
    for source, junction in pairs:
        slope = by[junction]
        if slope is not None:
            n = float((slope * carried[source]).sum())
            gain = -n
            if newton:
                steps = ((sign * _STEP * carried[source]).astype(zeros[junction].dtype) for sign in (-1, 1))
                before, after = (loss({junction: Tensor(from_numpy(x))})[0].item() for x in steps)
                d = (before - 2 * here.item() + after) / _STEP**2
                gain = n * n / (2 * d) if n < 0 and d > 0 else min(-n, 0.0)
            found.append((f"{p.path(source)} -> {p.path(junction)}", gain))
    return sorted(found, key=lambda row: (-row[1], row[0]))


def additions(
    view: DifferentiableGraph, task: Task, batch: Mapping[str, Any], *, least: float = 0.0, newton: bool = False
) -> list[Proposal]:
    """Absent edges with a gain above `least`, the best first; a ranking to verify by trials."""
    return [
        Proposal("add", name, 0.0, f"gains {gain:.3g}", None, -gain)
        for name, gain in gains(view, task, batch, newton=newton)
        if gain > max(least, 0.0)
    ]
