"""Specs that differ along an edge or at a join: what `program.validate()` finds, with edge, axis and repair."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np

from graphwright.array import Spec
from graphwright.errors import GraphwrightError
from graphwright.ops import OPS, get
from graphwright.program import Value
from graphwright.program.kinds import ASSIGN, KINDS, PARAM, SOURCES, STATE, STORED
from graphwright.program.validate import first_axis
from graphwright.surgery.findings.finding import Finding, Fix, Severity, bypassed, rewired
from graphwright.surgery.findings.kinds import finding
from graphwright.surgery.findings.wiring import least_arity

if TYPE_CHECKING:
    from graphwright.graph import EdgeId, NodeId
    from graphwright.program import Mismatch, Program
    from graphwright.program.editing.transaction import Transaction
    from graphwright.surgery.findings.diagnosis import Diagnosis
    from graphwright.surgery.findings.wiring import Wiring


def template(path: str) -> tuple[str, tuple[int, ...]]:
    """A path with its numbered segments as `*`, and the numbers: blocks of one template are siblings."""
    numbers: list[int] = []
    segments = []
    for segment in path.split("."):
        if segment.isascii() and segment.isdigit():
            numbers.append(int(segment))
            segment = "*"
        segments.append(segment)
    return ".".join(segments), tuple(numbers)


def siblings(p: Program, node: NodeId) -> list[NodeId]:
    """Other nodes of its op and template, in order of creation."""
    own, numbers = template(p.path(node))
    if not numbers:
        return []
    return [n for n in p.of_kind(p.op(node)) if n != node and template(p.path(n))[0] == own]


def shifted(path: str, of: str, to: str) -> str:
    """A path seen from `of`, as the same place seen from its sibling `to`: numbers move by as much."""
    by = [b - a for a, b in zip(template(of)[1], template(to)[1], strict=True)]
    segments, k = path.split("."), 0
    for i, segment in enumerate(segments):
        if segment.isascii() and segment.isdigit():
            segments[i] = str(int(segment) + (by[k] if k < len(by) else 0))
            k += 1
    return ".".join(segments)


def empty_places(p: Program, w: Wiring) -> Iterator[tuple[NodeId, int]]:
    """(node, port) of ports without their edge, and of junctions that something reads and that have none."""
    for i, node in enumerate(w.nodes):
        op = w.ops[i]
        if op in SOURCES or (op != ASSIGN and op not in OPS):
            continue
        if p.is_junction(node):
            if not w.before[i] and not w.unread(i):
                yield node, 0
            continue
        ports = {p.edge_port(e) for e in p.graph.in_edges(node)}
        if not ports and w.unread(i):
            continue  # it is isolated
        last = max((*ports, least_arity(op) - 1))
        yield from ((node, port) for port in range(last + 1) if port not in ports)


def fits(p: Program, node: NodeId, port: int, spec: Spec) -> bool:
    """Whether an operand of this spec at a port gives the node the results that it has."""
    if p.is_junction(node):
        return p.spec(node) == spec
    ins = {p.edge_port(e): p.specs(v.node)[v.port] for e in p.in_edges(node) for v in [p.edge_value(e)]}
    ins[port] = spec
    if p.op(node) == ASSIGN:
        return len(ins) == 2 and ins[0] == ins[1]
    if set(ins) != set(range(len(ins))):
        return False
    try:
        return get(p.op(node)).specs([ins[k] for k in range(len(ins))], p.attrs(node)) == p.specs(node)
    except GraphwrightError:
        return False


def best_source(p: Program, w: Wiring, node: NodeId, port: int, *, unread: bool = False) -> Value | None:
    """The value that most likely belongs at a port.

    What fits is ranked: values that nothing reads, what the port of a sibling reads, the nearest in the order.

    Args:
        unread: only values that nothing reads.
    """
    here = w.at[node]
    later = set(w.flood([here], w.after))
    numbered, plain = _as_siblings(p, node, port)
    best: tuple[tuple, Value] | None = None
    known: dict[Spec, bool] = {}
    for i, source in enumerate(w.nodes):
        if i in later or w.ops[i] == ASSIGN:
            continue
        dead = w.unread(i)
        if unread and not dead:
            continue
        if p.op(node) == ASSIGN and port == 0 and w.ops[i] not in (PARAM, STATE):
            continue
        for result, spec in enumerate(p.specs(source)):
            if spec not in known:
                known[spec] = fits(p, node, port, spec)
            if not known[spec]:
                continue
            at = (p.path(source), result)
            key = (not dead, at not in numbered, abs(i - here), at not in plain, result)
            if best is None or key < best[0]:
                best = key, Value(source, result)
    return None if best is None else best[1]


def _as_siblings(p: Program, node: NodeId, port: int) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
    """What the same port of siblings reads, as seen from here: with numbers in the path, and without."""
    numbered: set[tuple[str, int]] = set()
    plain: set[tuple[str, int]] = set()
    path = p.path(node)
    for other in siblings(p, node):
        for edge in p.in_edges(other):
            if p.edge_port(edge) == port:
                value = p.edge_value(edge)
                read = p.path(value)
                to = numbered if template(read)[1] else plain
                to.add((shifted(read, p.path(other), path), value.port))
    return numbered, plain


MISMATCHES = ("spec", "op", "output", "order", "weight")


@finding("interface")
def interface(d: Diagnosis) -> Iterator[Finding]:
    """Everything that does not fit: shapes, dtypes, unknown ops, outputs that are not there."""
    p = d.program
    nodes = {p.path(n): n for n in p.nodes()}
    for mismatch in d.assembly.mismatches:
        if mismatch.kind not in MISMATCHES:
            continue
        node = nodes.get(mismatch.where)
        found = _edge(d, node) if node is not None and mismatch.kind == "spec" else None
        yield _at_edge(d, node, mismatch, *found) if node is not None and found else _at_node(p, node, mismatch)


def _at_node(p: Program, node: NodeId | None, m: Mismatch) -> Finding:
    facts = {"axis": m.axis, "expected": m.expected, "got": m.got}
    if node is None:
        return Finding("interface", m.where, m.what, m.axis, m.expected, m.got, severity=Severity.CRITICAL)
    return Finding.of(p, "interface", Severity.CRITICAL, m.what, node, **facts)


def _at_edge(d: Diagnosis, node: NodeId, m: Mismatch, edge: EdgeId, want: Spec) -> Finding:
    p = d.program
    source = p.graph.source(edge)
    value = p.edge_value(edge)
    have = p.specs(value.node)[value.port]
    facts = {"axis": first_axis(want, have), "expected": repr(want), "got": repr(have)}
    fixes = tuple(_fixes(d, node, edge, want, have))
    return replace(
        Finding.of(p, "interface", Severity.CRITICAL, m.what, node, source, edges=(edge,), fixes=fixes, **facts),
        witness={"edge": p.path(edge), "port": p.edge_port(edge)},
    )


def _edge(d: Diagnosis, node: NodeId) -> tuple[EdgeId, Spec] | None:
    """The first edge that carries another spec than the node's results ask for, and the spec it should carry."""
    p = d.program
    edges = p.in_edges(node)
    specs = [p.specs(v.node)[v.port] for v in map(p.edge_value, edges)]
    if p.op(node) == ASSIGN:
        return (edges[1], specs[0]) if len(edges) == 2 else None
    if p.is_junction(node):
        wrong = [(e, p.spec(node)) for e, s in zip(edges, specs, strict=True) if s != p.spec(node)]
        return wrong[0] if wrong else None
    for make in (_dtypes, _behind, _sizes, _permutations):
        found: list[tuple[EdgeId, Spec]] = []
        for edge, spec in zip(edges, specs, strict=True):
            fitting = (want for want in make(p, edge, spec, [*specs, *p.specs(node)])
                       if want != spec and fits(p, node, p.edge_port(edge), want))  # fmt: skip
            found += [(edge, want) for want in fitting][:1]
        if found:  # where several edges could be wrong, it is the one that an edit touched last
            return max(found, key=lambda pair: _touched(d, p.graph.source(pair[0])))
    return None


def _touched(d: Diagnosis, node: NodeId) -> int:
    p = d.program
    names = [p.path(node), *([p.key(node)] if p.op(node) in STORED else [])]
    return max((entry.seq for name in names for entry in d.original.blame(name)), default=-1)


def _dtypes(p: Program, edge: EdgeId, spec: Spec, others: list[Spec]) -> Iterator[Spec]:
    for dtype in dict.fromkeys(o.dtype for o in others):
        yield Spec(spec.shape, dtype)


def _behind(p: Program, edge: EdgeId, spec: Spec, others: list[Spec]) -> Iterator[Spec]:
    """What the source itself reads, if it has one operand: it may stand there by mistake."""
    operands = p.operands(p.graph.source(edge))
    if len(operands) == 1:
        yield p.spec(operands[0])


def _sizes(p: Program, edge: EdgeId, spec: Spec, others: list[Spec]) -> Iterator[Spec]:
    for size in dict.fromkeys(n for o in others for n in o.shape):
        for axis in range(len(spec.shape)):
            yield Spec((*spec.shape[:axis], size, *spec.shape[axis + 1 :]), spec.dtype)


def _permutations(p: Program, edge: EdgeId, spec: Spec, others: list[Spec]) -> Iterator[Spec]:
    if len(spec.shape) <= 4:
        for order in permutations(spec.shape):
            yield Spec(order, spec.dtype)


def _fixes(d: Diagnosis, node: NodeId, edge: EdgeId, want: Spec, have: Spec) -> Iterator[Fix]:
    p = d.program
    port = p.edge_port(edge)
    lost = best_source(p, d.wiring, node, port, unread=True)
    if lost is not None and p.specs(lost.node)[lost.port] == want:
        yield rewired(p, edge, lost, keeps=True)
    source = p.graph.source(edge)
    operands = p.operands(source)
    if len(operands) == 1 and p.consumers(source) == (node,) and p.spec(operands[0]) == want:
        yield bypassed(p, source, keeps=True)
    if want.shape == have.shape:

        def cast(e: Transaction) -> None:
            e.insert(edge, "cast", dtype=want.dtype)

        yield Fix(f"cast {p.path(edge)} to {want.dtype.name}", cast, ops=1, edges=1, keeps_function=True)
    elif want.dtype == have.dtype and sorted(map(str, want.shape)) == sorted(map(str, have.shape)):
        orders = [o for o in permutations(range(len(have.shape))) if tuple(have.shape[i] for i in o) == want.shape]
        if len(orders) == 1:

            def permute(e: Transaction) -> None:
                e.insert(edge, "permute", axes=orders[0])

            yield Fix(f"permute {p.path(edge)} by {orders[0]}", permute, ops=1, edges=1, keeps_function=True)
    elif _projectable(p, edge, want, have):
        yield _projection(p, edge, int(want.shape[-1]), int(have.shape[-1]))


def _projectable(p: Program, edge: EdgeId, want: Spec, have: Spec) -> bool:
    kind = p.op(p.graph.source(edge))
    widths = bool(have.shape) and isinstance(want.shape[-1], int) and isinstance(have.shape[-1], int)
    alike = want.dtype == have.dtype and len(want.shape) == len(have.shape) and want.shape[:-1] == have.shape[:-1]
    return widths and alike and want.dtype.is_float and kind not in STORED and kind not in KINDS


def _projection(p: Program, edge: EdgeId, rows: int, columns: int) -> Fix:
    """A matrix on the edge that keeps the first channels as they are."""
    target = p.path(p.graph.target(edge))

    def apply(e: Transaction) -> None:
        name = e.program.free_name(f"{target}.projection")
        kind = e.program.spec(e.program.edge_value(edge)).dtype
        weight = e.param(f"{name}.weight", np.eye(rows, columns, dtype=np.float32))
        if kind.name != "float32":
            weight = e.add("cast", weight, dtype=kind, name=f"{name}.weight.cast")
        e.rewire(edge, e.add("linear", e.program.edge_value(edge), weight, name=name))

    return Fix(f"project {p.path(edge)} from {columns} to {rows} channels", apply, 1, 1, rows * columns)
