"""The elements of all gates of a program (edges, units, layers, nodes, options), and their probabilities.

An element is one thing that a gate opens or closes; it has one logit. `graphwright.ops.gate` computes values and
gradients of gates in a run; losses and policies use the functions of this module on the same logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from typing import Any
from warnings import warn

import numpy as np

from graphwright.array import from_numpy
from graphwright.array.formulas import gates, specialise
from graphwright.array.formulas.activations import sigmoid
from graphwright.array.formulas.gates import GATE_KINDS, LN11, STATES, by_code, open_probability
from graphwright.autograd import Tensor
from graphwright.errors import UsageError
from graphwright.graph import EdgeId, NodeId
from graphwright.ops import call, traits
from graphwright.program import DeadGate, Program
from graphwright.program import gates as g
from graphwright.program.gates import LOGITS, TEMPERATURE, Gate, junction_edge, relative
from graphwright.settings import Range
from graphwright.structure.errors import ClippedStart

_ON_TENSORS = specialise(gates, {"sigmoid": Tensor.sigmoid})
LEAST, MOST = 0.01, 0.99


def init_for(p0: float, kind: str, temperature: float = 1.0) -> float:
    """Return the logit at which a gate is open with probability p0.

    p0 outside [0.01, 0.99] is clipped with a warning. Raises: DeadGate if p0 is 0 or 1, where the gradient is 0;
    UsageError for an unknown kind, p0 outside (0, 1), or a temperature that is not positive.
    """
    allowed = {name: facts for name, facts in GATE_KINDS.items() if not facts.one_of}
    if kind not in allowed:
        raise UsageError("unsupported kind of gate", expected=", ".join(allowed), got=kind)
    if p0 in (0, 1):
        raise DeadGate("a gate that starts at 0 or 1 has no gradient", got=p0, fix="choose p0 from 0.01 to 0.99")
    Range(0, 1).check("p0", p0)
    Range(0, above=True).check("temperature", temperature)
    if not LEAST <= p0 <= MOST:
        warn(f"p0 = {p0} was clipped to [{LEAST}, {MOST}]: closer to 0 or 1 a gate hardly learns", ClippedStart, 2)
        p0 = min(max(p0, LEAST), MOST)
    facts, z = allowed[kind], log(p0 / (1 - p0))
    return p0 if facts.linear else z * temperature if facts.heated else z - temperature * LN11 * facts.stretched


def probabilities(p: Program, among: list[Element]) -> Tensor:
    """Return the open probability of each element, [n], differentiable with respect to the logits.

    Elements with state `open` or `closed` have the constant 1 or 0.
    """
    logits: Tensor = p.weights[LOGITS]

    def each(fact: Callable[[Element], Any], kind: Any = logits.dtype.numpy) -> np.ndarray:
        return np.asarray([fact(e) for e in among], kind)

    z = call("index", logits, each(lambda e: e.offset, np.int64), axis=0)
    warm = call("index", p.weights[TEMPERATURE], each(lambda e: e.gate.rows[0, 1], np.int64), axis=0)
    heated, stretched = each(lambda e: e.gate.facts.heated), each(lambda e: e.gate.facts.stretched)
    found = _ON_TENSORS.open_probability(z, warm, heated, stretched)
    if (linear := each(lambda e: e.gate.facts.linear, bool)).any():
        found = call("where", linear, call("abs", z), found)
    if starts := [i for i, e in enumerate(among) if e.gate.facts.one_of and e.index == 0]:
        found = _with_choices(found, z, among, starts)
    if any(e.state in ("open", "closed") for e in among):
        held, fixed = each(lambda e: e.state in ("open", "closed"), bool), each(lambda e: e.state == "open")
        found = call("where", held, fixed, found)
    if any(e.state == "frozen" for e in among):
        found = call("where", each(lambda e: e.state == "frozen", bool), found.detach(), found)
    return found


def _with_choices(found: Tensor, z: Tensor, among: list[Element], starts: list[int]) -> Tensor:
    """Return probabilities `found` with the entries of options set to the softmax over their choice, or 0 if closed.

    `starts` are the indices in `among` of the first option of each choice.
    """
    parts, at = [], 0
    for start in starts:
        options = among[start : start + among[start].gate.length]
        there = [i for i, e in enumerate(options) if e.state != "closed"]
        logits = z[np.asarray([start + i for i in there])]
        e = (logits - logits.detach().amax(0, keepdims=True)).exp()
        soft = e / e.sum()
        parts += [found[at:start]] if start > at else []
        for i in range(len(options)):
            parts.append(soft[there.index(i) : there.index(i) + 1] if i in there else found[start : start + 1] * 0.0)
        at = start + len(options)
    parts += [found[at:]] if at < len(among) else []
    return call("concat", *parts, axis=0)


Key = tuple[int, int, int]
"""Handle of the site (index and generation, never reused) and number of the element, unique in its gate."""


@dataclass(frozen=True, slots=True)
class Element:
    """One thing that a gate opens: an edge, a unit, a layer, a node or an option.

    Attributes:
        name: unique among the elements of the program.
        gate, index: the gate, and the current index of the element in it.
        site: a node that multiplies a value by the gate of the element; its handle identifies the element.
        z, offset: the logit, and its offset in the vector of all logits.
        p: decision probability, at temperature 1; relative to the largest of a row for gates inside a softmax.
        p_now: open probability at the current temperature.
        temperature: temperature of the gate's group; cost: cost of the element while it is open.
        state: `soft` (trained), `open`, `closed` or `frozen` (fixed at 1, at 0, or at its current value).
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
        """The permanent identity of the element: handle of its site (index, generation) and element number."""
        return self.site.index, self.site.generation, int(self.gate.rows[self.index, g.ELEMENT])

    @property
    def over(self) -> str:
        """The kind of element that the gate opens: `edges`, `units`, `nodes`, `layers`, `choice` or `pattern`."""
        return self.gate.over

    def to_json(self) -> dict[str, Any]:
        """Return the element as a JSON-serialisable dict, for a table of elements."""
        names = ("name", "over", "state", "z", "p", "p_now", "temperature", "cost")
        return {n: getattr(self, n) for n in names} | {"kind": self.gate.kind, "group": self.gate.group}


def elements(p: Program) -> list[Element]:
    """Return all elements, in order of their logits."""
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
        state, cost = STATES[table[at, g.STATE]], int(table[at, g.COST])
        found.append(Element(name, gate, i, site, at, logit, p_here, p_now, t, state, cost))
    return sorted(found, key=lambda e: e.offset)


def numbers(p: Program) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return gate table, logits, decision probabilities, open probabilities and temperatures, indexed by logit offset.

    The gate table is an int array with a row per logit (kind, state, cost, ...). Decision probabilities are softmax(z)
    for a choice, min(|z|, 1) for a scale, else σ(z); for edges of a pattern with gates inside the softmax it is divided
    by the largest of the edge's row, because a factor that all edges of a row share has no effect. Open probabilities
    are those that a gate is not 0 at its present temperature, |z| for a scale. Unused logits have probability 0.
    """
    table, z = p.weights[g.TABLE].data.to_numpy(), p.weights[LOGITS].data.to_numpy().astype(np.float64)
    warmth = p.weights[TEMPERATURE].data.to_numpy().astype(np.float64)[table[:, g.GROUP]]
    facts = ("linear", "heated", "stretched", "one_of")
    linear, heated, stretched, one_of = (np.array(by_code(fact))[table[:, g.KIND]] for fact in facts)
    now = np.where(linear, np.abs(z), open_probability(z, warmth, heated, stretched))
    by = np.where(linear, np.minimum(now, 1.0), sigmoid(z))
    by[one_of] = now[one_of] = 0.0
    for gate in (one for one in p.gates().values() if one.facts.one_of):
        there = gate.offset + np.flatnonzero(gate.rows[:, g.STATE] != g.CLOSED)
        by[there] = now[there] = call("softmax", from_numpy(z[there]), axis=-1).to_numpy()
    for state, value in ((g.OPEN, 1.0), (g.CLOSED, 0.0), (g.FREE, 0.0)):
        by[table[:, g.STATE] == state] = now[table[:, g.STATE] == state] = value
    for gate in (one for one in p.gates().values() if one.over == "pattern"):
        if p.attrs(gate.handle)["where"] == "exp":
            by[gate.span] = relative(p.patterns[gate.owner], by[gate.span])
    return table, z, by, now, warmth


def edge_of(p: Program, element: Element) -> EdgeId | None:
    """Return the edge into a junction that an edge or option element gates; None for other elements."""
    if element.over == "edges":
        return junction_edge(p, element.gate.sites[0])
    if element.over == "choice":
        return next((junction_edge(p, site) for site in sites_of(p, element)), None)
    return None


def sites_of(p: Program, element: Element) -> list[NodeId]:
    """Return the sites of the element's gate that were not removed; for an option, only the site of this option."""
    there = [site for site in element.gate.sites if site in p.graph]
    return [site for site in there if element.over != "choice" or _option(p, site) == element.index]


def _option(p: Program, site: NodeId) -> int:
    """Return the index of the option that `site` gates, in its choice."""
    node = p.operands(site)[1].node
    while not traits(p.op(node)).slices:
        node = p.operands(node)[0].node
    return p.attrs(node)["start"]
