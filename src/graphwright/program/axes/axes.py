"""Axes: groups of dimensions that must be resized together; their units are heads, neurons, channels or experts.

`program.axes()` maps names to groups. Each dimension is described by a term: an atom (a size that is not split any
further), a product of terms (heads × head_dim) or a concatenation of terms (q + k + v). A group is valid for one state
of the program. `Units` store the name of their group, so that a later edit can find the group again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache, cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.ops import get
from graphwright.ops.axes import Atom, Product, Term, atoms, resolve, spread, text
from graphwright.program.axes.solve_axes import AtomNotes, origin, solve
from graphwright.program.axes.units import Units, numbers
from graphwright.program.errors import BadName, NameTaken, UnknownAxis
from graphwright.program.gates import RESERVED as GATE_KEYS
from graphwright.program.kinds import KINDS as KINDS_OF_NODES
from graphwright.program.kinds import PARAM, STORED
from graphwright.program.op_graph import is_name
from graphwright.program.validate import infer, refuse_broken
from graphwright.report import listed, wrapped

if TYPE_CHECKING:
    from graphwright.program.axes.solve_axes import AxisSolution
    from graphwright.program.op_graph import Value
    from graphwright.program.program import Program

KINDS = (
    *("heads", "kv_groups", "queries", "experts", "head_dim"),
    *("vocabulary", "channels", "neurons", "channel_groups"),
)
"""Kinds of units; an axis of several kinds is named by the first."""
TOGETHER = frozenset({"heads", "channels"})
"""Kinds whose units are pairs if the axis has two atoms: (key head, its query), (group, its channel)."""


class AxisMember(NamedTuple):
    """A dimension of a value, as a member of an `AxisGroup`."""

    value: Value
    dim: int  # index of the dimension
    path: str  # of the value
    key: str | None  # checkpoint key, if the value is a weight

    def __str__(self) -> str:
        return f"{self.path}[{self.dim}]"


@dataclass(frozen=True, eq=False, repr=False)
class AxisGroup:
    """An axis of a program: dimensions that must be resized together, and the kind of their units.

    Attributes:
        axes: all groups of the program.
        name: module and kind, such as `layers.1.attn.heads`; or path and dimension of a weight, such as `0.weight:0`.
        kind: kind of the units: one of `KINDS`, or `units` if no kind is known.
        kinds: all kinds of the units; heads without grouped queries are also kv groups.
        atoms: the independent sizes of the axis: (kv groups, queries per group) for heads with grouped queries,
            (groups, channels per group) for channels of a grouped convolution, else one size.
        size: number of units.
        frozen: reasons why the axis cannot be resized; empty if it can be.
        ends: the reasons in `frozen` that name inputs and outputs of the program, ignored with `allow_io=True`.
        mixed: reasons why setting a unit to zero differs from removing the unit.
        corrected: True if all reasons in `mixed` are norms whose scale can be corrected for removed units.
    """

    axes: Axes
    name: str
    kind: str
    kinds: tuple[str, ...]
    atoms: tuple[Atom, ...]
    size: int
    frozen: tuple[str, ...]
    ends: tuple[str, ...]
    mixed: tuple[str, ...]
    corrected: bool

    @property
    def exact(self) -> bool:
        """True if setting a unit to zero gives the same results as removing the unit."""
        return not self.mixed

    @cached_property
    def members(self) -> tuple[AxisMember, ...]:
        """All dimensions in the group, of weights and of results, in topological order."""
        found = dict.fromkeys(m for atom in self.atoms for m in self.axes.members_of(atom))
        return tuple(sorted(found, key=lambda m: (self.axes.rank[m.value.node], m.value.port, m.dim)))

    @cached_property
    def _stored(self) -> list[AxisMember]:
        return [m for m in self.members if m.key is not None]

    @cached_property
    def _weights(self) -> list[AxisMember]:
        """The weights along the axis, oldest first: if possible only those along all its atoms, then only params."""
        p, dims = self.axes.program, self.axes.solution.dims
        weights = self._stored
        weights = [m for m in weights if m.key not in GATE_KEYS] or weights  # gates must not rename an axis
        weights = [m for m in weights if set(self.atoms) <= set(atoms(dims[m.value][m.dim]))] or weights
        trained = [m for m in weights if p.op(m.value.node) == PARAM] or weights
        return sorted(trained, key=lambda m: (p.seq(m.value.node), m.dim))

    @cached_property
    def _made(self) -> list[AxisMember]:
        """The weights that produce the axis's units, oldest first: those with a reader that does not sum over it."""
        summed = self.axes.summed
        return [m for m in self._weights if not any(summed.get((m.value.node, m.dim, a)) for a in self.atoms)]

    def units(self, ids: Any = None) -> Units:
        """Return the units selected by an int, several ints, a slice or a mask; all by default. Raises: UnitRange."""
        whole = Units.of(self.axes.program, [self])
        return whole if ids is None else whole[ids]

    def slices(self, unit: int) -> dict[str, dict[int, np.ndarray]]:
        """Return a dict from weight key to {dimension: indices along it that belong to the unit}. Raises: UnitRange."""
        shape = [int(a.size) for a in self.atoms]
        coordinates = np.unravel_index(numbers(unit, self.size, self.name)[0], shape)
        chosen = dict(zip(self.atoms, coordinates, strict=True))
        found: dict[str, dict[int, np.ndarray]] = {}
        for key, dims in self.axes.weights.items():
            for dim, term in enumerate(dims):
                inside = [a for a in chosen if any(a is b for b in atoms(term))]
                if inside:
                    marks = {a: np.where(np.arange(int(a.size)) == chosen[a], 0, -1) for a in inside}
                    found.setdefault(key, {})[dim] = np.flatnonzero(spread(term, marks) >= 0)
        return found

    def details(self) -> str:
        """Return a text that lists the weights of the axis, each with the ops that tie it to the first weight."""
        names, weights = self.axes.names, self._stored
        lines = [f"{self.name}: {self.size} {self.kind}"]
        lines += [f"  cannot be resized: {reason}" for reason in self.frozen]
        lines += [f"  not exact: {reason}" for reason in self.mixed]
        for member in weights:
            term = text(self.axes.solution.dims[member.value][member.dim], names)
            lines.append(f"  {member} = {term}" + self._because(weights[0], member))
        return "\n".join(lines)

    def _because(self, first: AxisMember, last: AxisMember) -> str:
        if last is first:
            return ""
        p = self.axes.program
        here: dict[NodeId, list[AxisMember]] = {}
        for m in self.members:
            for node in (m.value.node, *p.consumers(m.value)):
                here.setdefault(node, []).append(m)
        came: dict[AxisMember, tuple[AxisMember, NodeId] | None] = {first: None}
        queue = [first]
        for member in queue:
            for node in (member.value.node, *p.consumers(member.value)):
                for other in here[node]:
                    if other not in came:
                        came[other] = (member, node)
                        queue.append(other)
        steps: list[str] = []
        step = came.get(last)
        while step is not None:
            steps.append(p.op(step[1]))
            step = came[step[0]]
        path = [op for i, op in enumerate(steps[::-1]) if i == 0 or op != steps[-i]]
        return f", as {first} because {', '.join(path)}" if path else ""

    def __repr__(self) -> str:
        state = "frozen" if self.frozen else "exact" if self.exact else "corrected" if self.corrected else "not exact"
        return f"AxisGroup({self.name!r}, {self.size} {self.kind}, {state})"


@dataclass(eq=False, repr=False)
class Axes(Mapping[str, AxisGroup]):
    """A mapping from name to axis for one version of a program; `print` lists the axes.

    Attributes:
        program, version: the program, and the version of it for which the axes are valid.
        solution: the terms of all dimensions.
        weights: dict from weight key to the terms of the weight's dimensions.
        rank: dict from node to its position in topological order.
        names: dict from atom to the name of the group that consists of this atom alone.
        summed: dict from (weight node, dimension, atom) to True if all readers of the weight sum over the atom, False
            if only some do. Weights without such a reader are missing.
    """

    program: Program
    version: int
    solution: AxisSolution
    weights: dict[str, tuple[Term, ...]]
    rank: dict[NodeId, int]
    names: dict[Atom, str] = field(default_factory=dict)
    summed: dict[tuple[NodeId, int, Atom], bool] = field(default_factory=dict)
    _members: dict[Atom, list[AxisMember]] = field(default_factory=dict)
    _groups: dict[str, AxisGroup] = field(default_factory=dict)

    def members_of(self, atom: Atom) -> list[AxisMember]:
        """Return the dimensions that are an atom, or contain it as a factor or part, such as heads in heads × 64."""
        return self._members.get(atom, [])

    def readers(self, weight: NodeId) -> int:
        """Return the number of ports that read a weight node, directly or through casts."""
        p = self.program
        targets = [p.graph.target(e) for e in p.graph.out_edges(weight)]
        casts = [t for t in targets if p.op(t) not in KINDS_OF_NODES and get(p.op(t)).traits.convert]
        return len(targets) - len(casts) + sum(map(self.readers, casts))

    def name(self, old: str, new: str) -> AxisGroup:
        """Rename an axis by an edit, which can be saved, undone and replayed like other edits; return the axis.

        An attribute of the first weight along the axis stores the name. Raises: UnknownAxis; BadName if the new name is
        not a dotted path; NameTaken if another axis has this name.
        """
        p = self.program
        group = p.axes()[old]
        if not is_name(new):
            raise BadName("invalid new name for the axis", where=old, expected="a dotted path", got=repr(new)[:80])
        if new in p.axes() and new != old:
            raise NameTaken("another axis already has the new name", where=old, got=new)
        node, position = _position(group)
        names = {**dict(p.attrs(node).get("axes", ())), position: new}
        with p.edit(f"name the axis {old} {new}") as e:
            e.set_attr(node, axes=tuple(sorted(names.items())))
        return p.axes()[new]

    def __getitem__(self, name: str) -> AxisGroup:
        try:
            return self._groups[name]
        except (KeyError, TypeError):
            near = get_close_matches(str(name), self._groups, 3, 0.4)
            fix = f"did you mean {', '.join(near)}?" if near else "list all axes by print(program.axes())"
            raise UnknownAxis("no axis has this name", where=name, fix=fix) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def of(self, weight: str, dim: int) -> tuple[AxisGroup, ...]:
        """Return the axes that make up one dimension of a weight, outermost first.

        Args:
            weight: path of the weight's node, or its checkpoint key.
            dim: index of the dimension; a negative one counts from the end.
        Raises: UnknownNode; UsageError if `dim` is out of range.
        """
        p = self.program
        terms = self.weights.get(weight) or self.weights[p.key(p.node(weight))]
        if not -len(terms) <= dim < len(terms):
            expected = f"{-len(terms)} <= dim < {len(terms)}"
            raise UsageError("the weight has no dimension with this index", where=weight, expected=expected, got=dim)
        found = dict.fromkeys(atoms(terms[dim]))
        return tuple(self._groups[self.names[a]] for a in found if a in self.names)

    def __str__(self) -> str:
        width = max(map(len, self._groups), default=0)
        lines = []
        for name, group in self._groups.items():
            sizes = f"{group.size:>6} {group.kind:<10} {len(group._stored):>4} weights"
            lines.append(f"{name:<{width}}  {sizes}  {group.frozen[0] if group.frozen else ''}".rstrip())
        return wrapped("\n".join(listed(lines, "more axes"))) or "(no axes)"

    def __repr__(self) -> str:
        return f"Axes({len(self)} of {self.program.name!r})"


def axes(p: Program) -> Axes:
    """Return the axes of the present state of a program, which includes changes of an open edit.

    Raises: InvalidProgram if an earlier edit left the program broken; SpecMismatch if the open edit has broken it.
    """
    if (e := p.history.open) is None:
        refuse_broken(p)
    changed = e is not None and (bool(e.done) or not p.valid)  # False for an open edit without changes so far
    if e is not None and changed:
        infer(p, [n for n in e.touched if n in p.graph], e.specs_before)
        if not p.valid:  # broken before the edit, and perhaps repaired by it
            p.validate().check(p.name)
    known: Axes | None = p.derived.get("axes")
    if not changed and known is not None and known.version == p.version and known.program is p:
        return known
    found = _grouped(p, solve(p))
    if not changed:
        p.derived["axes"] = found
    return found


def _grouped(p: Program, solution: AxisSolution) -> Axes:
    rank = {node: i for i, node in enumerate(p.order())}
    made = Axes(p, p.version, solution, {}, rank)
    found: dict[Atom, None] = {}
    counted = {resolve(g.axis) for g in solution.groups}  # a mixture of one expert has an axis, too
    for value, dims in solution.dims.items():
        key = p.key(value.node) if p.op(value.node) in STORED else None
        if key is not None:
            made.weights[key] = dims
        path = p.path(value)
        for dim, term in enumerate(dims):
            for atom in dict.fromkeys(atoms(term)):
                made._members.setdefault(atom, []).append(AxisMember(value, dim, path, key))
                if key is not None and key not in GATE_KEYS and (atom.size not in (0, 1) or atom in counted):
                    found[atom] = None
    reads: Counter[tuple[NodeId, int, Atom]] = Counter()
    operands = cache(p.operands)  # a mixture has many, and sums over many axes
    for atom, about in solution.notes.items():
        for node, ends in about.summed:
            weights = [(origin(p, operands(node)[port]), dim) for port, dim in ends]
            reads.update((weight, dim, atom) for weight, dim in weights if weight is not None)
    made.summed |= {use: count == made.readers(use[0]) for use, count in reads.items()}
    plain = {atom: _group(made, (atom,)) for atom in found}
    together: dict[tuple[Atom, ...], str] = {}
    for _, kind, term in solution.composites:
        if kind in TOGETHER and isinstance(term, Product) and all(f in plain for f in term.factors):
            together[term.factors] = kind  # pyright: ignore[reportArgumentType]  # each is an atom of `plain`
    groups = [*(_group(made, a, kind) for a, kind in together.items()), *plain.values()]
    stored = map(_position, groups)
    given: list[str | None] = [dict(p.attrs(node).get("axes", ())).get(position) for node, position in stored]
    wanted = [name or _wanted(group) for group, name in zip(groups, given, strict=True)]
    taken = Counter(wanted)
    ranked = sorted(zip(groups, given, wanted, strict=True), key=lambda row: (row[1] is None, _rank(row[0])))
    for group, named, name in ranked:
        name = name if taken[name] == 1 or named else _fallback(group)
        while name in made._groups:
            name += "'"
        object.__setattr__(group, "name", name)
        made._groups[name] = group
        if len(group.atoms) == 1:
            made.names[group.atoms[0]] = name
    return made


def _group(made: Axes, parts: tuple[Atom, ...], kind: str | None = None) -> AxisGroup:
    p, solution = made.program, made.solution
    about = [solution.notes.get(a, AtomNotes()) for a in parts]
    kinds = (kind,) if kind else tuple(k for k in KINDS if any(k in s.kinds for s in about))[:1] or ("units",)
    if kinds == ("heads",) and any("kv_groups" in s.kinds for s in about) and kind is None:
        kinds = ("heads", "kv_groups")
    exact_after = {node for node, c in solution.corrections if any(a in parts for a in atoms(resolve(c.term)))}
    size = int(np.prod([int(a.size) for a in parts])) if all(isinstance(a.size, int) for a in parts) else 0
    ends, mixed = [note for s in about for note in s.ends], [note for s in about for note in s.mixed]
    frozen = [note for s in about for note in (*s.frozen, *s.ends)]
    corrected = bool(mixed) and all(node in exact_after for node, _ in mixed)

    def reasons(notes: Iterable[tuple[NodeId, str]]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(f"{p.path(node)} ({p.op(node)}) {why}" for node, why in notes))

    return AxisGroup(made, "", kinds[0], kinds, parts, size, reasons(frozen), reasons(ends), reasons(mixed), corrected)


def _position(group: AxisGroup) -> tuple[NodeId, str]:
    """Return where `Axes.name` stores the name of an axis: (weight node, key in the node's attribute `axes`)."""
    first = group._weights[0]
    inside = list(dict.fromkeys(atoms(group.axes.solution.dims[first.value][first.dim])))
    return first.value.node, f"{first.dim}.{inside.index(group.atoms[0])}.{group.kind}"


def _rank(group: AxisGroup) -> tuple[int, int, int]:
    first = (group._made or group._weights)[0]
    return group.axes.program.seq(first.value.node), first.dim, -len(group.atoms)


def _wanted(group: AxisGroup) -> str:
    """Return the default name of an axis: a module path followed by the kind of its units, like `layers.1.attn.heads`.

    The path is the common module of the axis's weights, else the module of the first weight that produces its units. If
    no weight produces the units (those of an input), return `<path of the first weight that reads them>:<dimension>`.
    """
    made = group._made
    modules = [m.path.split(".")[:-1] for m in group._weights] + [path.split(".")[:-1] for path in _grouped_by(group)]
    equal = takewhile(lambda column: len(set(column)) == 1, zip(*modules, strict=False))
    shared = ([column[0] for column in equal] or made[0].path.split(".")[:-1]) if made else []
    return ".".join([*shared, group.kind]) if shared else _fallback(group)


def _grouped_by(group: AxisGroup) -> list[str]:
    """Return the paths of the weights that an axis counts as operands in groups, such as the matrices of experts."""
    p = group.axes.program
    found = [v for g in group.axes.solution.groups if (resolve(g.axis),) == group.atoms
             for v in p.operands(g.node)[g.first :]]  # fmt: skip
    return [p.path(w) for v in found if (w := origin(p, v)) is not None]


def _fallback(group: AxisGroup) -> str:
    first = (group._made or group._weights)[0]
    return f"{first.path}:{first.dim}"
