"""Putting gates in and taking them out, inside an open edit: ordinary nodes, one vector of logits, one table.

A gate costs a product where it stands and its rows. Slots that are given back keep their place and are given out again
with the next generation, so that no gate moves another one's logits or noise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import float64
from graphwright.errors import UsageError
from graphwright.graph import EdgeId, NodeId
from graphwright.ops import get
from graphwright.ops.axes import Product, atoms, known
from graphwright.ops.gate import COLUMNS, KINDS
from graphwright.program.axes.solve_axes import Said, origin
from graphwright.program.axes.units import Units, branches
from graphwright.program.editing.unfold import put
from graphwright.program.errors import DeadGate, GateNotAllowed, NotZeroPreserving
from graphwright.program.gates import (
    CLOSED,
    COST,
    ELEMENT,
    FREE,
    FROZEN,
    GENERATION,
    GROUP,
    KIND,
    LEAST,
    LOGITS,
    NODE,
    OPEN,
    RESERVED,
    RUN,
    SLOT,
    SOFT,
    STATE,
    TABLE,
    TEMPERATURE,
    carrier,
    of_site,
    there,
)
from graphwright.program.kinds import KINDS as KINDS_OF_NODES
from graphwright.program.kinds import PARAM
from graphwright.program.op_graph import Value
from graphwright.program.readers import dependent, lead

if TYPE_CHECKING:
    from graphwright.ops.axes import Atom, Term
    from graphwright.program.axes.axes import AxisGroup
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.program import Program

INITS = {
    "scale": 0.0,
    "sigmoid": 1.0,
    "ste": float(np.log(9)),
    "bernoulli": float(np.log(9)),
    "concrete": 0.0,
    "concrete_st": 0.0,
    "hard_concrete": 2.5,
    "choice": 0.0,
}
"""Where logits of a kind begin: a scale adds nothing at first, a hard concrete gate is exactly open in evaluation."""
HARD_CONCRETE_T = 2 / 3
Cost = str | float | Sequence[float]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a gate is to stand: a value, its dimension (None: all of it), and what reads the product instead.

    With `log`, the value is scores, to which the logarithm is added.
    """

    value: Value
    dim: int | None
    readers: tuple[EdgeId, ...]
    outputs: bool
    name: str
    element: int | None = None
    term: Term | None = None
    log: bool = False


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One gate before it is made."""

    places: tuple[_Place, ...]
    length: int
    price: Callable[[], np.ndarray]
    atoms: tuple[Atom, ...] = ()


def gate(
    e: Transaction, target: Any, kind: str, init: Any, group: str | None, cost: Cost
) -> NodeId | tuple[NodeId, ...]:
    """See `Transaction.gate`."""
    if kind not in KINDS:
        raise UsageError("no such kind of gate", expected=", ".join(KINDS), got=kind)
    wanted, several = _wanted(e, target, kind)
    if not wanted:
        raise UsageError("there is nothing to gate", expected="an edge, a node, units, layers, or a list", got=target)
    count = sum(w.length for w in wanted)
    logits = np.broadcast_to(np.asarray(INITS[kind] if init is None else init, np.float64), (count,))
    if not np.isfinite(logits).all():
        raise DeadGate("a gate that begins at 0 or 1 has no gradient", got=init,
                       fix="structure.init_for(p0, kind) with p0 from 0.01 to 0.99")  # fmt: skip
    if kind == "ste" and (logits <= 0).any():
        e.warnings.append("a straight-through gate begins closed: nothing behind it learns until it opens")
    made = _make(e, wanted, kind, logits, group, cost)
    return tuple(made) if several else made[0]


# -- where -------------------------------------------------------------------------------------------------------------
def _wanted(e: Transaction, target: Any, kind: str) -> tuple[list[_Wanted], bool]:
    p = e.program
    if kind == "choice":
        edges = [p.edge(t) for t in target] if isinstance(target, Sequence) and not isinstance(target, str) else []
        if len(edges) < 2:
            raise UsageError("a choice is between options", expected="two or more edges into junctions", got=target)
        places = tuple(_at_edge(p, edge, i)[0] for i, edge in enumerate(edges))
        return [_Wanted(places, len(edges), lambda: np.concatenate([_weight(p, [edge]) for edge in edges]))], False
    if isinstance(target, Units):
        target.needed()
        return [w for name, ids in target.chosen.items() for w in _units(e, name, ids, target.sizes[name])], True
    if isinstance(target, Sequence) and not isinstance(target, str | Value | NodeId | EdgeId):
        return [_one(p, t) for t in target], True
    return [_one(p, target)], False


def _one(p: Program, target: Any) -> _Wanted:
    if isinstance(target, EdgeId) or (isinstance(target, str) and "->" in target):
        edge = p.edge(target)
        return _Wanted(_at_edge(p, edge, None), 1, lambda: _weight(p, [edge]))
    value = p.value(target)
    if p.op(value.node) in KINDS_OF_NODES or not p.spec(value).dtype.is_float:
        raise GateNotAllowed("a gate multiplies what an op computes", where=p.path(value), got=p.op(value.node))
    readers = tuple(edge for edge in p.out_edges(value.node) if p.edge_value(edge) == value)
    place = _Place(value, None, readers, value in p.outputs(), f"{p.path(value)}.gate")
    return _Wanted((place,), 1, lambda: _weight(p, list(readers)))


def _at_edge(p: Program, edge: EdgeId, element: int | None) -> tuple[_Place, ...]:
    target = p.graph.target(edge)
    value = p.edge_value(edge)
    if not p.is_junction(target):
        raise GateNotAllowed(
            "a gate stands on an edge into a junction: a port of an op needs its operand",
            where=p.path(edge),
            fix='e.insert(edge, "junction") makes one, or gate the node or its units',
        )
    if of_site(p, value.node) is not None:
        raise GateNotAllowed("the edge has a gate", where=p.path(edge), fix="e.ungate(gate) first")
    source = p.path(value.node).rpartition(".")[2]
    return (_Place(value, None, (edge,), False, f"{p.path(target)}.{source}.gate", element),)


def _units(e: Transaction, name: str, ids: Sequence[int], size: int) -> list[_Wanted]:
    p, found = e.program, e.program.axes()
    if name not in found:
        return [_layer(p, f"{name}.{number}", edges) for number, edges in branches(p, name, ids, size)]
    group = found[name]
    if group.frozen:
        raise GateNotAllowed("units of a frozen axis can't go", where=name, got=group.frozen[0])
    scores, decided = _scores(p, group)
    if any(node not in decided for node in _mixed(group)):
        raise NotZeroPreserving(
            "a unit that is 0 is not a unit that is gone", where=name, got=group.mixed[0],
            fix="gate the layer, or units before it",
        )  # fmt: skip
    if len(ids) != group.size:
        raise GateNotAllowed("an axis is gated as a whole", where=name, expected=f"all {group.size}", got=len(ids))
    places = [
        _Place(value, dim, readers, False, f"{name}.gate", term=group.axes.solution.dims[value][dim])
        for value, dim, readers in _before_sums(p, group, decided)
    ]
    places += [
        _Place(value, dim, (edge,), False, f"{name}.gate", term=group.axes.solution.dims[value][dim], log=True)
        for value, dim, edge in scores
    ]
    if not places:
        raise GateNotAllowed("no sum reads the axis", where=name)
    return [_Wanted(tuple(places), group.size, lambda: _prices(p, group), group.atoms)]


def _layer(p: Program, path: str, edges: Sequence[EdgeId]) -> _Wanted:
    places = tuple(_Place(p.edge_value(edge), None, (edge,), False, f"{path}.gate") for edge in edges)
    return _Wanted(places, 1, lambda: _weight(p, list(edges)))


def _mixed(group: AxisGroup) -> list[NodeId]:
    """Nodes where units that are 0 leave a trace."""
    said = group.axes.solution.said
    return list(dict.fromkeys(node for atom in group.atoms for node, _ in said.get(atom, Said()).mixed))


def _scores(p: Program, group: AxisGroup) -> tuple[list[tuple[Value, int, EdgeId]], set[NodeId]]:
    """(scores, dimension, edge) of each softmax over the axis, and all that depends on their results.

    A unit whose score is -∞ is gone there: it has weight 0, and what orders or counts weights never takes it.
    """
    found = []
    for node in _mixed(group):
        if p.op(node) == "softmax":
            edge = p.in_edges(node)[0]
            value = p.edge_value(edge)
            terms = group.axes.solution.dims[value]
            dim = p.attrs(node)["axis"] % len(terms)
            if tuple(atoms(terms[dim])) == group.atoms:
                found.append((value, dim, edge))
    return found, dependent(p, [p.graph.target(edge) for _, _, edge in found])


def _before_sums(
    p: Program, group: AxisGroup, decided: Collection[NodeId]
) -> list[tuple[Value, int, tuple[EdgeId, ...]]]:
    """(value, dimension, edges that read it) in front of each sum over the axis that is not decided by a softmax.

    Where one value has no place for exactly the units, it is the dimension that holds them among others.
    """
    solution = group.axes.solution
    found: dict[tuple[Value, int], list[EdgeId]] = {}
    for node, ends in dict.fromkeys(s for atom in group.atoms for s in solution.said.get(atom, Said()).summed):
        if node in decided:
            continue
        edges = p.in_edges(node)
        end = next(((port, dim) for port, dim in ends if origin(p, p.edge_value(edges[port])) is None), None)
        if end is None:
            raise GateNotAllowed("a sum over the axis reads weights alone", where=f"{group.name}, {p.path(node)}")
        edge, dim = edges[end[0]], end[1]
        value = p.edge_value(edge)
        better = _exact(p, group, value)
        if better is not None:
            value, dim, edge = *better, p.out_edges(better[0].node)[0]
        readers = found.setdefault((value, dim), [])
        if edge not in readers:
            readers.append(edge)
    return [(value, dim, tuple(readers)) for (value, dim), readers in found.items()]


def _exact(p: Program, group: AxisGroup, value: Value) -> tuple[Value, int] | None:
    """The nearest value from here back, over views that nothing else reads, with a dimension that is the axis alone."""
    dims = group.axes.solution.dims
    while True:
        for dim, term in enumerate(dims[value]):
            if tuple(atoms(term)) == group.atoms:
                return value, dim
        node = value.node
        if p.op(node) in KINDS_OF_NODES or get(p.op(node)).view is None or len(p.out_edges(node)) != 1:
            return None
        value = p.operands(node)[0]
        if len(p.out_edges(value.node)) != 1 or value in p.outputs():
            return None


# -- what it costs -----------------------------------------------------------------------------------------------------
def unit_prices(p: Program, group: AxisGroup, each: Mapping[str, float]) -> np.ndarray:
    """What goes with each unit of an axis, float64 [size]; of what several units share, as keys of queries, its part.

    Args:
        each: key of a param -> what one of its entries counts.
    """
    price = 0.0
    for key, dims in group.slices(0).items():  # a unit is one place of each atom: all have as many entries
        if key in each:
            here = {a for term in group.axes.weights[key] for a in atoms(term)}
            sharing = np.prod([known(a) for a in group.atoms if a not in here])
            rest = np.prod([n for d, n in enumerate(p.weights[key].shape) if d not in dims])
            price += each[key] * rest * np.prod([len(i) for i in dims.values()]) / sharing
    return np.full(group.size, price)


def behind(p: Program, edges: Iterable[EdgeId]) -> set[NodeId]:
    """Nodes that nothing needs any more without these edges."""
    needed = {v.node for v in p.outputs()} | set(p.writes())
    left: dict[NodeId, int] = {}
    stack, gone = list(edges), set()
    while stack:
        node = p.graph.source(stack.pop())
        left[node] = left.get(node, p.graph.out_degree(node)) - 1
        if not left[node] and node not in needed:
            gone.add(node)
            stack += p.in_edges(node)
    return gone


def _prices(p: Program, group: AxisGroup) -> np.ndarray:
    price = unit_prices(p, group, {p.key(n): 1.0 for n in p.params() if p.key(n) not in RESERVED})
    return np.maximum(np.round(price), 1).astype(np.int64)


def _weight(p: Program, edges: Iterable[EdgeId]) -> np.ndarray:
    """Entries of params that go with these edges, at least 1."""
    total = sum(p.spec(n).size for n in behind(p, edges) if p.op(n) == PARAM)
    return np.array([max(total, 1)], np.int64)


def _cost(cost: Cost, wanted: Sequence[_Wanted]) -> np.ndarray:
    if isinstance(cost, str):
        if cost not in ("params", "one"):
            raise UsageError("no such cost", expected="params, one, or numbers", got=cost)
        return np.concatenate([w.price() if cost == "params" else np.ones(w.length, np.int64) for w in wanted])
    given = np.broadcast_to(np.asarray(cost), (sum(w.length for w in wanted),))
    if (given < 0).any() or (given != np.round(given)).any():
        raise UsageError("a cost is a whole number from 0 on", got=cost)
    return given.astype(np.int64)


# -- making ------------------------------------------------------------------------------------------------------------
def _make(
    e: Transaction, wanted: Sequence[_Wanted], kind: str, inits: np.ndarray, group: str | None, cost: Cost
) -> list[NodeId]:
    p = e.program
    name = group if group is not None else "hard_concrete" if kind == "hard_concrete" else "default"
    price = _cost(cost, wanted)
    wide = all(p.spec(w.places[0].value).dtype is float64 for w in wanted)
    if not there(p):
        _begin(e, wide)
    node = p.node(NODE)
    sizes, groups = list(p.attrs(node)["sizes"]), list(p.attrs(node)["groups"])
    if name not in groups:
        groups.append(name)
        warmth = p.weights[TEMPERATURE].data.to_numpy()
        e.set_weight(TEMPERATURE, np.append(warmth, HARD_CONCRETE_T if kind == "hard_concrete" else 1.0))
    logits = list(np.split(p.weights[LOGITS].data.to_numpy(), np.cumsum(sizes)[:-1])) if sizes else []
    rows = list(np.split(p.weights[TABLE].data.to_numpy(), np.cumsum(sizes)[:-1])) if sizes else []
    free = {}
    for port, part in enumerate(rows):
        if len(part) and part[0, STATE] == FREE:
            free.setdefault(len(part), []).append(port)
    ports, at = [], 0
    for w in wanted:
        reused = free[w.length].pop(0) if free.get(w.length) else None
        port = len(sizes) if reused is None else reused
        generation = 0 if reused is None else int(rows[port][0, GENERATION]) + 1
        row = np.zeros((w.length, len(COLUMNS)), np.int64)
        row[:, [KIND, GROUP, STATE, SLOT, GENERATION]] = KINDS.index(kind), groups.index(name), SOFT, port, generation
        row[:, ELEMENT], row[:, COST] = np.arange(w.length), price[at : at + w.length]
        if reused is None:
            sizes.append(w.length)
            logits.append(inits[at : at + w.length])
            rows.append(row)
        else:
            logits[port], rows[port] = inits[at : at + w.length], row
        ports.append(port)
        at += w.length
    e.set_weight(LOGITS, np.concatenate(logits))
    e.set_weight(TABLE, np.concatenate(rows))
    if sizes != list(p.attrs(node)["sizes"]) or groups != list(p.attrs(node)["groups"]):
        e.set_attr(node, sizes=tuple(sizes), groups=tuple(groups))
    for value in dict.fromkeys([Value(node), *(place.value for w in wanted for place in w.places)]):
        if value.node in e.touched:
            e.spec(value)
    return [_stand(e, w, Value(node, port)) for w, port in zip(wanted, ports, strict=True)]


def _begin(e: Transaction, wide: bool) -> None:
    kind = "float64" if wide else "float32"
    logits = e.param(LOGITS, np.zeros(0, kind))
    table = e.const(TABLE, np.zeros((0, len(COLUMNS)), np.int64))
    temperature = e.state(TEMPERATURE, np.zeros(0, kind))
    run = e.state(RUN, np.zeros(3, np.int64))
    e.add("gate", logits, table, temperature, run, name=NODE, sizes=())


def _stand(e: Transaction, wanted: _Wanted, part: Value) -> NodeId:
    """The products; returns the first one."""
    p, sites = e.program, []
    for place in wanted.places:
        value, spec, factor = place.value, p.spec(place.value), part
        if place.log:
            factor = put(e, "clamp", [factor], {"low": LEAST, "high": None}, f"{place.name}.least")
            factor = put(e, "log", [factor], {}, f"{place.name}.log")
        if spec.dtype is not p.spec(part).dtype:
            factor = put(e, "cast", [factor], {"dtype": spec.dtype}, f"{place.name}.cast")
        if place.element is not None:
            attrs = {"axis": 0, "start": place.element, "size": 1, "step": 1}
            factor = put(e, "slice", [factor], attrs, f"{place.name}.option")
        if place.dim is not None:
            factor = _shaped(e, place, factor, wanted.atoms)
        elif not spec.shape:
            factor = put(e, "squeeze", [factor], {"axes": (0,)}, f"{place.name}.scalar")
        site = put(e, "add" if place.log else "mul", [value, factor], {}, place.name).node
        lead(e, value, Value(site), place.readers, outputs=place.outputs)
        sites.append(site)
    return sites[0]


def _shaped(e: Transaction, place: _Place, factor: Value, group: tuple[Atom, ...]) -> Value:
    """A vector over units as a factor along one dimension: repeated over what the dimension holds beside them."""
    p, term = e.program, place.term
    assert term is not None
    assert place.dim is not None
    made = tuple(atoms(term))
    if len(made) != len(group):
        parts = term.factors if isinstance(term, Product) else ()
        start = next((i for i in range(len(made)) if made[i : i + len(group)] == group), None)
        if start is None or len(parts) != len(made):
            raise GateNotAllowed("the units lie among others, not side by side", where=place.name)
        before, behind = (int(np.prod([known(t) for t in side])) for side in
                          (parts[:start], parts[start + len(group) :]))  # fmt: skip
        factor = put(e, "unsqueeze", [factor], {"axes": (0, 2)}, f"{place.name}.apart")
        shape = (before, p.spec(factor).shape[1], behind)
        factor = put(e, "expand", [factor], {"shape": shape}, f"{place.name}.repeated")
        factor = put(e, "flatten", [factor], {"start": 0, "end": 2}, f"{place.name}.flat")
    behind = len(p.spec(place.value).shape) - 1 - place.dim
    if behind:
        axes = tuple(range(1, behind + 1))
        factor = put(e, "unsqueeze", [factor], {"axes": axes}, f"{place.name}.along")
    return factor


# -- taking out --------------------------------------------------------------------------------------------------------
def ungate(e: Transaction, handle: NodeId) -> None:
    """See `Transaction.ungate`."""
    p = e.program
    found = p.gates()[p.node(handle)]
    for site in found.sites:
        lead(e, Value(site), p.operands(site)[0])
        release(e, site)


def release(e: Transaction, site: NodeId) -> None:
    """Take out a site that nothing reads, and give its slot back if it was the last one."""
    p = e.program
    part, between = of_site(p, site), carrier(p, site)
    assert part is not None
    e.remove(site)
    for node in between:
        if not p.graph.out_degree(node):
            e.remove(node)
    if any(p.edge_value(edge) == part for edge in p.out_edges(part.node)):
        return
    sizes = p.attrs(part.node)["sizes"]
    start = sum(sizes[: part.port])
    table = p.weights[TABLE].data.to_numpy().copy()
    table[start : start + sizes[part.port], STATE] = FREE
    if (table[:, STATE] == FREE).all():
        e.remove([NODE, LOGITS, TABLE, TEMPERATURE, RUN])
        return
    e.set_weight(TABLE, table)


def set_states(e: Transaction, handle: NodeId, state: str, elements: Any = None) -> None:
    """See `Transaction.set_gate`."""
    p = e.program
    found = p.gates()[p.node(handle)]
    code = {"soft": SOFT, "open": OPEN, "closed": CLOSED, "frozen": FROZEN}.get(state)
    if code is None:
        raise UsageError("no such state of a gate", expected="soft, open, closed, frozen", got=state)
    table = p.weights[TABLE].data.to_numpy().copy()
    rows = table[found.places]
    rows[slice(None) if elements is None else elements, STATE] = code
    if found.kind == "choice" and (rows[:, STATE] == CLOSED).all():
        raise GateNotAllowed("the last option stays", where=found.owner)
    if not np.array_equal(rows[:, STATE], found.rows[:, STATE]):
        e.set_weight(TABLE, table)
