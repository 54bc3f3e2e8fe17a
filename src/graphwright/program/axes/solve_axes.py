"""Solving for axes: one walk over a program in order, joining dimensions by the equations of each op's axes row.

The result has the terms of every dimension of every value, and notes on the atoms that the terms consist of.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graphwright.ops import get
from graphwright.ops.axes import Atom, AxesUse, AxisFact, atoms, resolve, same
from graphwright.program.kinds import ASSIGN, CONST, INPUT, SOURCES, STORED
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.ops.axes import Correction, Dims, Term
    from graphwright.program.program import Program


@dataclass(slots=True)
class AtomNotes:
    """Notes of ops on one atom, as (node, text).

    Attributes:
        frozen: reasons why it cannot be resized.
        ends: inputs and outputs of the program with the atom.
        mixed: reasons why a zero unit is not a removed one.
        summed: sums over the atom, as (node, (operand, dimension) pairs).
        kinds: names for its units.
    """

    frozen: list[tuple[NodeId, str]] = field(default_factory=list)
    ends: list[tuple[NodeId, str]] = field(default_factory=list)
    mixed: list[tuple[NodeId, str]] = field(default_factory=list)
    summed: list[tuple[NodeId, tuple[tuple[int, int], ...]]] = field(default_factory=list)
    kinds: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lookup:
    """A constant table of indices into an axis: an entry is removed with the unit it refers to.

    Attributes:
        key: of the constant.
        axis: that the entries index.
        entries: the table's own dimension.
    """

    key: str
    axis: Term
    entries: Term


@dataclass(slots=True)
class AxisSolution:
    """The dimensions of one state of a program, as terms of atoms.

    Attributes:
        dims: value -> terms of its dimensions, resolved.
        notes: atom -> notes of ops on it.
        sizes: (node, attribute, term or terms) of attributes that are sizes.
        corrections: (node, how to keep its result exact).
        lookups: tables of indices, which change with the axis they index.
        composites: (node, kind, term) of named dimensions of several atoms.
    """

    dims: dict[Value, Dims]
    notes: dict[Atom, AtomNotes]
    sizes: list[tuple[NodeId, str, Term | tuple[Term, ...]]]
    corrections: list[tuple[NodeId, Correction]]
    lookups: list[Lookup]
    composites: list[tuple[NodeId, str, Term]]


def solve(p: Program) -> AxisSolution:
    """Solve for the axes of a program whose specs are up to date."""
    dims: dict[Value, Dims] = {}
    ranges: dict[Value, Term | None] = {}
    by_key: dict[str, Dims] = {}
    notes: list[tuple[NodeId, AxisFact]] = []
    sizes: list[tuple[NodeId, str, Term | tuple[Term, ...]]] = []
    corrections: list[tuple[NodeId, Correction]] = []
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
                    notes += [
                        (node, AxisFact("frozen", t, "assigns a value that splits it differently")) for t in (a, b)
                    ]
            continue
        use = AxesUse(
            ins,
            [s.shape for s in p.specs(node)],
            p.attrs(node),
            [stored(p, v) for v in operands],
            [ranges.get(v) for v in operands],
            [p.op(v.node) == CONST for v in operands],
        )
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
        corrections += [(node, c) for c in use.corrections]
        for axis, port in use.lookups:
            lookups.setdefault(operands[port].node, []).append((node, axis))
        sizes += [(node, attr, term) for attr, term in use.sizes.items()]
    for name, value in zip(p.output_names(), p.outputs(), strict=True):
        notes += [(value.node, AxisFact("end", t, f"is the output {name!r} of the program")) for t in dims[value]]
    tables = [_table(p, table, uses, dims, notes) for table, uses in lookups.items()]
    return AxisSolution(
        {v: tuple(map(resolve, d)) for v, d in dims.items()},
        _collected(notes),
        sizes,
        corrections,
        tables,
        [(n, note.text, term) for n, note in notes if note.fact == "kind" and _several(term := resolve(note.term))],
    )


def _table(
    p: Program,
    table: NodeId,
    uses: list[tuple[NodeId, Term]],
    dims: dict[Value, Dims],
    notes: list[tuple[NodeId, AxisFact]],
) -> Lookup:
    """Join the axes that one table indexes, or freeze them if something else reads the table."""
    axis = uses[0][1]
    fits = [same(axis, other) for _, other in uses]
    if len(uses) != p.graph.out_degree(table) or not all(fits):
        notes += [(node, AxisFact("frozen", term, "indexes it by a table with other readers")) for node, term in uses]
    return Lookup(p.key(table), axis, dims[Value(table)][0])


def _several(term: Term) -> bool:
    return not isinstance(term, Atom)


def _collected(notes: Iterable[tuple[NodeId, AxisFact]]) -> dict[Atom, AtomNotes]:
    found: dict[Atom, AtomNotes] = {}
    for node, note in notes:
        among = dict.fromkeys(atoms(resolve(note.term)))
        for atom in among:
            about = found.setdefault(atom, AtomNotes())
            if note.fact == "frozen":
                about.frozen.append((node, note.text))
            elif note.fact == "end":
                about.ends.append((node, note.text))
            elif note.fact == "mixed":
                about.mixed.append((node, note.text))
            elif note.fact == "summed":
                about.summed.append((node, note.ends))
            elif len(among) == 1:
                about.kinds[note.text] = None
    return found


def stored(p: Program, value: Value) -> bool:
    """Return True for a stored weight, or a cast or copy of one."""
    return origin(p, value) is not None


def origin(p: Program, value: Value) -> NodeId | None:
    """Return the param, const or state that a value is, or is a cast or copy of; else None."""
    node = value.node
    while p.op(node) not in STORED:
        if p.op(node) in SOURCES or p.op(node) == ASSIGN or not get(p.op(node)).traits.convert:
            return None
        node = p.operands(node)[0].node
    return node
