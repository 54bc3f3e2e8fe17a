"""Mismatches of specs: the findings of `program.validate()`, with the edge, the axis and fixes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np

from graphwright.array import Spec
from graphwright.program.kinds import ASSIGN, KINDS, STORED
from graphwright.program.validate import first_axis
from graphwright.surgery.findings.finding import Finding, Fix, Severity, bypassed, rewired
from graphwright.surgery.findings.wiring import best_source, fits

if TYPE_CHECKING:
    from graphwright.graph import EdgeId, NodeId
    from graphwright.program import Mismatch, Program
    from graphwright.program.editing.transaction import Transaction
    from graphwright.surgery.findings.diagnosis import Diagnosis


MISMATCHES = ("spec", "op", "output", "order", "weight")


def interface(d: Diagnosis) -> Iterator[Finding]:
    """Shapes and dtypes that do not fit, unknown ops, and missing outputs."""
    p = d.program
    nodes = {p.path(n): n for n in p.nodes()}
    for mismatch in d.assembly.mismatches:
        if mismatch.kind not in MISMATCHES:
            continue
        node = nodes.get(mismatch.where)
        found = _edge(d, node) if node is not None and mismatch.kind == "spec" else None
        yield _at_edge(d, node, mismatch, *found) if node is not None and found else _at_node(p, node, mismatch)


def _at_node(p: Program, node: NodeId | None, m: Mismatch) -> Finding:
    if node is None:
        return Finding("interface", m.where, m.what, m.axis, m.expected, m.got, severity=Severity.CRITICAL)
    return Finding.of(p, "interface", Severity.CRITICAL, m.what, node, axis=m.axis, expected=m.expected, got=m.got)


def _at_edge(d: Diagnosis, node: NodeId, m: Mismatch, edge: EdgeId, want: Spec) -> Finding:
    p = d.program
    source = p.graph.source(edge)
    value = p.edge_value(edge)
    have = p.specs(value.node)[value.port]
    return Finding.of(
        p, "interface", Severity.CRITICAL, m.what, node, source, edges=(edge,), axis=first_axis(want, have),
        expected=repr(want), got=repr(have), witness={"edge": p.path(edge), "port": p.edge_port(edge)},
        fixes=tuple(_fixes(d, node, edge, want, have)),
    )  # fmt: skip


def _edge(d: Diagnosis, node: NodeId) -> tuple[EdgeId, Spec] | None:
    """The edge whose spec does not match the node's results, and the spec that would."""
    p = d.program
    edges = p.in_edges(node)
    specs = [p.specs(v.node)[v.port] for v in map(p.edge_value, edges)]
    if p.op(node) == ASSIGN:
        return (edges[1], specs[0]) if len(edges) == 2 else None
    if p.is_junction(node):
        wrong = [(e, p.spec(node)) for e, s in zip(edges, specs, strict=True) if s != p.spec(node)]
        return wrong[0] if wrong else None
    for make in (_dtypes, _bypassed_spec, _sizes, _permutations):
        found: list[tuple[EdgeId, Spec]] = []
        for edge, spec in zip(edges, specs, strict=True):
            fitting = (want for want in make(p, edge, spec, [*specs, *p.specs(node)])
                       if want != spec and fits(p, node, p.edge_port(edge), want))  # fmt: skip
            found += [(edge, want) for want in fitting][:1]
        if found:  # if several edges could be wrong, the one whose source was edited last
            return max(found, key=lambda pair: _touched(d, p.graph.source(pair[0])))
    return None


def _touched(d: Diagnosis, node: NodeId) -> int:
    """Number of the last journal entry about a node; -1 without one."""
    p = d.program
    names = [p.path(node), *([p.key(node)] if p.op(node) in STORED else [])]
    return max((entry.seq for name in names for entry in d.original.blame(name)), default=-1)


def _dtypes(p: Program, edge: EdgeId, spec: Spec, others: list[Spec]) -> Iterator[Spec]:
    for dtype in dict.fromkeys(o.dtype for o in others):
        yield Spec(spec.shape, dtype)


def _bypassed_spec(p: Program, edge: EdgeId, spec: Spec, others: list[Spec]) -> Iterator[Spec]:
    """The spec of the source's operand, if it has one operand: the source may have been inserted by mistake."""
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
    unread = best_source(p, d.wiring, node, port, unread=True)
    if unread is not None and p.specs(unread.node)[unread.port] == want:
        yield rewired(p, edge, unread, keeps=True)
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
    fits_else = want.dtype == have.dtype and len(want.shape) == len(have.shape) and want.shape[:-1] == have.shape[:-1]
    return widths and fits_else and want.dtype.is_float and kind not in STORED and kind not in KINDS


def _projection(p: Program, edge: EdgeId, rows: int, columns: int) -> Fix:
    """A fix that inserts an identity-like matrix on the edge, which passes the first channels on."""
    target = p.path(p.graph.target(edge))

    def apply(e: Transaction) -> None:
        name = e.program.free_name(f"{target}.projection")
        kind = e.program.spec(e.program.edge_value(edge)).dtype
        weight = e.param(f"{name}.weight", np.eye(rows, columns, dtype=np.float32))
        if kind.name != "float32":
            weight = e.add("cast", weight, dtype=kind, name=f"{name}.weight.cast")
        e.rewire(edge, e.add("linear", e.program.edge_value(edge), weight, name=name))

    return Fix(f"project {p.path(edge)} from {columns} to {rows} channels", apply, 1, 1, rows * columns)
