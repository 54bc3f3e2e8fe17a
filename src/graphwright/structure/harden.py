"""Hardening: elements with closed gates are cut, open gates become 1 or are folded into weights.

Large elements are cut before small ones: layers, nodes, edges, options, edges of patterns, units. After each of these
kinds, nodes that are no longer needed are removed. The caller opens the edit, so that everything is one journal entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from graphwright.graph import EdgeArray, NodeId
from graphwright.ops import get, traits
from graphwright.program import Program, Value
from graphwright.program.axes.resize import by_index
from graphwright.program.axes.solve_axes import origin
from graphwright.program.axes.units import Units
from graphwright.program.editing.gate_edits import release
from graphwright.program.editing.gate_slots import free_slots
from graphwright.program.editing.replace import redirect
from graphwright.program.editing.transaction import Transaction
from graphwright.program.gates import FREE, STATE, Gate, axis_of, of_site
from graphwright.program.kinds import INPUT, KINDS
from graphwright.structure.elements import Element, sites_of
from graphwright.structure.policy import Proposal

ORDER = ("layers", "nodes", "edges", "choice", "pattern", "units")


def cut(e: Transaction, proposals: Sequence[Proposal], step: int) -> list[str]:
    """Cut proposed elements, large ones first, and record each cut in the journal.

    Returns: names of the cut elements, except those that the cut of a larger element removed.
    """
    p, done = e.program, list[str]()
    elements = [q.element for q in proposals if q.element is not None]
    for over in ORDER:
        mine = [x for x in elements if x.over == over]
        done += _cut_units(e, mine) if over == "units" else _cut_pairs(e, mine) if over == "pattern" else []
        for x in mine if over not in ("units", "pattern") else ():
            sites = sites_of(p, x)
            if sites:  # else a larger cut removed it
                if over == "choice":
                    e.set_gate(p.gates().at(x.gate.port).handle, "closed", [x.index])
                for site in sites:
                    _close(e, site)
                done.append(x.name)
        remove_dead(e)
    gone = set(done)
    for q in proposals:
        if q.name in gone:
            annotate(e, q, step)
    return done


def annotate(e: Transaction, q: Proposal, step: int) -> None:
    """Record a proposal and its reason in the journal."""
    warm = {} if q.element is None else {"z": q.element.z, "temperature": q.element.temperature}
    e.annotate(q.name, decision=q.action, step=step, p=q.p, gradient=q.gradient, reason=q.reason, **warm)


def _close(e: Transaction, site: NodeId) -> None:
    """Replace `site`, the product of a gate and a value, by zero in all its readers."""
    p = e.program
    for edge in p.out_edges(site):
        reader = p.graph.target(edge)
        if p.is_junction(reader):
            e.cut(edge)
        elif get(p.op(reader)).traits.sums:
            other = next(v for v in p.operands(reader) if v.node != site)
            redirect(e, {Value(reader): other})
            e.remove(reader)
        else:
            zero = e.insert(edge, "junction", name=p.free_name(f"{p.path(site)}.closed"))
            e.cut(p.in_edges(zero)[0])
    if site in p.graph:
        if Value(site) in p.outputs():
            zero = e.add("junction", site, name=p.free_name(f"{p.path(site)}.closed"))
            redirect(e, {Value(site): Value(zero)})
            e.cut(p.in_edges(zero)[0])
        if site in p.graph:
            release(e, site)


def _cut_units(e: Transaction, elements: Sequence[Element]) -> list[str]:
    p, done = e.program, []
    gates: dict[NodeId, list[Element]] = {}
    for x in elements:
        gates.setdefault(x.gate.handle, []).append(x)
    for mine in gates.values():
        gate = mine[0].gate
        if any(site not in p.graph for site in gate.sites):
            continue
        axis = axis_of(p, gate)
        ids = tuple(sorted(x.index for x in mine))
        e.cut_units(Units(p, {axis.name: ids}, {axis.name: axis.size}), ragged=axis.kind == "heads")
        done += [x.name for x in mine]
    return done


def _cut_pairs(e: Transaction, elements: Sequence[Element]) -> list[str]:
    """Cut edges of patterns; those that are pinned stay."""
    p, done = e.program, []
    gates: dict[int, list[Element]] = {}
    for x in elements:
        if any(site in p.graph for site in x.gate.sites):
            gates.setdefault(x.gate.port, []).append(x)
    for mine in gates.values():
        pattern = p.patterns[mine[0].gate.owner]
        slots = np.asarray(pattern.edges["gate"])
        held = slots[np.asarray(pattern.edges["pinned"]) != 0]
        going = np.setdiff1d([x.index for x in mine], held)
        pattern.cut(EdgeArray(np.asarray(pattern.edges())[np.isin(slots, going)]))
        free_slots(e, mine[0].gate, going)
        done += [x.name for x in mine if x.index in set(going.tolist())]
    return done


def remove_dead(e: Transaction) -> list[str]:
    """Remove nodes (except inputs) on which no output or state update depends, and their gates; return their names."""
    p = e.program
    needed = p.reachable([*p.outputs(), *p.assigns()])
    names = []
    for node in sorted((n for n in p.nodes() if n not in needed), key=p.order_labels.key, reverse=True):
        own = {n for g in p.of_traits(gates=True) for n in (g, *p.producers(g))}  # removed with the last gate
        if node in p.graph and p.op(node) != INPUT and node not in own:
            names.append(p.path(node))
            if of_site(p, node) is not None:
                release(e, node)
            else:
                e.remove(node)
    return names


# -- open gates --------------------------------------------------------------------------------------------------------
def remove_gates(e: Transaction, gates: Iterable[Gate], to: str, values: np.ndarray) -> None:
    """Replace open gates by 1, or fold their values into adjacent weights; freeze gates that cannot be folded.

    Args:
        to: `one`, `fold`, or `auto` to choose by kind of gate.
        values: gate values in evaluation mode, indexed by logit offset, float64.
    """
    for gate in gates:
        one = to == "one" or (to == "auto" and not gate.facts.folded)
        if one or _fold(e, gate, values[gate.span]):
            e.ungate(gate.handle)
        else:
            e.set_gate(gate.handle, "frozen")


def _fold(e: Transaction, gate: Gate, values: np.ndarray) -> bool:
    """Fold the values of a gate into adjacent weights and return True; return False if there are no such weights."""
    if (values[gate.rows[:, STATE] != FREE] == 1).all():
        return True
    if gate.over == "pattern":
        return False  # no weight belongs to one edge
    p = e.program
    if gate.over == "units":
        return _fold_units(e, gate, values)
    if gate.over == "choice":
        return False
    makers = [maker(p, p.operands(site)[0], {site}) for site in gate.sites]
    for key in chain(*makers) if all(makers) else ():
        e.set_weight(key, lambda w: w * values[0])
    return all(makers)


def maker(p: Program, value: Value, readers: set[NodeId]) -> list[str]:
    """Return the weight and bias keys of the linear map that computes `value`; [] if it has no weights.

    Also return [] if nodes other than `readers` read the value, or if the weights are shared.
    """
    node = value.node
    while p.op(node) not in KINDS and (get(p.op(node)).view is not None or get(p.op(node)).traits.convert):
        if set(p.consumers(node)) != readers:
            return []
        readers, node = {node}, p.operands(node)[0].node
    linear = traits(p.op(node)).contracts in ("out_in", "window")
    if not linear or set(p.consumers(node)) != readers or Value(node) in p.outputs():
        return []
    weights = [origin(p, v) for v in p.operands(node)[1:]]
    return [p.key(w) for w in weights if w is not None] if all(_alone(p, w) for w in weights) else []


def _alone(p: Program, weight: NodeId | None) -> bool:
    """Return True if a param has exactly one reader; a cast is skipped: the reader of its result is counted."""
    while weight is not None and p.graph.out_degree(weight) == 1:
        reader = p.consumers(weight)[0]
        if p.op(reader) in KINDS or not get(p.op(reader)).traits.convert:
            return True
        weight = reader
    return False


def _fold_units(e: Transaction, gate: Gate, values: np.ndarray) -> bool:
    """Multiply the weight columns that act on gated units by the gate values; return False if that is impossible."""
    p, group = e.program, axis_of(e.program, gate)
    if any(traits(p.op(site)).sums for site in gate.sites):
        return False  # the gate's logarithm is added to scores: no weight column can absorb it
    axes = group.axes
    found: dict[str, np.ndarray] = {}
    sums = dict.fromkeys(s for atom in group.atoms for s in axes.solution.notes[atom].summed)
    for node, ends in sums:
        weights = [(origin(p, p.operands(node)[port]), dim) for port, dim in ends]
        mine = [(w, dim) for w, dim in weights if w is not None and axes.summed.get((w, dim, group.atoms[0]))]
        if not mine:
            return False
        weight, dim = mine[0]
        factor = by_index(axes.weights[p.key(weight)][dim], group.atoms, values)
        shape = [-1 if d == dim else 1 for d in range(len(axes.weights[p.key(weight)]))]
        found[p.key(weight)] = found.get(p.key(weight), np.ones(1)) * factor.reshape(shape)
    for key, factor in found.items():
        e.set_weight(key, lambda w, factor=factor: w * factor)
    return True
