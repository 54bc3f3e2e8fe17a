"""Who reads a value: all that depends on it, and letting its readers read another one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphwright.graph import EdgeId, NodeId
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.op_graph import Value
    from graphwright.program.program import Program


def dependent(p: Program, nodes: Iterable[NodeId]) -> set[NodeId]:
    """Nodes, and all that depends on them."""
    stack = list(nodes)
    seen = set(stack)
    while stack:
        for after in p.graph.successors(stack.pop()):
            if after not in seen:
                seen.add(after)
                stack.append(after)
    return seen


def lead(
    e: Transaction, value: Value, other: Value, edges: Iterable[EdgeId] | None = None, *, outputs: bool = True
) -> None:
    """Let readers of `value` read `other`; the node of `other` itself goes on reading `value`.

    Args:
        edges: which readers; by default all of them.
        outputs: also results of the program that are `value`.
    """
    p = e.program
    if edges is None:
        edges = [edge for edge in p.out_edges(value.node) if p.edge_value(edge) == value]
    for edge in edges:
        if p.graph.target(edge) != other.node:
            e.rewire(edge, other)
    declared = dict(zip(p.output_names(), p.outputs(), strict=True))
    if outputs and value in declared.values():
        e.set_outputs(**{name: other if v == value else v for name, v in declared.items()})
