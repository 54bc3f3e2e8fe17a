"""What can be opened or cut, one by one: the elements of all gates of a program at one moment, with their numbers."""

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
    from graphwright.program.gates import (
        Gate,
    )

Key = tuple[int, int, int]
"""Handle of its product (index and generation) and which element it is: never given to another one."""


@dataclass(frozen=True, slots=True)
class Element:
    """One thing that a gate opens: an edge, a unit, a layer, a node or an option.

    Attributes:
        name: unique among those of the program.
        gate, index: whose, and which one of its elements by now.
        site: the product that tells it from all others: an option's own, else the gate's handle.
        place: of its logit in the vector.
        z: the logit.
        p: decision probability, at temperature 1.
        p_now: the probability that it is open at the present temperature.
        temperature: of its group.
        state: `soft`, `open`, `closed` or `frozen`.
        cost: what it costs when open.
    """

    name: str
    gate: Gate
    index: int
    site: NodeId
    place: int
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
        """The row of the table."""
        return {
            "name": self.name,
            "over": self.over,
            "kind": self.gate.kind,
            "group": self.gate.group,
            "state": self.state,
            "z": self.z,
            "p": self.p,
            "p_now": self.p_now,
            "temperature": self.temperature,
            "cost": self.cost,
        }


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
                continue  # an option that was cut: its logit lies idle until the choice is given back
            site = mine[0]
        state, price = STATES[table[at, STATE]], int(table[at, COST])
        found.append(Element(name, gate, i, site, at, logit, p_here, p_now, t, state, price))
    return sorted(found, key=lambda e: e.place)


def numbers(p: Program) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of the whole vector of a program with gates: table, logits, decision probability, the present one, temperature.

    Slots that are free have probability 0.
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
    """The junction edge that an edge or an option stands for."""
    if element.over == "edges":
        return junction_edge(p, element.gate.sites[0])
    if element.over == "choice":
        return next((junction_edge(p, site) for site in sites_of(p, element)), None)
    return None


def sites_of(p: Program, element: Element) -> list[NodeId]:
    """The products that an element stands in by now; of an option its own one."""
    there = [site for site in element.gate.sites if site in p.graph]
    if element.over != "choice":
        return there
    return [site for site in there if _option(p, site) == element.index]


def _option(p: Program, site: NodeId) -> int:
    """Which option of its choice a product is."""
    node = p.operands(site)[1].node
    while not traits(p.op(node)).slices:
        node = p.operands(node)[0].node
    return p.attrs(node)["start"]
