"""Spec inference, forward from changed nodes until specs stop changing, and validation of a whole program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from graphwright.errors import GraphwrightError, ShapeError, UsageError
from graphwright.graph.analysis import strongly_connected_components
from graphwright.ops import OPS, get
from graphwright.program.errors import InvalidProgram, PortEmpty, SpecMismatch
from graphwright.program.incremental import IncrementalWalk
from graphwright.program.kinds import ASSIGN, KINDS, PARAM, PATTERN, SOURCES, STATE, STORED
from graphwright.program.patterns import PatternVariable
from graphwright.program.primitives import update_node
from graphwright.report import Report, listed

if TYPE_CHECKING:
    from graphwright.array import Spec
    from graphwright.graph import NodeId
    from graphwright.program.op_graph import Value
    from graphwright.program.program import Program


def check_ports(p: Program, node: NodeId) -> None:
    """Raise PortEmpty if an op has a port without an edge; junctions and sources are not checked."""
    op = p.op(node)
    if op in SOURCES or p.is_junction(node):
        return
    ports = [p.edge_port(e) for e in p.in_edges(node)]
    arity = 2 if op == ASSIGN else get(op).arity
    least = arity if isinstance(arity, int) else arity[0]
    fixed, width = _grouped(p, node, op, len(ports))
    gap = next((i for i, port in enumerate(ports[:fixed]) if port != i), min(fixed, len(ports)))
    if gap == fixed and (port := _broken_group(ports[fixed:], fixed, width)) is not None:
        fix = "cut or connect all edges of the group in the same edit"
        what = "a group of operands lacks an edge"
        raise PortEmpty(what, where=f"{p.path(node)} ({op}), port {port}", expected=f"{width} per group", fix=fix)
    if gap < min(fixed, len(ports)) or len(ports) < least:
        fix = "connect the port in the same edit, or e.rewire(edge, new_src) in place of removing its edge"
        raise PortEmpty("a port has no edge", where=f"{p.path(node)} ({op}), port {gap}", fix=fix)


def _grouped(p: Program, node: NodeId, op: str, count: int) -> tuple[int, int]:
    """Return how many of the `count` operands come before those in groups, and the width of a group."""
    groups = None if op == ASSIGN else get(op).groups
    return (count, 1) if groups is None else groups(p.attrs(node))


def _broken_group(ports: Sequence[int], first: int, width: int) -> int | None:
    """Return an empty port of a group of which only some ports have edges, or None."""
    taken = set(ports)
    whole = ((port, first + (port - first) // width * width) for port in ports)
    return next((i for _, start in whole for i in range(start, start + width) if i not in taken), None)


def infer_node(p: Program, node: NodeId, specs: Mapping[NodeId, tuple[Spec, ...]] | None = None) -> tuple[Spec, ...]:
    """Infer the specs of a node from those of its operands; `specs` (node -> specs) replaces the stored ones.

    Raises: ShapeError or DTypeError naming the node; ShapeError if an operand is a result that no longer exists;
        UsageError for an attribute of a wrong type.
    """
    op = p.op(node)
    if op in SOURCES:
        return p.specs(node)
    edges = p.in_edges(node)
    if edges and p.edge_port(edges[-1]) != len(edges) - 1 and not p.is_junction(node):
        check_ports(p, node)  # operands after a gap must not be taken for those before it
    operands = [p.edge_value(e) for e in edges]
    try:
        ins = [(p.specs(v.node) if specs is None else specs[v.node])[v.port] for v in operands]
    except IndexError:
        gone = next(v for v in operands if v.port >= len(p.specs(v.node) if specs is None else specs[v.node]))
        raise _no_result(p, p.path(node), gone, "e.rewire(edge, new_src) in the same edit") from None
    if op == ASSIGN:
        if len(ins) != 2:
            what = "the assign node does not have two operands, target and next value"
            raise PortEmpty(what, where=p.path(node), expected=2, got=len(ins))
        if p.op(operands[0].node) not in (PARAM, STATE):
            what = "the target of an assign node is not a param or a state"
            raise UsageError(what, where=p.path(node), got=p.path(operands[0]))
        if ins[0] != ins[1]:
            what = "a state is assigned a value of a different shape or dtype"
            raise SpecMismatch([GraphwrightError(what, where=p.path(node), expected=ins[0], got=ins[1])])
        return ()
    if not ins and p.is_junction(node):
        return p.specs(node)  # without edges it is zero, with its present spec
    row = get(op)
    row.check_attrs(p.attrs(node), p.path(node))
    if row.traits.table is not None and p.op(operands[row.traits.table].node) != PATTERN:
        raise UsageError("the table of an attention does not come from a pattern", where=p.path(node),
                         got=p.path(operands[row.traits.table]), expected="a `pattern` node",
                         fix="e.pattern(name, pattern)")  # fmt: skip
    return row.specs(ins, p.attrs(node), p.path(node))


def _no_result(p: Program, where: str, value: Value, fix: str) -> ShapeError:
    expected = f"result 0 to {len(p.specs(value.node)) - 1} of {p.path(value.node)}"
    what = "a node reads a result that no longer exists"
    return ShapeError(what, where=where, expected=expected, got=f"result {value.port}", fix=fix)


def check_outputs(p: Program) -> None:
    """Raise SpecMismatch if outputs refer to results that no longer exist; the error lists these outputs."""
    named, fix = zip(p.output_names(), p.outputs(), strict=True), "e.set_outputs(...) in the same edit"
    gone = [_no_result(p, f"output {name}", v, fix) for name, v in named if v.port >= len(p.specs(v.node))]
    if gone:
        raise SpecMismatch([*gone])


def _check_single_assign(p: Program, node: NodeId) -> None:
    """Raise UsageError if another assign node has the same target."""
    target = p.operands(node)[0]
    for n in p.consumers(target):
        if n != node and p.op(n) == ASSIGN and p.operands(n)[0] == target:
            got = f"{p.path(node)}, {p.path(n)}"
            raise UsageError("two nodes assign the same state", where=p.path(target), got=got)


def infer(
    p: Program, touched: Iterable[NodeId], before: dict[NodeId, tuple[Spec, ...]], wanted: NodeId | None = None
) -> set[NodeId]:
    """Update the specs downstream of the touched nodes; return the visited nodes.

    Args:
        before: dict that receives the old specs of nodes whose specs change.
        wanted: if given, raise only for a mismatch at this node; the open edit may still repair other nodes.
    Raises: SpecMismatch with every mismatch; the specs of a mismatched node and its descendants are unchanged.
    """
    walk = IncrementalWalk(p, (n for n in touched if n in p.graph))
    seen: set[NodeId] = set()
    wrong: list[GraphwrightError] = []
    for node in walk:
        seen.add(node)
        try:
            fresh = infer_node(p, node)
            if p.op(node) == ASSIGN:
                _check_single_assign(p, node)
        except GraphwrightError as error:
            if wanted is None or node == wanted:
                wrong.append(error)
            continue
        if fresh != p.specs(node):
            before.setdefault(node, p.specs(node))
            update_node(p, node, specs=fresh)
        elif node not in before and p.op(node) not in SOURCES:
            continue
        walk.add(reader for reader in p.graph.successors(node) if reader not in seen)
    if wrong:
        raise SpecMismatch(wrong)
    return seen


@dataclass(frozen=True, slots=True)
class Mismatch(Report):
    """One defect of a program.

    Attributes:
        kind: `spec`, `weight`, `port`, `cycle`, `order`, `name`, `op` or `output`; for a model also `tied_mismatch`.
        where: path of the node, name of the output, or key in the file.
        what: a description of the defect.
        axis: the first dimension that differs, for a shape mismatch.
        expected, got: the valid and the actual value, as text.
    """

    kind: str
    where: str
    what: str
    axis: int | None = None
    expected: str | None = None
    got: str | None = None
    OPTIONAL: ClassVar = ("axis", "expected", "got")

    def __str__(self) -> str:
        axis = "" if self.axis is None else f", axis {self.axis}"
        known = [f"{name} {value}" for name, value in (("expected", self.expected), ("got", self.got)) if value]
        return f"{self.where}{axis}: {self.what}" + (f" ({', '.join(known)})" if known else "")


@dataclass(frozen=True, slots=True, repr=False)
class AssemblyReport(Report):
    """Result of `program.validate()`; without mismatches the program is valid."""

    mismatches: tuple[Mismatch, ...]
    nodes: int
    edges: int
    FIGURES: ClassVar = ("ok",)

    @property
    def ok(self) -> bool:
        """True if there is no mismatch."""
        return not self.mismatches

    def check(self, name: str) -> None:
        """Raise InvalidProgram with all mismatches, if there are any."""
        if self.mismatches:
            fix = "repair it in program.edit(why, check=False); load(dir, check=False) opens a saved one"
            what = "the program is invalid:\n  " + "\n  ".join(listed([*map(str, self.mismatches)]))
            raise InvalidProgram(what, where=name, findings=self.mismatches, fix=fix)

    def _text(self) -> str:
        count = len(self.mismatches)
        verdict = "valid" if self.ok else f"{count} mismatch{'es' * (count != 1)}"
        head = f"{self.nodes} nodes, {self.edges} edges: {verdict}"
        return "\n".join([head, *listed([f"  {m}" for m in self.mismatches])])


def validate(p: Program) -> AssemblyReport:
    """Infer all specs again and check weights, ports, names, outputs and cycles; report all defects."""
    found = [m for node in p.nodes() for m in _node(p, node)]
    found += [*_weights(p), *_cycles(p), *_outputs(p)]
    return AssemblyReport(tuple(found), len(p), p.graph.edge_count)


def refuse_broken(p: Program) -> None:
    """Raise InvalidProgram with all mismatches, if the program was left broken."""
    if not p.valid:
        validate(p).check(p.name)
        raise InvalidProgram("the program is marked as broken, but has no defect any more", where=p.name,
                             fix="`with program.edit('repair'): pass` clears the mark")  # fmt: skip


def _node(p: Program, node: NodeId) -> Iterator[Mismatch]:
    path, op = p.path(node), p.op(node)
    if p._names.get(path) != node:
        yield Mismatch("name", path, "two nodes have this name")
    if op not in KINDS and op not in OPS:
        yield Mismatch("op", path, "unknown op", got=op)
        return
    broken = [v for v in p.operands(node) if v.port >= len(p.specs(v.node))]
    if broken:
        got = f"{p.path(broken[0])}, result {broken[0].port}"
        yield Mismatch("port", path, "reads a result that does not exist", got=got)
        return
    try:
        check_ports(p, node)
    except GraphwrightError as error:
        yield Mismatch("port", path, error.what, expected=f"an edge at {str(error.where).rpartition(', ')[2]}")
        return
    try:
        fresh = infer_node(p, node)
    except GraphwrightError as error:
        expected, got = (None if fact is None else str(fact) for fact in (error.expected, error.got))
        yield Mismatch("spec", path, error.what, None, expected, got)
        return
    for want, have in zip(fresh, p.specs(node), strict=False):
        if want != have:
            yield _spec_mismatch("spec", path, "the stored spec differs from the one that the op infers", want, have)
    count = 1 if op in SOURCES else len(fresh)  # the spec of a source is declared
    if count != len(p.specs(node)):
        yield Mismatch("spec", path, "wrong number of results", None, str(count), str(len(p.specs(node))))


def _spec_mismatch(kind: str, where: str, what: str, want: Spec, have: Spec) -> Mismatch:
    return Mismatch(kind, where, what, first_axis(want, have), repr(want), repr(have))


def _weights(p: Program) -> Iterator[Mismatch]:
    for kind in sorted(STORED):
        for node in p.of_kind(kind):
            key = p.attrs(node).get("key", "")
            if not p.weights.has_key(key):
                yield Mismatch("weight", p.path(node), "its checkpoint key names no weight", got=repr(key))
            elif isinstance(p.weights[key], PatternVariable) != (kind == PATTERN):
                what = "a pattern node reads a weight" if kind == PATTERN else f"a {kind} node reads a pattern"
                yield Mismatch("weight", p.path(node), what, got=repr(key))
            elif p.specs(node) and (have := p.weights[key].spec) != (want := p.spec(node)):
                yield _spec_mismatch("weight", p.path(node), f"the spec of its weight {key} differs", want, have)
    assigned: set[NodeId] = set()
    for node, target in ((n, v.node) for n in p.of_kind(ASSIGN) for v in p.operands(n)[:1]):
        if target in assigned:
            yield Mismatch("weight", p.path(target), "is assigned twice in a step", got=p.path(node))
        assigned.add(target)


def _cycles(p: Program) -> Iterator[Mismatch]:
    tangled: set[NodeId] = set()
    for component in strongly_connected_components(p.graph):
        if len(component) > 1 or p.graph.has_edge(*component, *component):
            tangled |= set(component)
            names = [p.path(n) for n in _cycle(p, component)]
            shown = [*names[:10], *(["..."] if len(names) > 10 else []), names[0]]
            yield Mismatch("cycle", names[0], "the nodes form a cycle", got=" -> ".join(shown))
    key = p.order_labels.key
    for edge in p.graph.edges():
        src, dst = p.graph.endpoints(edge)
        if src not in tangled and key(src) >= key(dst):
            yield Mismatch("order", p.path(edge), "the topological order has the source after the target")


def _cycle(p: Program, component: Sequence[NodeId]) -> list[NodeId]:
    """Return a shortest cycle in a strongly connected component: through a back edge, if any, else the oldest node."""
    inside = set(component)
    ends = [dst for src, dst in map(p.graph.endpoints, sorted(p.back_edges)) if src in inside and dst in inside]
    start = ends[0] if ends else min(inside, key=p.seq)
    came: dict[NodeId, NodeId] = {}
    queue = [start]
    for before in queue:
        fresh = [n for n in p.graph.successors(before) if n in inside and n not in came]
        came.update(dict.fromkeys(fresh, before))
        queue += fresh
    path = [start]
    while (node := came[path[-1]]) != start:
        path.append(node)
    return [start, *path[:0:-1]]


def _outputs(p: Program) -> Iterator[Mismatch]:
    for name, value in zip(p.output_names(), p.outputs(), strict=True):
        if value.node not in p.graph or not 0 <= value.port < len(p.specs(value.node)):
            yield Mismatch("output", name, "refers to a result that does not exist", got=repr(value))


def first_axis(want: Spec, have: Spec) -> int | None:
    """Return the first dimension in which two specs differ; None if their ranks differ."""
    if len(want.shape) != len(have.shape):
        return None
    return next((i for i, (a, b) in enumerate(zip(want.shape, have.shape, strict=True)) if a != b), None)
