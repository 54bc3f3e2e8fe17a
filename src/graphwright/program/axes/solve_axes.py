"""Solving for axes: one walk over a program in order, in which the axes row of each op says its equations.

The result is the terms of every dimension of every value, and what was said of the atoms they are made of.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graphwright.ops import get
from graphwright.ops.axes import Atom, AxesUse, AxisFact, atoms, resolve, same
from graphwright.program.kinds import CONST, INPUT, SOURCES, STORED, WRITE
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.ops.axes import Correction, Dims, Term
    from graphwright.program.program import Program


@dataclass(slots=True)
class Said:
    """What was said of one atom: (node, text) each, sums with the (operand, dimension) that they run over.

    `ends` are the inputs and outputs of the program that it reaches.
    """

    frozen: list[tuple[NodeId, str]] = field(default_factory=list)
    ends: list[tuple[NodeId, str]] = field(default_factory=list)
    mixed: list[tuple[NodeId, str]] = field(default_factory=list)
    summed: list[tuple[NodeId, tuple[tuple[int, int], ...]]] = field(default_factory=list)
    kinds: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lookup:
    """A constant of the program whose numbers name places of an axis: entries go with the places that they name.

    Attributes:
        key: of the constant.
        axis: whose places it names.
        entries: its own dimension.
    """

    key: str
    axis: Term
    entries: Term


@dataclass(slots=True)
class Solution:
    """The axes of one state of a program.

    Attributes:
        dims: value -> terms of its dimensions, resolved.
        said: atom -> what was said of it.
        sizes: (node, attribute, term or terms) of attributes that are sizes.
        corrections: (node, how to keep it exact).
        lookups: tables whose numbers are changed with the axis that they name.
        composites: (node, kind, term) of dimensions that have a name and are several atoms.
    """

    dims: dict[Value, Dims]
    said: dict[Atom, Said]
    sizes: list[tuple[NodeId, str, Term | tuple[Term, ...]]]
    corrections: list[tuple[NodeId, Correction]]
    lookups: list[Lookup]
    composites: list[tuple[NodeId, str, Term]]


def solve(p: Program) -> Solution:
    """The axes of a program; its specs must be up to date."""
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
        if op == WRITE:
            for a, b in zip(*ins, strict=True):
                if not same(a, b):
                    notes += [(node, AxisFact("frozen", t, "carries another split of it")) for t in (a, b)]
            continue
        use = AxesUse(ins, [s.shape for s in p.specs(node)], p.attrs(node), [stored(p, v) for v in operands],
                  [ranges.get(v) for v in operands], [p.op(v.node) == CONST for v in operands])  # fmt: skip
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
    return Solution(
        {v: tuple(map(resolve, d)) for v, d in dims.items()},
        _said(notes),
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
    """Axes that one table names are one; they are frozen if something else reads the table."""
    axis = uses[0][1]
    fits = [same(axis, other) for _, other in uses]
    if len(uses) != p.graph.out_degree(table) or not all(fits):
        notes += [(node, AxisFact("frozen", term, "reads it by number")) for node, term in uses]
    return Lookup(p.key(table), axis, dims[Value(table)][0])


def _several(term: Term) -> bool:
    return not isinstance(term, Atom)


def _said(notes: Iterable[tuple[NodeId, AxisFact]]) -> dict[Atom, Said]:
    said: dict[Atom, Said] = {}
    for node, note in notes:
        among = dict.fromkeys(atoms(resolve(note.term)))
        for atom in among:
            about = said.setdefault(atom, Said())
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
    return said


def stored(p: Program, value: Value) -> bool:
    """True for a weight as it is stored, but for a cast or copy."""
    return origin(p, value) is not None


def origin(p: Program, value: Value) -> NodeId | None:
    """The param, const or state whose entries a value holds, in another dtype or memory perhaps."""
    node = value.node
    while p.op(node) not in STORED:
        if p.op(node) in SOURCES or p.op(node) == WRITE or not get(p.op(node)).traits.convert:
            return None
        node = p.operands(node)[0].node
    return node
