"""The rule about mismatched specs: turn mismatches of `program.validate()` into findings with edge, axis and fixes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np

from graphwright.array import Spec
from graphwright.graph import EdgeId, NodeId
from graphwright.program.kinds import ASSIGN, KINDS, STORED
from graphwright.program.validate import first_axis
from graphwright.surgery.findings.diagnosis import Diagnosis
from graphwright.surgery.findings.finding import Finding, Fix, Severity, add_linear, bypassed, map_sizes, rewired
from graphwright.surgery.findings.wiring import best_source, fits

if TYPE_CHECKING:
    from graphwright.program.program import Program
    from graphwright.program.validate import Mismatch


MISMATCHES = ("spec", "op", "output", "order", "weight")


def interface(d: Diagnosis) -> Iterator[Finding]:
    """Report mismatched shapes and dtypes, unknown ops, and missing outputs."""
    p = d.program
    nodes = {p.path(n): n for n in p.nodes()}
    for m in (m for m in d.mismatches if m.kind in MISMATCHES):
        node = nodes.get(m.where)
        if node is not None and m.kind == "spec" and (found := _edge(d, node)) is not None:
            yield _at_edge(d, node, m, *found)
        else:
            yield Finding.of(p, "interface", Severity.CRITICAL, m.what, *([] if node is None else [node]),
                             where=m.where, axis=m.axis, expected=m.expected, got=m.got)  # fmt: skip


def _at_edge(d: Diagnosis, node: NodeId, m: Mismatch, edge: EdgeId, want: Spec) -> Finding:
    p, value = d.program, d.program.edge_value(edge)
    have = p.specs(value.node)[value.port]
    return Finding.of(
        p, "interface", Severity.CRITICAL, m.what, node, value.node, edges=(edge,), axis=first_axis(want, have),
        expected=repr(want), got=repr(have), witness={"edge": p.path(edge), "port": p.edge_port(edge)},
        fixes=tuple(_fixes(d, node, edge, want, have)),
    )  # fmt: skip


def _edge(d: Diagnosis, node: NodeId) -> tuple[EdgeId, Spec] | None:
    """Return the edge whose spec does not match a node's results, and the spec that would match; None if unclear."""
    p = d.program
    edges = p.in_edges(node)
    specs = [p.specs(v.node)[v.port] for v in map(p.edge_value, edges)]
    if p.op(node) == ASSIGN:
        return (edges[1], specs[0]) if len(edges) == 2 else None
    if p.is_junction(node):
        wrong = [(e, p.spec(node)) for e, s in zip(edges, specs, strict=True) if s != p.spec(node)]
        return wrong[0] if wrong else None
    for change in range(4):
        found: list[tuple[EdgeId, Spec]] = []
        for edge, spec in zip(edges, specs, strict=True):
            wanted = _changed(p, edge, spec, [*specs, *p.specs(node)])[change]
            fitting = (want for want in wanted if want != spec and fits(p, node, p.edge_port(edge), want))
            found += [(edge, want) for want in fitting][:1]
        if found:  # if several edges could be wrong, the one whose source was edited last
            return max(found, key=lambda pair: _touched(d, p.graph.source(pair[0])))
    return None


def _changed(p: Program, edge: EdgeId, spec: Spec, others: list[Spec]) -> tuple[Iterable[Spec], ...]:
    """Return candidates for the spec that an edge should have instead of `spec`, as one iterable per kind of mistake.

    The kinds: a wrong dtype, a wrongly inserted source node, a wrong size (sizes come from `others`), permuted axes.
    """
    shape, operands = spec.shape, p.operands(p.graph.source(edge))
    sizes = dict.fromkeys(n for o in others for n in o.shape)
    return ((Spec(shape, dtype) for dtype in dict.fromkeys(o.dtype for o in others)),
            [p.spec(operands[0])] if len(operands) == 1 else [],
            (Spec((*shape[:axis], n, *shape[axis + 1 :]), spec.dtype) for n in sizes for axis in range(len(shape))),
            (Spec(order, spec.dtype) for order in (permutations(shape) if len(shape) <= 4 else ())))  # fmt: skip


def _touched(d: Diagnosis, node: NodeId) -> int:
    """Return the sequence number of the last journal entry about a node; -1 if there is no entry."""
    p = d.program
    names = [p.path(node), *([p.key(node)] if p.op(node) in STORED else [])]
    return max((entry.seq for name in names for entry in d.original.blame(name)), default=-1)


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
        yield Fix(f"cast {p.path(edge)} to {want.dtype.name}", lambda e: e.insert(edge, "cast", dtype=want.dtype),
                  ops=1, edges=1, keeps_function=True)  # fmt: skip
    elif want.dtype == have.dtype and sorted(map(str, want.shape)) == sorted(map(str, have.shape)):
        orders = [o for o in permutations(range(len(have.shape))) if tuple(have.shape[i] for i in o) == want.shape]
        if len(orders) == 1:
            yield Fix(f"permute {p.path(edge)} by {orders[0]}", lambda e: e.insert(edge, "permute", axes=orders[0]),
                      ops=1, edges=1, keeps_function=True)  # fmt: skip
    elif p.op(source) not in KINDS and (sizes := map_sizes(have, want)) is not None:
        eye, name = np.eye(*sizes), f"{p.path(node)}.projection"  # the identity on the first channels
        yield Fix(f"project {p.path(edge)} from {sizes[1]} to {sizes[0]} channels",
                  lambda e: e.rewire(edge, add_linear(e, e.program.edge_value(edge), eye, name)),
                  1, 1, eye.size)  # fmt: skip
