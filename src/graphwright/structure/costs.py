"""Costs of elements, and nesting of elements: cutting an edge also removes gated nodes that only this edge needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.ops import traits
from graphwright.ops.axes import atoms
from graphwright.program import Program, Value
from graphwright.program.axes.axes import AxisGroup
from graphwright.program.cost import ones, op_flops
from graphwright.program.editing.gate_edits import removed_with, unit_costs
from graphwright.program.gates import RESERVED, axis_of, between
from graphwright.program.kinds import KINDS
from graphwright.structure.elements import Element, sites_of

OF = ("params", "bytes", "flops", "table")
Cost = str | Mapping[str, float]
"""The counted quantity: one of `OF`, or a dict from node paths to costs, such as `latency` measures."""


def latency(p: Program, feeds: Mapping[str, Any], runs: int = 5) -> dict[str, float]:
    """Map node paths to nanoseconds measured in a compiled run on these inputs, for `cost(of=...)`, `budget(of=...)`.

    The time of an instruction that runs several fused nodes is assigned to the node that gives it its name.
    Raises: the errors of `Plan.profile`.
    """
    shapes = {name: np.shape(value) for name, value in feeds.items()}
    found: dict[str, float] = defaultdict(float)
    for timing in p.compile(shapes).profile(feeds, runs).timings:
        found[timing.path] += 1e9 * timing.seconds
    return dict(found)


def _removed(p: Program, element: Element) -> set[NodeId]:
    """Return the nodes that are removed with an element.

    None for a unit or an edge of a pattern, whose ops also compute the others.
    """
    sites = sites_of(p, element) if element.over not in ("units", "pattern") else ()
    return removed_with(p, [edge for site in sites for edge in p.out_edges(site)])


def above(p: Program, among: Sequence[Element]) -> list[tuple[int, ...]]:
    """Return, for each element, the indices of the other elements whose removal also removes this element."""
    taken, known = [_removed(p, e) for e in among], dict[int, tuple[int, ...]]()
    keys = [id(e.gate) if e.over == "units" else -1 - i for i, e in enumerate(among)]  # equal for all units of a gate
    for key, e in zip(keys, among, strict=True):
        if key not in known:
            sites = sites_of(p, e)
            known[key] = tuple(j for j, gone in enumerate(taken) if among[j].gate is not e.gate
                               and gone and gone.issuperset(sites))  # fmt: skip
    return [known[key] for key in keys]


def check_cost(of: Cost, counted: bool = False) -> None:
    """Raise UsageError unless `of` is a mapping, or a name: params, bytes, flops, table, or with `counted` count."""
    known = ("count", *OF) if counted else OF
    if of not in known if isinstance(of, str) else not isinstance(of, Mapping):
        raise UsageError("unknown cost", expected=f"{', '.join(known)}, or a mapping from node paths to costs", got=of)


def element_costs(p: Program, among: Sequence[Element], of: Cost = "params") -> np.ndarray:
    """Compute the cost of each element without the elements nested in it, float64 [n].

    `params` and `bytes` count the weights that are removed with the element; `flops` (with all named sizes set to 1)
    and measured costs count the removed ops; `table` reads the costs given to `e.gate`. A unit has an equal share of
    the cost of each op over its axis.
    Raises: UsageError for an unknown cost.
    """
    check_cost(of)
    if of == "table":
        return np.array([e.cost for e in among], np.float64)
    stored = of in ("params", "bytes")
    each = _stored(p, of) if stored else _computed(p, of)
    whole = np.zeros(len(among))
    axes: dict[int, np.ndarray] = {}
    for i, e in enumerate(among):
        if e.over == "units":
            if id(e.gate) not in axes:
                group = axis_of(p, e.gate)
                axes[id(e.gate)] = (unit_costs(p, group, {p.key(n): x for n, x in each.items()}) if stored
                                    else _shared(p, group, each))  # fmt: skip
            whole[i] = axes[id(e.gate)][e.index]
        elif e.over == "pattern":  # no weights; of the attention's work, the share of the edge's pairs
            pairs = e.gate.cost / max(int(e.gate.cost.sum()), 1)
            whole[i] = 0.0 if stored else sum(each.get(n, 0.0) for n in e.gate.sites) * pairs[e.index]
        else:
            whole[i] = sum(each[n] * (p.spec(n).size if stored else 1) for n in _removed(p, e) if n in each)
    own = whole.copy()
    chains = above(p, among)
    for i, chain in enumerate(chains):
        # subtract from the nearest enclosing element only: outer ones contain it already
        nearest = [j for j in chain if not any(j in chains[k] for k in chain if k != j)]
        for j in nearest:
            own[j] -= whole[i]
    return np.maximum(own, 0.0)


def _stored(p: Program, of: Cost) -> dict[NodeId, float]:
    """Map each param to the cost of one of its entries: 1, or the size in bytes."""
    trained = (n for n in p.params() if p.key(n) not in RESERVED)
    return {n: float(p.spec(n).dtype.itemsize if of == "bytes" else 1) for n in trained}


def _computed(p: Program, of: Cost) -> dict[NodeId, float]:
    """Map each op to the cost of one run: its flops, or its entry in the mapping `of`; ops of gates are omitted."""
    gates = [gate for gate in p.gates().values() if gate.over != "pattern"]
    own = {n for gate in gates for site in gate.sites for n in (site, *between(p, site))}
    ops = [n for n in p.nodes() if p.op(n) not in KINDS and not traits(p.op(n)).gates and n not in own]
    if isinstance(of, str):
        dims = ones(p)
        return {n: float(op_flops(p, n, dims)) for n in ops}
    return {n: float(of.get(p.path(n), 0.0)) for n in ops}


def _shared(p: Program, group: AxisGroup, each: Mapping[NodeId, float]) -> np.ndarray:
    """Sum the costs `each` of ops with this axis in an operand or result; return equal shares per unit, [size]."""
    mine = set(group.atoms)
    over = {v for v, dims in group.axes.solution.dims.items() if any(mine & set(atoms(d)) for d in dims)}
    total = 0.0
    for n, x in each.items():
        values = (*p.operands(n), *(Value(n, k) for k in range(len(p.specs(n)))))
        total += 0.0 if over.isdisjoint(values) else x
    return np.full(group.size, total / group.size)
