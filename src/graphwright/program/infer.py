"""Spec inference: forward from changed nodes until specs stop changing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from graphwright.errors import GraphwrightError, ShapeError, UsageError
from graphwright.ops import get
from graphwright.program.errors import PortEmpty, SpecMismatch
from graphwright.program.incremental import IncrementalWalk
from graphwright.program.kinds import ASSIGN, PARAM, SOURCES, STATE

if TYPE_CHECKING:
    from graphwright.array import Spec
    from graphwright.graph import NodeId
    from graphwright.program.op_graph import Value
    from graphwright.program.program import Program


def check_ports(p: Program, node: NodeId) -> None:
    """Raises: PortEmpty unless an op has an edge at every port from 0 on; a junction may have any ports."""
    op = p.op(node)
    if op in SOURCES or p.is_junction(node):
        return
    ports = [p.edge_port(e) for e in p.in_edges(node)]
    least = 2 if op == ASSIGN else _least(op)
    gap = next((i for i, port in enumerate(ports) if port != i), len(ports))
    if gap < len(ports) or len(ports) < least:
        raise PortEmpty(
            "a port has no edge",
            where=f"{p.path(node)} ({op}), port {gap}",
            fix="connect the port in the same edit, or e.rewire(edge, new_src) in place of removing its edge",
        )


def _least(op: str) -> int:
    arity = get(op).arity
    return arity if isinstance(arity, int) else arity[0]


def infer_node(p: Program, node: NodeId, specs: Mapping[NodeId, tuple[Spec, ...]] | None = None) -> tuple[Spec, ...]:
    """Infer the specs of a node from those of its operands (`specs` overrides the stored ones).

    Raises: ShapeError or DTypeError naming the node; ShapeError for an operand that its node no longer produces.
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
            raise PortEmpty(
                "an assign node needs two operands, its target and the next value",
                where=p.path(node),
                expected=2,
                got=len(ins),
            )
        if p.op(operands[0].node) not in (PARAM, STATE):
            raise UsageError("only a param or a state can be assigned", where=p.path(node), got=p.path(operands[0]))
        if ins[0] != ins[1]:
            raise SpecMismatch([_mismatch(p, node, ins)])
        return ()
    if not ins and p.is_junction(node):
        return p.specs(node)  # without edges it is zero, with its present spec
    return get(op).specs(ins, p.attrs(node), p.path(node))


def _mismatch(p: Program, node: NodeId, ins: list[Spec]) -> GraphwrightError:
    return GraphwrightError(
        "a state is assigned a value of another spec", where=p.path(node), expected=ins[0], got=ins[1]
    )


def _no_result(p: Program, where: str, value: Value, fix: str) -> ShapeError:
    return ShapeError(
        "a node reads a result that no longer exists",
        where=where,
        expected=f"result 0 to {len(p.specs(value.node)) - 1} of {p.path(value)}",
        got=f"result {value.port}",
        fix=fix,
    )


def check_outputs(p: Program) -> None:
    """Raises: SpecMismatch listing outputs whose node no longer has the result."""
    named = zip(p.output_names(), p.outputs(), strict=True)
    gone = [(f"output {name}", v) for name, v in named if v.port >= len(p.specs(v.node))]
    if gone:
        fix = "e.set_outputs(...) in the same edit"
        raise SpecMismatch([_no_result(p, where, v, fix) for where, v in gone])


def _check_single_assign(p: Program, node: NodeId) -> None:
    """Raises: UsageError if another assign node has the same target."""
    target = p.operands(node)[0]
    others = [n for n in p.consumers(target) if n != node and p.op(n) == ASSIGN and p.operands(n)[0] == target]
    if others:
        raise UsageError(
            "two nodes assign the same state", where=p.path(target), got=f"{p.path(node)}, {p.path(others[0])}"
        )


def infer(
    p: Program, touched: Iterable[NodeId], before: dict[NodeId, tuple[Spec, ...]], wanted: NodeId | None = None
) -> set[NodeId]:
    """Update the specs downstream of the touched nodes; returns the visited nodes.

    Args:
        before: receives the old specs of changed nodes.
        wanted: report only a mismatch at this node; the edit may still repair others.
    Raises: SpecMismatch with every mismatch; the specs of a mismatched node and its descendants stay.
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
            p.update_node(node, specs=fresh)
        elif node not in before and p.op(node) not in SOURCES:
            continue
        walk.add(reader for reader in p.graph.successors(node) if reader not in seen)
    if wrong:
        raise SpecMismatch(wrong)
    return seen
