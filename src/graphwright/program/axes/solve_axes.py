"""Inference of axes: one walk over a program in topological order unifies dimensions by the `axes` rule of each op.

The result has a term for every dimension of every value (see `graphwright.ops.axes`), and notes on the atoms of the
terms. An atom is a size that is not split further.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from graphwright.graph import NodeId
from graphwright.ops import get
from graphwright.ops.axes import Atom, AxesUse, AxisFact, Correction, Dims, Range, Term, atoms, resolve, same
from graphwright.program.kinds import ASSIGN, CONST, INPUT, SOURCES, STORED
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.program.program import Program


@dataclass(slots=True)
class AtomNotes:
    """Notes of ops on one atom, a size that is not split further: lists of (node, text), and `summed`.

    `summed` lists the nodes that sum over the atom, each as (node, pairs of operand number and summed dimension).
    """

    frozen: list[tuple[NodeId, str]] = field(default_factory=list)  # reasons why it cannot be resized
    ends: list[tuple[NodeId, str]] = field(default_factory=list)  # inputs and outputs of the program with the atom
    mixed: list[tuple[NodeId, str]] = field(default_factory=list)  # why zeroing a unit differs from removing it
    summed: list[tuple[NodeId, tuple[tuple[int, int], ...]]] = field(default_factory=list)
    kinds: dict[str, None] = field(default_factory=dict)  # names for its units


class Lookup(NamedTuple):
    """A constant table of indices into an axis. If a unit is removed, so are the entries of the table that index it."""

    key: str  # of the constant
    axis: Term  # that the entries index
    entries: Term  # the table's own dimension


class OperandGroups(NamedTuple):
    """Operands of a node in groups along an axis: unit u is the u-th group of `width` operands from `first` on."""

    node: NodeId
    axis: Term
    first: int
    width: int


@dataclass(slots=True)
class AxisSolution:
    """The dimensions of one state of a program, as terms: products and concatenations of atoms (unsplit sizes).

    `sizes` lists the op attributes that hold sizes of dimensions, as (node, attribute, term or terms). `composites`
    lists the terms of several atoms whose units have a kind, such as heads, as (node, kind, term).
    """

    dims: dict[Value, Dims] = field(default_factory=dict)  # value -> terms of its dimensions, resolved
    notes: dict[Atom, AtomNotes] = field(default_factory=dict)  # atom -> notes of ops on it
    sizes: list[tuple[NodeId, str, Term | tuple[Term, ...]]] = field(default_factory=list)
    corrections: list[tuple[NodeId, Correction]] = field(default_factory=list)  # (node, how to keep its result exact)
    lookups: list[Lookup] = field(default_factory=list)  # tables of indices, which change with the axis they index
    composites: list[tuple[NodeId, str, Term]] = field(default_factory=list)
    groups: list[OperandGroups] = field(default_factory=list)  # operands that are removed and added with units


def solve(p: Program) -> AxisSolution:
    """Infer which dimensions of a program are resized together; the specs of the program must be up to date."""
    found = AxisSolution()
    dims = found.dims
    ranges: dict[Value, Range | None] = {}
    by_key: dict[str, Dims] = {}
    notes: list[tuple[NodeId, AxisFact]] = []
    lookups: dict[NodeId, list[tuple[NodeId, Term]]] = {}
    for node in p.order():
        op = p.op(node)
        if op in SOURCES:
            made = tuple(Atom(n) for n in p.spec(node).shape)
            if op in STORED:
                made = by_key.setdefault(p.key(node), made)
            elif op == INPUT:
                notes += [(node, AxisFact("end", t, "is an input of the program")) for t in made]
            dims[Value(node)] = made
            continue
        operands = p.operands(node)
        ins = [dims[v] for v in operands]
        if op == ASSIGN:
            for a, b in zip(*ins, strict=True):
                if not same(a, b):
                    why = "assigns a value that splits it differently"
                    notes += [(node, AxisFact("frozen", t, why)) for t in (a, b)]
            continue
        weights = [origin(p, v) is not None for v in operands]
        known, constant = [ranges.get(v) for v in operands], [p.op(v.node) == CONST for v in operands]
        kinds = [p.specs(v.node)[v.port].dtype for v in operands]
        use = AxesUse(ins, [s.shape for s in p.specs(node)], p.attrs(node), weights, known, constant, kinds)
        row = get(op)
        if row.axes is None:
            results = [tuple(Atom(n) for n in shape) for shape in use.shapes]
            for term in (t for d in (*ins, *results) for t in d):
                use.frozen(term, f"has no rule for axes: {row.why.get('axes', '')}")
        else:
            results = row.axes(use)
        for port, result in enumerate(results):
            dims[Value(node, port)] = tuple(result)
            ranges[Value(node, port)] = use.result_ranges.get(port)
        notes += [(node, note) for note in use.notes]
        found.corrections += [(node, c) for c in use.corrections]
        for axis, port in use.lookups:
            lookups.setdefault(operands[port].node, []).append((node, axis))
        found.sizes += [(node, attr, term) for attr, term in use.sizes.items()]
        found.groups += [OperandGroups(node, *group) for group in use.groups]
    for name, value in zip(p.output_names(), p.outputs(), strict=True):
        notes += [(value.node, AxisFact("end", t, f"is the output {name!r} of the program")) for t in dims[value]]
    for table, uses in lookups.items():  # unify the axes that one table indexes, or freeze them
        axis = uses[0][1]
        fits = [same(axis, other) for _, other in uses]
        if len(uses) != p.graph.out_degree(table) or not all(fits):
            why = "indexes it by a table with other readers"
            notes += [(node, AxisFact("frozen", term, why)) for node, term in uses]
        found.lookups.append(Lookup(p.key(table), axis, dims[Value(table)][0]))
    found.dims = {v: tuple(map(resolve, d)) for v, d in dims.items()}
    found.notes = _collected(notes)
    kinds = [(node, note.text, resolve(note.term)) for node, note in notes if note.fact == "kind"]
    found.composites = [kind for kind in kinds if not isinstance(kind[2], Atom)]
    return found


def _collected(notes: Iterable[tuple[NodeId, AxisFact]]) -> dict[Atom, AtomNotes]:
    found: dict[Atom, AtomNotes] = {}
    for node, note in notes:
        among = dict.fromkeys(atoms(resolve(note.term)))
        for atom in among:
            about = found.setdefault(atom, AtomNotes())
            if note.fact == "summed":
                about.summed.append((node, note.ends))
            elif note.fact != "kind":
                lists = {"frozen": about.frozen, "end": about.ends, "mixed": about.mixed}
                lists[note.fact].append((node, note.text))
            elif len(among) == 1:
                about.kinds[note.text] = None
    return found


def origin(p: Program, value: Value) -> NodeId | None:
    """Return the param, const or state from which a value comes, directly or through casts and copies; else None."""
    node = value.node
    while p.op(node) not in STORED:
        if p.op(node) in SOURCES or p.op(node) == ASSIGN or not get(p.op(node)).traits.convert:
            return None
        node = p.operands(node)[0].node
    return node
