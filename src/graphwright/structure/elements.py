"""What can be opened or cut, one by one: the elements of all gates of a program at one moment, with their numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from graphwright.graph import EdgeId, NodeId
from graphwright.program import Program
from graphwright.program.gates import TEMPERATURE, Gate, junction_edge
from graphwright.structure.relaxation import decision, open_probability

Key = tuple[int, int, int]
"""Handle of the gate (index and generation) and which element of it: never given to another one."""


@dataclass(frozen=True, slots=True)
class Element:
    """One thing that a gate opens: an edge, a unit, a layer, a node or an option.

    Attributes:
        name: unique among those of the program.
        gate, index: whose, and which one of its elements by now.
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
        handle = self.gate.handle
        return handle.index, handle.generation, int(self.gate.rows[self.index, 5])

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
    logits, warmth = gates.logits(), p.weights[TEMPERATURE].data.to_numpy()
    numbers: dict[NodeId, tuple[np.ndarray, np.ndarray]] = {}
    for gate in gates.values():
        z, t = logits[gate.places], float(warmth[gate.rows[0, 1]])
        numbers[gate.handle] = decision(gate.kind, z), open_probability(gate.kind, z, t)
    fixed = {"open": 1.0, "closed": 0.0}
    found = []
    for name, (gate, i) in gates.named().items():
        (by, now), state = numbers[gate.handle], gate.states[i]
        p_here, p_now = (fixed.get(state, float(x[i])) for x in (by, now))
        t, place = float(warmth[gate.rows[i, 1]]), gate.offset + i
        found.append(Element(name, gate, i, place, float(logits[place]), p_here, p_now, t, state, int(gate.cost[i])))
    return sorted(found, key=lambda e: e.place)


def edge_of(p: Program, element: Element) -> EdgeId | None:
    """The junction edge that an edge or an option stands for."""
    if element.over == "edges":
        return junction_edge(p, element.gate.sites[0])
    if element.over == "choice":
        return junction_edge(p, option_site(p, element))
    return None


def option_site(p: Program, element: Element) -> NodeId:
    """The product of one option of a choice."""
    for site in element.gate.sites:
        node = p.operands(site)[1].node
        while p.op(node) != "slice":
            node = p.operands(node)[0].node
        if p.attrs(node)["start"] == element.index:
            return site
    raise AssertionError("each option has its product")
