"""What elements cost, and which gates stand above others: an edge that goes takes all gates behind it along."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.program import Program
from graphwright.program.gates import RESERVED, axis_of
from graphwright.program.gating import behind, unit_prices
from graphwright.program.kinds import PARAM
from graphwright.structure.elements import Element, sites_of

OF = ("params", "bytes", "table")


def _carried(p: Program, element: Element) -> set[NodeId]:
    """Nodes that go with an element; of units none, since the op that makes them stays."""
    if element.over == "units":
        return set()
    return behind(p, [edge for site in sites_of(p, element) for edge in p.out_edges(site)])


def above(p: Program, among: Sequence[Element]) -> list[tuple[int, ...]]:
    """Per element the places of those that take it along when they go, itself left out."""
    known_above: dict[int, tuple[int, ...]] = {}
    taken = [_carried(p, e) for e in among]
    chains = []
    for i, e in enumerate(among):
        found = known_above.get(id(e.gate)) if e.over == "units" else None
        if found is None:
            sites = sites_of(p, e)
            found = tuple(j for j, gone in enumerate(taken) if j != i and among[j].gate is not e.gate
                          and gone and gone.issuperset(sites))  # fmt: skip
            if e.over == "units":
                known_above[id(e.gate)] = found
        chains.append(found)
    return chains


def prices(p: Program, among: Sequence[Element], of: str = "params") -> np.ndarray:
    """What each element costs by itself, without the elements below it, float64 [n].

    Raises: UsageError for another cost than those of `OF`.
    """
    if of not in OF:
        raise UsageError("no such cost", expected=", ".join(OF), got=of)
    if of == "table":
        return np.array([e.cost for e in among], np.float64)
    trained = [n for n in p.params() if p.key(n) not in RESERVED]
    each = {p.key(n): float(p.spec(n).dtype.itemsize if of == "bytes" else 1) for n in trained}
    whole = np.zeros(len(among))
    axes: dict[int, np.ndarray] = {}
    for i, e in enumerate(among):
        if e.over == "units":
            if id(e.gate) not in axes:
                axes[id(e.gate)] = unit_prices(p, axis_of(p, e.gate), each)
            whole[i] = axes[id(e.gate)][e.index]
        else:
            whole[i] = sum(each[p.key(n)] * p.spec(n).size for n in _carried(p, e) if p.op(n) == PARAM)
    own = whole.copy()
    chains = above(p, among)
    for i, chain in enumerate(chains):
        # counted by the nearest one above alone: those further up hold it already
        nearest = [j for j in chain if not any(j in chains[k] for k in chain if k != j)]
        for j in nearest:
            own[j] -= whole[i]
    return np.maximum(own, 0.0)
