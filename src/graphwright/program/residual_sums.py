"""Residual sums of recorded tensor code as junctions, whose edges can be cut, added and gated."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

from graphwright.graph import NodeId
from graphwright.ops import traits
from graphwright.program.kinds import STORED
from graphwright.program.op_graph import Value
from graphwright.program.primitives import discard, insert_edge, insert_node, move_edge, set_outputs

if TYPE_CHECKING:
    from graphwright.program.op_graph import OpGraph

JUNCTION = "junction"


def join_residuals(p: OpGraph, backward: Collection[NodeId] = ()) -> None:
    """Replace each residual sum x + f(x) of a newly recorded program by a junction; no edit is recorded.

    A residual sum adds floating values of equal spec, at least one of which is computed from another one, except from a
    param, const or state. x + f(x) + g(x) becomes one junction if nothing else reads the partial sum and one module
    adds them all. The terms keep the order in which they are added. The last residual sum of a module is named
    `<module>.out` and the others `<module>.mid`, unless these names are taken; outside modules the name is `junction`.
    A sum that the code named keeps its name.

    Args:
        backward: nodes of backward passes, whose sums stay as they are.
    """
    sums = {n for n in p.of_traits(sums=True) if n not in backward and _adds_equals(p, n)}
    inner = sums - {v.node for v in p.outputs()}
    found: list[tuple[NodeId, list[Value], list[NodeId]]] = []
    for node in sorted(sums, key=p.order_labels.key, reverse=True):
        if node in sums:
            terms, partial = _flat(p, node, inner)
            sums.difference_update(partial)
            if _is_residual(p, node, terms):
                found.append((node, terms, partial))
    left = Counter(_module(p, node) for node, *_ in found)
    scopes = {path[: dot.start()] for path in map(p.path, p.nodes()) for dot in re.finditer(r"\.", path)}
    joined: dict[Value, Value] = {}
    for node, terms, partial in reversed(found):
        left[_module(p, node)] -= 1
        name = _name(p, node, scopes, last=not left[_module(p, node)])
        made = insert_node(p, JUNCTION, {}, name, p.specs(node), seq=p.seq(node), after=node)
        for port, value in enumerate(terms):
            insert_edge(p, joined.get(value, value), made, port)
        joined[Value(node)] = Value(made)
        for edge in p.out_edges(node):
            move_edge(p, edge, Value(made))
        discard(p, [node, *partial])
    set_outputs(p, {name: joined.get(v, v) for name, v in zip(p.output_names(), p.outputs(), strict=True)})


def _adds_equals(p: OpGraph, node: NodeId) -> bool:
    """Return whether a node is the sum of two floating values of its own spec."""
    spec = p.spec(node)
    return spec.dtype.is_float and all(p.specs(v.node)[v.port] == spec for v in p.operands(node))


def _flat(p: OpGraph, node: NodeId, sums: Collection[NodeId]) -> tuple[list[Value], list[NodeId]]:
    """Return the terms of a sum in the order of their addition, and the partial sums of its module that only it reads.

    Args:
        sums: nodes that can be partial sums.
    """
    terms, partial, total = list[Value](), list[NodeId](), node
    while True:
        operands = p.operands(total)
        inner = next((v for v in operands if v.node in sums and p.graph.out_degree(v.node) == 1
                      and _module(p, v.node) == _module(p, node)), None)  # fmt: skip
        terms += [v for v in reversed(operands) if v != inner]
        if inner is None:
            return terms[::-1], partial
        partial.append(total := inner.node)


def _is_residual(p: OpGraph, total: NodeId, terms: list[Value]) -> bool:
    """Return whether the value of one of the terms of a sum is computed from another term that is not stored."""
    key = p.order_labels.key
    sources = {v for v in terms if p.op(v.node) not in STORED and p.graph.out_degree(v.node) > 1}
    first = min((key(v.node) for v in sources), default=key(total))
    stack = [v.node for v in terms]
    seen = set(stack)
    while stack:
        node = stack.pop()
        for value in () if traits(p.op(node)).valueless else p.operands(node):
            if value in sources:
                return True
            if value.node not in seen and key(value.node) > first:
                seen.add(value.node)
                stack.append(value.node)
    return False


def _module(p: OpGraph, node: NodeId) -> str:
    return p.path(node).rpartition(".")[0]


def _name(p: OpGraph, node: NodeId, scopes: Collection[str], *, last: bool) -> str:
    """Return the name of the junction for a sum, the last one of its module or not; `scopes`: paths of modules."""
    path, module = p.path(node), _module(p, node)
    if not re.fullmatch(rf"{p.op(node)}(_\d+)?", path.rpartition(".")[2]):
        return path
    wanted = f"{module}.{'out' if last else 'mid'}"
    if not module or wanted in scopes:
        wanted = f"{module}.{JUNCTION}" if module else JUNCTION
    return p.free_name(wanted)
