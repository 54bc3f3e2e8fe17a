"""The nodes of a program that choose and weigh experts, which generated code computes in float32 or wider."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphwright.ops import traits
from graphwright.program.kinds import SOURCES
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program.program import Program

_WEIGHTS = 4
"""Operand of ops over runs: after tokens, offsets, rows and pairs."""


def routing_nodes(p: Program) -> set[NodeId]:
    """Return the nodes between the tokens of a routed layer and the choice and weights of its experts."""
    found: set[NodeId] = set()
    for dispatched in p.of_traits(routes=True):
        for node in p.consumers(dispatched):
            if not (traits(p.op(node)).mixture or traits(p.op(node)).routed_heads):
                continue
            tokens, weights = p.operands(node)[0], p.operands(node)[_WEIGHTS]
            found |= p.reachable([*p.operands(dispatched), weights]) - p.reachable([tokens])
    return {n for n in found if p.op(n) not in SOURCES}


def in_precision(p: Program, routing: set[NodeId], node: NodeId, value: Value, text: str) -> str:
    """Return the expression `text` of an operand in the precision in which a node reads it."""
    if not p.spec(value).dtype.is_float or (node in routing) == (value.node in routing):
        return text
    if node in routing:
        return f"widen({text})"
    return text if traits(p.op(node)).mixture else f"{text}.to(run.dtype)"  # a mixture sums in float32 or wider
