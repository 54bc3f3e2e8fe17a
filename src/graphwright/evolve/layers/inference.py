"""A candidate as it answers, where it was traced as it trains: no dropout, norms by running statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program import Program


def inference(program: Program) -> Program:
    """A fork that answers; its weights and statistics are shared, and runs of it change none of the program's."""
    p = program.fork(f"{program.name}, answering")
    drops, norms = p.of_kind("dropout"), p.of_kind("batch_norm_train")
    if drops or norms:
        with p.edit("answer", author="evolution", keep_undo=False) as e:
            for node in drops:
                _instead(e, node, p.operands(node)[0])
                e.remove(node)
            for node in norms:
                eps = p.attrs(node)["eps"]
                _instead(e, node, e.add("batch_norm", *p.operands(node), name=f"{p.path(node)}.still", eps=eps))
                e.remove([*(w for w in p.consumers(node) if p.op(w) == "write"), node])
    return p


def _instead(e: Any, node: NodeId, other: Any) -> None:
    """Whoever reads a node's first result reads another value."""
    p = e.program
    for edge in p.out_edges(node):
        if p.graph.edge(edge, "src_port") == 0:
            e.rewire(edge, other)
    ends = dict(zip(p.output_names(), p.outputs(), strict=True))
    if any(value.node == node for value in ends.values()):
        e.set_outputs(**{name: other if value.node == node else value for name, value in ends.items()})
