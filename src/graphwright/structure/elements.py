"""The elements of all gates of a program (edges, units, layers, nodes, options) with their current numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array.formulas.gates import KINDS, STATES
from graphwright.ops import traits
from graphwright.program.gates import (
    CLOSED,
    COST,
    ELEMENT,
    FREE,
    GROUP,
    KIND,
    LOGITS,
    OPEN,
    STATE,
    TABLE,
    TEMPERATURE,
    junction_edge,
)
from graphwright.structure.relaxation import decision, open_probability

if TYPE_CHECKING:
    from graphwright.graph import EdgeId, NodeId
    from graphwright.program import Program
    from graphwright.program.gates import Gate

Key = tuple[int, int, int]
"""Handle of the product (index and generation) and number of the element; never reused."""


@dataclass(frozen=True, slots=True)
class Element:
    """One thing that a gate opens: an edge, a unit, a layer, a node or an option.

    Attributes:
        name: unique among those of the program.
        gate, index: the gate, and the current number of the element in it.
        site: the product that identifies it: an option's own product, else the gate's handle.
        offset: of its logit in the vector.
        z: the logit.
        p: decision probability, at temperature 1.
        p_now: open probability at the current temperature.
        temperature: of its group.
        state: `soft`, `open`, `closed` or `frozen`.
        cost: of the open element.
    """

    name: str
    gate: Gate
    index: int
    site: NodeId
    offset: int
    z: float
    p: float
    p_now: float
    temperature: float
    state: str
    cost: int

    @property
    def key(self) -> Key:
        """See `Key`."""
        return self.site.index, self.site.generation, int(self.gate.rows[self.index, ELEMENT])

    @property
    def over(self) -> str:
        """`edges`, `units`, `nodes`, `layers` or `choice`."""
        return self.gate.over

    def to_json(self) -> dict[str, Any]:
        """A row of the table of elements."""
        names = ("name", "over", "state", "z", "p", "p_now", "temperature", "cost")
        return {n: getattr(self, n) for n in names} | {"kind": self.gate.kind, "group": self.gate.group}


def elements(p: Program) -> list[Element]:
    """All elements, in order of their logits."""
    gates = p.gates()
    if not gates:
        return []
    table, z, by, now, warmth = numbers(p)
    found = []
    for name, (gate, i) in gates.named().items():
        at = gate.offset + i
        logit, p_here, p_now, t = (float(x[at]) for x in (z, by, now, warmth))
        site = gate.handle
        if gate.over == "choice":
            mine = [s for s in gate.sites if _option(p, s) == i]
            if not mine:
                continue  # an option that was cut: its logit is unused until the choice is released
            site = mine[0]
        state, price = STATES[table[at, STATE]], int(table[at, COST])
        found.append(Element(name, gate, i, site, at, logit, p_here, p_now, t, state, price))
    return sorted(found, key=lambda e: e.offset)


def numbers(p: Program) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Table, logits, decision probabilities, open probabilities and temperatures of all slots.

    Free slots have probability 0.
    """
    table, z = p.weights[TABLE].data.to_numpy(), p.weights[LOGITS].data.to_numpy().astype(np.float64)
    warmth = p.weights[TEMPERATURE].data.to_numpy().astype(np.float64)[table[:, GROUP]]
    by, now = np.zeros(len(z)), np.zeros(len(z))
    for code in np.unique(table[:, KIND]):
        mine, kind = table[:, KIND] == code, KINDS[code]
        if kind != "choice":
            by[mine], now[mine] = decision(kind, z[mine]), open_probability(kind, z[mine], warmth[mine])
            continue
        for gate in (g for g in p.gates().values() if g.kind == kind):
            there = gate.offset + np.flatnonzero(gate.rows[:, STATE] != CLOSED)
            by[there] = now[there] = decision(kind, z[there])
    for state, value in ((OPEN, 1.0), (CLOSED, 0.0), (FREE, 0.0)):
        by[table[:, STATE] == state] = now[table[:, STATE] == state] = value
    return table, z, by, now, warmth


def edge_of(p: Program, element: Element) -> EdgeId | None:
    """The junction edge of an edge or option element."""
    if element.over == "edges":
        return junction_edge(p, element.gate.sites[0])
    if element.over == "choice":
        return next((junction_edge(p, site) for site in sites_of(p, element)), None)
    return None


def sites_of(p: Program, element: Element) -> list[NodeId]:
    """The existing products of an element; for an option its own one."""
    there = [site for site in element.gate.sites if site in p.graph]
    if element.over != "choice":
        return there
    return [site for site in there if _option(p, site) == element.index]


def _option(p: Program, site: NodeId) -> int:
    """Number of the option that a product belongs to."""
    node = p.operands(site)[1].node
    while not traits(p.op(node)).slices:
        node = p.operands(node)[0].node
    return p.attrs(node)["start"]
