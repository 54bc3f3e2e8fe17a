"""Adding and removing gates inside an open edit. All gates of a program share one vector of logits and one table.

A gate has sites, the nodes that multiply a value by it, and a span of rows in logits and table. The span of a removed
gate is reused by a new gate, with the next generation number, so that other gates keep their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from graphwright.array import float64
from graphwright.array.formulas.gates import GATE_KINDS, KINDS
from graphwright.errors import UsageError
from graphwright.graph import EdgeId, NodeId
from graphwright.ops import get, traits
from graphwright.ops.axes import Product, atoms, axes_of, known
from graphwright.program import gates as g
from graphwright.program.axes.solve_axes import AtomNotes, origin
from graphwright.program.axes.units import Units, branches
from graphwright.program.editing.gate_slots import allocate, free_unread
from graphwright.program.editing.pattern_gates import ungate_edges
from graphwright.program.editing.replace import redirect
from graphwright.program.errors import DeadGate, GateNotAllowed, NotZeroPreserving
from graphwright.program.gates import GateKeywords, GateOptions
from graphwright.program.kinds import KINDS as KINDS_OF_NODES
from graphwright.program.kinds import PARAM
from graphwright.program.op_graph import Value
from graphwright.signatures import keywords

if TYPE_CHECKING:
    from graphwright.ops.axes import Atom, Term
    from graphwright.program.axes.axes import AxisGroup
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.program import Program

_Operand = tuple[Value, int, tuple[EdgeId, ...]]


@dataclass(frozen=True, slots=True)
class _Site:
    """A value to multiply by a gate, and the edges (`readers`) that then carry the product instead of the value.

    `dim` is the dimension along which the gate has one factor per unit; None if one factor multiplies the whole value.
    If `log` is True, the value holds softmax scores, and the logarithm of the gate is added to them instead.
    """

    value: Value
    dim: int | None
    readers: tuple[EdgeId, ...]
    outputs: bool  # whether the product also replaces the value as an output of the program
    name: str  # of the new node
    element: int | None = None  # the option of a choice gate
    term: Term | None = None  # of the dimension `dim`, see `graphwright.ops.axes`
    log: bool = False


@dataclass(frozen=True, slots=True)
class _Request:
    """A gate to create: its sites, its number of elements, and a function that returns the default costs of these."""

    sites: tuple[_Site, ...]
    length: int
    cost: Callable[[], np.ndarray]
    atoms: tuple[Atom, ...] = ()  # of the axis, for units


@keywords(GateOptions)
def gate(e: Transaction, target: Any, kind: str = "hard_concrete", **options: Unpack[GateKeywords]) -> Any:
    """Multiply the values of edges, units, layers or nodes by trained gates.

    Args:
        target: an edge into a junction (its handle, or "a -> b"); a node; all units of an axis; layers; or a list of
            edges or nodes, which each get their own gate. For a `choice`, a list of edges, which get one gate together.
        kind: "scale", "sigmoid", "ste", "bernoulli", "concrete", "concrete_st", "hard_concrete" or "choice", whose
            formulas are in docs/structure.md.
        options: see `GateOptions`.
    Returns: the handle of the gate, which is its first multiplication node; a tuple of handles for units or a list.
    Raises: GateNotAllowed for an edge into an op, NotZeroPreserving if zeroing a unit differs from removing it,
        DeadGate for logits that are not finite, StaleHandle, UnknownEdge.
    """
    if (facts := GATE_KINDS.get(kind)) is None:
        raise UsageError("unknown kind of gate", expected=", ".join(KINDS), got=kind)
    given = GateOptions(**options)
    requests, several = _requests(e, target, facts.one_of)
    if not requests:
        raise UsageError("nothing to gate: the list of targets is empty", expected="edges or nodes", got=target)
    count = sum(r.length for r in requests)
    logits = _per_element("init", facts.start if given.init is None else given.init, count)
    if not np.isfinite(logits).all():
        raise DeadGate("the gate would have no gradient: an initial logit is not finite", got=given.init,
                       fix="pass init=structure.init_for(p0, kind) with p0 from 0.01 to 0.99")  # fmt: skip
    if facts.rounded and not facts.noisy and (logits <= 0).any():
        e.warnings.append("a straight-through gate is closed at first: its operands get no gradient until it opens")
    made = _make(e, requests, kind, logits, given)
    return tuple(made) if several else made[0]


# -- sites -------------------------------------------------------------------------------------------------------------
def _requests(e: Transaction, target: Any, one_of: bool) -> tuple[list[_Request], bool]:
    """Return (the gates to create, whether `gate` returns a tuple of handles)."""
    p = e.program
    if one_of:
        edges = [p.edge(t) for t in target] if isinstance(target, Sequence) and not isinstance(target, str) else []
        if len(edges) < 2:
            expected = "edges into junctions"
            raise UsageError("a gate of kind 'choice' needs a list of two or more edges", expected=expected, got=target)
        sites = tuple(_edge_site(p, edge, i) for i, edge in enumerate(edges))
        return [_Request(sites, len(edges), lambda: np.concatenate([_edge_cost(p, [edge]) for edge in edges]))], False
    if isinstance(target, Units):
        target.check_nonempty()
        chosen = target.chosen.items()
        return [r for name, ids in chosen for r in _unit_requests(p, name, ids, target.sizes[name])], True
    if isinstance(target, Sequence) and not isinstance(target, str | Value | NodeId | EdgeId):
        return [_request(p, t) for t in target], True
    return [_request(p, target)], False


def _request(p: Program, target: Any) -> _Request:
    if isinstance(target, EdgeId) or (isinstance(target, str) and "->" in target):
        edge = p.edge(target)
        return _Request((_edge_site(p, edge, None),), 1, lambda: _edge_cost(p, [edge]))
    value = p.value(target)
    if p.op(value.node) in KINDS_OF_NODES or not p.spec(value).dtype.is_float:
        what = "cannot gate this value: it is not the floating-point result of an op"
        got = f"{p.op(value.node)} {p.spec(value)}"
        raise GateNotAllowed(what, where=p.path(value), got=got)
    readers = tuple(edge for edge in p.out_edges(value.node) if p.edge_value(edge) == value)
    site = _Site(value, None, readers, value in p.outputs(), f"{p.path(value)}.gate")
    return _Request((site,), 1, lambda: _edge_cost(p, readers))


def _edge_site(p: Program, edge: EdgeId, element: int | None) -> _Site:
    target = p.graph.target(edge)
    value = p.edge_value(edge)
    if not p.is_junction(target):
        fix = 'insert a junction by e.insert(edge, "junction"), or gate the node or its units'
        what = "cannot gate this edge: its target is not a junction"
        raise GateNotAllowed(what, where=p.path(edge), fix=fix)
    if g.of_site(p, value.node) is not None and not g.gates_edges(p, value.node):
        raise GateNotAllowed("the edge already has a gate", where=p.path(edge), fix="remove it first by e.ungate(gate)")
    source = p.path(value.node).rpartition(".")[2]
    return _Site(value, None, (edge,), False, f"{p.path(target)}.{source}.gate", element)


def _unit_requests(p: Program, name: str, ids: Sequence[int], size: int) -> list[_Request]:
    found, requests = p.axes(), []
    if name not in found:
        for number, edges in branches(p, name, ids, size):
            sites = tuple(_Site(p.edge_value(x), None, (x,), False, f"{name}.{number}.gate") for x in edges)
            requests.append(_Request(sites, 1, partial(_edge_cost, p, edges)))
        return requests
    group = found[name]
    if group.frozen:
        raise GateNotAllowed("cannot gate this axis: it cannot be resized, so that closed units could not be removed",
                             where=name, got=group.frozen[0], fix="gate edges, nodes or the whole layer")  # fmt: skip
    scores, decided = _scores(p, group)
    if any(node not in decided for node in _mixed(group)):
        what, fix = "zeroing a unit of this axis differs from removing it", "gate the layer, or an axis upstream"
        raise NotZeroPreserving(what, where=name, got=group.mixed[0], fix=fix)
    if len(ids) != group.size:
        expected, fix = f"all {group.size} units", "gate all, then e.set_gate(gate, 'open', others)"
        raise GateNotAllowed("cannot gate only some units of an axis", where=name, expected=expected,
                             got=f"{len(ids)} units", fix=fix)  # fmt: skip
    terms = group.axes.solution.dims
    sites = [
        _Site(value, dim, readers, False, f"{name}.gate", term=terms[value][dim], log=log)
        for log, found_at in ((False, _before_sums(p, group, decided)), (True, scores))
        for value, dim, readers in found_at
    ]
    if not sites:
        raise GateNotAllowed("cannot gate this axis: no op sums over it", where=name, fix="gate a node")
    return [_Request(tuple(sites), group.size, partial(_axis_cost, p, group), group.atoms)]


def _mixed(group: AxisGroup) -> list[NodeId]:
    """Return the nodes whose results differ between zeroing and removing a unit, such as norms and softmaxes."""
    notes = group.axes.solution.notes
    return list(dict.fromkeys(node for atom in group.atoms for node, _ in notes.get(atom, AtomNotes()).mixed))


def _scores(p: Program, group: AxisGroup) -> tuple[list[_Operand], set[NodeId]]:
    """Return (scores, dimension, edges from the scores) per softmax over the axis, and these softmaxes with dependents.

    A score of -∞ removes a unit: its softmax weight is 0, and ops that sort or count these weights never choose it.
    """
    found = []
    for node in _mixed(group):
        if traits(p.op(node)).excludes_minus_infinity:
            edge = p.in_edges(node)[0]
            value = p.edge_value(edge)
            terms, attrs = group.axes.solution.dims[value], p.attrs(node)
            over = axes_of(attrs["axis"] if "axis" in attrs else attrs["axes"], len(terms))
            found += [(value, dim, (edge,)) for dim in over if tuple(atoms(terms[dim])) == group.atoms]
    return found, p.dependents([p.graph.target(edge) for _, _, (edge,) in found])


def _before_sums(p: Program, group: AxisGroup, decided: Collection[NodeId]) -> list[_Operand]:
    """Return operands to gate of the ops that sum over the axis, as (value, dimension, edges that read the value).

    Ops in `decided` are skipped: a softmax before them is gated. If possible the dimension is exactly the axis.
    """
    solution = group.axes.solution
    found: dict[tuple[Value, int], dict[EdgeId, None]] = {}
    for node, ends in dict.fromkeys(s for atom in group.atoms for s in solution.notes.get(atom, AtomNotes()).summed):
        if node in decided:
            continue
        edges = p.in_edges(node)
        end = next(((port, dim) for port, dim in ends if origin(p, p.edge_value(edges[port])) is None), None)
        if end is None:
            where = f"{group.name}, {p.path(node)} ({p.op(node)})"
            raise GateNotAllowed("cannot gate this axis: an op that sums over it reads only weights", where=where)
        edge, dim = edges[end[0]], end[1]
        value = p.edge_value(edge)
        if (better := _exact(p, group, value)) is not None:
            if better[0] != value:  # through views, each with one reader
                edge = p.out_edges(better[0].node)[0]
            value, dim = better
        found.setdefault((value, dim), {})[edge] = None
    return [(value, dim, tuple(readers)) for (value, dim), readers in found.items()]


def _exact(p: Program, group: AxisGroup, value: Value) -> tuple[Value, int] | None:
    """Return (`value` or the nearest value before it with a dimension that is exactly the axis, that dimension).

    Return None if a node between the two values is not a view, or if a value between them has another reader.
    """
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


# -- costs -------------------------------------------------------------------------------------------------------------
def unit_costs(p: Program, group: AxisGroup, each: Mapping[str, float]) -> np.ndarray:
    """Return the cost of the weight entries that are removed with each unit of an axis, as float64 [size].

    `each` maps the key of a param to the cost of one of its entries. Entries that n units share, such as those of a key
    head with n query heads, count 1/n for each unit.
    """
    cost = 0.0
    for key, dims in group.slices(0).items():  # a unit is one index of each atom: all have as many entries
        if key in each:
            here = {a for term in group.axes.weights[key] for a in atoms(term)}
            sharing = prod(known(a) for a in group.atoms if a not in here)
            rest = prod(n for d, n in enumerate(p.weights[key].shape) if d not in dims)
            cost += each[key] * rest * prod(map(len, dims.values())) / sharing
    return np.full(group.size, cost)


def removed_with(p: Program, edges: Iterable[EdgeId]) -> set[NodeId]:
    """Return the nodes upstream of these edges that no output or assign node needs once the edges are removed."""
    needed = {v.node for v in p.outputs()} | set(p.assigns())
    left: dict[NodeId, int] = {}
    stack, gone = list(edges), set()
    while stack:
        node = p.graph.source(stack.pop())
        left[node] = left.get(node, p.graph.out_degree(node)) - 1
        if not left[node] and node not in needed:
            gone.add(node)
            stack += p.in_edges(node)
    return gone


def _axis_cost(p: Program, group: AxisGroup) -> np.ndarray:
    cost = unit_costs(p, group, {p.key(n): 1.0 for n in p.params() if p.key(n) not in g.RESERVED})
    return np.maximum(np.round(cost), 1).astype(np.int64)


def _edge_cost(p: Program, edges: Iterable[EdgeId]) -> np.ndarray:
    """Return the number of param entries that nothing needs once these edges are removed, at least 1, as int64 [1]."""
    total = sum(p.spec(n).size for n in removed_with(p, edges) if p.op(n) == PARAM)
    return np.array([max(total, 1)], np.int64)


def _costs(cost: g.Cost, requests: Sequence[_Request]) -> np.ndarray:
    if isinstance(cost, str):
        if cost not in ("params", "one"):
            raise UsageError("unknown cost of gate elements", expected='"params", "one" or integers >= 0', got=cost)
        return np.concatenate([r.cost() if cost == "params" else np.ones(r.length, np.int64) for r in requests])
    given = _per_element("cost", cost, sum(r.length for r in requests))
    if not ((given >= 0) & (given < 2**53) & (given == np.round(given))).all():
        raise UsageError("the cost of a gate element is invalid", expected="integers >= 0", got=cost)
    return given.astype(np.int64)


# -- adding ------------------------------------------------------------------------------------------------------------
def _make(
    e: Transaction, requests: Sequence[_Request], kind: str, inits: np.ndarray, options: GateOptions
) -> list[NodeId]:
    p = e.program
    wide = all(p.spec(r.sites[0].value).dtype is float64 for r in requests)
    costs = _costs(options.cost, requests)
    made = allocate(e, [r.length for r in requests], kind, inits, costs, options.group, wide=wide)
    for value in dict.fromkeys([Value(made[0].node), *(site.value for r in requests for site in r.sites)]):
        if value.node in e.touched:
            e.spec(value)
    return [_add_sites(e, r, value) for r, value in zip(requests, made, strict=True)]


def _put(e: Transaction, op: str, operands: Sequence[Value], name: str, **attrs: Any) -> Value:
    return Value(e.add_op(op, operands, attrs, e.program.free_name(name)))


def _add_sites(e: Transaction, request: _Request, part: Value) -> NodeId:
    """Add the nodes that multiply the values of a request by its gate `part`; return the first, the gate's handle."""
    p, sites = e.program, []
    for at in request.sites:
        value, spec, factor = at.value, p.spec(at.value), part
        if at.log:
            name = f"{at.name}.least"
            factor = _put(e, "clamp", [factor], name, low=g.LEAST, high=None, gradient="all")
            factor = _put(e, "log", [factor], f"{at.name}.log")
        if spec.dtype is not p.spec(part).dtype:
            factor = _put(e, "cast", [factor], f"{at.name}.cast", dtype=spec.dtype)
        if at.element is not None:
            factor = _put(e, "slice", [factor], f"{at.name}.option", axis=0, start=at.element, size=1, step=1)
        if at.dim is not None:
            factor = _shaped(e, at, factor, request.atoms)
        elif not spec.shape:
            factor = _put(e, "squeeze", [factor], f"{at.name}.scalar", axes=(0,))
        site = _put(e, "add" if at.log else "mul", [value, factor], at.name)
        redirect(e, {value: site}, edges=at.readers, outputs=at.outputs)
        sites.append(site.node)
    return sites[0]


def _shaped(e: Transaction, at: _Site, factor: Value, group: tuple[Atom, ...]) -> Value:
    """Reshape `factor`, a number per unit, to broadcast along `at.dim`; repeat it over other axes in that dimension."""
    p, term = e.program, at.term
    assert term is not None
    assert at.dim is not None
    made = tuple(atoms(term))
    if len(made) != len(group):
        parts = term.factors if isinstance(term, Product) else ()
        start = next((i for i in range(len(made)) if made[i : i + len(group)] == group), None)
        if start is None or len(parts) != len(made):
            got = f"dimension {at.dim} of {p.path(at.value)}"
            raise GateNotAllowed("cannot gate units that a dimension interleaves or concatenates with other axes",
                                 where=at.name, got=got)  # fmt: skip
        before, after = (prod(map(known, side)) for side in (parts[:start], parts[start + len(group) :]))
        factor = _put(e, "unsqueeze", [factor], f"{at.name}.apart", axes=(0, 2))
        shape = (before, p.spec(factor).shape[1], after)
        factor = _put(e, "expand", [factor], f"{at.name}.repeated", shape=shape)
        factor = _put(e, "flatten", [factor], f"{at.name}.flat", start=0, end=2)
    trailing = len(p.spec(at.value).shape) - 1 - at.dim
    if trailing:
        factor = _put(e, "unsqueeze", [factor], f"{at.name}.along", axes=tuple(range(1, trailing + 1)))
    return factor


# -- removing ----------------------------------------------------------------------------------------------------------
def ungate(e: Transaction, handle: NodeId) -> None:
    """Remove a gate: values pass unchanged, and new gates can reuse its logits. Raises: StaleHandle, UnknownGate."""
    p = e.program
    found = p.gates()[p.node(handle)]
    if found.over == "pattern":
        ungate_edges(e, found)
        return
    for site in found.sites:
        redirect(e, {Value(site): p.operands(site)[0]})
        release(e, site)


def release(e: Transaction, site: NodeId) -> None:
    """Remove a node that multiplies by a gate and has no readers. Free the gate's logits if no such node is left."""
    p = e.program
    part, nodes = g.of_site(p, site), g.between(p, site)
    assert part is not None
    e.remove(site)
    for node in nodes:
        if not p.graph.out_degree(node):
            e.remove(node)
    free_unread(e, part)


def set_gate(e: Transaction, handle: NodeId, state: str, elements: Any = None) -> None:
    """Fix a gate, or elements by index, at 1 ("open"), 0 ("closed") or its value ("frozen"), or train it ("soft")."""
    p = e.program
    found = p.gates()[p.node(handle)]
    code = {"soft": g.SOFT, "open": g.OPEN, "closed": g.CLOSED, "frozen": g.FROZEN}.get(state)
    if code is None:
        raise UsageError("unknown state of a gate", expected="soft, open, closed, frozen", got=state)
    table = p.weights[g.TABLE].data.to_numpy().copy()
    rows = table[found.span]
    used = rows[:, g.STATE] != g.FREE
    rows[used if elements is None else elements, g.STATE] = code
    if found.facts.one_of and (rows[:, g.STATE] == g.CLOSED).all():
        raise GateNotAllowed("cannot close all options of a choice gate", where=found.owner, fix="cut their edges")
    if not np.array_equal(rows[:, g.STATE], found.rows[:, g.STATE]):
        e.set_weight(g.TABLE, table)


def _per_element(name: str, value: Any, count: int) -> np.ndarray:
    """Return an option as float64 [count]. Raises: UsageError unless it is one number, or one per element."""
    try:
        return np.broadcast_to(np.asarray(value, np.float64), (count,))
    except (TypeError, ValueError, OverflowError):
        expected = f"a number, or {count} numbers"
        raise UsageError("the argument has another size or type", where=name, expected=expected, got=value) from None
