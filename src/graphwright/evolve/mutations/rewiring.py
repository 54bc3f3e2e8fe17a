"""Steps that several mutations share: rewire the readers of a node, and remove states without readers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphwright.program.kinds import ASSIGN, STATE

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program import Transaction


def rewire_readers(e: Transaction, node: NodeId, other: Any) -> None:
    """Rewire all readers of a node's first result to another value, except the other value itself."""
    p = e.program
    new = p.value(other)
    for edge in list(p.out_edges(node)):
        if p.graph.edge(edge, "src_port") == 0 and p.graph.target(edge) != new.node:
            e.rewire(edge, other)
    outputs = dict(zip(p.output_names(), p.outputs(), strict=True))
    if any(value.node == node for value in outputs.values()):
        e.set_outputs(**{name: other if value.node == node else value for name, value in outputs.items()})


def remove_unread_states(e: Transaction, node: NodeId) -> NodeId:
    """Remove a state that only its write uses, and the states before it; return the value that they stored."""
    p = e.program
    while p.op(node) == STATE and all(p.op(n) == ASSIGN for n in p.consumers(node)):
        (write,) = p.consumers(node)
        state, node = node, p.operands(write)[1].node
        e.remove([write, state])
    return node
